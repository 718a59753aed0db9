"""How the facts of an error become one sentence, in one fixed order, units always."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from .keys import Key


class ErrorFields(TypedDict, total=False):
    """The keyword fields that every error takes; each is an attribute, ``None`` when not given."""

    channel: str | None
    lane: int | None
    rank: int | None
    host: str | None
    pid: int | None
    stage: int | None
    key: Key | None
    tap: str | None
    slot: int | None
    seen: object
    expected: object
    waited: float | None
    limit: float | None
    last_progress: str | None
    cause: str | None
    next_step: str | None
    detail: str | None


def sentence(what: str, fields: ErrorFields, own_parts: Sequence[str]) -> str:
    """Say what failed, where, what is particular to the error, then what all errors may say."""
    where = _where(fields)
    parts = [f"{what}: {where}" if where else what, *own_parts, *_common_parts(fields)]
    return printable(" — ".join(parts))


def present(*named: tuple[str, object], joint: str = ": ") -> list[str]:
    """Write ``name: value`` for each value that is there."""
    return [f"{name}{joint}{value}" for name, value in named if value is not None]


def printable(text: str) -> str:
    """Escape all but printable characters and line feeds: a peer's text may be in an error."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows of cells out as lines with equal columns, cells made printable on one line."""
    cells = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def seconds(duration: float) -> str:
    """Write a duration with its unit: ``60.0 s``, ``250 ms``."""
    return f"{duration:.1f} s" if duration >= 1 or duration == 0 else f"{duration * 1e3:.3g} ms"


def _where(fields: ErrorFields) -> str:
    channel, tap = fields.get("channel"), fields.get("tap")
    places = present(
        ("channel", None if channel is None else repr(channel)),
        ("", fields.get("key")),
        ("tap", None if tap is None else repr(tap)),
        ("slot", fields.get("slot")),
        ("lane", fields.get("lane")),
        ("producer rank", fields.get("rank")),
        joint=" ",
    )
    process = " ".join(present(("on host", fields.get("host")), joint=" "))
    if (pid := fields.get("pid")) is not None:
        process += f" (pid {pid})" if process else f"in process {pid}"
    if process:
        places[-1:] = [" ".join([*places[-1:], process])]
    places += present(("stage", fields.get("stage")), joint=" ")
    return ", ".join(place.strip() for place in places)


def _common_parts(fields: ErrorFields) -> list[str]:
    compared = present(
        ("seen", fields.get("seen")), ("expected", fields.get("expected")), joint=" "
    )
    parts = [", ".join(compared)] if compared else []
    waited, limit = fields.get("waited"), fields.get("limit")
    if waited is not None:
        parts.append(
            f"waited {seconds(waited)}" + (f" of {seconds(limit)}" if limit is not None else "")
        )
    elif limit is not None:
        parts.append(f"limit {seconds(limit)}")
    parts += present(("last progress", fields.get("last_progress")))
    parts += present(("", fields.get("detail")), joint="")
    return parts + present(
        ("likely cause", fields.get("cause")), ("next step", fields.get("next_step"))
    )
