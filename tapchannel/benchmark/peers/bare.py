"""The limit: the same bytes copied by whoever has them, into plain memory, nobody being told."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from typing import Any, Final

import torch

from ..payload import Sources
from ..peer import Meeting, Receiver, Sender
from ..traffic import DTYPE, Place, Traffic

_MADV_POPULATE_WRITE: Final = 23


def shared_bytes(name: str, size: int) -> tuple[torch.Tensor, int]:
    """Map a memfd as a mailbox maps its slots: shared, huge pages, committed. The caller closes it.

    Ownership:  the tensor keeps the mapping.
    """
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(_MADV_POPULATE_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8), fd  # pyright: ignore[reportUnknownMemberType]


class BareSender(Sender):
    """Copies into as many slots as a mailbox would have."""

    def __init__(self, traffic: Traffic, rank: int) -> None:
        self._taps, self._depth = traffic.of(rank), traffic.depth
        self._on_gpu = traffic.place.on_gpu
        self._slots = [self._slot(traffic) for _ in range(self._depth)]

    def _slot(self, traffic: Traffic) -> dict[str, torch.Tensor]:
        slot: dict[str, torch.Tensor] = {}
        for tap in self._taps:
            if self._on_gpu:
                flat = torch.empty(tap.bytes, dtype=torch.uint8, device=traffic.place.consumer)
            else:
                flat, fd = shared_bytes("bench:bare", tap.bytes)
                os.close(fd)
            slot[tap.name] = flat.view(getattr(torch, DTYPE)).view(tap.rows, tap.width)
        return slot

    def prepare(self, taps: Mapping[str, torch.Tensor]) -> Any:
        """Work out what each copy takes."""
        if self._on_gpu:
            return taps
        return [(tap.name, taps[tap.name].data_ptr(), tap.bytes) for tap in self._taps]

    def send(self, message: int, prepared: Any) -> None:
        """Copy every tap."""
        slot = self._slots[message % self._depth]
        if self._on_gpu:
            for name, tensor in prepared.items():  # on the producer's own stream: nothing to await
                slot[name].copy_(tensor, non_blocking=True)
            return
        for name, address, size in prepared:
            ctypes.memmove(slot[name].data_ptr(), address, size)

    def drain(self) -> None:
        """Wait for the copies."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def landed(self, message: int) -> Mapping[str, torch.Tensor]:
        """Give the slot."""
        return self._slots[message % self._depth]


class BareCopy:
    """memmove in host memory, Tensor.copy_ on GPUs."""

    name = "bare copy"
    about = "the same bytes copied by the producer alone, nobody being told: the limit"
    one_sided = True
    unchecked = blocking = False

    def absence(self, place: Place, producers: int) -> str | None:
        """Refuse nothing."""
        return None

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Have none."""
        raise NotImplementedError

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Make the slots."""
        return BareSender(traffic, rank)


PEERS: Final = (BareCopy(),)
