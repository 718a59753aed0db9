"""Producers and consumers of different speed, and several producers at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from multiprocess import roles
from multiprocess.conftest import Crew, MailboxMaker
from multiprocess.roles import TAPS
from support.channels import until
from tapchannel.errors import CreditTimeout, WouldBlock

MICROBATCHES = 12


def push_when_told(desk: SimpleNamespace, step: int, microbatches: int) -> None:
    """Push a pass, each tap only once the test allows it."""
    roles.open_pass(desk, step, microbatches)
    for microbatch in range(microbatches):
        for tap in TAPS:
            desk.link.receive()
            roles.push(desk, microbatch, [tap])
    roles.close_pass(desk)


def push_shuffled(desk: SimpleNamespace, taps: Sequence[str], seed: int, steps: int) -> None:
    """Push passes, their microbatches in an order of this producer's own."""
    order = random.Random(seed)
    for step in range(steps):
        roles.open_pass(desk, step, MICROBATCHES)
        for microbatch in order.sample(range(MICROBATCHES), MICROBATCHES):
            roles.push(desk, microbatch, taps)
        roles.close_pass(desk)
    desk.outbox.flush()


def test_slow_producer_is_waited_for_tap_by_tap(
    crew: Crew, store: str, mailbox_of: MailboxMaker
) -> None:
    """Catches a lease that is given before the last tap of its microbatch has landed."""
    producer = crew.worker()
    mailbox = mailbox_of()
    producer.call(roles.attach, store, 0)
    producer.begin(push_when_told, 0, MICROBATCHES)
    with mailbox.open_pass(0, MICROBATCHES):
        for microbatch in range(MICROBATCHES):
            for _ in TAPS:
                with pytest.raises(WouldBlock):
                    mailbox.try_recv(microbatch)
                producer.send()
            with mailbox.recv(microbatch) as lease:
                roles.check(lease, 0, microbatch)
    producer.finish()


@pytest.mark.parametrize("depth", [1, 3])
def test_slow_consumer_gets_all_that_was_pushed_before_it_came(
    crew: Crew, store: str, mailbox_of: MailboxMaker, depth: int
) -> None:
    """Catches a queue that loses, swaps or overwrites what waits for credit."""
    producer = crew.worker()
    mailbox = mailbox_of(depth=depth)
    producer.call(roles.attach, store, 0)
    producer.call(roles.open_pass, 0, MICROBATCHES)
    with mailbox.open_pass(0, MICROBATCHES):
        for microbatch in range(MICROBATCHES):
            producer.call(roles.push, microbatch)
        queued = (MICROBATCHES - depth) * len(TAPS)
        assert producer.call(roles.facts)["queued"] == queued
        producer.call(roles.close_pass)
        for microbatch in range(MICROBATCHES):
            with mailbox.recv(microbatch) as lease:
                roles.check(lease, 0, microbatch)
    facts = producer.call(roles.facts)
    assert (facts["queued"], facts["queued_peak"], facts["deferred"]) == (0, queued, queued)


def test_full_queue_refuses_a_push_and_takes_it_later(
    crew: Crew, store: str, mailbox_of: MailboxMaker
) -> None:
    """Catches a queue without a bound, and a refused push that was half taken."""
    producer = crew.worker()
    mailbox = mailbox_of(depth=1)
    producer.call(roles.attach_with, store, 0, {"queue_limit": len(TAPS)})
    producer.call(roles.open_pass, 0, 3)
    with mailbox.open_pass(0, 3):
        producer.call(roles.push, 0)
        producer.call(roles.push, 1)
        with pytest.raises(CreditTimeout, match=f"{len(TAPS)} pushes queued"):
            producer.call(roles.push, 2)
        with mailbox.recv(0) as lease:
            roles.check(lease, 0, 0)
        until(lambda: producer.call(roles.facts)["queued"] == 0)
        producer.call(roles.push, 2)
        for microbatch in (1, 2):
            with mailbox.recv(microbatch) as lease:
                roles.check(lease, 0, microbatch)
    producer.call(roles.close_pass)


def test_three_producers_meet_in_every_slot(
    crew: Crew, store: str, mailbox_of: MailboxMaker
) -> None:
    """Catches lanes that share a word, a queue or a place in the slot."""
    steps = 20
    mailbox = mailbox_of(roles.THREE, depth=3)
    producers = [crew.worker() for _ in roles.THREE]
    for rank, producer in enumerate(producers):
        producer.call(roles.attach, store, rank)
    mailbox.wait_ready()
    for rank, producer in enumerate(producers):
        producer.begin(push_shuffled, roles.THREE[rank], rank, steps)
    for step in range(steps):
        roles.receive_pass(mailbox, step, MICROBATCHES)
    for producer in producers:
        producer.finish()
    lanes = mailbox.info()["lanes"]
    assert isinstance(lanes, list)
    assert [lane["messages"] for lane in lanes] == [steps * MICROBATCHES] * 3
