"""Drives a real channel beside its model: makes a call, and sees that what came of it was due."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from support.channel_model import ChannelModel
from support.channel_terms import CellKey, LaneModel, Verdict
from support.channels import until
from tapchannel import Lease, Mailbox, Outbox, TapPlan
from tapchannel.errors import TapChannelError
from tapchannel.keys import Key
from tapchannel.passes import Pass
from tapchannel.telemetry import read_events

LIMIT = 20.0
SETTLING = 3.0  # a failure is looked for again and again, to find its shortest form
BRIEFLY = 0.005
MAX_ROWS = 3
TAPS = ("left", "right", "only")
PLAN = TapPlan(
    groups={"pair": ["left", "right"], "only": ["only"]}, width=2, dtype="int64", max_rows=MAX_ROWS
)
SOURCES = {0: ["left", "only"], 1: ["right"]}


class Held:
    """A lease of the real channel, the views taken of it, and what each must show for ever."""

    def __init__(self, number: int, lease: Lease, wanted: dict[str, torch.Tensor]) -> None:
        self.number = number
        self.lease: Lease | None = lease
        self.wanted = wanted
        self.views: list[tuple[torch.Tensor, str]] = []

    def check(self) -> None:
        """See that every view that is still alive shows what was pushed for the lease's key."""
        for view, name in self.views:
            assert torch.equal(view, self.wanted[name]), f"{name}: {view} for {self.wanted[name]}"


