"""What workers do with a channel between two hosts, and the taps that they push.

Every word of a tap says which key and tap it belongs to, and its place in the tap.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from support.channels import until
from support.small_channel import Footprint
from tapchannel import Lease, Mailbox, Outbox, TapPlan
from tapchannel.errors import PeerLostError
from tapchannel.keys import MAX_STEP
from tapchannel.passes import Pass

NAME = "draft"
EMULATED = os.environ.get("TAPCHANNEL_RDMA_GUEST") == "1"  # by a processor many times as slow
LIMIT = 120.0 if EMULATED else 30.0  # seconds; no wait of a passing test comes near it
DEPTH = 2
ROWS = 256
WIDTHS = {"early": 512, "late": 256}  # 1 MiB and half of it, side by side in one group
PLAN = TapPlan(groups={"fused": list(WIDTHS)}, width=WIDTHS, dtype="int64", max_rows=ROWS)
SOURCES = {0: tuple(WIDTHS)}
MICROBATCH_BYTES = 8 * ROWS * sum(WIDTHS.values())
ENDLESS = 100_000  # microbatches of a pass that only a fault ends
FLOWING = 3  # microbatches after which data flows
PLACES = 20  # bits of a word that number the words of a tap


class Lost(NamedTuple):
    """How a wait ended that lost its peer: when, by the machine's clock, and with what error."""

    at: float
    error: PeerLostError


def payload(step: int, microbatch: int, tap: str) -> torch.Tensor:
    """Give the rows of a tap for a key: each word is (step, microbatch, tap, place)."""
    head = ((step << 18 | microbatch) << 4 | list(WIDTHS).index(tap)) << PLACES
    return torch.arange(head, head + ROWS * WIDTHS[tap]).view(ROWS, WIDTHS[tap])


def check(lease: Lease, step: int, microbatch: int) -> None:
    """See that a lease shows what was pushed for the key, in every tap and in the group."""
    wanted = {tap: payload(step, microbatch, tap) for tap in WIDTHS}
    wanted["fused"] = torch.cat(list(wanted.values()), 1)
    for name, value in wanted.items():
        wrong = (lease[name] != value).sum().item()
        assert wrong == 0, f"{wrong} wrong words in {name} of pass {step}, microbatch {microbatch}"


# ---- calls of the consumer


def serve(desk: SimpleNamespace, store: str, address: str, options: dict[str, Any]) -> None:
    """Make a mailbox that outboxes of other hosts can reach at this address."""
    settings = {"depth": DEPTH, "timeout": LIMIT, "transport": "ucx", **options}
    listen = f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
    desk.mailbox = Mailbox(
        PLAN, SOURCES, store=store, name=NAME, listen=listen, allow_no_secret=True, **settings
    )


def open_for_receiving(desk: SimpleNamespace, step: int, microbatches: int) -> None:
    """Open the mailbox's pass and leave it open."""
    desk.step = step
    desk.receiving = desk.mailbox.open_pass(step, microbatches)


def receive(desk: SimpleNamespace, microbatch: int) -> None:
    """Receive a microbatch of the open pass."""
    with desk.mailbox.recv(microbatch) as lease:
        check(lease, desk.step, microbatch)


def receive_at_once(desk: SimpleNamespace, microbatch: int) -> None:
    """Receive a microbatch that has landed already."""
    with desk.mailbox.try_recv(microbatch) as lease:
        check(lease, desk.step, microbatch)


def abort(desk: SimpleNamespace) -> None:
    """End the open pass."""
    desk.mailbox.abort("the peer was lost")


def receive_pass(desk: SimpleNamespace, step: int, microbatches: int) -> None:
    """Receive a whole pass."""
    with desk.mailbox.open_pass(step, microbatches):
        desk.step = step
        for microbatch in range(microbatches):
            receive(desk, microbatch)


def lose_producer(desk: SimpleNamespace, microbatch: int) -> Lost:
    """Wait for a microbatch that does not come, since its producer is lost."""
    return _lost(lambda: desk.mailbox.recv(microbatch))


def lose_producer_receiving(desk: SimpleNamespace, step: int) -> Lost:
    """Receive one microbatch after the other, until the producer is lost."""
    return _lost(lambda: _each(desk, desk.mailbox.open_pass(step, ENDLESS), receive))


