"""Do both sides mean the same plan? The table that answers, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence

from .descriptor import Hello
from .errors import ConfigError
from .plan import Lane, TapPlan


def mismatch_rows(
    plan: TapPlan, lanes: Sequence[Lane], hello: Hello
) -> tuple[dict[str, object], ...]:
    """List what a rank claims against what the mailbox expects; empty when they agree."""
    rank = hello.rank
    lane = next((lane for lane in lanes if lane.rank == rank), None)
    if lane is None:
        ranks = ", ".join(str(lane.rank) for lane in lanes)
        return (
            _row(rank, f"a rank of {ranks}", "to produce taps", "not in the mailbox's sources"),
        )
    try:
        theirs = TapPlan.from_json(hello.plan)
    except ConfigError as error:
        return (_row(rank, "a tap plan", "none", str(error)),)
    rows = _plan_rows(plan, theirs, rank) if theirs.fingerprint != plan.fingerprint else []
    if hello.claimed is not None:
        rows += _claim_rows(lane, hello.claimed)
    return tuple(rows)


def _plan_rows(ours: TapPlan, theirs: TapPlan, rank: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    if ours.max_rows != theirs.max_rows:
        rows.append(
            _row(rank, f"max_rows {ours.max_rows}", f"max_rows {theirs.max_rows}", "differs")
        )
    mine = {tap.name: tap for tap in ours.taps}
    other = {tap.name: tap for tap in theirs.taps}
    for name in [*mine, *(name for name in other if name not in mine)]:
        if name not in other:
            rows.append(_row(rank, f"tap {name!r}", "nothing", "missing in this rank's plan"))
        elif name not in mine:
            rows.append(_row(rank, "no such tap", f"tap {name!r}", "extra in this rank's plan"))
        elif mine[name] != other[name]:
            rows.append(_row(rank, _say(mine[name]), _say(other[name]), f"tap {name!r} differs"))
    order = ", ".join(group.name for group in theirs.groups)
    return rows or [
        _row(rank, ", ".join(group.name for group in ours.groups), order, "groups differ")
    ]


def _claim_rows(lane: Lane, claimed: Sequence[str]) -> list[dict[str, object]]:
    expected = sorted({cell.tap.name for cell in lane.cells})
    if sorted(claimed) == expected:
        return []
    missing = [name for name in expected if name not in claimed]
    extra = [name for name in claimed if name not in expected]
    doubled = sorted({name for name in claimed if claimed.count(name) > 1})
    parts = [
        f"{label}: {', '.join(names)}"
        for label, names in (("missing", missing), ("extra", extra), ("twice", doubled))
        if names
    ]
    return [_row(lane.rank, ", ".join(expected), ", ".join(claimed) or "nothing", "; ".join(parts))]


def _say(tap: object) -> str:
    group, width, column, dtype = (
        getattr(tap, name) for name in ("group", "width", "column", "dtype")
    )
    index = getattr(tap, "index", None)
    return f"place {index}, group {group!r}, width {width}, column {column}, {dtype.name}"


def _row(rank: int, expected: str, claimed: str, problem: str) -> dict[str, object]:
    return {"rank": rank, "expected": expected, "claimed": claimed, "problem": problem}
