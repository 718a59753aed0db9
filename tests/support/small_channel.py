"""A small channel in one process, for tests that disturb it and then want to see it still work."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tapchannel import Mailbox, Outbox, TapPlan
from tapchannel.errors import TapChannelError

NAME = "draft"
WIDTH = 8
MAX_ROWS = 16
GROUPS = {"features": ["low", "high"], "embedding": ["embedding"]}
SOURCES = {3: ["embedding", "low"], 7: ["high"]}
LIMIT = 5.0  # seconds that any wait of a test may take
SETTLING = 2.0  # seconds that a thread on its way out gets


def tap_plan(**changes: Any) -> TapPlan:
    """Give the tests' plan, or one that differs from it in what is named."""
    settings = {"groups": GROUPS, "width": WIDTH, "dtype": "float32", "max_rows": MAX_ROWS}
    return TapPlan(**{**settings, **changes})


PLAN = tap_plan()


class SmallChannel:
    """A mailbox and its outboxes by rank; `carry` proves that they work."""

    def __init__(self, mailbox: Mailbox, outboxes: Mapping[int, Outbox]) -> None:
        self.mailbox = mailbox
        self.outboxes = dict(outboxes)
        self.step = 0

    @contextmanager
    def open_pass(self, microbatches: int) -> Iterator[int]:
        """Open the next pass on all sides, and close it; give its step."""
        self.step += 1
        passes = [
            side.open_pass(self.step, microbatches)
            for side in (self.mailbox, *self.outboxes.values())
        ]
        yield self.step
        for side in passes:
            side.close()

    def open_next(self, microbatches: int) -> int:
        """Open the next pass on all sides and leave it open; give its step."""
        self.step += 1
        for side in (self.mailbox, *self.outboxes.values()):
            side.open_pass(self.step, microbatches)
        return self.step

    def abort(self) -> None:
        """End the pass on all sides, whatever state it is in."""
        for side in (self.mailbox, *self.outboxes.values()):
            side.abort("the test has seen what it wanted")

    def deliver(self, microbatch: int, pushed: Mapping[str, torch.Tensor] | None = None) -> None:
        """Push what is left of a microbatch and compare every tap that arrives, bit for bit.

        ``pushed`` holds the taps that the test has pushed already.
        """
        values = dict(pushed or {})
        for rank, outbox in self.outboxes.items():
            for tap in SOURCES[rank]:
                if tap not in values:
                    values[tap] = torch.randn(5, WIDTH)
                    outbox.push(microbatch, tap, values[tap])
        with self.mailbox.recv(microbatch, wait="host", timeout=LIMIT) as taps:
            for tap, value in values.items():
                assert torch.equal(taps[tap], value), f"tap {tap!r} of microbatch {microbatch}"

    def carry(self, microbatches: int = 3) -> None:
        """Run a whole pass, and compare every tap that arrives."""
        with self.open_pass(microbatches):
            for microbatch in range(microbatches):
                self.deliver(microbatch)

    def close(self) -> None:
        """Close all sides."""
        for side in (*self.outboxes.values(), self.mailbox):
            side.close()


@contextmanager
def small_channel(
    folder: Path, ranks: Sequence[int] = tuple(SOURCES), **settings: Any
) -> Iterator[SmallChannel]:
    """Make a mailbox in host memory and an outbox for each of ``ranks``; close them all at the end.

    ``settings`` are the mailbox's.
    """
    place = {"store": f"file://{folder}", "name": NAME}
    mailbox = Mailbox(PLAN, SOURCES, **{"depth": 2, "timeout": LIMIT, **place, **settings})
    channel = SmallChannel(mailbox, {})
    try:
        for rank in ranks:
            channel.outboxes[rank] = attach(folder, rank)
        yield channel
    finally:
        channel.close()


def attach(folder: Path, rank: int, plan: TapPlan = PLAN, **settings: Any) -> Outbox:
    """Attach an outbox to the mailbox that `small_channel` made in this folder."""
    place = {"store": f"file://{folder}", "name": NAME}
    limits = {"timeout": LIMIT, "attach_timeout": LIMIT}
    return Outbox(plan, rank, **{**place, **limits, **settings})


def states(mailbox: Mailbox) -> dict[int, str]:
    """Give each lane's state by its producer rank."""
    lanes: Any = mailbox.info()["lanes"]
    return {lane["rank"]: lane["state"] for lane in lanes}


@contextmanager
def refused(*kinds: type[TapChannelError], **facts: object) -> Iterator[list[TapChannelError]]:
    """Expect an error of exactly one of these classes, with these facts as fields and in its text.

    Gives a list that then holds the error. A fact given as ``...`` only has to be there.
    """
    caught: list[TapChannelError] = []
    with pytest.raises(kinds) as raised:
        yield caught
    caught.append(raised.value)
    # The error's traceback holds this frame, and the frames hold leases: no reference stays here.
    del raised
    assert type(caught[0]) in kinds
    check_facts(caught[0], facts)


def check_facts(error: TapChannelError, facts: Mapping[str, object]) -> None:
    """See that each fact is a field of the error and stands in its text."""
    for name, fact in facts.items():
        value = getattr(error, name)
        assert value is not None, f"{name} is not said: {error}"
        if fact is not ...:
            assert value == fact, f"{name} is {value!r}: {error}"
        if not isinstance(value, float):
            assert str(value) in str(error), f"{name} is not in the text: {error}"


def here(**more: object) -> dict[str, object]:
    """Give the facts by which an error names this process."""
    return {"host": socket.gethostname(), "pid": os.getpid(), **more}


def descriptors() -> dict[int, str]:
    """Give this process's open file descriptors and what they are."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the listing's own
            continue
    return found


class Footprint(NamedTuple):
    """How many descriptors and threads, native ones included, a process holds."""

    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Footprint:
        """Count."""
        return cls(len(descriptors()), len(os.listdir("/proc/self/task")))

    @classmethod
    def at_rest(cls) -> Footprint:
        """Count once nothing is on its way out any more: two equal counts, a while apart."""
        gc.collect()
        counted = cls.now()
        for _ in range(100):
            time.sleep(0.02)
            before, counted = counted, cls.now()
            if counted == before:
                break
        return counted

    def grown(self) -> Footprint | None:
        """Give what this process holds now if, for seconds, it is more than this; else None."""
        gc.collect()
        deadline = time.monotonic() + SETTLING
        while True:
            now = self.now()
            if now.descriptors <= self.descriptors and now.threads <= self.threads:
                return None
            if time.monotonic() > deadline:
                return now
            time.sleep(0.005)
