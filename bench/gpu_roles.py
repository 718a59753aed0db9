"""The two sides of the GPU bench: who watches the stamps, and the ways to move messages."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from common import MIB, Line, Partner
from words import PinnedWord, Stamps, check, driver, spin_until

from tapchannel import Mailbox, Outbox, TapPlan
from tapchannel.keys import Key
from tapchannel.tensors import rows_of

TAP = "state"
WIDTH = 4096  # of bfloat16: rows of 8 KiB
ROW_BYTES = 2 * WIDTH
# How many messages make a round: more would fill the launch queue while the gate is closed.
COUNTS = {MIB: 128, 8 * MIB: 128, 64 * MIB: 32}
CONSUMER = "cuda:0"
# UCX exports classic allocations only; the handshake goes by loopback.
OVER_UCX: dict[str, str] = {"listen": "tcp://127.0.0.1", "memory": "ipc"}
SETTLE_S = 0.003  # for the lane's own thread to enqueue what it has taken from its queue


# ---- the consuming process


@dataclass(frozen=True)
class Serve:
    """Have a mailbox made."""

    name: str
    size: int
    depth: int
    transport: str


@dataclass(frozen=True)
class Round:
    """Have a pass opened, and the last stamp's time told."""

    step: int
    count: int


def plan_of(size: int) -> TapPlan:
    """Plan one tap of this many bytes."""
    return TapPlan({TAP: [TAP]}, width=WIDTH, dtype="bfloat16", max_rows=size // ROW_BYTES)


def consume(line: Line, store: str) -> None:
    """Serve mailboxes and rounds until told to end."""
    torch.cuda.set_device(CONSUMER)
    mailbox: Mailbox | None = None
    while (asked := line.listen()) is not None:
        if isinstance(asked, Serve):
            if mailbox is not None:
                mailbox.close()
            mailbox = None  # its memory, before the next one's is reserved
            mailbox = Mailbox(
                plan_of(asked.size),
                {0: [TAP]},
                depth=asked.depth,
                device=CONSUMER,
                store=store,
                name=asked.name,
                transport=asked.transport,
                **(OVER_UCX if asked.transport == "ucx" else {}),
            )
            line.say()
        elif mailbox is not None:
            line.say(_watch(line, mailbox, asked))
    if mailbox is not None:
        mailbox.close()


def _watch(line: Line, mailbox: Mailbox, asked: Round) -> int:
    """Open a pass whose slots are all free, and watch its last stamp: a lane's land in order."""
    last = asked.count - 1
    stamps = Stamps(mailbox)
    with mailbox.open_pass(asked.step, asked.count):
        line.say()
        landed = spin_until(stamps.of_slot(last), Key(mailbox.epoch, asked.step, last).stamp())
        for microbatch in range(asked.count):
            with mailbox.recv(microbatch, wait="host"):
                pass
    return landed


# ---- this process


class Producer:
    """Sources of one size, and the ways to move them to the consumer's GPU."""

    transport = "cuda_ipc"

    def __init__(self, partner: Partner, outbox: Outbox, device: str, size: int) -> None:
        self._partner = partner
        self._outbox = outbox
        self._size = size
        shape = (COUNTS[size], size // ROW_BYTES, WIDTH)
        words = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
        self._sources = words.view(torch.bfloat16).unbind(0)
        self._targets = torch.empty_like(words, device=CONSUMER).view(torch.bfloat16).unbind(0)
        self._targets[0].copy_(self._sources[0])  # between two GPUs: opens the way for all
        self._stream, self._copies = torch.cuda.Stream(), torch.cuda.Stream()
        self._gate, self._end = PinnedWord(), PinnedWord()
        self._round = self._step = 0
        torch.cuda.synchronize()

    # Each way gives the seconds from its start to the host's sight of its end.

    def bare_queued(self, count: int) -> float:
        """Copy, with all copies queued behind a gate before the clock starts."""
        self._round += 1
        self._gate.hold(self._stream, self._round)
        self._copies.wait_stream(self._stream)
        copies = ctypes.c_void_p(self._copies.cuda_stream)
        for target, source in zip(self._targets[:count], self._sources[:count], strict=True):
            to, from_ = ctypes.c_uint64(target.data_ptr()), ctypes.c_uint64(source.data_ptr())
            code = driver().cuMemcpyDtoDAsync_v2(to, from_, ctypes.c_size_t(self._size), copies)
            check(code, "cuMemcpyDtoDAsync")
        self._end.write(self._copies, self._round)
        time.sleep(SETTLE_S)
        began = self._open_gate()
        return (spin_until(self._end.host, self._round) - began) / 1e9

    def push_queued(self, count: int) -> float:
        """Push, with all pushes queued behind a gate before the clock starts."""
        self._round += 1
        with self._pass(count) as ended:
            self._gate.hold(self._stream, self._round)
            with torch.cuda.stream(self._stream):
                for microbatch, source in enumerate(self._sources[:count]):
                    self._outbox.push(microbatch, TAP, source)
            self._await_enqueued()
            began = self._open_gate()
        if ended[0] < began:
            raise RuntimeError("a push landed before its gate was opened")
        return (ended[0] - began) / 1e9

    def copy_from_python(self, count: int) -> float:
        """Copy by Tensor.copy_, as a trainer would; the clock starts before the first call."""
        self._round += 1
        with torch.cuda.stream(self._copies):
            began = time.monotonic_ns()
            for target, source in zip(self._targets[:count], self._sources[:count], strict=True):
                target.copy_(source, non_blocking=True)
            self._end.write(self._copies, self._round)
        return (spin_until(self._end.host, self._round) - began) / 1e9

    def push_from_python(self, count: int) -> float:
        """Push; the clock starts before the first call."""
        with self._pass(count) as ended, torch.cuda.stream(self._stream):
            began = time.monotonic_ns()
            for microbatch, source in enumerate(self._sources[:count]):
                self._outbox.push(microbatch, TAP, source)
        return (ended[0] - began) / 1e9

    def push_costs(self, count: int, pause: float) -> list[float]:
        """Push without waiting for anything; give each call's microseconds."""
        costs = []
        with self._pass(count), torch.cuda.stream(self._stream):
            for microbatch, source in enumerate(self._sources[:count]):
                if pause:
                    time.sleep(pause)
                began = time.perf_counter_ns()
                self._outbox.push(microbatch, TAP, source)
                costs.append((time.perf_counter_ns() - began) / 1e3)
        return costs

    def native_costs(self, count: int) -> list[float]:
        """Make the native part of a push alone; give each call's microseconds."""
        core, handle = self._outbox._core, self._stream.cuda_stream
        payloads = [rows_of(source, WIDTH, ROW_BYTES) for source in self._sources[:count]]
        costs = []
        with self._pass(count):
            for microbatch, (owner, address, rows, pitch, version) in enumerate(payloads):
                shape = owner.shape
                began = time.perf_counter_ns()
                core.push(
                    microbatch, 0, address, rows, pitch, 0, handle, shape, owner, version, None
                )
                costs.append((time.perf_counter_ns() - began) / 1e3)
        return costs

    def _await_enqueued(self) -> None:
        """Wait until the lane's own thread has handed all pushes to the driver."""
        while self._outbox.info()["queued"]:
            time.sleep(SETTLE_S)
        time.sleep(SETTLE_S)

    def _open_gate(self) -> int:
        began = time.monotonic_ns()
        self._gate.host.value = self._round
        return began

    @contextmanager
    def _pass(self, count: int) -> Iterator[list[int]]:
        """Open a pass on both sides; after the block the list holds the time of the last stamp."""
        self._step += 1
        self._partner.ask(Round(self._step, count))
        ended: list[int] = []
        with self._outbox.open_pass(self._step, count):
            yield ended
        ended.append(self._partner.hear())


class UcxProducer(Producer):
    """Pushes as to another host: by whatever UCX takes between two processes of this one."""

    transport = "ucx"

    def _await_enqueued(self) -> None:
        """Let the lane's own thread come to the first push: it waits for the gate itself."""
        time.sleep(SETTLE_S)


@contextmanager
def producer_of(
    kind: type[Producer], partner: Partner, store: str, device: str, size: int
) -> Iterator[Producer]:
    """Have a mailbox made for this size, and attach to it from this device."""
    torch.cuda.set_device(device)
    depth = COUNTS[size]
    name = f"{device} {size} {kind.transport}"
    partner.ask(Serve(name, size, depth, kind.transport))
    queue = 2 * depth
    with Outbox(
        plan_of(size), 0, device=device, store=store, name=name, queue_limit=queue
    ) as outbox:
        yield kind(partner, outbox, device, size)
