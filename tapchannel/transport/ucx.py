"""ucx: to the mailbox of another host, by one-sided puts into memory that it has registered.

A GPU's slots are written directly where UCX knows CUDA and the GPU keeps the order of an RDMA
device's writes. Elsewhere the payload lands in pinned host memory, and the mailbox's gate does the
rest, as with host_staged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

from .. import _native
from ..descriptor import PROBE_STRIDE, Hello, Remote
from ..error_text import printable
from ..errors import ChannelClosed, ConfigError, DeviceError, ProtocolError, TransportUnavailable
from ..memory import Device
from ..speed import device_rates
from ..wire import Fields
from . import ucx_context
from .base import Adopted, Adoption, LaneOffer, LaneServer, Serving
from .cuda_ipc import device_uuid
from .ucx_context import unavailable

_PROBE_LIMIT_S: Final = 8.0  # less than the mailbox waits for: this side says why
_MEASURED: Final = 32  # pages that a lane's speed is measured with: 2 MiB
_NO_REGION: Final = (0, 0, b"")


@dataclass
class _Server:
    """The UCX side of one mailbox: a context, and the memory registered with it."""

    serving: Serving
    _words: dict[int, _native.UcxMemory] = field(default_factory=dict[int, _native.UcxMemory])

    def __post_init__(self) -> None:
        self.ucx = ucx_context.load(self.serving.reservation.device)
        self.label = ucx_context.label()

    @cached_property
    def slots(self) -> _native.UcxMemory:
        """The slots, registered."""
        return self.ucx.context.register(self.serving.reservation.arena)

    @cached_property
    def staging(self) -> _native.UcxMemory:
        """Host memory on the way to the slots, registered."""
        return self.ucx.context.register(self.serving.staging.arena())

    def offer(self, lane: int, hello: Hello) -> LaneOffer:
        """Make this side's end of the link; its worker is what the outbox connects to."""
        serving = self.serving
        on_gpu = serving.reservation.device.on_gpu
        by_host = self.ucx.by_host
        if on_gpu and not by_host and not hello.ucx.endswith(ucx_context.KNOWS_CUDA):
            by_host = f"the outbox's UCX {hello.ucx} knows no CUDA"
        try:
            words = self._arrivals(lane) if by_host else None
            landing = self.staging if by_host else self.slots
            block = serving.core.register_block(lane, self.ucx.context)
            link = _native.UcxLink(self.ucx.context, True, block, serving.peer_timeout)
        except (RuntimeError, ChannelClosed, ConfigError, DeviceError) as error:
            raise unavailable(str(error)) from error
        remote = Remote(
            link.address,
            block.address,
            block.key,
            landing.address,
            landing.key,
            words.address if words else 0,
            words.key if words else b"",
            self.label,
        )
        return LaneOffer(
            "staged" if by_host else serving.reservation.memory,
            serving.staging.arena() if by_host else serving.reservation.arena,
            device_uuid=device_uuid(serving.reservation.device) if on_gpu else None,
            staged=bool(by_host),
            remote=remote,
            link=link,
            ordering=_ordering(by_host, on_gpu),
            meet=partial(_meet, link, _native.block_bytes(serving.depth, serving.cells[lane])),
            end=link.end,
        )

    def _arrivals(self, lane: int) -> _native.UcxMemory:
        """Register the words that tell the gate of what has landed, once for each lane."""
        core = self.serving.core
        core.open_gate(self.serving.staging.arena())
        fd = core.arrivals_fd(lane, f"tapchannel:arrivals{lane}")
        if fd < 0:
            raise ChannelClosed("mailbox is closed")
        size = _native.arrival_bytes(self.serving.depth, self.serving.cells[lane])
        mapped = _native.Arena.adopt_host(fd, size)
        if lane not in self._words:
            self._words[lane] = self.ucx.context.register(mapped)
        return self._words[lane]


def _ordering(by_host: str, on_gpu: bool) -> str:
    if by_host:
        return f"{Ucx.ordering}; by the host, since {by_host}: the gate copies, then stamps"
    if on_gpu:
        return f"{Ucx.ordering}; the GPU keeps the order of writes, its streams await the stamp"
    return Ucx.ordering


