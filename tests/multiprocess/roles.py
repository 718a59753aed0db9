"""What the workers of this folder do: the calls that tests send them, and the taps that they push.

Every word of a tap says which key and tap it belongs to, and its place in the tap: whatever else a
lease shows, it cannot pass for what was pushed for the key.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tapchannel import Lease, Mailbox, Outbox, TapPlan

NAME = "draft"
LIMIT = 20.0  # seconds; no wait of a passing test comes near it
ROWS = 4
WIDTHS = {"early": 3, "late": 2, "ids": 1}
TAPS = tuple(WIDTHS)
PLAN = TapPlan(
    groups={"fused": ["early", "late"], "ids": ["ids"]}, width=WIDTHS, dtype="int64", max_rows=ROWS
)
ONE: Mapping[int, Sequence[str]] = {0: TAPS}
THREE: Mapping[int, Sequence[str]] = {0: ["early"], 1: ["late"], 2: ["ids"]}


class TrainerError(Exception):
    """What a user's own code raises in the middle of a pass."""


def payload(step: int, microbatch: int, tap: str) -> torch.Tensor:
    """Give the rows of a tap for a key: each word is (step, microbatch, tap, place)."""
    head = ((step << 18 | microbatch) << 8 | TAPS.index(tap)) << 8
    return torch.arange(head, head + ROWS * WIDTHS[tap]).view(ROWS, WIDTHS[tap])


def check(lease: Lease, step: int, microbatch: int) -> None:
    """See that a lease shows what was pushed for the key, in every tap and group."""
    wanted = {tap: payload(step, microbatch, tap) for tap in TAPS}
    wanted["fused"] = torch.cat([wanted["early"], wanted["late"]], 1)
    for name, value in wanted.items():
        seen = lease[name]
        assert torch.equal(seen, value), f"{name} of {step}, {microbatch}: {seen} for {value}"


def receive_pass(mailbox: Mailbox, step: int, microbatches: int) -> None:
    """Receive a whole pass, each microbatch in its turn."""
    with mailbox.open_pass(step, microbatches):
        for microbatch in range(microbatches):
            with mailbox.recv(microbatch) as lease:
                check(lease, step, microbatch)


# ---- calls of a producer


def attach(desk: SimpleNamespace, store: str, rank: int, **options: Any) -> None:
    """Attach an outbox."""
    settings = {"timeout": LIMIT, "attach_timeout": LIMIT, **options}
    desk.outbox = Outbox(PLAN, rank, store=store, name=NAME, **settings)


def attach_with(desk: SimpleNamespace, store: str, rank: int, options: dict[str, Any]) -> None:
    """Attach an outbox with settings of its own."""
    attach(desk, store, rank, **options)


def open_pass(desk: SimpleNamespace, step: int, microbatches: int) -> None:
    """Open a pass and leave it open."""
    desk.step = step
    desk.opened = desk.outbox.open_pass(step, microbatches)


def push(desk: SimpleNamespace, microbatch: int, taps: Sequence[str] = TAPS) -> None:
    """Push taps of a microbatch of the open pass."""
    for tap in taps:
        desk.outbox.push(microbatch, tap, payload(desk.step, microbatch, tap))


def push_tensor(desk: SimpleNamespace, microbatch: int, tap: str, tensor: torch.Tensor) -> None:
    """Push any tensor in a tap's place."""
    desk.outbox.push(microbatch, tap, tensor)


def close_pass(desk: SimpleNamespace) -> None:
    """Leave the open pass."""
    desk.opened.close()


def fail_in_pass(desk: SimpleNamespace, text: str) -> None:
    """Leave the open pass by an error of the user's."""
    desk.opened.__exit__(TrainerError, TrainerError(text), None)


def push_pass(
    desk: SimpleNamespace, step: int, microbatches: int, taps: Sequence[str] = TAPS
) -> None:
    """Push a whole pass, and wait until the last of it is copied."""
    open_pass(desk, step, microbatches)
    for microbatch in range(microbatches):
        push(desk, microbatch, taps)
    close_pass(desk)
    desk.outbox.flush()


def flush(desk: SimpleNamespace, timeout: float) -> None:
    """Wait until every push is copied."""
    desk.outbox.flush(timeout)


def facts(desk: SimpleNamespace) -> dict[str, Any]:
    """Give the outbox's facts."""
    return desk.outbox.info()


# ---- calls of a consumer


def serve(desk: SimpleNamespace, store: str, depth: int, sources: Mapping[int, Any]) -> None:
    """Make a mailbox."""
    desk.mailbox = Mailbox(PLAN, sources, depth=depth, store=store, name=NAME, timeout=LIMIT)


def open_for_receiving(desk: SimpleNamespace, step: int, microbatches: int) -> None:
    """Open the mailbox's pass and leave it open."""
    desk.step = step
    desk.receiving = desk.mailbox.open_pass(step, microbatches)


def receive(desk: SimpleNamespace, microbatch: int, timeout: float = LIMIT) -> None:
    """Receive one microbatch of the open pass, saying when the wait is about to begin."""
    desk.link.reach("receiving")
    with desk.mailbox.recv(microbatch, timeout=timeout) as lease:
        check(lease, desk.step, microbatch)


def end_receiving(desk: SimpleNamespace) -> None:
    """Leave the mailbox's open pass."""
    desk.receiving.close()


def receive_all(desk: SimpleNamespace, step: int, microbatches: int) -> None:
    """Receive a whole pass."""
    receive_pass(desk.mailbox, step, microbatches)


def close_mailbox(desk: SimpleNamespace) -> None:
    """Close the mailbox."""
    desk.mailbox.close()


# ---- calls of either


def cpu_seconds(desk: SimpleNamespace) -> float:
    """Give the processor time that this process has used so far, all its threads together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def clear(desk: SimpleNamespace) -> None:
    """Close what a test has left on the desk, and forget it."""
    for name in ("outbox", "mailbox"):
        if hasattr(desk, name):
            getattr(desk, name).close()
    link = desk.link
    desk.__dict__.clear()
    desk.link = link
    gc.collect()  # an error's frames may still hold a closed channel, which inspect() would find
