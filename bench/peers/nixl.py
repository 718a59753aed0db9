"""NIXL over its UCX backend: one-sided writes, whose notification is the stamp.

Handles are prepared once for every pair of source and slot. Credit goes back by plain words of
shared memory, which is cheaper than anything that NIXL has for it.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from tapchannel.benchmark.payload import Sources
from tapchannel.benchmark.peer import Meeting, Receiver, Sender
from tapchannel.benchmark.peers.staging import Words, share, shared
from tapchannel.benchmark.traffic import DTYPE, Place, TapShape, Traffic

_LIMIT_S = 60.0
_WORDS_BYTES = 4096


def _api() -> Any:
    """Import whichever of NIXL's packages is here."""
    for package in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ImportError("NIXL is not installed: pip install nixl-cu12 or nixl-cu13")


def _agent(name: str) -> Any:
    """Make an agent without a thread of its own: that would poll beside all other peers."""
    api = _api()
    config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    return api.nixl_agent(name, config)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


class _Slots:
    """The consumer's slots in one allocation; ``offset`` finds a tap of a slot in it."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.bytes = traffic.depth * traffic.message_bytes

    def offset(self, slot: int, tap: TapShape) -> int:
        before = sum(one.bytes for one in self._traffic.taps[: self._traffic.taps.index(tap)])
        return slot * self._traffic.message_bytes + before


class NixlReceiver(Receiver):
    """Registers the slots and waits for notifications."""

    def __init__(self, traffic: Traffic, meeting: Meeting) -> None:
        self._traffic = traffic
        on_gpu = traffic.place.on_gpu
        slots = _Slots(traffic)
        self._memory, address = _memory(slots.bytes, traffic.place)
        self._kind = "VRAM" if on_gpu else "DRAM"
        self._agent = _agent("consumer")
        described = self._agent.get_reg_descs([(address, slots.bytes, 0, "")], self._kind)
        self._registered = self._agent.register_memory(described)
        self._slots = [self._views(slots, slot) for slot in range(traffic.depth)]
        self._words = [
            Words(share(meeting, f"credit{rank}", _WORDS_BYTES))
            for rank in range(traffic.producers)
        ]
        self._seen = [0] * traffic.producers
        self._first = self._count = 0
        meeting.put("address", str(address).encode())
        meeting.put("consumer", self._agent.get_agent_metadata())
        for rank in range(traffic.producers):
            self._agent.add_remote_agent(meeting.get(f"producer{rank}"))

    def _views(self, slots: _Slots, slot: int) -> dict[str, torch.Tensor]:
        views = {}
        for tap in self._traffic.taps:
            begin = slots.offset(slot, tap)
            flat = self._memory[begin : begin + tap.bytes]
            views[tap.name] = flat.view(getattr(torch, DTYPE)).view(tap.rows, tap.width)
        return views

    def begin(self, step: int, count: int) -> None:
        """Go on counting."""
        self._first, self._count = self._first + self._count, count

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Poll until every producer has notified this message."""
        wanted = self._first + message + 1
        limit = time.monotonic() + _LIMIT_S
        while min(self._seen) < wanted:
            for notes in self._agent.get_new_notifs().values():
                for note in notes:
                    rank, number = note.decode().split(":")
                    self._seen[int(rank)] = max(self._seen[int(rank)], int(number))
            if min(self._seen) < wanted:
                os.sched_yield()  # there may be fewer cores than who polls
            if time.monotonic() > limit:
                raise TimeoutError(f"notifications stood at {self._seen}, not at {wanted}")
        return self._slots[(self._first + message) % self._traffic.depth]

    def release(self, message: int) -> None:
        """Count the slot as free."""
        for words in self._words:
            words.store(0, self._first + message + 1)

    def close(self) -> None:
        """Deregister."""
        self._agent.deregister_memory(self._registered)


class NixlSender(Sender):
    """Writes into the consumer's slots."""

    def __init__(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> None:
        self._traffic, self._rank = traffic, rank
        self._kind = "VRAM" if traffic.place.on_gpu else "DRAM"
        self._taps = traffic.of(rank)
        self._agent = _agent(f"producer{rank}")
        ordinal = int(traffic.place.producer(rank).partition(":")[2] or 0)
        regions = [(one.data_ptr(), one.nbytes, ordinal, "") for one in sources.memory.values()]
        described = self._agent.get_reg_descs(regions, self._kind)
        self._registered = self._agent.register_memory(described)
        self._ordinal = ordinal
        meeting.put(f"producer{rank}", self._agent.get_agent_metadata())
        self._address = int(meeting.get("address"))
        self._peer = _text(self._agent.add_remote_agent(meeting.get("consumer")))
        self._agent.make_connection(self._peer)
        self._words = Words(shared(meeting, f"credit{rank}", _WORDS_BYTES))
        self._slots = _Slots(traffic)
        self._remote = [self._remote_list(slot) for slot in range(traffic.depth)]
        self._local: dict[int, Any] = {}
        self._handles: dict[tuple[int, int], Any] = {}
        self._first = self._count = 0

    def _remote_list(self, slot: int) -> Any:
        parts = [
            (self._address + self._slots.offset(slot, tap), tap.bytes, 0) for tap in self._taps
        ]
        return self._agent.prep_xfer_dlist(self._peer, parts, self._kind)

    def begin(self, step: int, count: int) -> None:
        """Go on counting."""
        self._first, self._count = self._first + self._count, count

    def prepare(self, taps: Mapping[str, torch.Tensor]) -> Any:
        """Prepare the handles of these sources, one a slot."""
        address = taps[self._taps[0].name].data_ptr()
        if address not in self._local:
            parts = [(taps[tap.name].data_ptr(), tap.bytes, self._ordinal) for tap in self._taps]
            local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", parts, self._kind)
            self._local[address] = local
            every = list(range(len(self._taps)))
            for slot, remote in enumerate(self._remote):
                self._handles[address, slot] = self._agent.make_prepped_xfer(
                    "WRITE", local, every, remote, every
                )
        return address

    def send(self, message: int, prepared: Any) -> None:
        """Write as soon as the slot is free, and wait until the write is done."""
        number = self._first + message
        if self._traffic.place.on_gpu:
            torch.cuda.current_stream().synchronize()
        self._words.wait(0, number + 1 - self._traffic.depth)
        handle = self._handles[prepared, number % self._traffic.depth]
        state = self._agent.transfer(handle, f"{self._rank}:{number + 1}".encode())
        while state == "PROC":
            os.sched_yield()
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended in state {state}")

    def close(self) -> None:
        """Deregister."""
        for handle in self._handles.values():
            self._agent.release_xfer_handle(handle)
        self._agent.deregister_memory(self._registered)


def _memory(size: int, place: Place) -> tuple[torch.Tensor, int]:
    if place.on_gpu:
        memory = torch.zeros(size, dtype=torch.uint8, device=place.consumer)
        torch.cuda.synchronize()
    else:
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        ctypes.memset(memory.data_ptr(), 0, size)
    return memory, memory.data_ptr()


class Nixl:
    """Agents without progress threads."""

    name = "nixl"
    about = "NIXL write with notification over its UCX backend"
    one_sided = unchecked = blocking = False

    def absence(self, place: Place, producers: int) -> str | None:
        """Say why there is none."""
        try:
            _api()
        except ImportError as error:
            return str(error)
        return None

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Register the slots."""
        return NixlReceiver(traffic, meeting)

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Register the sources."""
        return NixlSender(traffic, rank, meeting, sources)


PEERS = (Nixl(),)
