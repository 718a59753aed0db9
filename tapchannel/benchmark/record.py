"""One row of a report, and the JSON line that keeps it with every round's own figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

from ..errors import ConfigError
from .samples import Spread, spread_of

SCHEMA: Final = 1
Kind = Literal["bandwidth", "latency", "info"]
Status = Literal["ok", "missing", "failed", "wrong"]


@dataclass
class Metric:
    """One figure: a sample a round. Of a bandwidth more is better, of a latency less."""

    unit: str
    kind: Kind
    samples: list[float] = field(default_factory=list[float])

    @property
    def spread(self) -> Spread:
        """Reduce the samples."""
        return spread_of(self.samples)


@dataclass
class Row:
    """What one peer came to in one case of one scenario.

    ``case`` says the same as ``label``, by number. ``curve``: every message's figure, thinned.
    """

    scenario: str
    label: str
    peer: str
    case: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])
    status: Status = "ok"
    reason: str = ""
    check: str = ""
    curve: list[float] = field(default_factory=list[float])

    def key(self) -> tuple[str, str, str]:
        """Name the row among those of a run."""
        return self.scenario, self.label, self.peer

    def as_json(self, facts: Mapping[str, str]) -> str:
        """Give the row's line."""
        metrics = {
            name: {"unit": one.unit, "kind": one.kind, "samples": one.samples}
            | ({"median": one.spread.median} if one.samples else {})
            for name, one in self.metrics.items()
        }
        plain = {**vars(self), "metrics": metrics}
        return json.dumps({"schema": SCHEMA, **plain, "facts": dict(facts)})


def append(file: Path, rows: Iterable[Row], facts: Mapping[str, str]) -> None:
    """Add rows to a file; what earlier runs left there stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(row.as_json(facts) + "\n" for row in rows)


def read(file: Path) -> list[tuple[Row, dict[str, str]]]:
    """Read the rows of a file, each with its run's facts.

    Raises:
        ConfigError: it cannot be read, or a line of it is no row.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("results cannot be read", seen=str(file), cause=str(error)) from error
    return [_row(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _row(file: Path, number: int, line: str) -> tuple[Row, dict[str, str]]:
    try:
        found = cast("dict[str, Any]", json.loads(line))
        if found.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        facts = {str(name): str(value) for name, value in found.pop("facts").items()}
        metrics = {
            str(name): Metric(one["unit"], one["kind"], [float(value) for value in one["samples"]])
            for name, one in found.pop("metrics").items()
        }
        return Row(**found, metrics=metrics), facts
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            "line is no row of a bench", seen=f"{file}, line {number}", cause=str(error)
        ) from error


def last_run(rows: Iterable[tuple[Row, dict[str, str]]]) -> dict[tuple[str, str, str], Row]:
    """Give the newest row of each key: a file keeps every run."""
    return {row.key(): row for row, _ in rows}
