"""torch's symmetric memory: the producer copies into the consumer's buffer and signals."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist

from ..payload import Sources
from ..peer import Meeting, Receiver, Sender
from ..traffic import DTYPE, Place, Traffic
from .distributed import join, leave, nccl_absence

_LIMIT_MS: Final = 60_000


class _Side:
    """One rank's view of the buffer: slots of every tap, a channel to fill and one to free each."""

    def __init__(self, traffic: Traffic, meeting: Meeting, rank: int) -> None:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # nothing here would use it
        join(traffic, meeting, "nccl", rank)
        memory: Any = import_module("torch.distributed._symmetric_memory")
        self._traffic = traffic
        size = traffic.depth * traffic.message_bytes
        device = traffic.place.consumer if rank == 0 else traffic.place.producer(rank - 1)
        self._whole = memory.empty(size, dtype=torch.uint8, device=device)
        self.handle: Any = memory.rendezvous(self._whole, dist.group.WORLD)
        whole: torch.Tensor = self.handle.get_buffer(0, (size,), torch.uint8)
        self.slots: list[dict[str, torch.Tensor]] = []
        begin = 0
        for _ in range(traffic.depth):
            slot: dict[str, torch.Tensor] = {}
            for tap in traffic.taps:
                flat = whole[begin : begin + tap.bytes]
                slot[tap.name] = flat.view(getattr(torch, DTYPE)).view(tap.rows, tap.width)
                begin += tap.bytes
            self.slots.append(slot)

    def filled(self, number: int) -> int:
        """Name the channel that says that a message is there."""
        return number % self._traffic.depth

    def free(self, number: int) -> int:
        """Name the channel that says that a message's slot is free."""
        return self._traffic.depth + number % self._traffic.depth


class SymmetricReceiver(Receiver):
    """Waits for the producers' signals, and gives slots back by signals of its own."""

    def __init__(self, traffic: Traffic, meeting: Meeting) -> None:
        self._traffic = traffic
        self._side = _Side(traffic, meeting, 0)
        self._first = self._count = 0

    def begin(self, step: int, count: int) -> None:
        """Go on counting."""
        self._first, self._count = self._first + self._count, count

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Wait for a message."""
        side, number = self._side, self._first + message
        for rank in range(self._traffic.producers):
            side.handle.wait_signal(rank + 1, side.filled(number), _LIMIT_MS)
        if self._traffic.wait == "host":
            torch.cuda.current_stream().synchronize()
        return side.slots[number % self._traffic.depth]

    def release(self, message: int) -> None:
        """Give a slot back."""
        side, number = self._side, self._first + message
        for rank in range(self._traffic.producers):
            side.handle.put_signal(rank + 1, side.free(number), _LIMIT_MS)

    def close(self) -> None:
        """Leave."""
        leave()


class SymmetricSender(Sender):
    """Copies into the consumer's slots."""

    def __init__(self, traffic: Traffic, rank: int, meeting: Meeting) -> None:
        self._traffic = traffic
        self._side = _Side(traffic, meeting, rank + 1)
        self._first = self._count = 0

    def begin(self, step: int, count: int) -> None:
        """Go on counting."""
        self._first, self._count = self._first + self._count, count

    def send(self, message: int, prepared: Any) -> None:
        """Wait for the slot, copy, signal; all on the stream."""
        side, number = self._side, self._first + message
        if number >= self._traffic.depth:
            side.handle.wait_signal(0, side.free(number), _LIMIT_MS)
        slot = side.slots[number % self._traffic.depth]
        for name, tensor in prepared.items():
            slot[name].copy_(tensor, non_blocking=True)
        side.handle.put_signal(0, side.filled(number), _LIMIT_MS)

    def drain(self) -> None:
        """Wait for the copies."""
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leave."""
        leave()


class Symmetric:
    """Copies into symmetric memory, and its signals."""

    name = "symmetric memory"
    about = "torch symmetric memory: copy into the consumer's buffer, put_signal and wait_signal"
    one_sided = unchecked = blocking = False

    def absence(self, place: Place, producers: int) -> str | None:
        """Say why there is none."""
        if not place.on_gpu:
            return "symmetric memory is memory of GPUs, and these taps are in host memory"
        return nccl_absence(place, producers)

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Make the consumer's side."""
        return SymmetricReceiver(traffic, meeting)

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Make a producer's side."""
        return SymmetricSender(traffic, rank, meeting)


PEERS: Final = (Symmetric(),)