def lose_producer_idly(desk: SimpleNamespace) -> Lost:
    """Wait, outside of any pass, until the mailbox says that its producer is lost."""
    until(lambda: lane_state(desk) == "lost")
    return _lost(lambda: desk.mailbox.open_pass(MAX_STEP, 1))


def await_arrival(desk: SimpleNamespace) -> None:
    """Wait until the producer has attached."""
    desk.mailbox.wait_ready()


def await_departure(desk: SimpleNamespace) -> None:
    """Wait until the mailbox knows that its producer has gone."""
    until(lambda: lane_state(desk) != "attached")


def lane_state(desk: SimpleNamespace) -> str:
    """Give the lane's state."""
    return desk.mailbox.info()["lanes"][0]["state"]


def footprint(desk: SimpleNamespace) -> tuple[int, int, int]:
    """Give this process's descriptors, threads and resident bytes, once they have settled."""
    at_rest = Footprint.at_rest()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return at_rest.descriptors, at_rest.threads, pages * os.sysconf("SC_PAGESIZE")


# ---- calls of the producer


def attach(desk: SimpleNamespace, store: str, options: dict[str, Any]) -> None:
    """Attach an outbox."""
    settings = {"timeout": LIMIT, "attach_timeout": LIMIT, "transport": "ucx", **options}
    desk.outbox = Outbox(PLAN, 0, store=store, name=NAME, **settings)


def open_for_pushing(desk: SimpleNamespace, step: int, microbatches: int) -> None:
    """Open the outbox's pass and leave it open."""
    desk.step = step
    desk.pushing = desk.outbox.open_pass(step, microbatches)


def push(desk: SimpleNamespace, microbatch: int, taps: Sequence[str] = tuple(WIDTHS)) -> None:
    """Push a microbatch of the open pass, or some taps of it."""
    for tap in taps:
        desk.outbox.push(microbatch, tap, payload(desk.step, microbatch, tap))


def await_credit(desk: SimpleNamespace, microbatch: int) -> None:
    """Wait until a push of this microbatch would not have to wait."""
    until(lambda: desk.outbox._core.has_credit(microbatch))


def flush(desk: SimpleNamespace) -> None:
    """Wait until every push has been performed at the consumer."""
    desk.outbox.flush()


def push_pass(desk: SimpleNamespace, step: int, microbatches: int) -> None:
    """Push a whole pass, and wait until the last of it has been taken."""
    with desk.outbox.open_pass(step, microbatches):
        desk.step = step
        for microbatch in range(microbatches):
            push(desk, microbatch)
    desk.outbox.flush()


def lose_consumer(desk: SimpleNamespace) -> Lost:
    """Wait for the credit that does not come, since the consumer is lost."""
    return _lost(desk.outbox.flush)


def lose_consumer_pushing(desk: SimpleNamespace, step: int) -> Lost:
    """Push one microbatch after the other, until the consumer is lost."""
    return _lost(lambda: _each(desk, desk.outbox.open_pass(step, ENDLESS), _push_and_flush))


def lose_consumer_idly(desk: SimpleNamespace) -> Lost:
    """Ask, outside of any pass, until the outbox says that its consumer is lost."""
    return _lost(lambda: until(lambda: desk.outbox.flush(0)))


def _push_and_flush(desk: SimpleNamespace, microbatch: int) -> None:
    push(desk, microbatch)
    desk.outbox.flush()


# ---- calls of either


def facts(desk: SimpleNamespace) -> dict[str, Any]:
    """Give the facts of this side."""
    return (desk.mailbox if hasattr(desk, "mailbox") else desk.outbox).info()


def _each(
    desk: SimpleNamespace, opened: Pass, handle: Callable[[SimpleNamespace, int], None]
) -> None:
    """Handle the microbatches of a pass without end; say when they flow."""
    with opened:
        desk.step = opened.step
        for microbatch in range(ENDLESS):
            handle(desk, microbatch)
            if microbatch == FLOWING:
                desk.link.reach("flowing")


def _lost(wait: Callable[[], object]) -> Lost:
    """See that a wait ends because the peer is lost."""
    try:
        wait()
    except PeerLostError as error:
        return Lost(time.monotonic(), error)
    raise AssertionError("the peer was to be lost")


def clear(desk: SimpleNamespace) -> None:
    """Close what is open, and forget it."""
    for name in ("outbox", "mailbox"):
        if hasattr(desk, name):
            getattr(desk, name).close()
    link = desk.link
    desk.__dict__.clear()
    desk.link = link
    gc.collect()
