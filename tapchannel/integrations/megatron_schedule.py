"""In which order a rank of Megatron-Core runs its microbatches, from Megatron's own tables."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from .depth import Action, slots_needed


def slots(pp_group: dist.ProcessGroup, chunks: int, interleaved: bool, group_size: int) -> int:
    """Give the slots that this rank's schedule fills before it has to wait for a backward.

    The bound grows with the number of microbatches up to a few rounds and may depend on what is
    left for the last round; a batch ramp-up meets all of those, so all are looked at.
    """
    stages, stage = pp_group.size(), pp_group.rank()
    if not interleaved:
        return slots_needed(order(stages, stage, 4 * stages, 1, None))
    ends = [group_size, *range(stages, group_size)]
    counts = [rounds * group_size + end for rounds in (0, 1, 3) for end in ends]
    return max(
        slots_needed(order(stages, stage, count, chunks, group_size))
        for count in counts
        if count >= group_size
    )


def order(
    stages: int, stage: int, microbatches: int, chunks: int, group_size: int | None
) -> list[Action]:
    """Give one rank's forwards and backwards in order; ``group_size`` None: not interleaved."""
    schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    place = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: stages, rank=lambda: stage),
        virtual_pipeline_model_parallel_size=None if group_size is None else chunks,
    )
    found = schedules.get_pp_rank_microbatches(
        microbatches, chunks, group_size, p2p_communicator=place
    )
    total, ahead = int(found[0]), int(found[2])
    table = _forwards(schedules, microbatches, chunks, group_size)
    actions: list[Action] = []
    for index in range(total + ahead):
        if index < total:
            microbatch, chunk = table[index]
            actions.append(Action(True, chunk, microbatch))
        if index >= ahead:
            microbatch, chunk = table[index - ahead]
            actions.append(Action(False, chunks - 1 - chunk, microbatch))
    return actions


def _forwards(
    schedules: Any, microbatches: int, chunks: int, group_size: int | None
) -> list[tuple[int, int]]:
    """Give microbatch and chunk of each forward; the backwards go through them mirrored."""
    if group_size is None:
        return [(microbatch, 0) for microbatch in range(microbatches)]
    return schedules.get_schedule_table(microbatches, chunks, group_size)
