"""shm: host memory of one host, shared by a memfd. The lane's own CPU moves the bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .. import _native
from ..descriptor import Offer
from ..errors import TransportUnavailable
from ..memory import Device, Reservation
from .base import Adopted, LaneOffer


class Shm:
    """Payload stores, then a release store of the stamp; the reader's acquire load."""

    name = "shm"
    ordering = "payload stores, then a release store of the stamp (x86-64)"

    def refusal(self, device: Device) -> str | None:
        """Refuse GPUs: their memory is not this host's."""
        return (
            f"the mailbox is on {device}, shm reaches host memory only" if device.on_gpu else None
        )

    def absence(self) -> str | None:
        """Refuse nothing: every process has host memory."""
        return None

    def offer(self, reservation: Reservation) -> LaneOffer:
        """Give a descriptor of the memfd."""
        arena = reservation.arena
        return LaneOffer(reservation.memory, arena, fds=(arena.export_fd(),))

    def adopt(self, offer: Offer, fds: Sequence[int], device: Device, mailbox_id: bytes) -> Adopted:
        """Map the memfd after its size and seals were checked."""
        if len(fds) != 1 or offer.memory != "host":
            for fd in fds:
                os.close(fd)
            raise TransportUnavailable(
                "offer cannot be mapped",
                refused={
                    "shm": f"{offer.memory} memory with {len(fds)} descriptors came, not one memfd"
                },
            )
        try:
            arena = _native.Arena.adopt_host(fds[0], offer.arena_bytes)
        except (OSError, ValueError) as error:
            raise TransportUnavailable(
                "offered memory cannot be mapped", refused={"shm": str(error)}
            ) from error
        return Adopted(arena, _native.Wire(arena))
