"""Session: one rank's part of a tapped pipeline, whatever framework runs it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

import torch

from ..errors import UsageError
from ..keys import MAX_STEP, checked_int
from ..lease import Lease
from ..mailbox import Mailbox
from ..outbox import Outbox
from ..plan import TapPlan
from .forwards import Forwards, in_backward
from .wiring import Settings, Wiring

Microbatches: TypeAlias = int | Callable[[], int] | None


@dataclass
class Ends:
    """What a rank has open: the draft's mailbox, an outbox to each mailbox that it pushes to."""

    on_gpu: bool
    mailbox: Mailbox | None = None
    outboxes: list[Outbox] = field(default_factory=list[Outbox])
    closing: ExitStack = field(default_factory=ExitStack)


class Session:
    """Push this rank's taps and, on the draft stage, take all of them, pass by pass.

    An adapter's ``attach`` gives one to every rank of the pipeline. The trainer opens a `step`
    around each forward-backward call and, where the draft trains, takes the taps of the microbatch
    just forwarded. Outside a step nothing is pushed: evaluation needs no switch.
    """

    def __init__(
        self, settings: Settings, wiring: Wiring, ends: Ends, microbatches: Microbatches
    ) -> None:
        self.settings = settings
        self.plan: TapPlan = wiring.plan
        self.depth = wiring.depth
        self.mailbox = ends.mailbox
        self.outboxes = tuple(ends.outboxes)
        self._on_gpu = ends.on_gpu
        self._share = wiring.share
        self._microbatches = microbatches
        self._forwards = Forwards()
        self._step = 0
        self._seen: tuple[int, int] | None = None  # the draft stage's last microbatch, its rows
        self._cleanup = ends.closing
        self.notes: dict[str, object] = {}

    @property
    def is_consumer(self) -> bool:
        """Whether the draft trains on this rank."""
        return self.mailbox is not None

    @property
    def is_open(self) -> bool:
        """Whether a step is open: outside of one there is nothing to `take`."""
        return self._forwards.open

    # ---- the trainer's calls

    @contextmanager
    def step(
        self, microbatches: int | None = None, *, step: int | None = None
    ) -> Generator[None, None, None]:
        """Wrap one forward-backward call, on every rank of the pipeline.

        ``microbatches`` is that call's; by default what ``attach`` was given. ``step`` names the
        pass, strictly growing and the same on all ranks; by default each rank counts. A rank that
        failed before it came here has counted one less: name the steps where that can happen.

        Blocks:     never by itself. Leaving it normally waits for nothing either.
        On failure: an exception inside ends the pass on all ranks that this one's taps go to or
                    come from; the next step works (I7).

        Raises:
            UsageError: steps are nested or do not grow; a microbatch was not pushed or not taken.
            TapChannelError: a lane failed, or another rank ended the pass.
        """
        if self._forwards.open:
            raise UsageError("step: a step is open", next_step="leave it before the next one")
        count = self._count(microbatches)
        self._step = self._step + 1 if step is None else self._grown(step)
        with ExitStack() as passes:
            if self.mailbox is not None:
                passes.enter_context(self.mailbox.open_pass(self._step, count))
            for outbox in self.outboxes:
                passes.enter_context(outbox.open_pass(self._step, count))
            self._forwards.begin(count)
            self._seen = None
            passes.callback(self._forwards.end)
            yield

    def take(
        self,
        microbatch: int | None = None,
        *,
        rows: int | None = None,
        wait: str = "stream",
        timeout: float | None = None,
    ) -> Lease:
        """Give the taps of a microbatch: by default of the one that the draft stage forwarded last.

        Call it in the loss function. The lease is `Mailbox.recv`'s: ``taps["features"]`` is
        ``[rows, sum of widths]``, in place; use it as a context manager.

        Blocks:     on a GPU not the host: the rows are those of this stage's own hidden states. In
                    host memory until the taps are there. At most ``timeout`` seconds.

        Raises:
            UsageError: not the draft stage, no step is open, or nothing was forwarded yet.
            TapChannelError: as `Mailbox.recv`.
        """
        if self.mailbox is None:
            raise UsageError(
                "take: no draft trains on this rank",
                next_step="ask session.is_consumer first",
            )
        if not self._forwards.open:
            raise UsageError(
                "take: no step is open", next_step="wrap the forward-backward call in step()"
            )
        if microbatch is None:
            if self._seen is None:
                raise UsageError(
                    "take: the draft stage has forwarded no microbatch in this step",
                    next_step="call it in the loss function, or name the microbatch",
                )
            microbatch, seen = self._seen
            rows = seen if rows is None and self._on_gpu else rows
        return self.mailbox.recv(microbatch, wait=wait, rows=rows, timeout=timeout)

    def info(self) -> dict[str, object]:
        """Give the facts of this rank's mailbox and lanes, and what the adapter decided."""
        return {
            "depth": self.depth,
            "layout": self.settings.layout,
            "copy": self.settings.copy,
            **self.notes,
            "mailbox": None if self.mailbox is None else self.mailbox.info(),
            "outboxes": [outbox.info() for outbox in self.outboxes],
        }

    def close(self) -> None:
        """Remove the adapter's hooks and close this rank's lanes, then its mailbox. Twice is fine.

        Blocks:     until the copies in flight are done.
        """
        self._forwards.end()
        self._cleanup.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                for outbox in self.outboxes:
                    outbox.flush()
        finally:
            self.close()

    # ---- the adapter's calls: outside a step they do nothing

    def on_close(self, action: Callable[[], object]) -> None:
        """Do this when the session is closed: remove a hook."""
        self._cleanup.callback(action)

    def enter(self, chunk: int, microbatch: int | None = None) -> None:
        """Say that a real forward of a chunk begins: its taps may be pushed.

        Raises:
            UsageError: the pass has no more microbatches, or counts another one.
        """
        self._forwards.enter(chunk, microbatch)

    def leave(self, chunk: int) -> None:
        """Say that the chunk's forward has ended, well or not."""
        self._forwards.leave(chunk)

    def tap(self, name: str, hidden: torch.Tensor) -> None:
        """Push this rank's share of a tap, ``[..., width]``, if a forward is running.

        Ordering, Ownership, Raises: as `Outbox.push`.
        """
        running = self._forwards.running
        if running is None or not self.outboxes or in_backward():
            return
        rows, begin = self._own_rows(hidden.detach().reshape(-1, hidden.shape[-1]))
        if self.settings.copy:
            rows = rows.clone()
        for outbox in self.outboxes:
            outbox.push(running.microbatch, name, rows, row_begin=begin)

    def saw(self, hidden: torch.Tensor) -> None:
        """Say which hidden states the draft stage's last chunk works on: `take` is for these."""
        running = self._forwards.running
        if running is None or in_backward():
            return
        rows = hidden.numel() // hidden.shape[-1]
        index, count = self._share
        if self.settings.sequence_parallel:
            rows *= count if self.settings.layout == "whole" else 1
        elif self.settings.layout == "share":
            first, last = _span(rows, index, count)
            rows = last - first
        self._seen = running.microbatch, rows

    def _own_rows(self, flat: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Give the rows that this rank pushes, and where they begin in the slot."""
        index, count = self._share
        whole = self.settings.layout == "whole"
        if self.settings.sequence_parallel or count == 1:
            return flat, index * flat.shape[0] if whole else 0
        first, last = _span(flat.shape[0], index, count)
        return flat[first:last], first if whole else 0

    def _grown(self, step: int) -> int:
        if checked_int("step", step, 0, MAX_STEP) <= self._step:
            raise UsageError(
                "step: the steps of a session must grow",
                seen=step,
                expected=f"more than {self._step}",
                next_step="name each by the trainer's growing step number, the same on all ranks",
            )
        return step

    def _count(self, microbatches: int | None) -> int:
        said = self._microbatches if microbatches is None else microbatches
        count = said() if callable(said) else said
        if count is None:
            raise UsageError(
                "step: how many microbatches?",
                next_step="give attach or step the number of microbatches of a pass",
            )
        return count


def _span(rows: int, index: int, count: int) -> tuple[int, int]:
    """Give share ``index`` of ``count`` of the rows: equal ones, the last shorter or empty."""
    each = -(-rows // count)
    return min(index * each, rows), min((index + 1) * each, rows)
