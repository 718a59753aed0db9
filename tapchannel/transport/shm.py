"""shm: host memory of one host, shared by a memfd. The lane's own CPU moves the bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .. import _native
from ..descriptor import Hello
from ..errors import TransportUnavailable
from ..memory import Device
from ..speed import host_limit, reading
from .base import Adopted, Adoption, LaneOffer, LaneServer, Serving, adopt_block


@dataclass(frozen=True, slots=True)
class _Server:
    serving: Serving

    def offer(self, lane: int, hello: Hello) -> LaneOffer:
        """Give descriptors of the lane's control block and of the memfd."""
        arena, core = self.serving.reservation.arena, self.serving.core
        return LaneOffer("host", arena, fds=(core.block_fd(lane), arena.export_fd()))


class Shm:
    """Payload stores, then a release store of the stamp; the reader's acquire load."""

    name = "shm"
    ordering = "payload stores, then a release store of the stamp (x86-64)"
    one_host = True

    def refusal(self, device: Device) -> str | None:
        """Refuse GPUs: their memory is not this host's."""
        return (
            f"the mailbox is on {device}, shm reaches host memory only" if device.on_gpu else None
        )

    def absence(self) -> str | None:
        """Refuse nothing: every process has host memory."""
        return None

    def serve(self, serving: Serving) -> LaneServer:
        """Begin to serve lanes."""
        return _Server(serving)

    def adopt(self, adoption: Adoption) -> Adopted:
        """Map the memfd after its size and seals were checked."""
        offer, fds = adoption.offer, adoption.fds
        if len(fds) != 2 or offer.memory != "host":
            for fd in fds:
                os.close(fd)
            raise TransportUnavailable(
                "offer cannot be mapped",
                refused={"shm": f"{offer.memory} memory came with {len(fds)} descriptors, not two"},
            )
        try:
            block = adopt_block(fds[0], adoption)
        except BaseException:
            os.close(fds[1])
            raise
        try:
            arena = _native.Arena.adopt_host(fds[1], offer.arena_bytes)
        except (OSError, ValueError) as error:
            raise TransportUnavailable(
                "offered memory cannot be mapped", refused={"shm": str(error)}
            ) from error
        return Adopted(
            _native.Wire(arena),
            block,
            arena.write_probe,
            arena.drop,
            measure=lambda _: reading(arena),
            limit=lambda: host_limit(arena),
        )
