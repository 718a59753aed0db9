"""A pass fails on one side: the other side hears why, and the next pass works on both (I7)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from multiprocess import roles
from multiprocess.conftest import Crew, MailboxMaker
from multiprocess.roles import LIMIT, TAPS, TrainerError
from support.channels import until
from support.workers import Worker
from tapchannel import Mailbox
from tapchannel.errors import PassAborted, StampTimeout, UsageError


@pytest.fixture
def producer(crew: Crew) -> Worker:
    """Give a producer's worker."""
    return crew.worker()


@pytest.fixture
def mailbox(producer: Worker, store: str, mailbox_of: MailboxMaker) -> Mailbox:
    """Give a mailbox with one slot, to which the producer is attached."""
    made = mailbox_of(depth=1)
    producer.call(roles.attach, store, 0)
    return made


def assert_next_passes_work(mailbox: Mailbox, producer: Worker, step: int) -> None:
    """See two whole passes through."""
    for next_step in (step, step + 1):
        producer.begin(roles.push_pass, next_step, 3)
        roles.receive_pass(mailbox, next_step, 3)
        producer.finish()


def push_whole(producer: Worker, step: int, microbatches: int) -> None:
    """Push a whole pass and leave it: what finds no credit stays queued."""
    producer.call(roles.open_pass, step, microbatches)
    for microbatch in range(microbatches):
        producer.call(roles.push, microbatch)
    producer.call(roles.close_pass)


def test_error_in_the_producers_code_reaches_the_waiting_consumer(
    mailbox: Mailbox, producer: Worker
) -> None:
    """Catches a consumer that waits for a producer that has given up, or is not told why it did."""
    producer.call(roles.open_pass, 0, 3)
    with pytest.raises(PassAborted) as aborted, mailbox.open_pass(0, 3):
        producer.call(roles.push, 0)
        with mailbox.recv(0) as lease:
            roles.check(lease, 0, 0)
        producer.call(roles.push, 1, TAPS[:1])
        producer.begin(roles.fail_in_pass, "loss is NaN")
        mailbox.recv(1)
    producer.finish()
    assert aborted.value.who == "the producer"
    assert aborted.value.rank == 0
    assert "TrainerError: loss is NaN" in str(aborted.value)
    assert_next_passes_work(mailbox, producer, 1)


def test_error_in_the_consumers_code_reaches_the_producer(
    mailbox: Mailbox, producer: Worker
) -> None:
    """Catches a producer that goes on pushing into a pass that is over, and a queue that stays."""
    producer.call(roles.open_pass, 0, 4)
    with pytest.raises(TrainerError), mailbox.open_pass(0, 4):
        for microbatch in range(3):
            producer.call(roles.push, microbatch)
        with mailbox.recv(0) as lease:
            roles.check(lease, 0, 0)
            raise TrainerError("out of memory")
    with pytest.raises(PassAborted, match="TrainerError: out of memory") as aborted:
        producer.call(roles.push, 3)
    assert "consumer" in str(aborted.value.who)
    until(lambda: producer.call(roles.facts)["queued"] == 0)
    producer.call(roles.fail_in_pass, "the consumer gave up")
    assert_next_passes_work(mailbox, producer, 1)


def test_flush_does_not_call_dropped_pushes_copied(mailbox: Mailbox, producer: Worker) -> None:
    """Catches a flush that returns as if all had been sent, when it was thrown away."""
    push_whole(producer, 0, 3)
    mailbox.open_pass(0, 3)
    mailbox.abort("the draft gave up")
    with pytest.raises(PassAborted, match="the draft gave up"):
        producer.call(roles.flush, LIMIT)
    assert_next_passes_work(mailbox, producer, 1)


def test_consumers_abort_spares_what_is_queued_for_the_next_pass(
    mailbox: Mailbox, producer: Worker
) -> None:
    """Catches a dead pass whose end takes the next pass's pushes along.

    The producer has left pass 0, with pushes queued, and is in pass 1 already.
    """
    push_whole(producer, 0, 3)
    producer.call(roles.open_pass, 1, 2)
    producer.call(roles.push, 0)
    mailbox.open_pass(0, 3)
    mailbox.abort("the draft gave up")
    until(lambda: producer.call(roles.facts)["queued"] == len(TAPS))
    producer.call(roles.push, 1)
    producer.call(roles.close_pass)
    roles.receive_pass(mailbox, 1, 2)
    assert_next_passes_work(mailbox, producer, 2)


def test_abort_of_a_later_pass_spoils_no_pass_that_was_sent_whole(
    mailbox: Mailbox, producer: Worker
) -> None:
    """Catches a producer that hears of an abort which came after its own pass had arrived.

    The consumer has all of pass 0, goes on, and aborts pass 1 before the producer leaves pass 0.
    """
    producer.call(roles.open_pass, 0, 1)
    producer.call(roles.push, 0)
    roles.receive_pass(mailbox, 0, 1)
    mailbox.open_pass(1, 1)
    mailbox.abort("the draft gave up")
    producer.call(roles.close_pass)
    producer.call(roles.flush, LIMIT)
    producer.call(roles.open_pass, 1, 1)
    with pytest.raises(PassAborted, match="the draft gave up"):
        producer.call(roles.push, 0)
    producer.call(roles.fail_in_pass, "as the consumer")
    assert_next_passes_work(mailbox, producer, 2)


