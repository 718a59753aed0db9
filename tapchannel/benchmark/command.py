"""The command: runs scenarios, keeps every figure, prints the tables, draws; or compares runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from ..errors import ConfigError
from . import compare, plots, record, report
from .facts import facts
from .frame import Bench
from .peers import catalogue, source_folder
from .record import Row
from .scenarios import SCENARIOS
from .settings import Options, add_options, options_of, with_peers

OK, FAULTY, BAD_OPTIONS, INTERRUPTED = 0, 1, 2, 130
RUNS: Final = "runs.jsonl"
_WIDE: Final = 200  # columns of a table that goes into a file


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tapchannel bench`` and return its exit code.

    0: measured, and every payload that was checked was equal. 1: a payload came wrong, or a peer
    failed. 2: options that cannot work. 130: Ctrl-C. Of compare: see `compare.main`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    if arguments[:1] == ["compare"]:
        return compare.main(arguments[1:], console)
    if arguments[:1] == ["plot"]:
        return _plot(arguments[1:], console)
    given = _parser().parse_args(arguments)
    about = {name: text for name, (_, text) in SCENARIOS.items()}
    try:
        options = options_of(given, about)
        options = with_peers(options, peers := catalogue(_extra(options)), _extra(options))
    except ConfigError as error:
        return _complain(error, BAD_OPTIONS)
    known = facts(arguments, options.place)
    bench = Bench(options, peers, console)
    try:
        _measure(bench, options, known)
    except KeyboardInterrupt:
        return _complain("interrupted; what was measured is kept", INTERRUPTED)
    report.show(console, bench.rows, known)
    console.print(f"every round: {options.out / RUNS}", soft_wrap=True)
    _draw(bench.rows, options.out, options.plots, console)
    found = report.faults(bench.rows)
    for line in found:
        _complain(line, FAULTY)
    return FAULTY if found else OK


def _measure(bench: Bench, options: Options, known: dict[str, str]) -> None:
    """Run the scenarios; each one's rows are kept when it ends."""
    for name in options.scenarios:
        before = len(bench.rows)
        try:
            SCENARIOS[name][0](bench)
        finally:
            record.append(options.out / RUNS, bench.rows[before:], known)


def _extra(options: Options) -> Path | None:
    return options.extra if options.extra is not None else source_folder()


def _parser() -> argparse.ArgumentParser:
    about = {name: text for name, (_, text) in SCENARIOS.items()}
    lines = "\n".join(f"  {name:<14}{text}" for name, text in about.items())
    parser = argparse.ArgumentParser(
        prog="tapchannel bench",
        description="Measure tapchannel beside other ways to move the same bytes, in one run.",
        epilog=f"scenarios:\n{lines}\n  {'all':<14}all of them\n\n"
        "tapchannel bench compare A B   what became slower between two results\n"
        "tapchannel bench plot FOLDER   draw its results again",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, about)
    return parser


def _plot(arguments: Sequence[str], console: Console) -> int:
    parser = argparse.ArgumentParser(
        prog="tapchannel bench plot", description="Draw the newest figures of a folder's results."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder: Path = parser.parse_args(arguments).folder
    try:
        rows = list(record.last_run(record.read(folder / RUNS)).values())
    except ConfigError as error:
        return _complain(error, BAD_OPTIONS)
    return OK if _draw(rows, folder, True, console) else FAULTY


def _draw(rows: Sequence[Row], folder: Path, wanted: bool, console: Console) -> bool:
    if not wanted:
        return False
    if not plots.can_draw():
        console.print("no plots: pip install 'tapchannel[plot]'", markup=False)
        return False
    for file in plots.draw(rows, folder):
        console.print(f"plot: {file}", soft_wrap=True)
    return True


def _complain(problem: object, exit_code: int) -> int:
    print(f"tapchannel bench: {problem}", file=sys.stderr)
    return exit_code
