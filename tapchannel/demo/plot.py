"""The timeline of the passes as a PNG, drawn from the flight recorders of all stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..keys import Key
from ..telemetry import Event
from .policy import taps_of
from .settings import Settings

_WAITS, _HELD, _PASS = "#f2a65a", "#2f6690", "#eeeeee"
_NUMBERS_ACROSS = 150  # of the microbatches: what fits beside each other and can be read
_PUSH_STEPS = {"claim", "announce", "put"}  # whichever a lane records first


@dataclass(frozen=True)
class Stay:
    """One microbatch of one lane, in seconds since the first push of all."""

    lane: int
    key: Key
    pushed: float  # the push of the cell that was sent last
    sent: float  # later than pushed where that push had to wait for credit
    released: float


def require_matplotlib() -> None:
    """Raise now, not after the run, if the plot cannot be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot cannot be used",
            cause="matplotlib is not installed",
            next_step="pip install 'tapchannel[plot]'",
        )


def stays(events: Iterable[Event]) -> list[Stay]:
    """Join the events of both sides into one `Stay` for each lane and key that has them all."""
    pushed: dict[tuple[int, Key, int], int] = {}
    sent: dict[tuple[int, Key], tuple[int, int]] = {}
    released: dict[Key, int] = {}
    for event in sorted(events, key=lambda event: event.time_ns):
        if event.key is None:
            continue
        cell = (event.lane, event.key, event.cell)
        if event.step_name in _PUSH_STEPS:
            pushed.setdefault(cell, event.time_ns)
        elif event.step_name == "stamp" and cell in pushed:
            sent[event.lane, event.key] = (pushed[cell], event.time_ns)
        elif event.step_name == "release":
            released[event.key] = event.time_ns
    begin = min(pushed.values(), default=0)
    return [
        Stay(lane, key, *((time - begin) / 1e9 for time in (*times, released[key])))
        for (lane, key), times in sorted(sent.items())
        if key in released
    ]


def draw(events: Iterable[Event], settings: Settings, file: Path) -> None:
    """Write the timeline: a band a lane, in it a row a slot, in that a bar a microbatch."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")  # a file is wanted, and there may be no display
    pyplot: Any = import_module("matplotlib.pyplot")
    shown = stays(events)
    band = settings.depth + 1  # rows: the slots and a gap
    figure, axes = pyplot.subplots(
        figsize=(14, 1.8 + 0.22 * settings.stages * band), layout="constrained"
    )
    _shade_passes(axes, shown)
    _draw_bars(axes, shown, settings.depth)
    axes.set_yticks(
        [lane * band + (settings.depth - 1) / 2 for lane in range(settings.stages)],
        [f"lane {lane}\n{', '.join(taps_of(lane))}" for lane in range(settings.stages)],
    )
    axes.invert_yaxis()
    axes.margins(x=0.005)
    axes.set_xlabel("seconds since the first push")
    due = settings.stages * settings.microbatches * settings.passes
    kept = "" if len(shown) == due else f" (the flight recorders kept {len(shown)} of {due})"
    axes.set_title(
        f"The mailbox's slots, {settings.depth} in each lane; numbers are microbatches{kept}",
        pad=18,
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)


def _draw_bars(axes: Any, shown: Sequence[Stay], depth: int) -> None:
    """Draw a slot's stays in its row, and below them, since they overlap, who waits for it."""
    rows = [stay.lane * (depth + 1) + stay.key.microbatch % depth for stay in shown]
    holds = [stay.released - stay.sent for stay in shown]
    waits = [stay.sent - stay.pushed for stay in shown]
    sent, pushed = [stay.sent for stay in shown], [stay.pushed for stay in shown]
    axes.barh(
        rows,
        holds,
        left=sent,
        height=0.65,
        color=_HELD,
        edgecolor="white",
        label="sent, until its slot is released",
    )
    edges = [row + 0.45 for row in rows]
    axes.barh(edges, waits, left=pushed, height=0.2, color=_WAITS, label="push waits for credit")
    readable = max((stay.released for stay in shown), default=0) / _NUMBERS_ACROSS
    for stay, row, hold in zip(shown, rows, holds, strict=True):
        if hold > readable:
            number = str(stay.key.microbatch)
            axes.text(
                stay.sent + hold / 2, row, number, color="white", size=6, ha="center", va="center"
            )


def _shade_passes(axes: Any, shown: Sequence[Stay]) -> None:
    for step in sorted({stay.key.step for stay in shown}):
        of_pass = [stay for stay in shown if stay.key.step == step]
        begin = min(stay.pushed for stay in of_pass)
        end = max(stay.released for stay in of_pass)
        axes.axvspan(begin, end, color=_PASS, zorder=0)
        axes.text(
            (begin + end) / 2,
            1.02,
            f"pass {step}",
            ha="center",
            size=8,
            transform=axes.get_xaxis_transform(),
        )
