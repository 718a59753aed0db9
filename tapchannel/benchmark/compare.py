"""``tapchannel bench compare A B``: what became slower from one run to another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from .record import Metric, Row, last_run, read
from .samples import digits_of

SAME, SLOWER, NOTHING = 0, 1, 2
_BANDWIDTH: Final = 5.0
_LATENCY: Final = 15.0


@dataclass(frozen=True)
class Change:
    """One figure in both runs; ``worse`` is in percent, negative where it became better."""

    row: Row
    name: str
    before: Metric
    after: Metric
    worse: float
    tolerance: float

    @property
    def slower(self) -> bool:
        """Tell whether it became worse by more than is tolerated."""
        return self.worse > self.tolerance


def changes(before: Path, after: Path, latency: float, bandwidth: float) -> list[Change]:
    """Compare the newest rows of two files.

    Raises:
        ConfigError: one cannot be read.
    """
    old, new = last_run(read(before)), last_run(read(after))
    found: list[Change] = []
    for key, row in new.items():
        was = old.get(key)
        if was is None or was.status != "ok" or row.status != "ok":
            continue
        for name, metric in row.metrics.items():
            earlier = was.metrics.get(name)
            if metric.kind == "info" or earlier is None or not (earlier.samples and metric.samples):
                continue
            tolerance = latency if metric.kind == "latency" else bandwidth
            found.append(Change(row, name, earlier, metric, _worse(earlier, metric), tolerance))
    return found


def lost(before: Path, after: Path) -> list[str]:
    """Name the rows that were good and no longer are: missing, failed or wrong.

    Raises:
        ConfigError: a file cannot be read.
    """
    new = last_run(read(after))
    return [
        f"{', '.join(key)}: {new[key].status}: {new[key].reason}"
        for key, row in last_run(read(before)).items()
        if row.status == "ok" and key in new and new[key].status != "ok"
    ]


def _worse(earlier: Metric, metric: Metric) -> float:
    was, now = earlier.spread.median, metric.spread.median
    if metric.kind == "latency":
        return 100 * (now / was - 1) if was else 0.0
    return 100 * (was / now - 1) if now else float("inf")


def _table(found: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("scenario", "case", "peer", "figure"):
        table.add_column(head, no_wrap=True)
    for head in ("before", "after", "worse by", "tolerated"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in sorted(found, key=lambda change: change.tolerance - change.worse):
        was, now = one.before.spread.median, one.after.spread.median
        table.add_row(
            one.row.scenario,
            one.row.label,
            one.row.peer,
            one.name,
            f"{was:.{digits_of(was)}f} {one.before.unit}",
            f"{now:.{digits_of(now)}f} {one.after.unit}",
            f"{one.worse:+.1f} %",
            f"{one.tolerance:.0f} %",
            style="bold red" if one.slower else "",
        )
    return table


def main(arguments: Sequence[str], console: Console) -> int:
    """Run the command and return its exit code.

    0: nothing became worse by more than is tolerated. 1: something did, or is no longer there.
    2: the two have nothing in common, or cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="tapchannel bench compare",
        description="Compare the newest figures of two files of results, by their medians.",
    )
    parser.add_argument("before", type=Path, metavar="A", help="runs.jsonl, or its folder")
    parser.add_argument("after", type=Path, metavar="B")
    parser.add_argument("--latency", type=float, default=_LATENCY, metavar="PERCENT")
    parser.add_argument("--bandwidth", type=float, default=_BANDWIDTH, metavar="PERCENT")
    parser.add_argument("--peers", metavar="A,B", help="only these")
    given = parser.parse_args(arguments)
    before, after = _file(given.before), _file(given.after)
    try:
        found = changes(before, after, given.latency, given.bandwidth)
        gone = lost(before, after)
    except ConfigError as error:
        console.print(f"tapchannel bench compare: {error}", markup=False, soft_wrap=True)
        return NOTHING
    if given.peers is not None:
        found = [one for one in found if one.row.peer in given.peers.split(",")]
        gone = [one for one in gone if one.split(", ")[2].split(":")[0] in given.peers.split(",")]
    if not found and not gone:
        console.print("the two runs have no figure in common")
        return NOTHING
    console.print(_table(found))
    for line in gone:
        console.print(line, markup=False, soft_wrap=True)
    slower = sum(one.slower for one in found)
    console.print(f"{slower} of {len(found)} figures became worse, {len(gone)} rows were lost")
    return SLOWER if slower or gone else SAME


def _file(path: Path) -> Path:
    return path / "runs.jsonl" if path.is_dir() else path
