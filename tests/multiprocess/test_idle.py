"""A wait costs next to nothing, holds up nothing, and can be interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch

from multiprocess import roles
from multiprocess.conftest import Crew, MailboxMaker
from tapchannel import Mailbox, Outbox, TapPlan
from tapchannel.errors import CreditTimeout, StampTimeout, TapTimeout

WAIT = 2.0
SHARE = 0.2  # of one core
SIGNAL_AFTER = 0.2
LARGE = 1 << 28
LARGE_PLAN = TapPlan(groups={"large": ["large"]}, width=LARGE // 8, dtype="int64", max_rows=1)


def wait_idly(
    desk: SimpleNamespace, wait: Callable[[SimpleNamespace], object]
) -> tuple[float, float]:
    """Run a wait that times out; return the seconds it took and the processor's part of them."""
    began, used = time.monotonic(), roles.cpu_seconds(desk)
    try:
        wait(desk)
    except TapTimeout:
        return time.monotonic() - began, roles.cpu_seconds(desk) - used
    raise AssertionError("the wait was to time out")


def wait_for_stamp(desk: SimpleNamespace) -> None:
    """Wait for a microbatch of which nothing was pushed."""
    desk.mailbox.recv(1, wait="host", timeout=WAIT)


def wait_for_slot(desk: SimpleNamespace) -> None:
    """Wait for a slot that this process itself holds."""
    with desk.mailbox.recv(0):
        desk.mailbox.recv(1, wait="host", timeout=WAIT)


def wait_for_credit(desk: SimpleNamespace) -> None:
    """Wait for credit that does not come."""
    desk.outbox.flush(WAIT)


@pytest.mark.parametrize(
    ("depth", "consumers_wait", "producers_wait"),
    [(1, wait_for_slot, wait_for_credit), (2, wait_for_stamp, None)],
    ids=["credit", "stamp"],
)
def test_long_wait_leaves_the_processor_alone(
    crew: Crew,
    store: str,
    depth: int,
    consumers_wait: Callable[[SimpleNamespace], object],
    producers_wait: Callable[[SimpleNamespace], object] | None,
) -> None:
    """Catches a thread that spins: in the wait itself, in the monitor, or in the outbox's own."""
    consumer, producer = crew.worker(), crew.worker()
    consumer.call(roles.serve, store, depth, roles.ONE)
    consumer.call(roles.open_for_receiving, 0, 2)
    producer.call(roles.attach, store, 0)
    producer.call(roles.open_pass, 0, 2)
    producer.call(roles.push, 0)
    if producers_wait is not None:
        producer.call(roles.push, 1)
        producer.begin(wait_idly, producers_wait)
    before = producer.call(roles.cpu_seconds) if producers_wait is None else 0.0
    took, used = consumer.call(wait_idly, consumers_wait)
    assert took >= WAIT
    assert used < SHARE * took
    if producers_wait is not None:
        took, used = producer.finish()
    else:
        used = producer.call(roles.cpu_seconds) - before
    assert used < SHARE * took


class Ticker:
    """A thread that wants the interpreter every millisecond, and counts how often it got it."""

    def __init__(self) -> None:
        self.count = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.001):
            self.count += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count while the block runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


def ticks(call: Callable[[], object]) -> int:
    """Count how often another thread got the interpreter while a call ran."""
    ticker = Ticker()
    with ticker.running():
        before = ticker.count
        call()
        return ticker.count - before


def test_interpreter_is_free_during_waits(tmp_path: Path, mailbox_of: MailboxMaker) -> None:
    """Catches a wait that holds the interpreter's lock: every other thread would stand still."""
    mailbox = mailbox_of(depth=1)
    with Outbox(roles.PLAN, 0, store=f"file://{tmp_path}", name=roles.NAME) as outbox:
        opened = mailbox.open_pass(0, 2)
        outbox.open_pass(0, 2)

        def receive() -> None:
            with pytest.raises(StampTimeout):
                mailbox.recv(0, timeout=0.5)

        def flush() -> None:
            for microbatch in range(2):
                for tap in roles.TAPS:
                    outbox.push(microbatch, tap, roles.payload(0, microbatch, tap))
            with pytest.raises(CreditTimeout):
                outbox.flush(0.5)

        assert ticks(receive) > 50
        mailbox.abort("the test has seen what it wanted")
        del opened
        outbox.abort("the test has seen what it wanted")
        mailbox.open_pass(1, 2)
        outbox.open_pass(1, 2)
        assert ticks(flush) > 50
        outbox.abort("the test has seen what it wanted")


def test_interpreter_is_free_during_a_large_push(tmp_path: Path) -> None:
    """Catches a copy that is made under the interpreter's lock."""
    store = f"file://{tmp_path}"
    tap = torch.zeros(1, LARGE // 8, dtype=torch.int64)
    with Mailbox(LARGE_PLAN, {0: ["large"]}, depth=1, store=store) as mailbox:
        with Outbox(LARGE_PLAN, 0, store=store) as outbox:
            with mailbox.open_pass(0, 1), outbox.open_pass(0, 1):
                assert ticks(lambda: outbox.push(0, "large", tap)) > 5
                mailbox.recv(0).release()


def seconds_until_a_signal_ends(
    desk: SimpleNamespace, wait: Callable[[SimpleNamespace], object]
) -> float:
    """Run a wait during which a signal's handler raises; return how long the wait still took."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise roles.TrainerError("this rank is to end")

    before = signal.signal(signal.SIGALRM, handle)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, SIGNAL_AFTER)
        wait(desk)
    except (roles.TrainerError, TapTimeout):
        return time.monotonic() - began - SIGNAL_AFTER
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    raise AssertionError("the wait was to end by an error")


@pytest.mark.parametrize("wait", [wait_for_stamp, wait_for_credit])
def test_signal_ends_a_wait(
    crew: Crew, store: str, wait: Callable[[SimpleNamespace], object]
) -> None:
    """Catches a wait that a trainer's Ctrl-C, or torchrun's SIGTERM, cannot get through to."""
    consumer, producer = crew.worker(), crew.worker()
    consumer.call(roles.serve, store, 2, roles.ONE)
    producer.call(roles.attach, store, 0)
    producer.call(roles.open_pass, 0, 2)
    if wait is wait_for_credit:
        producer.call(roles.push, 0)  # queued: the mailbox has no pass open
        took = producer.call(seconds_until_a_signal_ends, wait)
    else:
        consumer.call(roles.open_for_receiving, 0, 2)
        took = consumer.call(seconds_until_a_signal_ends, wait)
    assert took < WAIT / 2
