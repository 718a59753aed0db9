"""What the two processes of a cell do: each lives through two passes, and stops at its station."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from support import host_entry
from support.channels import until
from support.small_channel import Footprint
from tapchannel import Lease, Mailbox, Outbox, TapPlan
from tapchannel import attach as attaching
from tapchannel.errors import TapChannelError, TapTimeout
from tapchannel.testing import FaultyOutbox

NAME = "campaign"
ROWS, DEPTH = 8, 1
WIDTHS = {"early": 16, "late": 8}
PLAN = TapPlan(groups={"fused": list(WIDTHS)}, width=WIDTHS, dtype="int64", max_rows=ROWS)
ATTACH_LIMIT = 3.0
GPU_SLACK = 64 << 20  # bytes that the driver may hold back


class TrainerError(Exception):
    """What the user's own code raises."""


def payload(step: int, microbatch: int, tap: str) -> torch.Tensor:
    """Give the rows of a tap for a key: each word is (step, microbatch, tap, place)."""
    head = ((step << 18 | microbatch) << 8 | list(WIDTHS).index(tap)) << 8
    return torch.arange(head, head + ROWS * WIDTHS[tap]).view(ROWS, WIDTHS[tap])


# ---- stations


def at(desk: SimpleNamespace, moment: str) -> None:
    """Stand still at the cell's moment until the campaign says to go on."""
    if desk.moment == moment:
        desk.moment = None
        desk.link.reach("there")
        desk.link.receive()


def entering(desk: SimpleNamespace, moment: str) -> None:
    """At the cell's moment, say that the next call is the one to be struck."""
    if desk.moment == moment and not desk.slow:
        desk.moment = None
        desk.link.reach("there")
    at(desk, moment)


def standing_before(desk: SimpleNamespace, moment: str, call: Callable[..., Any]) -> Any:
    """Give a function that stands still at the moment, then makes the call."""

    def stand(*args: Any) -> Any:
        at(desk, moment)
        return call(*args)

    return stand


def raise_here(*_: object) -> None:
    """Be the user's own code that fails."""
    raise TrainerError("the user's own code failed")


# ---- a life


def begin(desk: SimpleNamespace, host: str | None, settings: dict[str, Any]) -> None:
    """Move into a host, make and close a channel of its own, and count what is held afterwards."""
    if host is not None:
        host_entry.enter(host)
    torch.set_num_threads(1)
    logging.getLogger("tapchannel").setLevel(logging.ERROR)
    desk.settings = settings
    desk.moment, desk.slow = None, False
    os.makedirs(settings["warm"], exist_ok=True)
    warm = {**settings, "store": f"file://{settings['warm']}/{os.getpid()}"}
    mailbox, outbox = mailbox_of(warm), None
    outbox = outbox_of(warm, True)
    push_pass_of(outbox, 1, 1, settings["device"])
    receive_pass_of(mailbox, 1, 1)
    outbox.close()
    mailbox.close()
    del mailbox, outbox
    desk.before = Footprint.at_rest()
    desk.pinned, desk.free = pinned(), free_on_gpu(settings)


def mailbox_of(settings: dict[str, Any]) -> Mailbox:
    """Make the mailbox."""
    return Mailbox(
        PLAN,
        {0: list(WIDTHS)},
        depth=DEPTH,
        store=settings["store"],
        name=NAME,
        device=settings["device"],
        transport=settings["wire"],
        listen=settings["listen"],
        allow_no_secret=True,
        timeout=settings["deadline"],
        peer_timeout=settings["peer_timeout"],
    )


def outbox_of(settings: dict[str, Any], faulty: bool = False) -> Outbox:
    """Attach the outbox."""
    return (FaultyOutbox if faulty else Outbox)(
        PLAN,
        0,
        store=settings["store"],
        name=NAME,
        device=None if settings["device"] == "cpu" else settings["device"],
        transport=settings["wire"],
        timeout=settings["deadline"],
        attach_timeout=ATTACH_LIMIT,
        peer_timeout=settings["peer_timeout"],
    )


def push_pass_of(outbox: Outbox, step: int, microbatches: int, device: str) -> None:
    """Open a pass and push it whole."""
    with outbox.open_pass(step, microbatches):
        for microbatch in range(microbatches):
            for tap in WIDTHS:
                outbox.push(microbatch, tap, payload(step, microbatch, tap).to(device))


def receive_pass_of(mailbox: Mailbox, step: int, microbatches: int) -> None:
    """Receive a whole pass."""
    with mailbox.open_pass(step, microbatches):
        for microbatch in range(microbatches):
            with mailbox.recv(microbatch, wait="host") as lease:
                check(lease, step, microbatch)


def check(lease: Lease, step: int, microbatch: int) -> None:
    """See that a lease shows what was pushed for its key."""
    for tap in WIDTHS:
        seen = lease[tap].cpu()
        assert torch.equal(seen, payload(step, microbatch, tap)), f"WRONG DATA in {tap}: {seen}"


