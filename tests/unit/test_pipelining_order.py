"""The slots that torch's schedules need: as read from their orders, and whether they are enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tapchannel.integrations.pipelining_order import needs_of

SCHEDULES = [
    (Schedule1F1B, 1),
    (ScheduleGPipe, 1),
    (ScheduleInterleaved1F1B, 2),
    (ScheduleInterleaved1F1B, 3),
    (ScheduleInterleavedZeroBubble, 2),
    (ScheduleZBVZeroBubble, 2),
    (ScheduleDualPipeV, 2),
    (ScheduleLoopedBFS, 2),
]


class Step(NamedTuple):
    """An action, with the names of torch's."""

    computation_type: str
    stage_index: int = 0
    microbatch_index: int = 0
    sub_actions: Any = None


@pytest.mark.parametrize(
    ("order", "slots"),
    [
        ([Step("F"), None, Step("B"), Step("F", 0, 1)], 1),
        ([Step("F"), Step("F", 0, 1), Step("B"), Step("F", 0, 2)], 2),
        ([Step("F"), Step("I"), Step("F", 0, 1), Step("W")], 2),
        ([Step("F"), Step("OVERLAP_F_B", -1, 0, (Step("F", 0, 1), Step("B")))], 2),
    ],
    ids=["one", "ahead", "weights later", "overlapped"],
)
def test_slots_follow_from_the_order(order: list[Step | None], slots: int) -> None:
    """Catches: a backward for inputs that counts as a whole one, overlapped actions not seen."""
    schedule = ScheduleGPipe.__new__(ScheduleGPipe)
    schedule._stage, schedule._n_microbatches = SimpleNamespace(group_rank=1), 8
    schedule.pipeline_order = {0: [], 1: order}
    assert needs_of(schedule) == slots


@pytest.mark.parametrize(("kind", "slots"), [(Schedule1F1B, 3), (ScheduleGPipe, 8)])
def test_slots_of_a_torch_that_gives_no_order(kind: type[Any], slots: int) -> None:
    """Catches: a depth of one with an older torch, whose single-stage schedules have no order."""
    schedule = kind.__new__(kind)
    schedule._stage = SimpleNamespace(group_rank=1, stage_index=1, num_stages=4)
    schedule._n_microbatches = 8
    assert needs_of(schedule) == slots


def schedule_of(kind: type[Any], turns: int, ranks: int, rank: int, microbatches: int) -> Any:
    """Make a rank's schedule on as much of stages as its constructor reads."""
    stages = [
        SimpleNamespace(
            num_stages=turns * ranks,
            stage_index=turn * ranks + rank,
            group_size=ranks,
            group_rank=rank,
            is_last=False,
            submod=torch.nn.Identity(),
        )
        for turn in range(turns)
    ]
    many = issubclass(kind, PipelineScheduleMulti)
    return kind(stages if many else stages[0], microbatches, loss_fn=torch.nn.MSELoss())


def actions_of(schedule: Any, ranks: int, rank: int, microbatches: int) -> Iterator[Step]:
    """Yield what a rank computes, in its order."""
    if isinstance(schedule, Schedule1F1B):  # as it runs; the order that it gives is off by one
        ahead = min(microbatches, ranks - rank)
        yield from (Step("F", rank, microbatch) for microbatch in range(ahead))
        for microbatch in range(microbatches):
            yield Step("B", rank, microbatch)
            if microbatch + ahead < microbatches:
                yield Step("F", rank, microbatch + ahead)
        return
    for action in filter(None, schedule.pipeline_order[rank]):
        yield from (
            Step(part[1].value, part[0], part[2]) for part in action.sub_actions or [action]
        )


class Pipeline:
    """Ranks that run in their order, whose pushes wait for a slot in the middle of the forward."""

    def __init__(self, orders: Sequence[list[Step]], depth: int, freed_by: str) -> None:
        self._orders, self._depth, self._freed_by = orders, depth, freed_by
        self._last = max(step.stage_index for order in orders for step in order)
        self._done: set[tuple[str, int, int]] = set()
        self._freed: set[int] = set()

    def ends(self) -> bool:
        """Tell whether all ranks come to their end."""
        places = [0] * len(self._orders)
        moving = True
        while moving:
            moving = False
            for rank, order in enumerate(self._orders):
                while places[rank] < len(order) and self._may_run(order[places[rank]]):
                    self._run(order[places[rank]])
                    places[rank] += 1
                    moving = True
        return places == [len(order) for order in self._orders]

    def _may_run(self, step: Step) -> bool:
        what, stage, microbatch, _ = step
        if what == "F":
            slot = microbatch < self._depth or microbatch - self._depth in self._freed
            return slot and (stage == 0 or ("F", stage - 1, microbatch) in self._done)
        if what in ("B", "I"):
            return stage == self._last or ("B", stage + 1, microbatch) in self._done
        return True

    def _run(self, step: Step) -> None:
        what, stage, microbatch, _ = step
        self._done.add(("B" if what == "I" else what, stage, microbatch))
        if stage == self._last and what in self._freed_by:
            self._freed.add(microbatch)


@pytest.mark.parametrize("freed_by", ["F", "BI", "BW"], ids=["in the loss", "backward", "weights"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("kind", "turns"), SCHEDULES)
def test_slots_are_enough_for_pushes_that_wait(
    kind: type[Any], turns: int, ranks: int, freed_by: str
) -> None:
    """Catches: a depth with which a push waits for ever for what comes after it on its own rank."""
    microbatches = 3 * ranks
    schedules = [schedule_of(kind, turns, ranks, rank, microbatches) for rank in range(ranks)]
    orders = [
        list(actions_of(schedule, ranks, rank, microbatches))
        for rank, schedule in enumerate(schedules)
    ]
    depth = max(needs_of(schedule) for schedule in schedules)
    assert Pipeline(orders, depth, freed_by).ends()
    if kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV) or (kind, freed_by) == (
        ScheduleGPipe,
        "BW",
    ):
        assert not Pipeline(
            orders, depth - 1, freed_by
        ).ends()  # and the model sees one that is not
