"""The order in which a rank runs its stages' forwards and backwards, read from a torch schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from .depth import Action, slots_needed

Schedule: TypeAlias = "PipelineScheduleSingle | PipelineScheduleMulti"

# Backward in full, or for the weights, the later half of a split one: a draft that is a part of the
# last stage reads its slot until then.
_BACKWARDS: Final = ("B", "W")


def microbatches_of(schedule: Schedule) -> int:
    """Give the number of microbatches in a step of the schedule."""
    return schedule._n_microbatches  # pyright: ignore[reportPrivateUsage]


def stages_of(schedule: Schedule) -> list[Any]:
    """Give the stages that the schedule runs on this rank."""
    if isinstance(schedule, PipelineScheduleMulti):
        return list(schedule._stages)  # pyright: ignore[reportPrivateUsage]
    return [schedule._stage]  # pyright: ignore[reportPrivateUsage]


def needs_of(schedule: Schedule) -> int:
    """Give the slots that this rank's part of the schedule can run ahead."""
    first, microbatches = stages_of(schedule)[0], microbatches_of(schedule)
    if isinstance(schedule, Schedule1F1B):  # in its order torch numbers a last stage's from 1
        return min(microbatches, first.num_stages - first.stage_index)
    planned: Mapping[int, Iterable[Any]] = getattr(schedule, "pipeline_order", None) or {}
    order = planned.get(first.group_rank)
    # Without one it is GPipe, in an older torch, or not known: all forwards may come first.
    return slots_needed(_computed(order)) if order else microbatches


def _computed(actions: Iterable[Any]) -> Iterator[Action]:
    """Yield an order's forwards and backwards, those that overlap one after the other."""
    for action in actions:
        for part in () if action is None else action.sub_actions or (action,):
            if part.computation_type == "F":
                yield Action(True, part.stage_index, part.microbatch_index)
            elif part.computation_type in _BACKWARDS:
                yield Action(False, part.stage_index, part.microbatch_index)
