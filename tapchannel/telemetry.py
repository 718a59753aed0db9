"""Telemetry: the flight recorder, as events, a Chrome trace, Prometheus text and NVTX ranges.

Each side of each lane records who did which protocol step on which key, and when, in a ring inside
the control block: the other side still has it after a SIGKILL, and `inspect` reads it from outside.
"""

from __future__ import annotations

import functools
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

from . import _native
from .errors import ConfigError, TapChannelError, UsageError
from .keys import MAX_MICROBATCHES, Key
from .reports import RawEvent

_HEADER: Final = struct.Struct("<QIIIIQ16s")
_STEPS: Final[Sequence[str]] = _native.step_names()


class Recorded(Protocol):
    """A mailbox or an outbox."""

    def events(self) -> list[RawEvent]:
        """Give the raw flight recorder."""
        ...


@dataclass(frozen=True, slots=True)
class Event:
    """One protocol step: when (CLOCK_MONOTONIC), on which side of which lane, on which key."""

    time_ns: int
    side: str
    step_name: str
    lane: int
    key: Key | None
    cell: int
    bytes: int
    microbatches: int | None = None  # of open_pass and close_pass, whose key is the first one's


def read_events(role: Recorded) -> list[Event]:
    """Give the last steps of both sides of the role's lanes, in order of time."""
    return _sorted(role.events())


def chrome_trace(events: Iterable[Event]) -> dict[str, object]:
    """Give events as a Chrome trace (``chrome://tracing``, Perfetto): one row a side of a lane."""
    made: list[dict[str, object]] = []
    for event in events:
        label = event.step_name if event.key is None else f"{event.step_name} {event.key}"
        made.append(
            {
                "name": label,
                "ph": "i",
                "s": "t",
                "ts": event.time_ns / 1e3,
                "pid": event.side,
                "tid": event.lane,
                "args": {"cell": event.cell, "bytes": event.bytes},
            }
        )
    return {"traceEvents": made, "displayTimeUnit": "ns"}


def prometheus(info: Mapping[str, object]) -> str:
    """Give ``info()`` of a role as Prometheus text: every number, by channel, role and rank."""
    lanes = cast("Sequence[Mapping[str, object]]", info.get("lanes", [info]))
    lines: list[str] = []
    for lane in lanes:
        labels = f'channel="{_label(info["channel"])}",role="{info["role"]}",rank="{lane["rank"]}"'
        for name, value in lane.items():
            if isinstance(value, (int, float)) and name not in ("rank", "lane"):
                lines.append(f"tapchannel_{name.lower()}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


def annotate(role: Any) -> None:
    """Put an NVTX range around each push, recv and open_pass of this object, for Nsight.

    Raises:
        UsageError: this torch has no NVTX.
    """
    import torch

    nvtx = cast("Any", torch.cuda.nvtx)
    try:
        nvtx.range_push("tapchannel")
        nvtx.range_pop()
    except RuntimeError as error:
        raise UsageError("this torch was built without NVTX", detail=str(error)) from error
    for name in ("push", "recv", "open_pass"):
        if hasattr(role, name):
            setattr(role, name, _ranged(getattr(role, name), name, nvtx))


def inspect(pid: int) -> list[Event]:
    """Read the flight recorders of a running or stopped process, from outside it.

    Raises:
        ConfigError: the process does not exist, may not be read, or has no channel.
    """
    folder = Path(f"/proc/{pid}/fd")
    found: list[RawEvent] = []
    try:
        for entry in sorted(folder.iterdir(), key=lambda path: int(path.name)):
            link = _link_of(entry)
            if re.match(r"/memfd:tapchannel:lane\d+:", link):
                found += _raw_events(entry)
    except OSError as error:
        raise ConfigError("process cannot be inspected", pid=pid, detail=str(error)) from error
    if not found:
        raise ConfigError("process has no open channel", pid=pid)
    return _sorted(found)


def inspect_main(argv: Sequence[str]) -> int:
    """Run ``tapchannel inspect PID [--json] [--last N]``."""
    import argparse

    parser = argparse.ArgumentParser(
        "tapchannel inspect", description="read a process's flight recorder"
    )
    parser.add_argument("pid", type=int)
    parser.add_argument("--last", type=int, default=40, help="events to show (default 40)")
    parser.add_argument("--json", action="store_true", help="one JSON object an event")
    chosen = parser.parse_args(argv)
    try:
        events = inspect(chosen.pid)[-chosen.last :]
    except TapChannelError as error:
        print(f"tapchannel inspect: {error}")
        return 1
    newest = events[-1].time_ns if events else 0
    for event in events:
        if chosen.json:
            print(json.dumps(asdict(event)))
            continue
        key = event.key or "-"
        print(
            f"{(event.time_ns - newest) / 1e6:10.3f} ms  lane {event.lane:3d}  {event.side:8s}  "
            f"{event.step_name:10s}  {key}  cell {event.cell}  {event.bytes} B"
        )
    return 0


def _raw_events(entry: Path) -> list[RawEvent]:
    fd = os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    fields = os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
    _, _, lane, depth, cells, _, mailbox_id = _HEADER.unpack(fields)
    try:
        block = _native.ControlBlock.adopt(fd, lane, depth, cells, mailbox_id)
    except (OSError, ValueError):  # somebody else's memory under our name; adopt closed it
        return []
    return [(lane, side, event) for side in (False, True) for event in block.events(side)]


def _link_of(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except FileNotFoundError:  # closed since the folder was listed
        return ""


def _sorted(raw: Iterable[RawEvent]) -> list[Event]:
    return sorted((_event(*entry) for entry in raw), key=lambda event: event.time_ns)


def _event(lane: int, producer: bool, fields: tuple[int, ...]) -> Event:
    _, time_ns, word, size, step, cell = fields
    name = _STEPS[step] if 0 < step < len(_STEPS) else f"step {step}"
    count = word & MAX_MICROBATCHES if name in ("open_pass", "close_pass") else None
    try:
        key = Key.from_stamp(word)
    except ConfigError:  # the step concerns a whole pass, or none
        key = None
    if key is not None and count is not None:
        key = Key(key.epoch, key.step, 0)
    side = "producer" if producer else "consumer"
    return Event(time_ns, side, name, lane, key, cell, size, count)


def _label(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _ranged(call: Callable[..., object], name: str, nvtx: Any) -> Callable[..., object]:
    @functools.wraps(call)
    def inside(*args: object, **named: object) -> object:
        nvtx.range_push(f"tapchannel.{name}")
        try:
            return call(*args, **named)
        finally:
            nvtx.range_pop()

    return inside
