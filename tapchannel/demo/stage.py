"""One stage's process: trains its share of the policy and pushes its taps."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional

from ..errors import TapChannelError
from . import rendezvous, text
from .check import flat_weights
from .consumer import DraftStage
from .messages import Assignment, StageDone, StageFailed, StageReady
from .policy import SEQUENCES, TOKENS, Stage
from .producer import Producer, TapStage

LEARNING_RATE = 2e-3


class StageRun:
    """All that one stage does between rendezvous and goodbye."""

    def __init__(self, assignment: Assignment, store: rendezvous.Store, link: Connection) -> None:
        self._index = assignment.stage
        self._settings = settings = assignment.settings
        self._link = link
        self._text = text.load()
        device = torch.device(assignment.placement.devices[self._index])
        boundary = device if "nccl" in assignment.placement.backend else torch.device("cpu")
        self._module = Stage(self._index, settings.stages, device, boundary)
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=LEARNING_RATE)
        self._pipeline = TapStage(self._module, self._index, settings.stages, boundary)
        self._schedule = Schedule1F1B(self._pipeline, settings.microbatches, loss_fn=_policy_loss)
        self._boundary = boundary
        self._draft = self._start_draft(device, store)
        self._producer = Producer(self._pipeline, self._module, settings.stages, store)

    def _start_draft(self, device: torch.device, store: rendezvous.Store) -> DraftStage | None:
        if self._index != self._settings.stages - 1:
            return None
        draft = DraftStage(self._settings, device, store)
        self._pipeline.on_forward = lambda mb: self._link.send(draft.consume(mb))
        return draft

    def run(self) -> StageDone:
        """Run every pass, close both ends, and return what this stage has to report."""
        if self._draft is not None:
            self._draft.mailbox.wait_ready()
        self._link.send(StageReady(self._index))
        for step in range(1, self._settings.passes + 1):
            self._run_pass(step)
        _meet()  # nobody leaves while another still pushes
        lane = self._producer.close()
        if self._draft is not None:
            self._draft.mailbox.close()
        return StageDone(self._index, lane)

    def _run_pass(self, step: int) -> None:
        batch = text.draw(self._text, step, self._settings.microbatches * SEQUENCES, TOKENS)
        if self._draft is not None:
            self._draft.fetch_weights(self._module)
            self._draft.prepare(step, batch)
        else:
            dist.send(flat_weights(self._module), dst=self._settings.stages - 1)
        _meet()  # so that the pass measures the pipeline, not the check's own forward
        with ExitStack() as passes:
            if self._draft is not None:
                passes.enter_context(self._draft.open_pass())
            passes.enter_context(self._producer.open_pass(step, self._settings.microbatches))
            self._train(batch)
        if self._draft is not None:
            self._link.send(self._draft.report())

    def _train(self, batch: text.Batch) -> None:
        self._optimizer.zero_grad()
        if self._index == 0:
            self._schedule.step(batch.inputs.to(self._boundary))
        elif self._draft is not None:
            self._schedule.step(target=batch.targets.to(self._boundary))
        else:
            self._schedule.step()
        self._optimizer.step()


def run_stage(assignment: Assignment, link: Connection) -> None:
    """Be one stage until the last pass or the first error, and report either over ``link``."""
    torch.set_num_threads(1)  # one order of summation, on every machine
    # torch's backward thread says this once on every GPU before it does what it says.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS", UserWarning)
    try:
        link.send(_run(assignment, link))
    except Exception as error:
        cause = typed_cause(error)
        link.send(
            StageFailed(
                assignment.stage,
                os.getpid(),
                type(cause).__name__,
                str(cause),
                time.monotonic_ns(),
            )
        )
        raise SystemExit(1) from error


def _run(assignment: Assignment, link: Connection) -> StageDone:
    device = torch.device(assignment.placement.devices[assignment.stage])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = rendezvous.join(assignment.store_port)
    dist.init_process_group(
        assignment.placement.backend,
        store=rendezvous.part(store, "pipeline"),
        rank=assignment.stage,
        world_size=assignment.settings.stages,
        timeout=rendezvous.PATIENCE,
    )
    done = StageRun(assignment, rendezvous.part(store, "taps"), link).run()
    dist.destroy_process_group()  # not after an error: it may wait for a stage that is gone
    return done


def _policy_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _meet() -> None:
    """Wait until every stage is here."""
    dist.all_reduce(torch.zeros(1))


def typed_cause(error: BaseException) -> BaseException:
    """Find the error of ours inside what torch's pipelining wrapped around it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TapChannelError):
            return cause
        cause = cause.__cause__
    return error
