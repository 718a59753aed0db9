"""Field reports of kinds K2, K3 and K4: what a stamp stands for, and what a failed wait leaves."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.channels import BRIEFLY, LIMIT, SHM, UCX, Wire, until
from support.payloads import payload, same_bits
from tapchannel import Mailbox, TapPlan
from tapchannel.errors import (
    ChecksumError,
    StampTimeout,
    TapChannelError,
    UsageError,
    WouldBlock,
)
from tapchannel.keys import MAX_MICROBATCHES, MAX_STEP, Key, landed
from tapchannel.testing import FaultyOutbox

ROWS, WIDTH = 64, 128
PLAN = TapPlan({"tap": ["tap"]}, WIDTH, "float32", ROWS)


class Line:
    """A mailbox and one faulty outbox of one process, on one wire."""

    def __init__(self, wire: Wire, folder: Path, depth: int = 2) -> None:
        place = {"store": folder.as_uri(), "transport": wire.transport, "timeout": LIMIT}
        self.mailbox = Mailbox(PLAN, {0: ["tap"]}, depth=depth, listen=wire.listen, **place)
        self.outbox = FaultyOutbox(PLAN, 0, **place)

    def open_pass(self, step: int, microbatches: int) -> None:
        """Open a pass on both sides."""
        self.mailbox.open_pass(step, microbatches)
        self.outbox.open_pass(step, microbatches)
        assert self.mailbox._core.carried(LIMIT)
        assert self.outbox._core.carried(LIMIT)

    def abort(self) -> None:
        """End the pass on both sides."""
        for side in (self.outbox, self.mailbox):
            side.abort("seen what was to be seen")
            assert side._core.carried(LIMIT)

    def push(self, step: int, microbatch: int) -> None:
        """Push the tap of a key."""
        self.outbox.push(microbatch, "tap", payload((step, microbatch), ROWS, WIDTH))

    def check(self, step: int, microbatch: int) -> None:
        """Receive the tap of a key, twice the same."""
        with self.mailbox.recv(microbatch) as taps:
            for _ in range(2):
                assert same_bits(taps["tap"], payload((step, microbatch), ROWS, WIDTH))

    def close(self) -> None:
        """Close both sides."""
        self.outbox.close()
        self.mailbox.close()


@pytest.fixture(params=[SHM, pytest.param(UCX, marks=pytest.mark.ucx)], ids=["shm", "ucx"])
def wire(request: pytest.FixtureRequest) -> Wire:
    """Give the wire under test."""
    return request.param


@pytest.fixture
def line(wire: Wire, tmp_path: Path) -> Iterator[Line]:
    """Give both sides."""
    made = Line(wire, tmp_path)
    yield made
    made.close()


# ---- A2


@pytest.mark.parametrize("thread", ["the caller's", "another"])
def test_field_a02_a_stamp_stands_for_all_of_its_payload(line: Line, thread: str) -> None:
    """A2 (K3): chunks part new, part old, since a copy on its way passed for one that was over."""
    line.open_pass(1, 4)
    for microbatch in range(4):
        line.outbox.faults.hold()
        if thread == "another":
            with ThreadPoolExecutor(1) as second:
                second.submit(line.push, 1, microbatch).result(LIMIT)
        else:
            line.push(1, microbatch)
        until(lambda: line.outbox.faults.held == 2)
        with pytest.raises(WouldBlock):
            line.mailbox.try_recv(microbatch)
        line.outbox.faults.let_go()
        line.check(1, microbatch)


# ---- A3


def test_field_a03_a_source_lives_until_its_copy_is_done(line: Line) -> None:
    """A3 (K3): the allocator gave a source's memory to the next tensor while it was still read."""
    line.open_pass(1, 3)
    line.outbox.faults.hold()
    alive: list[weakref.ref[torch.Tensor]] = []
    for microbatch in range(3):  # one is half copied, one waits behind it, one for credit
        base = payload((1, microbatch), 2 * ROWS, WIDTH)
        base[ROWS:] = payload((1, microbatch), ROWS, WIDTH)
        view = base[ROWS:]  # a view whose base is freed
        alive.append(weakref.ref(view))
        line.outbox.push(microbatch, "tap", view)
        del base, view
    garbage = [torch.full((2 * ROWS, WIDTH), float("nan")) for _ in range(50)]
    until(lambda: line.outbox.faults.held == 4)
    line.outbox.faults.let_go()
    for microbatch in range(3):
        line.check(1, microbatch)
    line.outbox.flush()
    del garbage
    gc.collect()
    assert not any(reference() for reference in alive)


def test_field_a03_a_source_that_is_modified_is_right_or_loud(line: Line) -> None:
    """A3 (K3), variant: the layer after the hook works in place."""
    line.open_pass(1, 1)
    line.outbox.faults.hold()
    source = payload((1, 0), ROWS, WIDTH)
    line.outbox.push(0, "tap", source)
    until(lambda: line.outbox.faults.held == 2)
    source.add_(1)
    line.outbox.faults.let_go()
    with pytest.raises(UsageError, match="modified in place"):
        until(lambda: line.outbox.flush(LIMIT))
    line.abort()
    line.open_pass(2, 1)
    line.push(2, 0)
    line.check(2, 0)