def produce(desk: SimpleNamespace, moment: str, slow: bool) -> str:
    """Be the producer: attach, push two passes, close if the moment is there."""
    desk.moment, desk.slow = moment, slow
    signal.signal(signal.SIGUSR2, raise_here)
    device = desk.settings["device"]
    if moment == "attach":
        attaching._map = standing_before(desk, moment, attaching._map)
    desk.outbox = outbox = outbox_of(desk.settings, faulty=moment == "put")
    with outbox.open_pass(1, 2):
        at(desk, "open pass")
        at(desk, "wait")
        if isinstance(outbox, FaultyOutbox):
            outbox.faults.pass_by()
            outbox.faults.hold()
        outbox.push(0, "early", payload(1, 0, "early").to(device))
        at(desk, "push")
        outbox.push(0, "late", payload(1, 0, "late").to(device))
        if isinstance(outbox, FaultyOutbox):
            until(lambda: outbox.faults.held == 2)
            at(desk, "put")
            outbox.faults.let_go()
        for tap in WIDTHS:
            outbox.push(1, tap, payload(1, 1, tap).to(device))
        at(desk, "read")
        entering(desk, "release")
        outbox.flush()
    at(desk, "idle")
    push_pass_of(outbox, 2, 1, device)
    outbox.flush()
    if moment == "close":
        outbox._may_close = standing_before(desk, moment, outbox._may_close)  # type: ignore[method-assign]
        outbox.close()
    return "data"


def consume(desk: SimpleNamespace, moment: str, slow: bool) -> str:
    """Be the consumer: serve, receive two passes, close if the moment is there."""
    desk.moment, desk.slow = moment, slow
    signal.signal(signal.SIGUSR2, raise_here)
    desk.mailbox = mailbox = mailbox_of(desk.settings)
    at(desk, "attach")
    mailbox.wait_ready(ATTACH_LIMIT)
    with mailbox.open_pass(1, 2):
        for station in ("open pass", "push", "put"):
            at(desk, station)
        entering(desk, "wait")
        with mailbox.recv(0, wait="host") as lease:
            check(lease, 1, 0)
            at(desk, "read")
            check(lease, 1, 0)
            view = lease["fused"]
        try:
            at(desk, "release")
        finally:
            del view, lease
        with mailbox.recv(1, wait="host") as lease:
            check(lease, 1, 1)
        del lease
    at(desk, "idle")
    receive_pass_of(mailbox, 2, 1)
    if moment == "close":
        mailbox._may_close = standing_before(desk, moment, mailbox._may_close)  # type: ignore[method-assign]
        mailbox.close()
    return "data"


# ---- afterwards


def take_over(desk: SimpleNamespace, side: str) -> None:
    """Be the next life of a side: make its object."""
    if side == "consumer":
        desk.mailbox = mailbox_of(desk.settings)
    else:
        desk.outbox = outbox_of(desk.settings)


def mend_consumer(desk: SimpleNamespace, reset: bool) -> bool:
    """Leave what has failed; make another mailbox if this one is closed. Tell whether it is new."""
    mailbox = getattr(desk, "mailbox", None)
    if mailbox is not None and not mailbox._closed:
        mailbox.abort("the campaign goes on")
        if reset:
            mailbox.reset()
        mailbox._core.carried(ATTACH_LIMIT)  # who pushes next is to know of it
        return False
    take_over(desk, "consumer")
    return True


def mend_producer(desk: SimpleNamespace, again: bool) -> bool:
    """Leave what has failed; attach anew if the lane is gone. Tell whether it is new."""
    outbox = getattr(desk, "outbox", None)
    if outbox is not None and not outbox._closed:
        outbox.abort("the campaign goes on")
        if isinstance(outbox, FaultyOutbox):
            outbox.faults.let_go()  # the wire was slow, not broken
        if not again and alive(outbox):
            return False
        outbox.close()
    take_over(desk, "producer")
    return True


def alive(outbox: Outbox) -> bool:
    """Tell whether an outbox can open another pass."""
    try:
        outbox.flush(0)
    except TapTimeout:
        return True
    except TapChannelError:
        return False
    return True


def lane_state(desk: SimpleNamespace) -> str:
    """Give the state of the mailbox's lane."""
    lanes: Any = desk.mailbox.info()["lanes"]
    return lanes[0]["state"]


def push_pass(desk: SimpleNamespace, step: int) -> None:
    """Push a sound pass."""
    push_pass_of(desk.outbox, step, 3, desk.settings["device"])
    desk.outbox.flush()


def receive_pass(desk: SimpleNamespace, step: int) -> None:
    """Receive it."""
    desk.mailbox.wait_ready(ATTACH_LIMIT)
    receive_pass_of(desk.mailbox, step, 3)


def end(desk: SimpleNamespace, alone: bool) -> str | None:
    """Close all; tell what is held that was not held before, if anything is.

    The GPU's memory is everybody's, so only who is alone on it can tell.
    """
    for name in ("outbox", "mailbox"):
        if hasattr(desk, name):
            getattr(desk, name).close()
            delattr(desk, name)
    gc.collect()
    leaks: list[str] = []
    if (grown := desk.before.grown()) is not None:
        leaks.append(f"{desk.before} grew to {grown}")
    if pinned() > desk.pinned:
        leaks.append(f"pinned memory grew from {desk.pinned} to {pinned()} kB")
    free = free_on_gpu(desk.settings)
    if alone and free < desk.free - GPU_SLACK:
        leaks.append(f"free GPU memory shrank from {desk.free} to {free} B")
    return "; ".join(leaks) or None


def pinned() -> int:
    """Give the kB of this process that are locked or pinned."""
    text = Path("/proc/self/status").read_text()
    return sum(int(found) for found in re.findall(r"^Vm(?:Lck|Pin):\s+(\d+) kB", text, re.M))


def free_on_gpu(settings: dict[str, Any]) -> int:
    """Give the GPU's free bytes."""
    return 0 if settings["device"] == "cpu" else torch.cuda.mem_get_info()[0]
