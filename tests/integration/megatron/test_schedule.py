"""How many slots a schedule needs, from Megatron's own tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.crew import Crew
from support.megatron_shim import import_megatron
from tapchannel.integrations.megatron_schedule import order, slots

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]


def _slots_of(cases: list[tuple[int, int | None, int]]) -> list[list[int]]:
    """Give each stage's slots, for pipelines of so many stages, chunks and microbatches a group."""
    import_megatron()
    found: list[list[int]] = []
    for stages, chunks, group_size in cases:
        groups: list[Any] = [
            SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)  # noqa: B023
            for stage in range(stages)
        ]
        interleaved = chunks is not None
        found.append([slots(group, chunks or 1, interleaved, group_size) for group in groups])
    return found


def _orders(stage: int) -> list[list[tuple[bool, int, int]]]:
    import_megatron()
    plain = order(2, stage, 3, 1, None)
    interleaved = order(2, stage, 4, 2, 2)
    return [[tuple(action) for action in actions] for actions in (plain, interleaved)]


def test_slots_follow_the_schedule(crew: Crew) -> None:
    """Catches: a mailbox too small, whose pushes wait, or one that wastes memory."""
    expected = {
        (1, None, 1): [1],
        (2, None, 2): [2, 1],
        (8, None, 8): [8, 7, 6, 5, 4, 3, 2, 1],
        (4, 2, 4): [7, 5, 4, 4],
        (4, 4, 4): [7, 5, 4, 4],
        (8, 2, 8): [15, 13, 11, 9, 8, 8, 8, 8],
        (4, 2, 8): [8, 8, 8, 8],  # twice as many microbatches a round as stages
        (4, 2, 5): [7, 5, 5, 5],
    }
    [found] = crew.run(1, _slots_of, list(expected))
    assert dict(zip(expected, found, strict=True)) == expected


def test_order_is_megatron_s(crew: Crew) -> None:
    """Catches: forwards and backwards that the schedule runs in another order."""
    [(plain, interleaved)] = crew.run(1, _orders, 0)
    forward, backward = True, False
    assert plain == [
        (forward, 0, 0),
        (forward, 0, 1),
        (backward, 0, 0),
        (forward, 0, 2),
        (backward, 0, 1),
        (backward, 0, 2),
    ]
    assert interleaved[:6] == [
        (forward, 0, 0),
        (forward, 0, 1),
        (forward, 1, 0),
        (forward, 1, 1),
        (forward, 0, 2),
        (backward, 1, 0),
    ]
    assert len(interleaved) == 16
