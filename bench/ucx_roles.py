"""The two hosts of the ucx bench. Each function runs in a process inside its own host."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch

from tapchannel import Mailbox, Outbox, TapPlan

if TYPE_CHECKING:
    from support.link import Link

TAP = "state"
WIDTH = 1024  # of uint8: rows of 1 KiB
DEPTH = 4


def plan_of(size: int) -> TapPlan:
    """Plan one tap of this many bytes."""
    return TapPlan({TAP: [TAP]}, width=WIDTH, dtype="uint8", max_rows=size // WIDTH)


def _mailbox(store: str, name: str, size: int, listen: str) -> Mailbox:
    where = {"transport": "ucx", "listen": listen, "allow_no_secret": True}
    return Mailbox(plan_of(size), {1: [TAP]}, depth=DEPTH, store=store, name=name, **where)


def _outbox(store: str, name: str, size: int, queue: int) -> Outbox:
    return Outbox(plan_of(size), 1, store=store, name=name, transport="ucx", queue_limit=queue)


def _source(size: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (size // WIDTH, WIDTH), dtype=torch.uint8, generator=random)


def receive(link: Link, store: str, listen: str, size: int, core: int) -> None:
    """Receive passes of as many microbatches as asked for; tell when each pass was there."""
    os.sched_setaffinity(0, {core})
    with _mailbox(store, "stream", size, listen) as mailbox:
        link.reach("serving")
        step = 0
        while (count := link.receive()) is not None:
            step += 1
            with mailbox.open_pass(step, count):
                link.reach("open")
                for microbatch in range(count):
                    with mailbox.recv(microbatch, wait="host"):
                        pass
            link.reach("received", time.monotonic_ns())


def push(link: Link, store: str, size: int, queue: int, core: int) -> None:
    """Push passes of as many microbatches as asked for; tell when each pass was begun."""
    os.sched_setaffinity(0, {core})
    source = _source(size)  # one, as ucx_perftest has one
    with _outbox(store, "stream", size, queue) as outbox:
        link.reach("attached", outbox.info()["ucx_lanes"])
        step = 0
        while (count := link.receive()) is not None:
            step += 1
            with outbox.open_pass(step, count):
                began = time.monotonic_ns()
                for microbatch in range(count):
                    outbox.push(microbatch, TAP, source)
                outbox.flush()
            link.reach("pushed", began)


def pong(link: Link, store: str, listen: str, size: int, count: int, first: bool) -> list[int]:
    """Push and receive in turns; the first to push gives each round trip's nanoseconds."""
    mine, theirs = ("a", "b") if first else ("b", "a")
    source = _source(size)
    rounds: list[int] = []
    with (
        _mailbox(store, mine, size, listen) as mailbox,
        _outbox(store, theirs, size, count) as outbox,
        mailbox.open_pass(1, count),
        outbox.open_pass(1, count),
    ):
        mailbox.wait_ready()
        link.reach("ready")
        link.receive()
        for microbatch in range(count):
            began = time.monotonic_ns()
            if first:
                outbox.push(microbatch, TAP, source)
            with mailbox.recv(microbatch, wait="host"):
                pass
            if not first:
                outbox.push(microbatch, TAP, source)
            rounds.append(time.monotonic_ns() - began)
        outbox.flush()
        link.reach("over")
        link.receive()
    return rounds
