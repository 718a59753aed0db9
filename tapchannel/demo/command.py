"""The command: runs the stages, shows the progress, prints the verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from ..errors import ConfigError
from . import plot, report
from .launch import DemoFailed, Stages
from .outcome import Outcome
from .settings import Placement, Settings, parse, place

OK, FAILED, BAD_OPTIONS, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tapchannel demo`` and return its exit code.

    0: every tap was equal and the draft's loss fell. 1: not so, or a stage failed. 2: options
    that cannot work. 130: Ctrl-C.
    """
    try:
        settings = parse(argv)
        placement = place(settings)
        if settings.plot is not None:
            plot.require_matplotlib()
    except ConfigError as error:
        return _complain(error, BAD_OPTIONS)
    try:
        outcome = _run(settings, placement)
    except DemoFailed as error:
        if settings.json:
            print(json.dumps({"ok": False, "failure": vars(error.failure)}))
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; every stage was ended", INTERRUPTED)
    return FAILED if outcome.faults() else OK


def _run(settings: Settings, placement: Placement) -> Outcome:
    console = Console(quiet=settings.json, markup=False, highlight=False, soft_wrap=True)
    console.print(report.heading(settings, placement))
    outcome = Outcome(settings)
    begun = time.monotonic()
    with report.ProgressReport(settings, console) as progress, Stages(settings, placement) as run:
        for message in run.messages():
            outcome.add(message)
            progress.show(message)
    outcome.seconds = time.monotonic() - begun
    console.print(f"\n{report.lane_table(outcome)}\n\n{report.summary(outcome)}")
    if settings.plot is not None:
        plot.draw(outcome.events, settings, settings.plot)
        console.print(f"timeline:   {settings.plot}")
    if settings.json:
        print(json.dumps(report.as_json(outcome)))
    return outcome


def _complain(problem: object, exit_code: int) -> int:
    print(f"tapchannel demo: {problem}", file=sys.stderr)
    return exit_code
