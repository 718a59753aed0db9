"""What shm reaches here, against a plain memcpy and gloo, in one run.

Two processes; this one pushes, the other receives and looks at nothing. See README.md for how.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    MIB,
    RESULTS,
    Line,
    Partner,
    Spread,
    facts,
    quantile,
    ratio_of,
    size_text,
    spread_of,
    table,
)

from tapchannel import Mailbox, Outbox, TapPlan

SIZES = (64 * 1024, 256 * 1024, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
SMALL = 4096
DEPTH = 4
ROUND_BYTES = 128 * MIB  # moved by each way in each round
SOURCES_BYTES = 64 * MIB  # sources take turns: at least this much is read before one is read again
SMALL_MESSAGES = 4000
PINGS = 1000
TAP = "state"
WIDTH = 1024  # of uint8: rows of 1 KiB
MADV_POPULATE_WRITE = 23


def plan_of(size: int) -> TapPlan:
    """Plan one tap of this many bytes."""
    return TapPlan({TAP: [TAP]}, width=WIDTH, dtype="uint8", max_rows=size // WIDTH)


@dataclass(frozen=True)
class Round:
    """Move ``count`` messages by a channel or by gloo; asked of the other process."""

    way: str
    step: int
    size: int
    count: int


# ---- the receiving process


def receive(line: Line, store: str, meeting: str) -> None:
    """Serve rounds until told to end; answer each with the times at which messages were there."""
    _meet(meeting, 0)
    mailbox: Mailbox | None = None
    while (asked := line.listen()) is not None:
        if isinstance(asked, int):
            if mailbox is not None:
                mailbox.close()
            mailbox = Mailbox(plan_of(asked), {1: [TAP]}, depth=DEPTH, store=store, name=str(asked))
            line.say()
            continue
        if asked.way == "gloo":
            line.say(list(_from_gloo(line, asked)))
        elif mailbox is not None:
            line.say(list(_from_mailbox(line, asked, mailbox)))
    if mailbox is not None:
        mailbox.close()
    dist.destroy_process_group()


def _from_mailbox(line: Line, asked: Round, mailbox: Mailbox) -> Iterator[int]:
    acknowledge = asked.way == "ping"
    with mailbox.open_pass(asked.step, asked.count):
        line.say()
        for microbatch in range(asked.count):
            with mailbox.recv(microbatch, wait="host"):
                at = time.monotonic_ns()
            if acknowledge:
                line.say()
            yield at


def _from_gloo(line: Line, asked: Round) -> Iterator[int]:
    slots = [torch.empty(asked.size, dtype=torch.uint8) for _ in range(DEPTH)]
    line.say()
    for message in range(asked.count):
        dist.recv(slots[message % DEPTH], src=1)
        yield time.monotonic_ns()


def _meet(meeting: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)


# ---- this process


class Sender:
    """Sources of one size, and the three ways to move them."""

    def __init__(self, partner: Partner, outbox: Outbox, size: int, slots: int) -> None:
        self._partner = partner
        self._outbox = outbox
        self._size = size
        self._slots = slots  # the address of memory like the mailbox's
        count = max(2, SOURCES_BYTES // size)
        random = torch.Generator().manual_seed(1)
        self._sources = [
            torch.randint(0, 256, (size // WIDTH, WIDTH), dtype=torch.uint8, generator=random)
            for _ in range(min(count, 1024))
        ]
        self._step = 0

    def memcpy(self, count: int) -> float:
        """Copy by memmove into a mapping like the mailbox's; give the seconds."""
        began = time.monotonic_ns()
        for message in range(count):
            source = self._sources[message % len(self._sources)]
            target = self._slots + message % DEPTH * self._size
            ctypes.memmove(target, source.data_ptr(), self._size)
        return (time.monotonic_ns() - began) / 1e9

    def push(self, count: int) -> float:
        """Push; give the seconds from the first push to the last receipt."""
        self._step += 1
        self._partner.ask(Round("push", self._step, self._size, count))
        with self._outbox.open_pass(self._step, count):
            began = time.monotonic_ns()
            for message in range(count):
                self._outbox.push(message, TAP, self._sources[message % len(self._sources)])
            self._outbox.flush()
        return (self._partner.hear()[-1] - began) / 1e9

    def gloo(self, count: int) -> float:
        """Send by gloo; give the seconds from the first send to the last receipt."""
        self._partner.ask(Round("gloo", 0, self._size, count))
        began = time.monotonic_ns()
        for message in range(count):
            dist.send(self._sources[message % len(self._sources)].view(-1), dst=0)
        return (self._partner.hear()[-1] - began) / 1e9

    def pings(self, count: int) -> list[float]:
        """Push one at a time to a receiver that waits; give each message's microseconds."""
        self._step += 1
        self._partner.ask(Round("ping", self._step, self._size, count))
        began = []
        with self._outbox.open_pass(self._step, count):
            for message in range(count):
                began.append(time.monotonic_ns())
                self._outbox.push(message, TAP, self._sources[message % len(self._sources)])
                self._partner.hear()
        there = self._partner.hear()
        return [(at - from_) / 1e3 for at, from_ in zip(there, began, strict=True)]


