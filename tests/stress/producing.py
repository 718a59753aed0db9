"""A producer's part in a stress."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

from stress.course import Leg, Turn
from stress.words import Words
from support.channels import SHM, UCX
from tapchannel import Key, Outbox
from tapchannel.errors import EpochMismatchError, PassAborted

LIMIT = 30.0
AHEAD = 4_000  # pushes of calm passes that a producer may be ahead by
WIRES = {"shm": SHM, "ucx": UCX}
SHARE_DELAYED = 0.002
DELAY = 0.002  # seconds, at most: a delay orders nothing


class Halt(Exception):
    """What a user's own code raises in the middle of a pass."""


class Pushed(NamedTuple):
    """What came of a life: pushes made, passes that others ended."""

    pushes: int
    ended: int


def dawdle(chance: random.Random) -> None:
    """Delay now and then, so that the sides meet in every way."""
    if chance.random() < SHARE_DELAYED:
        time.sleep(chance.random() * DELAY)


def be_quiet(desk: SimpleNamespace) -> None:
    """Warn of nothing: each attach over loopback would be told to be slow."""
    logging.getLogger("tapchannel").setLevel(logging.ERROR)


def join_leg(desk: SimpleNamespace, leg: Leg, rank: int, store: str) -> None:
    """Attach to a leg's mailbox."""
    desk.leg, desk.rank, desk.store = leg, rank, store
    desk.words = Words(leg)
    desk.outbox = _outbox(desk)


def _outbox(desk: SimpleNamespace) -> Outbox:
    wire = WIRES[desk.leg.wire].transport
    most = AHEAD + desk.leg.size.microbatches * 3
    limits = {"timeout": LIMIT, "queue_limit": most, "transport": wire}
    return Outbox(desk.leg.plan, desk.rank, store=desk.store, name=str(desk.leg.seed), **limits)


def leave_leg(desk: SimpleNamespace) -> None:
    """End the lane."""
    desk.outbox.close()
    del desk.outbox, desk.words, desk.leg


def begin_life(desk: SimpleNamespace, life: int) -> None:
    """Now and then, come back as another outbox. In an open pass that would bar the lane."""
    if life and desk.leg.chance("back", desk.rank, life).random() < 0.3:
        desk.outbox.close()
        desk.outbox = _outbox(desk)


def push_life(desk: SimpleNamespace, life: int, epoch: int) -> Pushed:
    """Push a life's passes."""
    leg: Leg = desk.leg
    chance = leg.chance("producer", desk.rank, life)
    before, ended = _pushes(desk), 0
    desk.ahead = 0
    for turn in leg.lives[life]:
        try:
            _push_pass(desk, chance, turn, epoch)
        except Halt:
            assert turn.producers[desk.rank] is not None
        except (PassAborted, EpochMismatchError):
            if turn.calm:
                raise
            ended += 1
    if turn.calm:
        desk.outbox.flush()
    return Pushed(_pushes(desk) - before, ended)


def _pushes(desk: SimpleNamespace) -> int:
    return desk.outbox.info()["pushes"]


def _push_pass(desk: SimpleNamespace, chance: random.Random, turn: Turn, epoch: int) -> None:
    with desk.outbox.open_pass(turn.step, turn.microbatches):
        if turn.reset:  # a pass that is opened after the reset would be one of the next life
            desk.link.reach("opened", desk.leg.name_of(turn))
        for microbatch, tap, rows in _order(desk, chance, turn):
            if turn.producers[desk.rank] == microbatch:
                raise Halt(f"producer {desk.rank}")
            dawdle(chance)
            key = Key(epoch, turn.step, microbatch)
            desk.outbox.push(microbatch, tap, desk.words.of_tap(tap, key, rows))
            desk.ahead += 1
            if turn.paced:
                desk.outbox.flush()


def _order(
    desk: SimpleNamespace, chance: random.Random, turn: Turn
) -> Iterator[tuple[int, str, int]]:
    """Give a pass's pushes: those of some neighbouring microbatches in any order."""
    leg: Leg = desk.leg
    taps = set(leg.sources[desk.rank])
    rows = leg.rows(turn)
    # A paced producer waits for the credit of each push, and credit comes in order.
    window = 1 if turn.paced else chance.choice((1, 1, 2, leg.depth))
    for first in range(0, turn.microbatches, window):
        # Only here: all microbatches before are whole, so that the consumer can give credit.
        if desk.ahead >= AHEAD:
            desk.outbox.flush()
            desk.ahead = 0
        some = [
            (microbatch, tap, rows[number][microbatch])
            for microbatch in range(first, min(first + window, turn.microbatches))
            for number, group in enumerate(leg.groups.values())
            for tap in group
            if tap in taps
        ]
        chance.shuffle(some)
        yield from some
