"""What every transport promises, whatever the wire.

1. A stamp never becomes visible before the payload that it covers (I1).
2. What one lane puts and stamps in one cell becomes visible in the order of its pushes.
3. A put costs the caller's stream an event record and nothing else (I5), and never waits for
credit. 4. A source is read only after what the caller's stream held at push time has been
performed (step
4),
   and is kept alive until it has been read.
5. After `close` returned cleanly no byte of this lane is in flight any more.

==========  ======================================  ==========================================
transport   payload, then stamp                     the reader
==========  ======================================  ==========================================
shm         stores, then a release store            acquire load
cuda_ipc    copy, then cuStreamWriteValue64 on the  cuStreamWaitValue64 GEQ on the lease's
            same stream (default fence)             stream, or an acquire load by a host thread
==========  ======================================  ==========================================

`tests/conformance` holds one suite that runs on every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .. import _native
from ..descriptor import Offer
from ..memory import Device, Reservation


@dataclass(frozen=True, slots=True)
class LaneOffer:
    """How a lane's producer gets at the memory: what the offer says, and the descriptors beside it.

    ``arena`` is where the bytes of the attach self-test must arrive.
    """

    memory: str
    arena: _native.Arena
    handle: bytes | None = None
    fds: Sequence[int] = ()
    device_uuid: bytes | None = None


@dataclass(frozen=True, slots=True)
class Adopted:
    """A producer's end of a lane: the memory that it writes, and its copy engine or CPU for it."""

    arena: _native.Arena
    wire: _native.Wire


class Transport(Protocol):
    """One wire, on both sides of it."""

    name: str
    ordering: str

    def refusal(self, device: Device) -> str | None:
        """Say why this transport cannot serve a mailbox on ``device``; None if it can."""
        ...

    def absence(self) -> str | None:
        """Say why no outbox of this process can use this transport; None if one may."""
        ...

    def offer(self, reservation: Reservation) -> LaneOffer:
        """Give what a lane's producer needs (consumer); the descriptors are the caller's."""
        ...

    def adopt(self, offer: Offer, fds: Sequence[int], device: Device, mailbox_id: bytes) -> Adopted:
        """Map what was offered (producer). Takes the descriptors over, also when it fails.

        Raises:
            TransportUnavailable: it cannot be mapped from here; the text says why.
        """
        ...