def _meet(link: _native.UcxLink, block_bytes: int, ready: Fields) -> None:
    """Connect back to the outbox, whose control block takes this side's words."""
    outbox = Remote.parse(ready)
    block = (outbox.block_address, block_bytes, outbox.block_key)
    try:
        link.connect(outbox.worker, block, _NO_REGION, _NO_REGION)
    except RuntimeError as error:
        raise unavailable(str(error)) from error


class Ucx:
    """Payload puts, a flush that completed at the target, then the puts of stamp and announce."""

    name = "ucx"
    ordering = "payload puts, a flush completed at the target, then the stamp's put"
    one_host = False

    def refusal(self, device: Device) -> str | None:
        """Refuse where no UCX library does for the job."""
        try:
            ucx_context.choose()
        except TransportUnavailable as error:
            return str(error)
        return None

    def absence(self) -> str | None:
        """Refuse where no UCX library does for the job."""
        return self.refusal(Device(None))

    def serve(self, serving: Serving) -> LaneServer:
        """Begin to serve lanes."""
        return _Server(serving)

    def adopt(self, adoption: Adoption) -> Adopted:
        """Connect to the mailbox's worker; this side's control block is its own."""
        offer, remote, device = adoption.offer, adoption.offer.remote, adoption.device
        if adoption.fds or remote is None:
            raise ProtocolError("mailbox offers ucx without saying where it puts its memory")
        ucx = ucx_context.load(device)
        try:
            block = _native.ControlBlock.create(
                "tapchannel:outbox", offer.lane, offer.depth, adoption.cells, adoption.mailbox_id
            )
            own = ucx.context.register_block(block)
            link = _native.UcxLink(ucx.context, False, own, adoption.peer_timeout)
            _connect(link, remote, adoption)
            wire = link.wire(device.ordinal, ucx_reads_gpu=not ucx.by_host)
        except (RuntimeError, DeviceError) as error:
            raise unavailable(str(error)) from error
        return Adopted(
            wire,
            block,
            partial(_probe, link, remote.ucx),
            link.end,
            Remote(link.address, own.address, own.key, ucx=ucx_context.label()).body(),
            partial(_facts, link, ucx),
            _slow(link),
            partial(_speed, link),
            lambda: device_rates(link.transports()),
        )


def _connect(link: _native.UcxLink, remote: Remote, adoption: Adoption) -> None:
    depth, cells = adoption.offer.depth, adoption.cells
    words = (remote.words_address, _native.arrival_bytes(depth, cells), remote.words_key)
    link.connect(
        remote.worker,
        (remote.block_address, _native.block_bytes(depth, cells), remote.block_key),
        (remote.arena_address, adoption.offer.arena_bytes, remote.arena_key),
        words if remote.words_key else _NO_REGION,
    )


def _probe(link: _native.UcxLink, theirs: str, offset: int, pattern: bytes) -> None:
    try:
        link.write(offset, pattern, _PROBE_LIMIT_S)
    except RuntimeError as error:
        both = f"UCX {ucx_context.label()} here, {printable(theirs)} there"
        reason = f"the self-test's bytes were not taken: {error} ({both})"
        raise unavailable(reason) from error


def _slow(link: _native.UcxLink) -> str:
    """Name the wire where it is TCP: RDMA would leave both sides' CPUs alone."""
    tcp = [name for name in link.transports() if name.startswith("tcp/")]
    return f"ucx over {', '.join(tcp)}" if tcp else ""


def _speed(link: _native.UcxLink, offset: int) -> float:
    try:
        seconds = link.measure(offset, PROBE_STRIDE, _MEASURED, _PROBE_LIMIT_S)
    except RuntimeError:  # the lane's own first push will say why
        return 0.0
    return PROBE_STRIDE * _MEASURED / seconds / 1e9


def _facts(link: _native.UcxLink, ucx: ucx_context.Ucx) -> Mapping[str, object]:
    chosen = ucx.choice.chosen
    return {
        "ucx": f"{chosen.version} ({chosen.name})",
        "ucx_passed_over": dict(ucx.choice.passed_over),
        "ucx_lanes": link.transports(),
        "ucx_by_host": ucx.by_host,
    }
