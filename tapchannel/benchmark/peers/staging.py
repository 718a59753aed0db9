"""Through host memory that both processes share: down, a word that says so, and up again.

On GPUs that memory is pinned. In host memory the same code makes two copies where tapchannel makes
one.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from ..cuda_words import pin, unpin, write
from ..payload import Sources
from ..peer import Meeting, Receiver, Sender
from ..traffic import DTYPE, Place, TapShape, Traffic
from .bare import shared_bytes

LIMIT_S: Final = 60.0
_SPINS: Final = 200  # before the core is given to whoever else wants it
_LINE: Final = 64


class Words:
    """Counters in shared memory, a cache line each; x86 keeps the order of stores."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._first = memory.data_ptr()

    def address(self, index: int) -> int:
        """Give where a counter lies."""
        return self._first + index * _LINE

    def _word(self, index: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self.address(index))

    def store(self, index: int, value: int) -> None:
        """Set a counter."""
        self._word(index).value = value

    def wait(self, index: int, value: int) -> None:
        """Wait until a counter has reached a value.

        Raises:
            TimeoutError: it has not in a minute.
        """
        word, spins = self._word(index), 0
        limit = time.monotonic() + LIMIT_S
        while word.value < value:
            spins += 1
            if spins > _SPINS:
                os.sched_yield()
                if time.monotonic() > limit:
                    raise TimeoutError(f"counter {index} stood at {word.value}, not at {value}")


def share(meeting: Meeting, key: str, size: int) -> torch.Tensor:
    """Make memory that the other processes can map by `shared`."""
    memory, fd = shared_bytes(f"bench:{key}", size)
    meeting.put(key, f"/proc/{os.getpid()}/fd/{fd}".encode())
    return memory


def shared(meeting: Meeting, key: str, size: int) -> torch.Tensor:
    """Map memory that another process has made by `share`."""
    path = meeting.get(key).decode()
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)  # pyright: ignore[reportUnknownMemberType]


def _cut(buffer: torch.Tensor, taps: list[TapShape]) -> dict[str, torch.Tensor]:
    """Give each tap's part of a buffer."""
    parts: dict[str, torch.Tensor] = {}
    begin = 0
    for tap in taps:
        flat = buffer[begin : begin + tap.bytes]
        parts[tap.name] = flat.view(getattr(torch, DTYPE)).view(tap.rows, tap.width)
        begin += tap.bytes
    return parts


class _Rank:
    """One producer's staging buffers and words, as one of the two sides sees them."""

    def __init__(self, memory: torch.Tensor, traffic: Traffic, rank: int, buffers: int) -> None:
        taps = traffic.of(rank)
        size = sum(tap.bytes for tap in taps)
        self.memory = memory
        self.words = Words(memory)
        self.buffers = [
            _cut(memory[4096 + number * size : 4096 + (number + 1) * size], taps)
            for number in range(buffers)
        ]
        if traffic.place.on_gpu:
            pin(memory)

    @staticmethod
    def bytes(traffic: Traffic, rank: int, buffers: int) -> int:
        """Say how much memory that takes."""
        return 4096 + buffers * sum(tap.bytes for tap in traffic.of(rank))


_FILLED, _DRAINED = 0, 1


class StagingReceiver(Receiver):
    """Copies up into slots of its own device."""

    def __init__(self, traffic: Traffic, meeting: Meeting, buffers: int) -> None:
        place = traffic.place
        self._on_gpu = place.on_gpu
        self._ranks: list[_Rank] = []
        for rank in range(traffic.producers):
            memory = share(meeting, f"staging{rank}", _Rank.bytes(traffic, rank, buffers))
            self._ranks.append(_Rank(memory, traffic, rank, buffers))
        flat = torch.zeros(
            (traffic.depth, traffic.message_bytes), dtype=torch.uint8, device=place.consumer
        )
        self._slots = [_cut(slot, list(traffic.taps)) for slot in flat]
        self._stream = torch.cuda.Stream() if self._on_gpu else None
        self._first = 0  # messages of earlier rounds
        self._count = 0

    def begin(self, step: int, count: int) -> None:
        """Go on counting."""
        self._first, self._count = self._first + self._count, count

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Copy a message up."""
        number = self._first + message
        slot = self._slots[message % len(self._slots)]
        for rank in self._ranks:
            rank.words.wait(_FILLED, number + 1)
            with torch.cuda.stream(self._stream):
                for name, staged in rank.buffers[number % len(rank.buffers)].items():
                    slot[name].copy_(staged, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        for rank in self._ranks:
            rank.words.store(_DRAINED, number + 1)
        return slot

    def close(self) -> None:
        """Let the driver forget the memory."""
        if self._on_gpu:
            for rank in self._ranks:
                unpin(rank.memory)


class StagingSender(Sender):
    """Copies down. With two buffers a message goes down while the one before goes up."""

    def __init__(self, traffic: Traffic, rank: int, meeting: Meeting, buffers: int) -> None:
        self._on_gpu = traffic.place.on_gpu
        memory = shared(meeting, f"staging{rank}", _Rank.bytes(traffic, rank, buffers))
        self._rank = _Rank(memory, traffic, rank, buffers)
        self._stream = torch.cuda.Stream() if self._on_gpu else None
        self._first = self._count = 0

    def begin(self, step: int, count: int) -> None:
        """Go on counting."""
        self._first, self._count = self._first + self._count, count

    def send(self, message: int, prepared: Any) -> None:
        """Copy a message down, as soon as its buffer is free, and say so."""
        number = self._first + message
        words, buffers = self._rank.words, self._rank.buffers
        words.wait(_DRAINED, number - len(buffers) + 1)
        buffer = buffers[number % len(buffers)]
        if self._stream is None:
            for name, tensor in prepared.items():
                buffer[name].copy_(tensor)
            words.store(_FILLED, number + 1)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, tensor in prepared.items():
                buffer[name].copy_(tensor, non_blocking=True)
        write(self._stream, words.address(_FILLED), number + 1)
        if len(buffers) == 1:
            self._stream.synchronize()

    def drain(self) -> None:
        """Wait for the copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Let the driver forget the memory."""
        if self._on_gpu:
            unpin(self._rank.memory)


class Staging:
    """Host memory that both map, with one buffer or two."""

    one_sided = unchecked = blocking = False

    def __init__(self, name: str, about: str, buffers: int) -> None:
        self.name, self.about, self._buffers = name, about, buffers

    def absence(self, place: Place, producers: int) -> str | None:
        """Refuse nothing."""
        return None

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Make the buffers."""
        return StagingReceiver(traffic, meeting, self._buffers)

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Map them."""
        return StagingSender(traffic, rank, meeting, self._buffers)


PEERS: Final = (
    Staging("staging", "through shared (on GPUs: pinned) host memory, one buffer, blocking", 1),
    Staging("staging x2", "the same, double-buffered", 2),
)
