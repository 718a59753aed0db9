"""The tables: one a scenario, a line a case and peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .record import Row

_NOTE = "Medians (tenth to ninetieth of a hundred rounds); neighbouring rounds are compared."


def table(scenario: str, rows: Sequence[Row]) -> Table:
    """Lay out one scenario's rows; those that are not there keep their reason for `missing`."""
    shown = [row for row in rows if row.scenario == scenario and row.status in ("ok", "wrong")]
    columns = list(dict.fromkeys(name for row in shown for name in row.metrics))
    laid = Table(title=scenario, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    laid.add_column("case", no_wrap=True)
    laid.add_column("peer", no_wrap=True)
    for name in columns:
        units = {row.metrics[name].unit for row in shown if name in row.metrics}
        laid.add_column(_head(name, units.pop()), justify="right", no_wrap=True)
    laid.add_column("payload")
    case = None
    for row in shown:
        figures = [_figure(row, name) for name in columns]
        verdict = Text(row.reason, "bold red") if row.status == "wrong" else Text(row.check)
        laid.add_row("" if row.label == case else row.label, row.peer, *figures, verdict)
        case = row.label
    return laid


def _head(name: str, unit: str) -> str:
    return name if not unit or name in ("GB/s", "messages/s") else f"{name}, {unit}"


def _figure(row: Row, name: str) -> str:
    metric = row.metrics.get(name)
    return metric.spread.text() if metric is not None and metric.samples else ""


def missing(rows: Sequence[Row]) -> list[str]:
    """Give a line for each peer that was not measured, or not to the end, with the reason."""
    lines: dict[str, None] = {}
    for row in rows:
        if row.status in ("missing", "failed"):
            lines[f"{row.scenario}: {row.peer} {row.status}: {row.reason}"] = None
    return list(lines)


def show(console: Console, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Print all tables, then what is not in them, then on what it was measured."""
    for scenario in dict.fromkeys(row.scenario for row in rows):
        console.print(table(scenario, rows))
    for line in missing(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_NOTE)
    told = "; ".join(f"{name} {value}" for name, value in facts.items())
    console.print(told, style="dim", markup=False, highlight=False, soft_wrap=True)


def faults(rows: Sequence[Row]) -> list[str]:
    """Give a line for each row that must not be so: wrong payload, or a peer that failed."""
    return [
        f"{row.scenario}, {row.label}: {row.peer}: {row.reason}"
        for row in rows
        if row.status in ("wrong", "failed")
    ]
