"""The draft's side of the last stage: receives the taps, checks them in place, trains on them."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..mailbox import Mailbox
from ..telemetry import read_events
from .check import Difference, UnpipelinedPolicy, flat_weights, problem_of
from .draft import DraftTrainer
from .messages import MicrobatchDone, PassDone
from .policy import SEQUENCES, Stage, sources, tap_plan
from .rendezvous import Store
from .settings import Settings
from .text import Batch


class DraftStage:
    """Owns the mailbox, the draft, and the unpipelined policy that the taps are compared with."""

    def __init__(self, settings: Settings, device: torch.device, store: Store) -> None:
        self._microbatches = settings.microbatches
        self._last = settings.stages - 1
        self._keep_events = settings.plot is not None
        self._device = device
        self._policy = UnpipelinedPolicy(settings.stages, device)
        self._trainer = DraftTrainer(settings.stages, device)
        self.mailbox = Mailbox(
            tap_plan(settings.stages),
            sources(settings.stages),
            depth=settings.depth,
            device=str(device),
            store=store,
            name="demo",
        )

    def fetch_weights(self, own: Stage) -> None:
        """Bring the unpipelined policy up to date with the stages' weights.

        Blocks: until every other stage has sent its own, to the process group's deadline.
        """
        self._policy.load(self._last, flat_weights(own))
        for stage in range(self._last):
            weights = torch.empty(self._policy.weight_count(stage))
            dist.recv(weights, src=stage)
            self._policy.load(stage, weights)

    def prepare(self, step: int, batch: Batch) -> None:
        """Compute every tap that pass ``step`` should bring."""
        shares = [batch.microbatch(index, SEQUENCES) for index in range(self._microbatches)]
        self._targets = [share.targets.to(self._device) for share in shares]
        self._expected = [self._policy.taps(share.inputs.to(self._device)) for share in shares]
        self._step = step
        self._checked = 0
        self._tap_wait_seconds = 0.0
        self._losses: list[float] = []
        self._differences: list[Difference] = []

    @contextmanager
    def open_pass(self) -> Generator[None, None, None]:
        """Open the prepared pass on the mailbox."""
        with self.mailbox.open_pass(self._step, self._microbatches):
            opened = time.perf_counter()
            yield
            self._seconds = time.perf_counter() - opened

    def consume(self, microbatch: int) -> MicrobatchDone:
        """Wait for the taps of one microbatch, check them, train the draft on them."""
        began = time.perf_counter()
        with self.mailbox.recv(microbatch) as taps:
            self._tap_wait_seconds += time.perf_counter() - began
            for tap, expected in self._expected[microbatch].items():
                self._compare(microbatch, tap, taps[tap], expected)
            loss = self._trainer.train(
                taps["features"], taps["embedding"], self._targets[microbatch]
            )
        self._losses.append(loss)
        return MicrobatchDone(self._step, microbatch, loss)

    def _compare(
        self, microbatch: int, tap: str, seen: torch.Tensor, expected: torch.Tensor
    ) -> None:
        problem = problem_of(seen, expected)
        if problem is not None:
            self._differences.append(Difference(self._step, microbatch, tap, problem))
        self._checked += 1

    def report(self) -> PassDone:
        """Sum up the pass that was just closed."""
        return PassDone(
            step=self._step,
            loss=sum(self._losses) / len(self._losses),
            taps_checked=self._checked,
            differences=[str(difference) for difference in self._differences],
            seconds=self._seconds,
            tap_wait_seconds=self._tap_wait_seconds,
            # Read after every pass: the recorders' rings hold a few passes, not all.
            events=read_events(self.mailbox) if self._keep_events else [],
        )
