"""Aborts that race with pushes: never a wrong byte, and the next pass always works."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from multiprocess import roles
from multiprocess.conftest import Crew, MailboxMaker
from multiprocess.roles import TAPS
from support.effort import repeated
from tapchannel import Mailbox
from tapchannel.errors import PassAborted, UsageError

PASSES = repeated(200)
MICROBATCHES = 6
DEPTH = 2
REASON = "as the schedule says"


class Turn(NamedTuple):
    """Who aborts a pass, if anybody does, and before which microbatch.

    In a paced pass the producers wait for credit, so that an abort meets them in mid-pass; in the
    others they run ahead, and it meets what they have queued.
    """

    consumer: int | None
    producers: tuple[int | None, ...]
    paced: bool

    @property
    def calm(self) -> bool:
        """Tell whether nobody aborts this pass."""
        return self.consumer is None and not any(at is not None for at in self.producers)


def schedule(seed: int, passes: int, producers: int) -> list[Turn]:
    """Say who aborts which pass; all sides work it out alike. Every other pass is calm."""
    chance = random.Random(seed)
    turns: list[Turn] = []
    for step in range(passes):
        sides = [
            chance.randrange(MICROBATCHES) if step % 2 and chance.random() < 0.6 else None
            for _ in range(1 + producers)
        ]
        turns.append(Turn(sides[0], tuple(sides[1:]), paced=chance.random() < 0.5))
    return turns


def run_producer(desk: SimpleNamespace, lane: int, taps: Sequence[str], turns: list[Turn]) -> int:
    """Push all passes; return how many of them the consumer, or another producer, ended."""
    ended = 0
    for step, turn in enumerate(turns):
        try:
            with desk.outbox.open_pass(step, MICROBATCHES):
                for microbatch in range(MICROBATCHES):
                    if turn.producers[lane] == microbatch:
                        raise roles.TrainerError(REASON)
                    for tap in taps:
                        desk.outbox.push(microbatch, tap, roles.payload(step, microbatch, tap))
                    if turn.paced:
                        desk.outbox.flush()
            if turn.calm:
                desk.outbox.flush()
        except roles.TrainerError:
            assert turn.producers[lane] is not None
        except PassAborted:
            assert not turn.calm, f"calm pass {step} was aborted"
            ended += 1
    return ended


def run_consumer(mailbox: Mailbox, turns: list[Turn], from_a_thread: bool) -> int:
    """Receive all passes, checking every byte; return how many of them did not end whole."""
    ended = 0
    for step, turn in enumerate(turns):
        aborting: threading.Thread | None = None
        try:
            with mailbox.open_pass(step, MICROBATCHES):
                for microbatch in range(MICROBATCHES):
                    if turn.consumer == microbatch and from_a_thread:
                        aborting = threading.Thread(target=mailbox.abort, args=(REASON,))
                        aborting.start()
                    elif turn.consumer == microbatch:
                        raise roles.TrainerError(REASON)
                    with mailbox.recv(microbatch) as lease:
                        roles.check(lease, step, microbatch)
                if aborting is not None:
                    aborting.join()
        except (roles.TrainerError, PassAborted):
            assert not turn.calm, f"calm pass {step} was aborted"
            ended += 1
        except UsageError:  # the thread's abort came between two calls: no pass is open any more
            assert aborting is not None
            ended += 1
        if aborting is not None:
            aborting.join()
    return ended


@pytest.mark.parametrize("from_a_thread", [False, True], ids=["between calls", "from a thread"])
def test_aborts_of_one_lane_race_with_its_pushes(
    crew: Crew, store: str, mailbox_of: MailboxMaker, from_a_thread: bool
) -> None:
    """Catches a push of an ended pass that is seen in the next, and a lane that an abort wedges."""
    producer = crew.worker()
    mailbox = mailbox_of(depth=DEPTH)
    turns = schedule(11, PASSES, producers=1)
    producer.call(roles.attach, store, 0)
    producer.begin(run_producer, 0, TAPS, turns)
    ended = run_consumer(mailbox, turns, from_a_thread)
    heard = producer.finish()
    rough = sum(not turn.calm for turn in turns)
    assert 0 < ended <= rough
    assert 0 < heard <= rough


def test_aborts_of_three_lanes_race_with_their_pushes(
    crew: Crew, store: str, mailbox_of: MailboxMaker
) -> None:
    """Catches one lane's abort that leaves the others in a pass of their own."""
    producers = [crew.worker() for _ in roles.THREE]
    mailbox = mailbox_of(roles.THREE, depth=DEPTH)
    turns = schedule(12, PASSES, producers=len(producers))
    for rank, producer in enumerate(producers):
        producer.call(roles.attach, store, rank)
    for rank, producer in enumerate(producers):
        producer.begin(run_producer, rank, roles.THREE[rank], turns)
    ended = run_consumer(mailbox, turns, from_a_thread=False)
    heard = sum(producer.finish() for producer in producers)
    assert ended > 0
    assert heard > 0
