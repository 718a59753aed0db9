"""The producer's side of a stage: pushes its taps while the pipeline runs a microbatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from ..outbox import Outbox
from .messages import LaneReport
from .policy import Stage, tap_plan, taps_of
from .rendezvous import Store


class TapStage(PipelineStage):
    """A pipeline stage that knows, while its module runs, which microbatch is inside.

    torch also runs the module once before the first pass to learn its shapes; that run does not
    come through here, so ``microbatch`` is ``None`` then and nothing is pushed.
    """

    microbatch: int | None = None
    on_forward: Callable[[int], None] | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch, then hand its number to ``on_forward``."""
        self.microbatch = fwd_chunk_id
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self.microbatch = None
        if self.on_forward is not None:
            self.on_forward(fwd_chunk_id)
        return output


class Producer:
    """Owns the outbox of one stage and the hooks that feed it."""

    def __init__(self, pipeline: TapStage, module: Stage, stages: int, store: Store) -> None:
        self._pipeline = pipeline
        self._stage: int = pipeline.stage_index
        self._push_seconds: list[float] = []
        self._outbox = Outbox(
            tap_plan(stages), self._stage, store=store, name="demo", device=str(module.device)
        )
        for tap, tapped in zip(taps_of(self._stage), module.tapped(), strict=True):
            tapped.register_forward_hook(self._hook(tap))

    def _hook(self, tap: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
        def push(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            if self._pipeline.microbatch is not None:
                began = time.perf_counter()
                self._outbox.push(self._pipeline.microbatch, tap, output.detach())
                self._push_seconds.append(time.perf_counter() - began)

        return push

    def open_pass(self, step: int, microbatches: int) -> AbstractContextManager[object]:
        """Open the pass on the outbox."""
        return self._outbox.open_pass(step, microbatches)

    def close(self) -> LaneReport:
        """Close the outbox and return what its lane did."""
        info = cast("dict[str, Any]", self._outbox.info())
        self._outbox.close()
        return LaneReport(
            lane=info["lane"],
            stage=self._stage,
            taps=taps_of(self._stage),
            transport=info["transport"],
            bytes=info["bytes"],
            pushes=info["pushes"],
            push_seconds=median(self._push_seconds),
            queued=info["deferred"],
            credit_wait_seconds=info["credit_wait_s"],
        )
