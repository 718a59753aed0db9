"""The words in which the model of a channel speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tapchannel.errors import TapChannelError

Outcome = type[TapChannelError] | None
Verdict = frozenset[Outcome]


def only(*outcomes: Outcome) -> Verdict:
    """Give the verdict that one of these is due."""
    return frozenset(outcomes)


RIGHT = only(None)


class PassKey(NamedTuple):
    """A pass in one epoch; grows for ever."""

    epoch: int
    step: int


class CellKey(NamedTuple):
    """What one push brings."""

    of: PassKey
    microbatch: int
    tap: str


class Opened(NamedTuple):
    """A pass as one side opened it."""

    key: PassKey
    microbatches: int


NOTHING = PassKey(0, 0)


@dataclass
class LaneModel:
    """One producer and its lane."""

    taps: Sequence[str]
    attached: bool = False
    ever: bool = False
    # the producer's side
    open: Opened | None = None
    last: PassKey | None = None
    pushed: set[tuple[int, str]] = field(default_factory=set)
    queue: list[CellKey] = field(default_factory=list)
    announced: Opened | None = None
    gave_up: set[PassKey] = field(default_factory=set)
    # what the consumer tells the lane
    ended: PassKey = NOTHING
    shown: Opened | None = None
    barred: PassKey = NOTHING
    took_part: PassKey = NOTHING
    landed: set[CellKey] = field(default_factory=set)


@dataclass
class LeaseModel:
    """A slot that is being read."""

    key: PassKey
    microbatch: int
    slot: int
