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
from dataclasses import dataclass, field
from typing import Protocol

from .. import _native
from ..descriptor import Offer
from ..memory import Device, Reservation


@dataclass(frozen=True, slots=True)
class Export:
    """How a peer gets at an arena: a handle inside the offer, or descriptors beside it."""

    handle: bytes | None = None
    fds: Sequence[int] = ()
    device_uuid: bytes | None = None


class Transport(Protocol):
    """One wire, on both sides of it."""

    name: str
    ordering: str

    def refusal(self, device: Device) -> str | None:
        """Say why this transport cannot serve a mailbox on ``device``; None if it can."""
        ...

    def reserve(
        self, device: Device, label: str, size: int, memory: str, arithmetic: str
    ) -> Reservation:
        """Reserve the arena (consumer)."""
        ...

    def export(self, reservation: Reservation) -> Export:
        """Give what a peer needs to map the arena (consumer); its descriptors are the caller's."""
        ...

    def adopt(self, offer: Offer, fds: Sequence[int], device: Device) -> _native.Arena:
        """Map an offered arena (producer). Takes the descriptors over, also when it fails.

        Raises:
            TransportUnavailable: it cannot be mapped from here; the text says why.
        """
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport in use and why each faster one is not."""

    transport: Transport
    refused: dict[str, str] = field(default_factory=dict[str, str])
