"""Workers that are the ranks of one process group, a pipeline of stages times tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from support.children import Children
from support.workers import Worker

COLLECTIVE_LIMIT = timedelta(seconds=40)


class Ranks:
    """The test's hold on them. On each desk: ``rank``, ``stage``, ``pp_group``, ``tp_group``."""

    def __init__(self, children: Children, folder: Path, stages: int, tp: int = 1) -> None:
        self.workers = [Worker(children, name=f"rank {rank}") for rank in range(stages * tp)]
        for rank, worker in enumerate(self.workers):
            worker.begin(join, f"file://{folder}/ranks", rank, stages, tp)
        self._finish()

    def each(self, function: Callable[..., object], *args: object) -> list[Any]:
        """Run ``function(desk, *args)`` on all ranks together; return the values by rank."""
        for worker in self.workers:
            worker.begin(function, *args)
        return self._finish()

    def _finish(self) -> list[Any]:
        answers: list[Any] = []
        errors: list[Exception] = []
        for (
            worker
        ) in self.workers:  # all are waited for: a rank left busy would spoil the next call
            try:
                answers.append(worker.finish())
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def dismiss(self) -> None:
        """Let every rank leave its group, and end."""
        self.each(leave)
        for worker in self.workers:
            worker.dismiss()


def join(desk: SimpleNamespace, where: str, rank: int, stages: int, tp: int) -> None:
    """Make the process group and the two groups that this rank is in."""
    torch.set_num_threads(1)
    desk.rank, desk.stage, desk.tp_rank = rank, rank // tp, rank % tp
    world = stages * tp
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=world, timeout=COLLECTIVE_LIMIT
    )
    for first in range(tp):
        group = dist.new_group(range(first, world, tp))
        if rank % tp == first:
            desk.pp_group = group
    for stage in range(stages):
        group = dist.new_group(range(stage * tp, stage * tp + tp))
        if rank // tp == stage:
            desk.tp_group = group


def leave(desk: SimpleNamespace) -> None:
    """End the process group."""
    dist.destroy_process_group()
