"""What one leg of the stress does: a channel, its lives, their passes. All sides draw it alike.

A leg is one mailbox with its producers. A life is what lies between two resets. All of it follows
from the seed, so that the sides need not tell each other, and a failure can be run again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tapchannel import TapPlan
from tapchannel.keys import MAX_EPOCH, MAX_MICROBATCHES, MAX_STEP

PASSES = 8  # in one life, at most
LIVES = 4
ROUGH = 0.35  # share of the passes that somebody aborts


class Size(NamedTuple):
    """How large the taps of a leg may be, and how long its passes."""

    rows: int
    width: int
    microbatches: int
    weight: int


SIZES = (Size(4, 8, 500, 6), Size(64, 64, 120, 3), Size(512, 128, 16, 1))
LONGEST = Size(2, 2, MAX_MICROBATCHES, 0)


class Turn(NamedTuple):
    """One pass, and who ends it early, if anybody does: before which microbatch."""

    life: int
    step: int
    microbatches: int
    consumer: int | None
    producers: tuple[int | None, ...]
    reset: bool  # the consumer's way to end it early
    paced: bool  # the producers wait for credit; else they run ahead

    @property
    def calm(self) -> bool:
        """Tell whether all of the pass must arrive."""
        return self.consumer is None and not any(at is not None for at in self.producers)


@dataclass(frozen=True)
class Leg:
    """One channel, from its making to its end."""

    seed: int
    wire: str
    producers: int
    longest: bool = False  # one pass of as many microbatches as there are numbers
    last_epochs: bool = False  # the epochs end at the last that there is
    aged: bool = False  # bells and recorders count on from just before their words wrap

    def chance(self, *label: object) -> random.Random:
        """Give chances that follow from the seed and a label."""
        return random.Random(repr((self.seed, *label)))

    @cached_property
    def size(self) -> Size:
        """Say how large its taps may be."""
        weights = [size.weight for size in SIZES]
        return LONGEST if self.longest else self.chance("size").choices(SIZES, weights)[0]

    @cached_property
    def depth(self) -> int:
        """Count its slots."""
        return 64 if self.longest else self.chance("depth").randint(1, 12)

    @cached_property
    def sources(self) -> dict[int, list[str]]:
        """Say which producer pushes which taps."""
        chance = self.chance("taps")
        most = 1 if self.longest else 3
        counts = [chance.randint(1, most) for _ in range(self.producers)]
        return {rank: [f"tap{rank}.{i}" for i in range(n)] for rank, n in enumerate(counts)}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Say which taps lie side by side: each group mixes the producers."""
        chance = self.chance("groups")
        taps = [tap for taps in self.sources.values() for tap in taps]
        chance.shuffle(taps)
        count = chance.randint(1, min(3, len(taps)))
        return {f"group{i}": taps[i::count] for i in range(count)}

    @cached_property
    def widths(self) -> dict[str, int]:
        """Say how wide each tap is."""
        chance = self.chance("widths")
        return {
            tap: chance.randint(1, self.size.width)
            for taps in self.sources.values()
            for tap in taps
        }

    @cached_property
    def plan(self) -> TapPlan:
        """Give the tap plan."""
        return TapPlan(self.groups, self.widths, "int64", self.size.rows)

    @cached_property
    def lives(self) -> tuple[tuple[Turn, ...], ...]:
        """Say what happens, life by life."""
        chance = self.chance("lives")
        if self.longest:
            calm = (None,) * self.producers
            return ((Turn(0, MAX_STEP, MAX_MICROBATCHES, None, calm, False, False),),)
        return tuple(self._life(chance, number) for number in range(chance.randint(1, LIVES)))

    @property
    def first_epoch(self) -> int:
        """Say in which epoch the producers come."""
        return MAX_EPOCH - len(self.lives) + 1 if self.last_epochs else 1

    def name_of(self, turn: Turn) -> tuple[int, int, int]:
        """Tell a pass from all of all legs."""
        return self.seed, turn.life, turn.step

    def rows(self, turn: Turn) -> list[list[int]]:
        """Say how many rows each group has, for each microbatch of a pass."""
        chance = self.chance("rows", turn.life, turn.step)
        most = range(self.size.rows + 1)
        return [chance.choices(most, k=turn.microbatches) for _ in self.groups]

    def _life(self, chance: random.Random, number: int) -> tuple[Turn, ...]:
        strides = [chance.choice((1, 1, 1, 2, 1000)) for _ in range(chance.randint(1, PASSES))]
        first = chance.choice((0, chance.randrange(MAX_STEP // 2), MAX_STEP - sum(strides[1:])))
        steps = [first + sum(strides[1 : place + 1]) for place in range(len(strides))]
        return tuple(self._turn(chance, number, step, last=step == steps[-1]) for step in steps)

    def _turn(self, chance: random.Random, life: int, step: int, last: bool) -> Turn:
        microbatches = chance.randint(1, self.size.microbatches)
        sides: Sequence[int | None] = [None] * (1 + self.producers)
        if chance.random() < ROUGH:
            odds = 1 / len(sides)
            sides = [
                chance.randrange(microbatches) if chance.random() < odds else None for _ in sides
            ]
        reset = last and chance.random() < 0.5
        if reset:
            sides = [chance.randrange(microbatches), *sides[1:]]
        paced = chance.random() < 0.3
        return Turn(life, step, microbatches, sides[0], tuple(sides[1:]), reset, paced)