@contextmanager
def _shared_memory(size: int) -> Iterator[int]:
    """Map a memfd as a mailbox maps its slots: shared, and committed beforehand."""
    descriptor = os.memfd_create("bench")
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(MADV_POPULATE_WRITE)
    buffer = ctypes.c_char.from_buffer(memory)
    yield ctypes.addressof(buffer)
    del buffer
    memory.close()


@contextmanager
def sender_of(partner: Partner, store: str, size: int, queue: int) -> Iterator[Sender]:
    """Have a mailbox made for this size, and attach to it."""
    partner.ask(size)
    with (
        _shared_memory(DEPTH * size) as slots,
        Outbox(plan_of(size), 1, store=store, name=str(size), queue_limit=queue) as outbox,
    ):
        yield Sender(partner, outbox, size, slots)


# ---- what is measured


def _interleaved(
    ways: dict[str, Callable[[int], float]], count: int, rounds: int
) -> dict[str, list[float]]:
    """Take turns, so that whatever else the machine does meets all ways alike; drop the first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            seconds[name].append(way(count))
    return {name: taken[1:] for name, taken in seconds.items()}


def measure_size(partner: Partner, store: str, size: int, rounds: int) -> dict[str, Any]:
    """Measure GB/s of the three ways at one size."""
    count = min(2048, max(8, ROUND_BYTES // size))
    with sender_of(partner, store, size, count) as sender:
        ways = {"memcpy": sender.memcpy, "push": sender.push, "gloo": sender.gloo}
        seconds = _interleaved(ways, count, rounds)
    speeds = {
        way: spread_of([count * size / one / 1e9 for one in taken])
        for way, taken in seconds.items()
    }
    return {
        "size": size,
        "messages": count,
        **speeds,
        "of memcpy": ratio_of(seconds["memcpy"], seconds["push"]),
        "of gloo": ratio_of(seconds["gloo"], seconds["push"]),
    }


def measure_small(partner: Partner, store: str, rounds: int) -> dict[str, Any]:
    """Measure messages a second, and the time that one takes to a receiver that waits."""
    with sender_of(partner, store, SMALL, SMALL_MESSAGES) as sender:
        ways = {"push": sender.push, "gloo": sender.gloo}
        seconds = _interleaved(ways, SMALL_MESSAGES, rounds)
        latency = [one for _ in range(3) for one in sender.pings(PINGS)]
    rates = {
        f"{way} messages/s": spread_of([SMALL_MESSAGES / one for one in taken])
        for way, taken in seconds.items()
    }
    return {
        "size": SMALL,
        **rates,
        "latency p50 us": quantile(latency, 0.5),
        "latency p99 us": quantile(latency, 0.99),
    }


def _report(sizes: list[dict[str, Any]], small: dict[str, Any]) -> str:
    rows = []
    for one in sizes:
        speeds = [one[way].text(2) for way in ("memcpy", "push", "gloo")]
        ratios = [f"{100 * one['of memcpy'].median:.0f} %", f"{one['of gloo'].median:.1f} ×"]
        rows.append([size_text(one["size"]), *speeds, *ratios])
    heads = ["message", "memcpy GB/s", "push GB/s", "gloo GB/s", "of memcpy", "of gloo"]
    push, gloo = small["push messages/s"], small["gloo messages/s"]
    return (
        f"{table(heads, rows)}\n\n"
        f"4 KiB: {push.text(0)} messages/s, gloo {gloo.text(0)}; one way to a waiting receiver "
        f"p50 {small['latency p50 us']:.1f} µs, p99 {small['latency p99 us']:.1f} µs\n"
        "Medians (10 % to 90 % of the rounds). Targets: at least 80 % of memcpy, 5 × gloo."
    )


def _save(sizes: list[dict[str, Any]], small: dict[str, Any]) -> Path:
    """Append one JSON line a measurement."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "shm.jsonl"
    known = facts()
    with path.open("a") as file:
        for one in [*sizes, small]:
            plain = {k: asdict(v) if isinstance(v, Spread) else v for k, v in one.items()}
            file.write(json.dumps({**plain, **known}) + "\n")
    return path


def main() -> None:
    """Run all, print the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds a size, all ways in each")
    parser.add_argument("--save", action="store_true", help="append the figures to bench/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tapchannel-") as folder:
        store, meeting = f"file://{folder}", f"file://{folder}/gloo"
        with Partner(receive, store, meeting) as partner:
            _meet(meeting, 1)
            sizes = [measure_size(partner, store, size, options.rounds) for size in SIZES]
            small = measure_small(partner, store, options.rounds)
            dist.destroy_process_group()
    if options.save:
        print(f"saved to {_save(sizes, small).relative_to(RESULTS.parents[1])}")
    print(_report(sizes, small))


if __name__ == "__main__":
    main()
