"""A process stands still (SIGSTOP) and goes on later, as under a debugger."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multiprocess import roles
from multiprocess.conftest import Crew, MailboxMaker
from multiprocess.roles import LIMIT, TAPS
from support.channels import until
from support.workers import Worker
from tapchannel import Mailbox, Outbox, TapPlan
from tapchannel.errors import CreditTimeout, PassAborted, StampTimeout
from tapchannel.telemetry import read_events

DEADLINE = 1.0
STANDSTILL = 2.0  # seconds, longer than the deadline
LARGE = 1 << 26  # bytes; to copy them takes long enough to be stopped in the middle
LARGE_PLAN = TapPlan(groups={"large": ["large"]}, width=LARGE // 8, dtype="int64", max_rows=1)


def test_stopped_producer_times_out_and_its_late_pushes_never_match(
    crew: Crew, store: str, mailbox_of: MailboxMaker
) -> None:
    """Catches a time-out that does not say for how long the producer has been silent, and pushes
    of the failed pass that are taken for the next pass's.
    """
    producer = crew.worker()
    mailbox = mailbox_of(depth=1)
    producer.call(roles.attach, store, 0)
    producer.call(roles.open_pass, 0, 3)
    producer.call(roles.push, 0)
    producer.call(roles.push, 1)  # queued, as is the first: there is no credit yet
    producer.child.stop()
    with pytest.raises(StampTimeout) as late, mailbox.open_pass(0, 3):
        mailbox.recv(0, timeout=0.5)  # its thread stands still, too: what is queued stays so
    assert late.value.limit == 0.5
    assert late.value.waited == pytest.approx(0.5, abs=0.4)
    assert late.value.pid == producer.pid
    assert "last heartbeat" in str(late.value.last_progress)
    assert str(late.value.last_progress) in str(late.value)
    mailbox.open_pass(1, 2)  # credit for the very slot that the late pushes were meant for
    producer.child.resume()
    with pytest.raises(PassAborted):
        producer.call(roles.push, 2)
    until(lambda: producer.call(roles.facts)["queued"] == 0)  # by its thread, which was stopped too
    producer.call(roles.fail_in_pass, "too late")
    producer.begin(roles.push_pass, 1, 2)
    for microbatch in range(2):
        with mailbox.recv(microbatch) as lease:
            roles.check(lease, 1, microbatch)
    producer.finish()


def attach_large(desk: SimpleNamespace, store: str) -> None:
    """Attach an outbox for large taps."""
    desk.outbox = Outbox(LARGE_PLAN, 0, store=store, name="large", attach_timeout=LIMIT)


def push_large(desk: SimpleNamespace, step: int) -> None:
    """Push one large tap; every word of it is the pass's step."""
    tap = torch.full((1, LARGE // 8), step)
    desk.opened = desk.outbox.open_pass(step, 1)
    desk.link.reach("pushing")
    desk.outbox.push(0, "large", tap)


def stop_in_mid_copy(producer: Worker, mailbox: Mailbox, step: int) -> bool:
    """Have a large tap pushed; tell whether the producer was stopped between announce and stamp."""
    producer.begin(push_large, step)
    producer.wait_for("pushing")
    until(lambda: _seen(mailbox, step, "announce"))
    producer.child.stop()
    return not _seen(mailbox, step, "stamp")


def _seen(mailbox: Mailbox, step: int, what: str) -> bool:
    return any(
        event.step_name == what and event.key is not None and event.key.step == step
        for event in read_events(mailbox)
    )


def test_copy_that_ends_in_a_later_pass_is_not_taken_for_its_data(crew: Crew, store: str) -> None:
    """Catches a slot that is read while, or before, a copy of a dead pass runs into it."""
    producer = crew.worker()
    with Mailbox(LARGE_PLAN, {0: ["large"]}, depth=1, store=store, name="large") as mailbox:
        producer.call(attach_large, store)
        for attempt in range(20):
            step = 2 * attempt
            opened = mailbox.open_pass(step, 1)
            if stop_in_mid_copy(producer, mailbox, step):
                break
            producer.child.resume()
            producer.finish()
            mailbox.recv(0).release()
            opened.close()
            producer.call(roles.close_pass)
        else:
            pytest.fail("the producer could never be stopped in the middle of its copy")
        with pytest.raises(StampTimeout, match="announced"), opened:
            mailbox.recv(0, timeout=0.05)
        mailbox.open_pass(step + 1, 1)  # credit for the slot that the copy still runs into
        producer.child.resume()
        producer.finish()
        with pytest.raises(PassAborted):
            producer.call(roles.close_pass)
        producer.call(push_large, step + 1)
        with mailbox.recv(0, timeout=LIMIT) as taps:
            assert bool((taps["large"] == step + 1).all())


@pytest.mark.parametrize("pushed", ["meanwhile", "afterwards"])
def test_time_for_which_a_consumer_is_stopped_is_no_waiting(
    crew: Crew, store: str, mailbox_of: MailboxMaker, pushed: str
) -> None:
    """Catches a deadline that is judged by the clock on the wall once the process goes on."""
    consumer, producer = crew.worker(), crew.worker()
    consumer.call(roles.serve, store, 2, roles.ONE)
    producer.call(roles.attach, store, 0)
    producer.call(roles.open_pass, 0, 1)
    consumer.call(roles.open_for_receiving, 0, 1)
    consumer.begin(roles.receive, 0, DEADLINE)
    consumer.wait_for("receiving")
    consumer.child.stop()
    stopped = time.monotonic()
    if pushed == "meanwhile":
        producer.call(roles.push, 0)
    until(lambda: time.monotonic() - stopped > STANDSTILL)
    consumer.child.resume()
    if pushed == "afterwards":
        producer.call(roles.push, 0)
    consumer.finish()
    consumer.call(roles.end_receiving)
    producer.call(roles.close_pass)


def test_producer_says_that_a_stopped_consumer_gives_no_credit(crew: Crew, store: str) -> None:
    """Catches a queue that waits for ever, and a consumer that does not hear why its pass ended."""
    consumer, producer = crew.worker(), crew.worker()
    consumer.call(roles.serve, store, 1, roles.ONE)
    settings: dict[str, Any] = {"timeout": 0.5}
    producer.call(roles.attach_with, store, 0, settings)
    consumer.call(roles.open_for_receiving, 0, 2)
    producer.call(roles.open_pass, 0, 2)
    producer.call(roles.push, 0)
    consumer.child.stop()
    producer.call(roles.push, 1)
    with pytest.raises(CreditTimeout) as late:
        producer.call(roles.flush, LIMIT)
    assert late.value.limit == 0.5
    assert f"consumer (pid {consumer.pid} " in str(late.value.last_progress)
    assert "last heartbeat" in str(late.value.last_progress)
    assert str(late.value.last_progress) in str(late.value)
    with pytest.raises(CreditTimeout):
        producer.call(roles.push, 1, TAPS[:1])
    producer.call(roles.fail_in_pass, "no credit")
    consumer.child.resume()
    with pytest.raises(PassAborted, match="no credit") as aborted:
        consumer.call(roles.receive, 0)
    assert "producer" in str(aborted.value)
    with pytest.raises(PassAborted):
        consumer.call(roles.end_receiving)
    producer.begin(roles.push_pass, 1, 3)
    consumer.call(roles.receive_all, 1, 3)
    producer.finish()