def test_flush_in_a_pass_tells_nothing_of_the_pass_before(
    mailbox: Mailbox, producer: Worker
) -> None:
    """Catches a good pass that fails at its end because the one before it was aborted."""
    push_whole(producer, 0, 3)
    producer.call(roles.open_pass, 1, 2)
    producer.call(roles.push, 0)
    mailbox.open_pass(0, 3)
    mailbox.abort("the draft gave up")
    until(lambda: producer.call(roles.facts)["queued"] == len(TAPS))
    producer.call(roles.push, 1)
    producer.begin(roles.flush, LIMIT)
    roles.receive_pass(mailbox, 1, 2)
    producer.finish()
    producer.call(roles.close_pass)
    assert_next_passes_work(mailbox, producer, 2)


def change_what_was_pushed(desk: SimpleNamespace) -> None:
    """Push a pass, leave it, go on with the next, and change what is queued of the first."""
    tensors = {tap: roles.payload(0, 0, tap) for tap in TAPS}
    with desk.outbox.open_pass(0, 1):
        for tap, tensor in tensors.items():
            desk.outbox.push(0, tap, tensor)
    roles.open_pass(desk, 1, 1)
    tensors["late"].add_(1)


def look_until_it_fails(desk: SimpleNamespace) -> None:
    """Look at the outbox until it raises."""
    until(lambda: desk.outbox.info()["queued"] == 0)
    until(lambda: desk.outbox.flush(0))


def test_source_that_was_changed_ends_its_own_pass(mailbox: Mailbox, producer: Worker) -> None:
    """Catches wrong bytes that are read as right ones, while an innocent pass is ended for them."""
    producer.call(change_what_was_pushed)
    opened = mailbox.open_pass(0, 1)
    with pytest.raises(UsageError, match="modified"):
        producer.call(look_until_it_fails)
    with pytest.raises(PassAborted, match="modified"), opened:
        mailbox.recv(0)
    producer.call(roles.fail_in_pass, "a source was changed")
    assert_next_passes_work(mailbox, producer, 2)


def test_reset_spares_what_is_queued_for_the_new_epoch(mailbox: Mailbox, producer: Worker) -> None:
    """Catches an epoch's end that takes the next epoch's pushes along."""
    push_whole(producer, 7, 3)
    mailbox.reset()
    push_whole(producer, 0, 2)
    roles.receive_pass(mailbox, 0, 2)
    assert_next_passes_work(mailbox, producer, 1)


def test_pass_that_the_consumer_never_opens_blocks_nothing(
    mailbox: Mailbox, producer: Worker
) -> None:
    """Catches pushes that wait for credit of a pass which the mailbox has gone past.

    The consumer's own code failed before it opened pass 0; all sides go on with pass 1.
    """
    push_whole(producer, 0, 3)
    producer.begin(roles.push_pass, 1, 3)
    roles.receive_pass(mailbox, 1, 3)
    producer.finish()
    assert producer.call(roles.facts)["queued"] == 0
    assert_next_passes_work(mailbox, producer, 2)


def test_pass_that_the_producer_never_opens_ends_at_the_deadline(
    mailbox: Mailbox, producer: Worker
) -> None:
    """Catches a pass whose taps are taken from the next one, or one that never ends."""
    push_whole(producer, 1, 3)
    with pytest.raises(StampTimeout) as late, mailbox.open_pass(0, 3):
        mailbox.recv(0, timeout=0.2)
    assert late.value.rank == 0
    roles.receive_pass(mailbox, 1, 3)
    assert_next_passes_work(mailbox, producer, 2)


def test_wrong_calls_in_a_pass_leave_it_usable(mailbox: Mailbox, producer: Worker) -> None:
    """Catches a caller's mistake that breaks the pass for both sides."""
    producer.call(roles.open_pass, 0, 2)
    with mailbox.open_pass(0, 2):
        producer.call(roles.push, 0)
        right = roles.payload(0, 1, "ids")
        for wrong in ((0, "ids", right), (2, "ids", right), (1, "none", right), (1, "late", right)):
            with pytest.raises(UsageError):
                producer.call(roles.push_tensor, *wrong)
        with mailbox.recv(0) as lease:
            roles.check(lease, 0, 0)
        for wrong_microbatch in (0, 2):
            with pytest.raises(UsageError):
                mailbox.recv(wrong_microbatch)
        producer.call(roles.push, 1)
        with mailbox.recv(1) as lease:
            roles.check(lease, 0, 1)
    producer.call(roles.close_pass)
    assert_next_passes_work(mailbox, producer, 1)
