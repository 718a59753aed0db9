"""The pictures: GB/s over size, the distribution of latencies, bars of step times."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .frame import LIMIT, OURS
from .record import Row
from .traffic import KIB, size_text

_OTHERS: Final = (
    "#f2a65a", "#6a994e", "#8e7dbe", "#bc4749", "#577590", "#b5838d",
    "#a98467", "#43aa8b", "#c9ada7", "#90be6d", "#4d908e",
)  # fmt: skip
_CURVE: Final = 50  # fewer points, such as averages, are no distribution
_OURS: Final = "#2f6690"


def can_draw() -> bool:
    """Tell whether there is matplotlib."""
    return find_spec("matplotlib") is not None


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what there are rows for; give the files."""
    good = [row for row in rows if row.status == "ok" and row.metrics]
    drawn: list[Path] = []
    for scenario, make in (
        ("stream", _speed),
        ("fan-in", _fan_in),
        ("latency", _latency),
        ("pipeline", _steps),
    ):
        own = [row for row in good if row.scenario == scenario]
        if own:
            drawn.append(folder / f"{scenario}.png")
            make(own, drawn[-1])
    return drawn


def _figure(height: float = 5.0) -> tuple[Any, Any, Any]:
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")  # a file is wanted, and there may be no display
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    return pyplot, figure, axes


def _save(pyplot: Any, figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    others = [name for name in _peers(rows) if name not in (OURS, LIMIT)]
    found = {name: _OTHERS[number % len(_OTHERS)] for number, name in enumerate(others)}
    return {OURS: _OURS, LIMIT: "black", **found}


def _peers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.peer for row in rows))


def _style(peer: str, colours: dict[str, str]) -> dict[str, Any]:
    if peer == LIMIT:
        return {"color": "black", "linestyle": "--", "linewidth": 1.2, "zorder": 3}
    wide = peer == OURS
    return {"color": colours[peer], "linewidth": 2.4 if wide else 1.3, "zorder": 4 if wide else 2}


def _speed(rows: Sequence[Row], file: Path) -> None:
    """Draw GB/s over size, a line a peer with its spread; the limit is dashed."""
    pyplot, figure, axes = _figure()
    colours = _colours(rows)
    for peer in _peers(rows):
        own = [
            (row.case["size"], row.metrics["GB/s"].spread)
            for row in rows
            if row.peer == peer and "GB/s" in row.metrics
        ]
        sizes = [size for size, _ in own]
        style = _style(peer, colours)
        axes.plot(
            sizes,
            [one.median for _, one in own],
            marker="o",
            markersize=4,
            label=f"{peer} (the limit)" if peer == LIMIT else peer,
            **style,
        )
        axes.fill_between(
            sizes,
            [one.low for _, one in own],
            [one.high for _, one in own],
            color=style["color"],
            alpha=0.12,
            linewidth=0,
        )
    sizes = sorted({row.case["size"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.set_xlabel("message")
    axes.set_ylabel("GB/s")
    axes.set_title("stream: one producer, one consumer")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    _save(pyplot, figure, file)


def _latency(rows: Sequence[Row], file: Path) -> None:
    """Draw the share of messages that were visible after so many microseconds."""
    pyplot, figure, axes = _figure()
    smallest = min(row.case["size"] for row in rows)
    rows = [row for row in rows if row.case["size"] == smallest and len(row.curve) >= _CURVE]
    colours = _colours(rows)
    for row in rows:
        shares = [100 * (number + 1) / len(row.curve) for number in range(len(row.curve))]
        axes.plot(row.curve, shares, label=row.peer, **_style(row.peer, colours))
    axes.set_xscale("log")
    axes.set_xlabel("µs from before the push until the consumer sees it")
    axes.set_ylabel("% of messages")
    axes.set_title(f"latency: {smallest // KIB} KiB, one at a time")
    axes.grid(alpha=0.3)
    if rows:
        axes.legend(frameon=False, fontsize=8)
    _save(pyplot, figure, file)


def _fan_in(rows: Sequence[Row], file: Path) -> None:
    """Draw GB/s of every case, a bar a peer."""
    _bars(rows, file, "GB/s", "fan-in: a draft's taps into one mailbox")


def _bars(rows: Sequence[Row], file: Path, metric: str, title: str) -> None:
    cases, peers = list(dict.fromkeys(row.label for row in rows)), _peers(rows)
    pyplot, figure, axes = _figure(1.5 + 0.16 * len(cases) * (len(peers) + 1))
    colours = _colours(rows)
    for number, peer in enumerate(peers):
        own = [row for row in rows if row.peer == peer and metric in row.metrics]
        axes.barh(
            [cases.index(row.label) * (len(peers) + 1) + number for row in own],
            [row.metrics[metric].spread.median for row in own],
            color="#999999" if peer == LIMIT else colours[peer],
            label=f"{peer} (the limit)" if peer == LIMIT else peer,
        )
    middles = [number * (len(peers) + 1) + (len(peers) - 1) / 2 for number in range(len(cases))]
    axes.set_yticks(middles, cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(metric)
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    _save(pyplot, figure, file)


def _steps(rows: Sequence[Row], file: Path) -> None:
    """Draw step times, two bars a peer: without taps, and with them."""
    pyplot, figure, axes = _figure(1.6 + 0.6 * len(rows))
    for offset, name, colour in (
        (-0.2, "step without taps", "#bbbbbb"),
        (0.2, "step with taps", _OURS),
    ):
        spreads = [row.metrics[name].spread for row in rows]
        places = [number + offset for number in range(len(rows))]
        medians = [one.median for one in spreads]
        errors = [
            [one.median - one.low for one in spreads],
            [one.high - one.median for one in spreads],
        ]
        axes.barh(places, medians, height=0.36, xerr=errors, color=colour, label=name, capsize=2)
        for place, one in zip(places, spreads, strict=True):
            axes.text(0, place, f" {one.median:.1f} ms", va="center", size=8)
    axes.set_yticks(range(len(rows)), [f"{row.peer}\n{row.label}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.set_title("pipeline: 1F1B step time")
    axes.legend(frameon=False, fontsize=8)
    _save(pyplot, figure, file)
