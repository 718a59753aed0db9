"""What the demo says: progress while it runs, then the lanes, the check and the draft's loss."""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .messages import Message, MicrobatchDone, PassDone, StageReady
from .outcome import Outcome
from .settings import Placement, Settings

_DIFFERENCES_SHOWN = 5
_TABLE_HEAD = ("lane", "stage", "taps", "transport", "MiB", "GB/s", "push", "queued", "wait")
_TABLE_NOTE = (
    "GB/s: mean over the passes. push: host time of one, median. "
    "queued: pushes that found no credit. wait: for credit, mean of all pushes."
)


class ProgressReport:
    """Progress for a human: a bar on a terminal, else a line a pass."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._ready = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("microbatches"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        total = settings.passes * settings.microbatches
        self._task = self._bar.add_task(self._starting(), total=total)

    def _starting(self) -> str:
        return f"starting: {self._ready} of {self._settings.stages} stages ready"

    def __enter__(self) -> ProgressReport:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, message: Message) -> None:
        """Bring the display up to date with one report."""
        if isinstance(message, StageReady):
            self._ready += 1
            self._bar.update(self._task, description=self._starting())
        elif isinstance(message, MicrobatchDone):
            text = f"pass {message.step} of {self._settings.passes}, draft loss {message.loss:.3f}"
            self._bar.update(self._task, advance=1, description=text)
        elif isinstance(message, PassDone) and not self._console.is_terminal:
            self._console.print(_pass_line(message, self._settings))


def _pass_line(done: PassDone, settings: Settings) -> str:
    equal = done.taps_checked - len(done.differences)
    return (
        f"pass {done.step} of {settings.passes}: draft loss {done.loss:.3f}, "
        f"{equal} of {done.taps_checked} taps equal, {done.seconds:.2f} s"
    )


def heading(settings: Settings, placement: Placement) -> str:
    """Say what is about to run."""
    return (
        f"{settings.stages} pipeline stages {placement}; {settings.passes} passes of "
        f"{settings.microbatches} microbatches; {settings.depth} slots in the mailbox"
    )


def lane_table(outcome: Outcome) -> str:
    """Lay out one line a lane: what it carried, how fast, and what that cost its producer."""
    rows: list[tuple[str, ...]] = [_TABLE_HEAD]
    for lane in outcome.lanes:
        rows.append(
            (
                str(lane.lane),
                str(lane.stage),
                ", ".join(lane.taps),
                lane.transport,
                f"{lane.bytes / 2**20:.1f}",
                f"{lane.bytes / outcome.pass_seconds / 1e9:.3g}",
                f"{lane.push_seconds * 1e6:.0f} µs",
                f"{lane.queued} of {lane.pushes}",
                f"{lane.credit_wait_seconds / lane.pushes * 1e3:.1f} ms",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [*lines, _TABLE_NOTE])


def summary(outcome: Outcome) -> str:
    """Say what the check found and how the draft fared, the verdict last."""
    shown = outcome.differences[:_DIFFERENCES_SHOWN]
    lines = [f"DIFFERS: {difference}" for difference in shown]
    if len(outcome.differences) > len(shown):
        lines.append(f"DIFFERS: {len(outcome.differences) - len(shown)} more taps")
    equal = outcome.taps_checked - len(outcome.differences)
    lines.append(
        f"taps:       {equal} of {outcome.taps_due} equal, bit for bit, to an unpipelined "
        "forward of the same weights"
    )
    waited = outcome.tap_wait_seconds * 1e3
    lines.append(
        f"draft:      waited {waited:.1f} ms for taps in {outcome.pass_seconds:.1f} s of passes"
    )
    first, last = outcome.passes[0], outcome.passes[-1]
    lines.append(
        f"draft loss: {first.loss:.3f} in pass {first.step}, {last.loss:.3f} in pass {last.step}"
    )
    verdict = "; ".join(outcome.faults()) or "all well"
    lines.append(f"{verdict} ({outcome.seconds:.1f} s)")
    return "\n".join(lines)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the whole outcome as plain data."""
    settings = outcome.settings
    return {
        "ok": not outcome.faults(),
        "faults": outcome.faults(),
        "stages": settings.stages,
        "microbatches": settings.microbatches,
        "passes": settings.passes,
        "depth": settings.depth,
        "taps_due": outcome.taps_due,
        "taps_checked": outcome.taps_checked,
        "differences": outcome.differences,
        "draft_loss": [done.loss for done in outcome.passes],
        "pass_seconds": [done.seconds for done in outcome.passes],
        "lanes": [asdict(lane) for lane in outcome.lanes],
        "tap_wait_seconds": outcome.tap_wait_seconds,
        "seconds": outcome.seconds,
    }