class ChannelDriver(RuleBasedStateMachine):
    """One mailbox and two outboxes over shm; the rules are the tests'."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = f"file://{self.folder.name}"
        self.outboxes: dict[int, Outbox] = {}
        self.opened: Pass | None = None
        self.opened_at: dict[int, Pass] = {}
        self.payloads: dict[CellKey, torch.Tensor] = {}
        self.held: dict[int, Held] = {}
        self.numbers = 0

    @initialize(
        depth=st.integers(1, 3), attached=st.sampled_from(["both", "both", "both", "one", ""])
    )
    def start(self, depth: int, attached: str) -> None:
        """Make the mailbox, and attach some of its producers."""
        self.mailbox = Mailbox(PLAN, SOURCES, depth=depth, store=self.store, timeout=LIMIT)
        self.model = ChannelModel(depth, list(SOURCES.values()))
        for index in {"both": (0, 1), "one": (1,)}.get(attached, ()):
            self.attach(index)

    def teardown(self) -> None:
        """Close everything, with leases and views still alive."""
        for outbox in self.outboxes.values():
            outbox.close()
        if hasattr(self, "mailbox"):
            self.mailbox.close()
            for held in self.held.values():
                held.check()
        self.held.clear()
        self.folder.cleanup()

    # ---- how calls are made

    def run(self, verdict: Verdict, call: Callable[[], Any]) -> tuple[Any, type | None]:
        """Make a call whose outcome the model has judged; give its value, and its error's class."""
        came = "success"
        try:
            value, kind = call(), None
        except TapChannelError as error:
            value, kind, came = None, type(error), repr(error)
        due = ", ".join(sorted(outcome.__name__ if outcome else "success" for outcome in verdict))
        assert kind in verdict, f"due: {due}; it came to: {came}"
        return value, kind

    def lane(self, index: int) -> LaneModel:
        """Give a lane's model."""
        return self.model.lanes[index]

    @invariant()
    def queues_are_as_the_model_has_them(self) -> None:
        """Wait until the outboxes have sent what there is credit for, and dropped what is over."""
        for index, outbox in self.outboxes.items():
            wanted = len(self.lane(index).queue)
            until(lambda outbox=outbox, wanted=wanted: outbox.info()["queued"] == wanted, SETTLING)

    @invariant()
    def views_show_what_was_pushed(self) -> None:
        """Look at every view that is alive (I1, I2, I9)."""
        for held in self.held.values():
            held.check()

    # ---- the consumer

    def leave_pass(self) -> None:
        """Leave the mailbox's pass, whole or not."""
        if self.opened is None:
            return
        _, kind = self.run(self.model.judge_close(), self.opened.close)
        self.opened = None
        if kind is None:
            self.model.close_pass()
        else:
            self.model.abort()

    def give_up(self) -> None:
        """Abort at the mailbox."""
        self.mailbox.abort("the consumer gave up")
        self.opened = None
        self.model.abort()

    def begin_epoch(self) -> None:
        """Reset the mailbox."""
        self.mailbox.reset()
        self.opened = None
        self.model.reset()
        assert self.mailbox.epoch == self.model.epoch

    def lease_of(self, microbatch: int, mode: str, is_due: bool) -> Lease:
        """Receive, with a deadline that is short where nothing can come."""
        if mode != "try":
            return self.mailbox.recv(microbatch, wait=mode, timeout=LIMIT if is_due else BRIEFLY)
        if is_due:  # the last of what the outboxes have just sent may be a moment away
            until(lambda: self.is_there(microbatch))
        return self.mailbox.try_recv(microbatch)

    def is_there(self, microbatch: int) -> bool:
        """Tell by the recorder whether every cell of a microbatch has been stamped."""
        assert self.model.open is not None
        stamped = {
            (event.lane, event.cell)
            for event in read_events(self.mailbox)
            if event.step_name == "stamp" and event.key == Key(*self.model.open.key, microbatch)
        }
        return len(stamped) == len(TAPS)

    def keep(self, lease: Lease, microbatch: int) -> None:
        """Keep a lease, and what it must show."""
        assert self.model.open is not None
        key = self.model.open.key
        assert (lease.key.epoch, lease.key.step, lease.key.microbatch) == (*key, microbatch)
        wanted = {tap: self.payloads[CellKey(key, microbatch, tap)] for tap in TAPS}
        if wanted["left"].shape == wanted["right"].shape:
            wanted["pair"] = torch.cat([wanted["left"], wanted["right"]], 1)
        self.numbers += 1
        self.held[self.numbers] = Held(self.numbers, lease, wanted)
        self.model.receive(self.numbers, microbatch)

    # ---- leases

    def pick(self, which: int) -> Held:
        """Choose a lease."""
        return list(self.held.values())[which % len(self.held)]

    def give_back_if_free(self, held: Held) -> None:
        """Tell the model once nothing holds the slot any more."""
        if held.lease is None and not held.views:
            del self.held[held.number]
            self.model.give_back(held.number)

    # ---- producers

    def attach(self, index: int) -> None:
        """Begin a producer's life; end the one before."""
        self.detach(index)
        self.outboxes[index] = Outbox(PLAN, index, store=self.store, timeout=LIMIT)
        self.model.attach(self.lane(index))

    def detach(self, index: int) -> None:
        """End a producer's life."""
        if index in self.outboxes:
            self.outboxes.pop(index).close()
            self.mailbox.info()  # the mailbox looks, and sees that it is closed
            self.opened_at.pop(index, None)
            self.model.detach(self.lane(index))

    def push_all(self, index: int, rows: int) -> None:
        """Push all that the producer's pass still lacks."""
        opened = self.lane(index).open
        if opened is None:
            return
        for microbatch in range(opened.microbatches):
            for tap in SOURCES[index]:
                if (microbatch, tap) not in self.lane(index).pushed:
                    self.push_one(index, microbatch, tap, rows)

    def push_one(self, index: int, microbatch: int, tap: str, rows: int) -> None:
        """Push one tap; every push has a content of its own."""
        lane, outbox = self.lane(index), self.outboxes[index]
        self.numbers += 1
        tensor = torch.arange(rows * 2).view(rows, 2) + (self.numbers << 8)
        verdict = self.model.judge_push(lane, microbatch, tap)
        _, kind = self.run(verdict, lambda: outbox.push(microbatch, tap, tensor))
        if kind is None:
            self.payloads[self.model.push(lane, microbatch, tap)] = tensor.clone()

    def give_up_at(self, index: int) -> None:
        """Abort at a producer."""
        if index in self.outboxes:
            self.outboxes[index].abort("the producer gave up")
            self.opened_at.pop(index, None)
            self.model.abort_at(self.lane(index))
