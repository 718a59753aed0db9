"""Mooncake's transfer engine over tcp: a write of the payload, then one of the stamp.

The consumer polls the stamp in its own memory. Credit goes back by plain words of shared memory,
which is cheaper than a write of the engine.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import struct
from collections.abc import Mapping
from typing import Any

import torch

from tapchannel.benchmark.payload import Sources
from tapchannel.benchmark.peer import Meeting, Receiver, Sender
from tapchannel.benchmark.peers.staging import Words, share, shared
from tapchannel.benchmark.traffic import DTYPE, Place, Traffic

_LOOPBACK = "127.0.0.1"
_PAGE = 4096


def _engine() -> tuple[Any, str]:
    """Start an engine; give it with the name by which others reach it."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    code = engine.initialize(_LOOPBACK, "P2PHANDSHAKE", "tcp", "")
    if code:
        raise RuntimeError(f"initialize answered {code}")
    return engine, f"{_LOOPBACK}:{engine.get_rpc_port()}"


def _mapped(engine: Any, size: int) -> torch.Tensor:
    """Map memory and register it."""
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    ctypes.memset(memory.data_ptr(), 0, size)
    _register(engine, memory)
    return memory


def _register(engine: Any, memory: torch.Tensor) -> None:
    code = engine.register_memory(memory.data_ptr(), memory.nbytes)
    if code:
        raise RuntimeError(f"register_memory answered {code}")


class MooncakeReceiver(Receiver):
    """Registers slots and stamps, and polls the stamps."""

    def __init__(self, traffic: Traffic, meeting: Meeting) -> None:
        self._traffic = traffic
        self._engine, name = _engine()
        size = traffic.depth * traffic.message_bytes
        self._memory = _mapped(self._engine, size + _PAGE * (1 + traffic.producers // 64))
        self._stamps = Words(self._memory[size:])
        self._words = [
            Words(share(meeting, f"credit{rank}", _PAGE)) for rank in range(traffic.producers)
        ]
        self._slots = []
        begin = 0
        for _ in range(traffic.depth):
            slot = {}
            for tap in traffic.taps:
                flat = self._memory[begin : begin + tap.bytes]
                slot[tap.name] = flat.view(getattr(torch, DTYPE)).view(tap.rows, tap.width)
                begin += tap.bytes
            self._slots.append(slot)
        self._first = self._count = 0
        meeting.put("consumer", f"{name} {self._memory.data_ptr()}".encode())

    def begin(self, step: int, count: int) -> None:
        """Go on counting."""
        self._first, self._count = self._first + self._count, count

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Poll the stamps."""
        for rank in range(self._traffic.producers):
            self._stamps.wait(rank, self._first + message + 1)
        return self._slots[(self._first + message) % self._traffic.depth]

    def release(self, message: int) -> None:
        """Count the slot as free."""
        for words in self._words:
            words.store(0, self._first + message + 1)

    def close(self) -> None:
        """Deregister."""
        self._engine.unregister_memory(self._memory.data_ptr())


class MooncakeSender(Sender):
    """Writes payload, then stamp, each synchronously."""

    def __init__(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> None:
        self._traffic, self._rank = traffic, rank
        self._engine, _ = _engine()
        for memory in sources.memory.values():
            _register(self._engine, memory)
        self._sources = sources
        self._stamp = _mapped(self._engine, _PAGE)
        name, address = meeting.get("consumer").decode().split()
        self._target, self._address = name, int(address)
        self._words = Words(shared(meeting, f"credit{rank}", _PAGE))
        self._first = self._count = 0

    def begin(self, step: int, count: int) -> None:
        """Go on counting."""
        self._first, self._count = self._first + self._count, count

    def send(self, message: int, prepared: Any) -> None:
        """Write every tap as soon as the slot is free, then the stamp."""
        traffic, number = self._traffic, self._first + message
        self._words.wait(0, number + 1 - traffic.depth)
        place = self._address + number % traffic.depth * traffic.message_bytes
        for tap in traffic.taps:
            if tap.rank == self._rank:
                self._write(prepared[tap.name].data_ptr(), place, tap.bytes)
            place += tap.bytes
        struct.pack_into(
            "<Q", (ctypes.c_char * 8).from_address(self._stamp.data_ptr()), 0, number + 1
        )
        stamps = self._address + traffic.depth * traffic.message_bytes
        self._write(self._stamp.data_ptr(), stamps + 64 * self._rank, 8)

    def _write(self, source: int, target: int, size: int) -> None:
        code = self._engine.transfer_sync_write(self._target, source, target, size)
        if code:
            raise RuntimeError(f"transfer_sync_write answered {code}")

    def close(self) -> None:
        """Deregister."""
        for memory in [*self._sources.memory.values(), self._stamp]:
            self._engine.unregister_memory(memory.data_ptr())


class Mooncake:
    """Two engines over tcp."""

    name = "mooncake"
    about = "Mooncake transfer engine over tcp: payload, then stamp"
    one_sided = unchecked = blocking = False

    def absence(self, place: Place, producers: int) -> str | None:
        """Say why there is none."""
        if place.on_gpu:
            return "only its engine for host memory is measured here"
        try:
            importlib.import_module("mooncake.engine")
        except ImportError as error:
            return f"{error}: pip install mooncake-transfer-engine-non-cuda"
        return None

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Register the slots."""
        return MooncakeReceiver(traffic, meeting)

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Register the sources."""
        return MooncakeSender(traffic, rank, meeting, sources)


PEERS = (Mooncake(),)
