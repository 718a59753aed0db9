"""Any order of calls, on both sides of a real channel, against a model of what must come of it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from support.channel_driver import MAX_ROWS, SOURCES, TAPS, ChannelDriver
from support.channel_terms import Verdict
from support.effort import repeated
from tapchannel.errors import UsageError

lanes = st.sampled_from([0, 1])
microbatches = st.integers(0, 4)
counts = st.integers(1, 5)
leases = st.integers(0, 7)


class ChannelMachine(ChannelDriver):
    """What trainers do, right and wrong, in any order.

    Catches whatever the tests of single failures do not think of: a lease that shows another key's
    bytes, a push that is sent without credit or never, the wrong error, a failure that outlives the
    pass that it failed.
    """

    # ---- the consumer

    @precondition(lambda self: self.model.open is None)
    @rule(stride=st.sampled_from([1, 1, 1, 2, 0]), count=counts)
    def open_pass(self, stride: int, count: int) -> None:
        """Open the next pass, skip one, or name the last one again."""
        step = max(0, self.model.last_step + stride)
        verdict = self.model.judge_open(step)
        opened, kind = self.run(verdict, lambda: self.mailbox.open_pass(step, count))
        if kind is None:
            self.opened = opened
            self.model.open_pass(step, count)

    @precondition(lambda self: self.opened is not None and None in self.model.judge_close())
    @rule()
    def close_pass(self) -> None:
        """Leave the pass, all of it received."""
        self.leave_pass()

    @precondition(lambda self: self.model.failure is not None)
    @rule(by=st.sampled_from(["close", "close", "abort", "reset"]))
    def recover(self, by: str) -> None:
        """Leave, abort or reset after a wait that failed."""
        {"close": self.leave_pass, "abort": self.give_up, "reset": self.begin_epoch}[by]()

    @rule(
        what=st.sampled_from(["leave", "abort", "reset", "restart", "end", "give up", "misuse"]),
        index=lanes,
    )
    def disturb(self, what: str, index: int) -> None:
        """Do what a schedule does only when something goes wrong."""
        {
            "leave": self.leave_pass,
            "abort": self.give_up,
            "reset": self.begin_epoch,
            "restart": lambda: self.attach(index),
            "end": lambda: self.detach(index),
            "give up": lambda: self.give_up_at(index),
            "misuse": lambda: self._misuse(index),
        }[what]()

    def _misuse(self, index: int) -> None:
        """Make calls that no state but the right one allows."""
        step = self.model.last_step + 1
        if self.model.open is not None:
            self.run(self.model.judge_open(step), lambda: self.mailbox.open_pass(step, 1))
        else:
            self.run(self.model.judge_receive(0, "host"), lambda: self.mailbox.recv(0, timeout=0))
        if index in self.outboxes and self.lane(index).open is None:
            tensor = torch.zeros(1, 2, dtype=torch.int64)
            verdict = self.model.judge_push(self.lane(index), 0, SOURCES[index][0])
            self.run(verdict, lambda: self.outboxes[index].push(0, SOURCES[index][0], tensor))

    @precondition(lambda self: self.model.open is not None)
    @rule(microbatch=microbatches, mode=st.sampled_from(["try", "host", "stream"]))
    def receive(self, microbatch: int, mode: str) -> None:
        """Receive a microbatch, whether it can be there or not."""
        verdict = self.model.judge_receive(microbatch, mode)
        lease, kind = self.run(verdict, lambda: self.lease_of(microbatch, mode, None in verdict))
        if kind is None:
            self.keep(lease, microbatch)
        else:
            self.model.fail(kind)

    @rule(count=counts, rows=st.integers(0, MAX_ROWS), mode=st.sampled_from(["try", "host"]))
    def deliver(self, count: int, rows: int, mode: str) -> None:
        """Have all sides do as they should, until a microbatch is received."""
        if self.model.failure is not None:
            self.leave_pass()
        if self.model.open is None:
            self.open_pass(1, count)
        self.follow((0, 1), rows)
        if self.ready():
            self.receive(self.ready()[0], mode)

    @precondition(lambda self: self.ready())
    @rule(which=microbatches, mode=st.sampled_from(["try", "host", "stream"]))
    def receive_ready(self, which: int, mode: str) -> None:
        """Receive a microbatch that is there."""
        ready = self.ready()
        self.receive(ready[which % len(ready)], mode)

    def ready(self) -> list[int]:
        """Give the microbatches that have landed and were not received yet."""
        if self.model.open is None:
            return []
        left = set(range(self.model.open.microbatches)) - self.model.received
        return sorted(number for number in left if self.model.is_ready(number))

    # ---- leases

    @precondition(lambda self: self.held)
    @rule(which=leases, name=st.sampled_from([*TAPS, "pair"]))
    def look(self, which: int, name: str) -> None:
        """Take a view, also of a lease whose pass or epoch is long over."""
        held = self.pick(which)
        if held.lease is None:
            return
        if name not in held.wanted:
            try:
                held.lease[name]
            except UsageError:
                return
            raise AssertionError("taps with different rows were given side by side")
        held.views.append((held.lease[name], name))
        held.check()

    @precondition(lambda self: self.held)
    @rule(which=leases)
    def leave(self, which: int) -> None:
        """Leave a lease; the views that were taken stay, and so does the slot."""
        held = self.pick(which)
        if held.lease is not None:
            held.lease.__exit__(None, None, None)
            held.lease = None
        self.give_back_if_free(held)

    @precondition(lambda self: self.held)
    @rule(which=leases)
    def release(self, which: int) -> None:
        """Release a lease, which views that are alive forbid."""
        held = self.pick(which)
        if held.lease is None:
            return
        verdict: Verdict = frozenset([UsageError if held.views else None])
        _, kind = self.run(verdict, held.lease.release)
        if kind is None:
            held.lease = None
        self.give_back_if_free(held)

    @precondition(lambda self: self.held)
    @rule(which=leases)
    def clone(self, which: int) -> None:
        """Take copies, which a slot does not outlive."""
        held = self.pick(which)
        if held.lease is None or "pair" not in held.wanted:
            return
        copies = held.lease.clone()
        assert set(copies) == set(held.wanted)
        for name, copy in copies.items():
            assert torch.equal(copy, held.wanted[name])
        held.lease = None
        self.give_back_if_free(held)

    @precondition(lambda self: self.held)
    @rule(which=leases)
    def drop_views(self, which: int) -> None:
        """Drop the views of a lease."""
        held = self.pick(which)
        held.views.clear()
        self.give_back_if_free(held)

    # ---- producers

    @precondition(lambda self: len(self.outboxes) < len(SOURCES))
    @rule()
    def attach_missing(self) -> None:
        """Begin the life of a producer that is not there."""
        for index in sorted(set(SOURCES) - set(self.outboxes)):
            self.attach(index)

    @rule(index=lanes, ahead=st.sampled_from([0, 0, 0, 1, 2]), count=counts, same=st.booleans())
    def open_at(self, index: int, ahead: int, count: int, same: bool) -> None:
        """Open the mailbox's pass at a producer, or a later one, or the last one again."""
        if index not in self.outboxes:
            return
        now = self.model.open
        step = max(0, self.model.last_step + ahead + (now is None))
        if same and now is not None:
            count = now.microbatches
        verdict = self.model.judge_open_at(self.lane(index), step)
        outbox = self.outboxes[index]
        opened, kind = self.run(verdict, lambda: outbox.open_pass(step, count))
        if kind is None:
            self.opened_at[index] = opened
            self.model.open_at(self.lane(index), step, count)

    @precondition(lambda self: self.opened_at)
    @rule(index=lanes, microbatch=microbatches, second=st.booleans(), rows=st.integers(0, MAX_ROWS))
    def push(self, index: int, microbatch: int, second: bool, rows: int) -> None:
        """Push any tap of any microbatch."""
        if index in self.outboxes:
            taps = SOURCES[index]
            self.push_one(index, microbatch, taps[int(second) % len(taps)], rows)

    @rule(
        ranks=st.sampled_from([(0, 1), (0, 1), (1, 0), (0,), (1,)]), rows=st.integers(0, MAX_ROWS)
    )
    def follow(self, ranks: tuple[int, ...], rows: int) -> None:
        """Have producers do as they should: go to the mailbox's pass, and push all of it."""
        for index in ranks:
            if index not in self.outboxes:
                continue
            if self.lane(index).open != self.model.open:
                self.close_at(index)
                self.open_at(index, 0, 3, True)
            self.push_all(index, rows)

    @rule(index=lanes)
    def close_at(self, index: int) -> None:
        """Leave a producer's pass, whole or not."""
        if index not in self.opened_at:
            return
        lane, opened = self.lane(index), self.opened_at.pop(index)
        _, kind = self.run(self.model.judge_close_at(lane), opened.close)
        if kind is None:
            self.model.close_at(lane)
        else:
            self.model.abort_at(lane)


ChannelMachine.TestCase.settings = settings(
    max_examples=repeated(60), stateful_step_count=50, deadline=None
)


@pytest.mark.timeout(300)  # to shorten an example takes long; to pass takes seconds
class TestChannel(ChannelMachine.TestCase):
    """Any order of calls."""
