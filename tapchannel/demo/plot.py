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
    pushed: float
    sent: float  # later than pushed where the push had to wait for credit
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
    pushed: dict[tuple[int, Key], int] = {}
    sent: dict[tuple[int, Key], int] = {}
    released: dict[Key, int] = {}
    for event in sorted(events, key=lambda event: event.time_ns):
        if event.step_name in _PUSH_STEPS:
            pushed.setdefault((event.lane, event.key), event.time_ns)
        if event.step_name == "stamp":
            sent[event.lane, event.key] = event.time_ns
        if event.step_name == "release":
            released[event.key] = event.time_ns
    begin = min(pushed.values(), default=0)
    return [
        Stay(lane, key, *((t - begin) / 1e9 for t in (pushed[lane, key], time, released[key])))
        for (lane, key), time in sorted(sent.items())
        if (lane, key) in pushed and key in released
    ]


def draw(events: Sequence[Event], settings: Settings, file: Path) -> None:
    """Write the timeline: a band a lane, in it a row a slot, in that a bar a microbatch."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")  # a file is wanted, and there may be no display
    pyplot: Any = import_module("matplotlib.pyplot")
    shown = stays(events)
    figure, axes = pyplot.subplots(
        figsize=(14, 1.5 + 0.22 * settings.stages * (settings.depth + 1)), layout="constrained"
    )
    _shade_passes(axes, shown)
    _draw_bars(axes, shown, settings.depth)
    height = settings.depth + 1
    axes.set_yticks(
        [lane * height + (settings.depth - 1) / 2 for lane in range(settings.stages)],
        [f"lane {lane}\n{', '.join(taps_of(lane))}" for lane in range(settings.stages)],
    )
    axes.invert_yaxis()
    axes.margins(x=0.005)
    axes.set_xlabel("seconds since the first push")
    axes.set_title(
        f"Taps in the mailbox: {settings.stages} lanes, a row for each of {settings.depth} slots"
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)


def _draw_bars(axes: Any, shown: Sequence[Stay], depth: int) -> None:
    rows = [stay.lane * (depth + 1) + stay.key.microbatch % depth for stay in shown]
    pushed = [stay.pushed for stay in shown]
    sent = [stay.sent for stay in shown]
    waits = [stay.sent - stay.pushed for stay in shown]
    holds = [stay.released - stay.sent for stay in shown]
    axes.barh(rows, waits, left=pushed, color=_WAITS, label="pushed, waits for credit")
    axes.barh(rows, holds, left=sent, color=_HELD, label="sent, until the slot is released")
    readable = max((stay.released for stay in shown), default=0) / _NUMBERS_ACROSS
    for stay, row in zip(shown, rows, strict=True):
        if stay.released - stay.sent > readable:
            middle = (stay.sent + stay.released) / 2
            axes.text(
                middle, row, stay.key.microbatch, color="white", size=6, ha="center", va="center"
            )


def _shade_passes(axes: Any, shown: Sequence[Stay]) -> None:
    for step in sorted({stay.key.step for stay in shown}):
        of_pass = [stay for stay in shown if stay.key.step == step]
        begin = min(stay.pushed for stay in of_pass)
        end = max(stay.released for stay in of_pass)
        axes.axvspan(begin, end, color=_PASS, zorder=0)
        axes.text((begin + end) / 2, -0.8, f"pass {step}", ha="center", va="bottom", size=8)
