"""What every transport promises, whatever the wire.

1. A stamp never becomes visible before the payload that it covers (I1).
2. What one lane puts and stamps in one cell becomes visible in the order of its pushes.
3. A put costs the caller's stream an event record and nothing else (I5), and no stream ever waits
   for credit. Where it is only enqueued on a GPU, the caller's host may (see `Outbox.push`).
4. A source is read only after what the caller's stream held at push time has been performed
   (step 4), and is kept alive until it has been read.
5. After `close` returned cleanly no byte of this lane is in flight any more.

=========== ======================================  ==========================================
transport   payload, then stamp                     the reader
=========== ======================================  ==========================================
shm         stores, then a release store            acquire load
cuda_ipc    copy, then cuStreamWriteValue64 on the  cuStreamWaitValue64 GEQ on the lease's
            same stream (default fence)             stream, or an acquire load by a host thread
ucx         puts, a flush completed at the target,  acquire load; the announce's key is awaited
            then the puts of stamp and announce     with the stamp, they have no mutual order
host_staged copy into staging memory, then the      as on the mailbox's device; a stream's wait is
            arrival word; the consumer's gate:      enqueued only once the gate has enqueued
            copy into the slot, then the stamp      copy and stamp
=========== ======================================  ==========================================

`tests/conformance` holds one suite that runs on every transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .. import _native
from ..descriptor import Hello, Offer, Remote
from ..errors import ProtocolError
from ..memory import Device, Reservation, Staging
from ..speed import Limit, no_limit
from ..wire import Fields


@dataclass(frozen=True, slots=True)
class Serving:
    """What a transport serves lanes from: the mailbox's memory, words and settings."""

    reservation: Reservation
    staging: Staging
    core: _native.Mailbox
    depth: int
    cells: Sequence[int]  # of each lane
    peer_timeout: float


@dataclass(frozen=True, slots=True)
class LaneOffer:
    """How a lane's producer gets at the memory: what the offer says, and the descriptors beside it.

    ``arena`` is where the bytes of the attach self-test must arrive. ``staged``: it is staging
    memory, and payload passes the consumer's gate before it is stamped. ``meet`` takes what the
    outbox answers; ``end`` undoes an offer that came to nothing.
    """

    memory: str
    arena: _native.Arena
    handle: bytes | None = None
    fds: Sequence[int] = ()
    device_uuid: bytes | None = None
    staged: bool = False
    remote: Remote | None = None
    link: _native.UcxLink | None = None
    ordering: str = ""  # the rule in force on this lane, where it is not the transport's own
    meet: Callable[[Fields], None] = lambda ready: None
    end: Callable[[], None] = lambda: None


class LaneServer(Protocol):
    """One transport of one mailbox, made when the first lane asks for it."""

    def offer(self, lane: int, hello: Hello) -> LaneOffer:
        """Give what a lane's producer needs; its descriptors are the caller's.

        Raises:
            TransportUnavailable: it cannot be served after all; the text says why.
        """
        ...


@dataclass(frozen=True, slots=True)
class Adoption:
    """What an outbox was offered, and what it knows of itself."""

    offer: Offer
    fds: Sequence[int]
    device: Device
    mailbox_id: bytes
    cells: int
    peer_timeout: float


def own_device(offer: Offer, wanted: Device | None) -> Device:
    """Give where a producer's taps are; by default on a GPU where the mailbox is on one."""
    if offer.memory == "host":
        return Device(None)
    if offer.memory == "staged" and (offer.device_uuid is None or not _native.device_count()):
        return wanted or Device(None)
    return wanted or Device.parse("cuda")


@dataclass(frozen=True, slots=True)
class Adopted:
    """A producer's end of a lane.

    ``probe`` writes the self-test's bytes at an offset; ``ready`` is what the mailbox is answered;
    ``facts`` are for `Outbox.info`; ``end`` lets go of the memory. ``slow`` names a wire that is
    not the fastest that hardware offers: nobody is to be slow without being told. ``measure`` finds
    the lane's GB/s, where it must write by writing at an offset PROBE_STRIDE bytes, and ``limit``
    those of its link (`speed`).
    """

    wire: _native.Wire
    block: _native.ControlBlock
    probe: Callable[[int, bytes], None]
    end: Callable[[], None]
    ready: Mapping[str, object] = field(default_factory=dict[str, object])
    facts: Callable[[], Mapping[str, object]] = dict[str, object]
    slow: str = ""
    measure: Callable[[int], float] = lambda offset: 0.0
    limit: Callable[[], Limit] = no_limit


class Transport(Protocol):
    """One wire, on both sides of it."""

    name: str
    ordering: str
    one_host: bool  # needs memory that both sides map: descriptors travel over a Unix socket only

    def refusal(self, device: Device) -> str | None:
        """Say why this transport cannot serve a mailbox on ``device``; None if it can."""
        ...

    def absence(self) -> str | None:
        """Say why no outbox of this process can use this transport; None if one may."""
        ...

    def serve(self, serving: Serving) -> LaneServer:
        """Begin to serve lanes of a mailbox (consumer)."""
        ...

    def adopt(self, adoption: Adoption) -> Adopted:
        """Take an offer (producer). Takes its descriptors over, also when it fails.

        Raises:
            TransportUnavailable: it cannot be used from here; the text says why.
            ProtocolError: the offer is not what it must be.
        """
        ...


def adopt_block(fd: int, adoption: Adoption) -> _native.ControlBlock:
    """Map an offered control block after checking its size, seals and header.

    Raises:
        ProtocolError: it is not what it must be.
    """
    offer = adoption.offer
    try:
        return _native.ControlBlock.adopt(
            fd, offer.lane, offer.depth, adoption.cells, adoption.mailbox_id
        )
    except (OSError, ValueError) as error:
        raise ProtocolError(
            "offered control block is not what it must be", detail=str(error)
        ) from error