# ---- A5


def test_field_a05_a_wait_that_timed_out_stays_so(line: Line) -> None:
    """A5 (K5): a wait gave up, its paths did not look, and the step went on with half the data."""
    line.open_pass(1, 2)
    with pytest.raises(StampTimeout):
        line.mailbox.recv(0, timeout=BRIEFLY)
    line.push(1, 0)  # just after the deadline
    line.outbox.flush()
    for call in (
        lambda: line.mailbox.recv(0, timeout=BRIEFLY),
        lambda: line.mailbox.try_recv(0),
        lambda: line.mailbox.recv(1, timeout=BRIEFLY),
        lambda: line.mailbox.open_pass(2, 1),
    ):
        with pytest.raises(StampTimeout):
            call()
    line.abort()
    line.open_pass(2, 1)
    line.push(2, 0)
    line.check(2, 0)


# ---- A6


def test_field_a06_a_late_half_does_not_reach_a_reused_slot(line: Line) -> None:
    """A6 (K2): after a time-out the pages went to a new request, and the old write landed there."""
    line.open_pass(1, 1)
    line.outbox.faults.hold()
    line.push(1, 0)
    until(lambda: line.outbox.faults.held == 2)
    with pytest.raises(StampTimeout):
        line.mailbox.recv(0, timeout=BRIEFLY)
    line.abort()
    line.open_pass(2, 1)
    later = ThreadPoolExecutor(1)
    pushed = later.submit(line.push, 2, 0)  # to the very slot
    pushed.result(LIMIT)
    with pytest.raises(WouldBlock):
        line.mailbox.try_recv(0)
    line.outbox.faults.let_go()
    line.check(2, 0)
    line.outbox.flush()
    later.shutdown()


# ---- A16


def test_field_a16_no_stamp_overtakes_what_is_held_back(line: Line) -> None:
    """A16 (K3): a notice proves that the notice came, not that the payload did."""
    rounds, random_order = 200, random.Random(16)
    line.open_pass(1, rounds)
    for microbatch in range(rounds):
        fate = random_order.choice(("pass_by", "hold", "duplicate"))
        getattr(line.outbox.faults, fate)()
        line.push(1, microbatch)
        opener = threading.Thread(target=let_go, args=(line,)) if fate == "hold" else None
        if opener is not None:
            opener.start()
        line.check(1, microbatch)
        if opener is not None:
            opener.join()


def let_go(line: Line) -> None:
    """Let go of a message once its first half has been put."""
    until(lambda: line.outbox.faults.held == 2)
    line.outbox.faults.let_go()


def test_field_a16_check_mode_finds_a_stamp_that_did(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A16 (K3): a checksum a tap detects violations."""
    monkeypatch.setenv("TAPCHANNEL_CHECK", "1")
    line = Line(wire, tmp_path)
    line.outbox.faults.overtake()
    line.open_pass(1, 1)
    line.push(1, 0)
    with pytest.raises(ChecksumError) as found:
        line.mailbox.recv(0)
    assert found.value.rank == 0
    del found
    line.close()


# ---- A19

NEAR = {
    "2^31": (1 << 31) >> 18,  # a key's word crosses it from one step to the next
    "2^32": (1 << 32) >> 18,
    "the last step": MAX_STEP,
}


@pytest.mark.parametrize("limit", NEAR)
def test_field_a19_keys_go_on_over_the_limits_of_small_words(line: Line, limit: str) -> None:
    """A19 (K4): a counter wrapped after days, and the comparison could never hold again."""
    last = NEAR[limit]
    first = last - 3
    assert Key(1, last, 0).stamp() > Key(1, first, MAX_MICROBATCHES - 1).stamp()
    for step in range(first, last + 1):
        line.open_pass(step, 2)
        for microbatch in range(2):
            line.push(step, microbatch)
            line.check(step, microbatch)
        line.abort()
    if last == MAX_STEP:
        with pytest.raises(TapChannelError, match="step"):
            line.mailbox.open_pass(last + 1, 1)
        line.mailbox.reset()  # a new epoch counts its steps anew
        assert line.mailbox._core.carried(LIMIT)
        line.open_pass(0, 1)
        line.push(0, 0)
        line.check(0, 0)


def test_field_a19_a_stamp_of_the_last_lap_satisfies_nothing(line: Line) -> None:
    """A19 (K4): cells set to 1 and tested for 1 were satisfied by their former use."""
    line.open_pass(1, 4)
    for microbatch in range(2):
        line.push(1, microbatch)
        line.check(1, microbatch)
    old, due = Key(1, 1, 0).stamp(), Key(1, 1, 2).stamp()  # of one slot
    assert not landed(old, due)
    with pytest.raises(WouldBlock):
        line.mailbox.try_recv(2)
    line.abort()
    line.open_pass(2, 4)
    for microbatch in range(4):  # a full ring ahead: held back until the slot comes back
        line.push(2, microbatch)
    assert line.outbox.info()["deferred"] == 2
    for microbatch in range(4):
        line.check(2, microbatch)
