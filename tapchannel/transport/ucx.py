"""ucx: to the mailbox of another host, by one-sided puts into memory that it has registered."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from .. import _native
from ..descriptor import PROBE_STRIDE, Remote
from ..errors import ProtocolError, TransportUnavailable
from ..memory import Device
from ..rdma import rdma_devices
from ..ucx_library import choose_ucx, loading
from ..wire import Fields
from .base import Adopted, Adoption, LaneOffer, LaneServer, Serving

_SEGMENTS: Final = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")
_SETTINGS: Final = {**dict.fromkeys(_SEGMENTS, "256k"), "TCP_PUT_ENABLE": "n"}
# Before 1.17, what ucp_config_modify says of a transport is not heard; its environment is.
_CONFIG_REACHES_TCP: Final = (1, 17)
_PROBE_LIMIT_S: Final = 10.0
_MEASURED: Final = 32  # pages that a lane's speed is measured with: 2 MiB


def _context(needs_cuda: bool) -> _native.UcxContext:
    """Load UCX, once a process, and make a context.

    Raises:
        TransportUnavailable: no library does for the job, or it does not start here.
    """
    choice = choose_ucx(_has_rdma(), needs_cuda)
    try:
        with loading(choice) as plan:
            version = _native.ucx_load(list(plan.preload), plan.libucp)
            return _native.UcxContext(_settings(version))
    except RuntimeError as error:
        raise _unavailable(str(error)) from error


def _settings(version: str) -> list[tuple[str, str]]:
    """Give the settings of UCX that are ours; those that the user has set stay.

    Puts over TCP go in fragments: larger ones take a quarter of the CPU time. The zero-copy way
    (RNDV_THRESH=inf, from 1.20 on) would be faster for the largest, but it writes on after the
    consumer has closed its endpoint, which is what fences a dead peer.
    """
    kept = {name for name in _SETTINGS if f"UCX_{name}" in os.environ}
    if kept & set(_SEGMENTS):  # the two must fit together: UCX refuses RX below TX
        kept |= set(_SEGMENTS)
    wanted = {name: value for name, value in _SETTINGS.items() if name not in kept}
    if tuple(int(part) for part in version.split(".")[:2]) < _CONFIG_REACHES_TCP:
        os.environ.update({f"UCX_{name}": value for name, value in wanted.items()})
    return list(wanted.items())


def _has_rdma() -> bool:
    return any(not device.refusal for device in rdma_devices())


def _unavailable(reason: str) -> TransportUnavailable:
    return TransportUnavailable("UCX cannot carry this lane", refused={"ucx": reason})


@dataclass
class _Server:
    """The UCX side of one mailbox: a context, and the slots registered with it."""

    serving: Serving
    _blocks: list[_native.UcxMemory] = field(default_factory=list[_native.UcxMemory])

    def __post_init__(self) -> None:
        self.context = _context(self.serving.reservation.device.on_gpu)

    @cached_property
    def slots(self) -> _native.UcxMemory:
        """The registered arena."""
        return self.context.register(self.serving.reservation.arena)

    def offer(self, lane: int) -> LaneOffer:
        """Make this side's end of the link; its worker is what the outbox connects to."""
        serving = self.serving
        try:
            block = serving.core.register_block(lane, self.context)
            link = _native.UcxLink(self.context, True, block, serving.peer_timeout)
            slots = self.slots
        except RuntimeError as error:
            raise _unavailable(str(error)) from error
        remote = Remote(link.address, block.address, block.key, slots.address, slots.key)
        size = _native.block_bytes(serving.depth, serving.cells[lane])

        def meet(ready: Fields) -> None:
            _meet(link, Remote.parse(ready), size)

        arena, memory = serving.reservation.arena, serving.reservation.memory
        return LaneOffer(memory, arena, remote=remote, link=link, meet=meet, end=link.end)


def _meet(link: _native.UcxLink, outbox: Remote, block_bytes: int) -> None:
    """Connect back to the outbox, whose control block takes this side's words."""
    try:
        block = (outbox.block_address, block_bytes, outbox.block_key)
        link.connect(outbox.worker, block, (0, 0, b""))
    except RuntimeError as error:
        raise _unavailable(str(error)) from error


class Ucx:
    """Payload puts, a flush that completed at the target, then the puts of stamp and announce."""

    name = "ucx"
    ordering = "payload puts, a flush completed at the target, then the stamp's put"
    one_host = False

    def refusal(self, device: Device) -> str | None:
        """Refuse where no UCX library does for the job."""
        try:
            choose_ucx(_has_rdma(), device.on_gpu)
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
        offer, remote = adoption.offer, adoption.offer.remote
        if adoption.fds or remote is None:
            raise ProtocolError("mailbox offers ucx without saying where it puts its memory")
        context = _context(offer.memory != "host")
        try:
            block = _native.ControlBlock.create(
                "tapchannel:outbox", offer.lane, offer.depth, adoption.cells, adoption.mailbox_id
            )
            own = context.register_block(block)
            link = _native.UcxLink(context, False, own, adoption.peer_timeout)
            size = _native.block_bytes(offer.depth, adoption.cells)
            link.connect(
                remote.worker,
                (remote.block_address, size, remote.block_key),
                (remote.arena_address, offer.arena_bytes, remote.arena_key),
            )
        except RuntimeError as error:
            raise _unavailable(str(error)) from error
        return Adopted(
            link.wire(),
            block,
            lambda offset, pattern: _probe(link, offset, pattern),
            link.end,
            Remote(link.address, own.address, own.key).body(),
            lambda: _facts(link),
            _slow(link),
            lambda offset: _speed(link, offset),
        )


def _probe(link: _native.UcxLink, offset: int, pattern: bytes) -> None:
    try:
        link.write(offset, pattern, _PROBE_LIMIT_S)
    except RuntimeError as error:
        raise _unavailable(f"the self-test's bytes were not taken: {error}") from error


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


def _facts(link: _native.UcxLink) -> Mapping[str, object]:
    return {"ucx_lanes": link.transports()}
