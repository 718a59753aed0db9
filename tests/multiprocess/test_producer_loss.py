"""A producer is killed: the consumer names it in time, and goes on with its replacement."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from multiprocess import roles
from multiprocess.conftest import Crew, MailboxMaker
from multiprocess.roles import LIMIT, TAPS
from support.channels import until
from support.workers import Worker
from tapchannel import Mailbox
from tapchannel.errors import PassAborted, PeerLostError
from tapchannel.telemetry import read_events

MICROBATCHES = 4


def before_push(victim: Worker) -> int:
    """Push nothing; return how many microbatches can be received."""
    return 0


def between_taps(victim: Worker) -> int:
    """Push one microbatch, and the first tap of the next."""
    victim.call(roles.push, 0)
    victim.call(roles.push, 1, TAPS[:1])
    return 1


def with_pushes_queued(victim: Worker) -> int:
    """Push all: two microbatches find credit, the others are queued."""
    for microbatch in range(MICROBATCHES):
        victim.call(roles.push, microbatch)
    assert victim.call(roles.facts)["queued"] == 2 * len(TAPS)
    return 2


def assert_names(error: PeerLostError, victim: Worker, rank: int = 0) -> None:
    """See that the error says who was lost, in its fields and in its text."""
    assert error.rank == rank
    assert error.pid == victim.pid
    assert error.host == socket.gethostname()
    for fact in (f"rank {rank}", f"pid {victim.pid}", socket.gethostname(), roles.NAME):
        assert fact in str(error)


@pytest.mark.parametrize("moment", [before_push, between_taps, with_pushes_queued])
def test_killed_producer_is_named_and_replaced(
    crew: Crew, store: str, mailbox_of: MailboxMaker, moment: Callable[[Worker], int]
) -> None:
    """Catches a wait that sits out its deadline, a nameless error, and a lane that stays dead."""
    victim, spare = crew.victim(), crew.worker()
    mailbox = mailbox_of(depth=2)
    victim.call(roles.attach, store, 0)
    victim.call(roles.open_pass, 0, MICROBATCHES)
    opened = mailbox.open_pass(0, MICROBATCHES)
    landed = moment(victim)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as lost, opened:
        with ExitStack() as held:
            for microbatch in range(landed):
                roles.check(held.enter_context(mailbox.recv(microbatch)), 0, microbatch)
            killer = threading.Thread(target=victim.child.kill)
            killer.start()
            if landed == 2:  # their slots go back only once nobody can send what is queued
                killer.join()
                until(lambda: lane_state(mailbox) == "lost")
        mailbox.recv(landed)
    killer.join()
    assert time.monotonic() - began < LIMIT / 2
    assert_names(lost.value, victim)
    assert lost.value.key is not None
    assert lost.value.key.microbatch == landed
    with pytest.raises(PeerLostError) as still_lost:
        mailbox.open_pass(1, 1)
    assert_names(still_lost.value, victim)
    spare.call(roles.attach, store, 0)
    spare.begin(roles.push_pass, 1, MICROBATCHES)
    roles.receive_pass(mailbox, 1, MICROBATCHES)
    spare.finish()


def lane_state(mailbox: Mailbox, lane: int = 0) -> str:
    """Give a lane's state as the mailbox tells it."""
    lanes = mailbox.info()["lanes"]
    assert isinstance(lanes, list)
    return lanes[lane]["state"]


def test_last_steps_of_the_dead_are_readable(
    crew: Crew, store: str, mailbox_of: MailboxMaker
) -> None:
    """Catches a recorder that dies with its process, or misses where the producer stopped."""
    victim = crew.victim()
    mailbox = mailbox_of()
    victim.call(roles.attach, store, 0)
    victim.call(roles.open_pass, 5, 2)
    mailbox.open_pass(5, 2)
    victim.call(roles.push, 0, TAPS[:2])
    victim.child.kill()
    until(lambda: lane_state(mailbox) == "lost")
    events = read_events(mailbox)
    stamped = [(e.cell, e.key) for e in events if e.side == "producer" and e.step_name == "stamp"]
    assert [cell for cell, _ in stamped] == [0, 1]
    assert {(key.step, key.microbatch) for _, key in stamped if key} == {(5, 0)}
    assert events[-1].step_name == "lost"
    assert events[-1].side == "consumer"


def test_lane_that_restarts_in_mid_pass_takes_no_part_in_the_rest(
    crew: Crew, store: str, mailbox_of: MailboxMaker
) -> None:
    """Catches a half-pushed pass that a restarted producer completes as if nothing had happened."""
    victim, spare = crew.victim(), crew.worker()
    mailbox = mailbox_of()
    victim.call(roles.attach, store, 0)
    victim.call(roles.open_pass, 0, 2)
    with pytest.raises(PeerLostError), mailbox.open_pass(0, 2):
        victim.call(roles.push, 0)
        with mailbox.recv(0) as lease:
            roles.check(lease, 0, 0)
        victim.child.kill()
        spare.call(roles.attach, store, 0)
        spare.call(roles.open_pass, 0, 2)
        with pytest.raises(PassAborted, match="restarted"):
            spare.call(roles.push, 1)
        mailbox.recv(1)
    spare.call(roles.fail_in_pass, "the pass was lost")
    spare.begin(roles.push_pass, 1, 2)
    roles.receive_pass(mailbox, 1, 2)
    spare.finish()


def test_the_dead_rank_is_blamed_not_the_rank_that_waits_for_it(
    crew: Crew, store: str, mailbox_of: MailboxMaker
) -> None:
    """Catches a wait that looks at the first late lane only.

    In a pipeline the ranks before and behind a dead one stop too. Who is alive and late must not be
    waited for, to the deadline and by name, while somebody is known to be dead.
    """
    victim = crew.victim()
    early, late, spare = crew.worker(), crew.worker(), crew.worker()
    mailbox = mailbox_of(roles.THREE)
    for rank, producer in enumerate((early, late, victim)):
        producer.call(roles.attach, store, rank)
    for producer in (early, late, victim):
        producer.call(roles.open_pass, 0, 1)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as lost, mailbox.open_pass(0, 1):
        late.call(roles.push, 0, ["late"])
        victim.child.kill()
        mailbox.recv(0, timeout=5)
    assert time.monotonic() - began < LIMIT / 2
    assert_names(lost.value, victim, rank=2)
    for producer, tap in ((early, "early"), (late, "late")):
        with pytest.raises(PassAborted):
            producer.call(roles.close_pass)
        producer.begin(roles.push_pass, 1, 3, [tap])
    spare.call(roles.attach, store, 2)
    spare.begin(roles.push_pass, 1, 3, ["ids"])
    roles.receive_pass(mailbox, 1, 3)
    for producer in (early, late, spare):
        producer.finish()
