"""Who pushes what: from ``sources`` (producer rank -> taps) to the lanes and their cells."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias, cast

from .errors import ConfigError, PlanMismatchError, PlanMismatchRow
from .keys import checked_int
from .layout import MAX_ROWS, Group, Tap, checked_name

MAX_LANES: Final = 4096
MAX_CELLS: Final = 4096
MAX_RANK: Final = (1 << 31) - 1
_MISSING_LISTED: Final = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """A producer's share of one tap: share ``(i, n)`` of its rows, ``(j, m)`` of its columns.

    Columns are split equally. Rows are split equally unless the push says where its rows begin.

    Raises:
        ConfigError: the name is impossible, or a share is not an ``(index, count)``.
    """

    tap: str
    rows: tuple[int, int] = (0, 1)
    columns: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        checked_name("tap", self.tap)
        for axis, share in (("rows", self.rows), ("columns", self.columns)):
            _check_share(f"{axis} of shard of tap {self.tap!r}", share)

    def __str__(self) -> str:
        rows = "" if self.rows == (0, 1) else f" rows={self.rows}"
        columns = "" if self.columns == (0, 1) else f" columns={self.columns}"
        return f"{self.tap!r}{rows}{columns}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One lane's part of one tap in one slot.

    ``byte_offset`` is that of its first row in the slot, ``row_bytes`` its share of a row,
    ``pitch`` the bytes from row to row. ``column`` and ``width`` count elements inside the tap.
    ``row_limit`` is the most rows that it may hold.
    """

    index: int
    tap: Tap
    shard: Shard
    byte_offset: int
    row_bytes: int
    pitch: int
    row_limit: int
    column: int
    width: int


@dataclass(frozen=True, slots=True)
class Lane:
    """What one outbox may write: the cells of one producer rank, in the plan's order."""

    index: int
    rank: int
    cells: tuple[Cell, ...]


Sources: TypeAlias = Mapping[int, Sequence[str | Shard]]
_Claim: TypeAlias = tuple[int, Shard]


def assign(groups: Sequence[Group], max_rows: int, sources: Sources) -> tuple[Lane, ...]:
    """Give every producer rank its lane, once every tap is covered exactly once.

    Lanes stand by rank and cells in the plan's order (tap, row share, column share), whatever the
    order in ``sources``, so both sides number them alike.

    Raises:
        ConfigError: a rank or a share is impossible, or there are too many of them.
        PlanMismatchError: a tap, or a share of one, is missing, doubled, unknown or split unevenly.
    """
    shards_of = _shards_by_rank(sources)
    taps = {tap.name: tap for group in groups for tap in group.taps}
    group_of = {group.name: group for group in groups}
    claims: dict[str, list[_Claim]] = {name: [] for name in taps}
    rows: list[PlanMismatchRow] = []
    for rank, shards in shards_of.items():
        if not shards:
            rows.append(_row(rank, "a tap for each rank", "no tap", "no lane: leave the rank out"))
        for shard in shards:
            if shard.tap in taps:
                claims[shard.tap].append((rank, shard))
            else:
                problem = "a group: name its taps" if shard.tap in group_of else "not in the plan"
                rows.append(_row(rank, "a tap of the plan", str(shard), problem))
    for tap in taps.values():
        rows += _split_problems(tap, claims[tap.name]) or _cover_problems(tap, claims[tap.name])
    if rows:
        raise PlanMismatchError("sources do not cover the tap plan exactly once", rows=rows)
    return tuple(
        Lane(index, rank, cells_of(shards, taps, group_of, max_rows))
        for index, (rank, shards) in enumerate(shards_of.items())
    )


def lane_of(lanes: Sequence[Lane], rank: int) -> Lane:
    """Give the lane of a producer rank.

    Raises:
        ConfigError: there is none.
    """
    for lane in lanes:
        if lane.rank == rank:
            return lane
    ranks = ", ".join(str(lane.rank) for lane in lanes)
    raise ConfigError("no lane belongs to this rank", seen=repr(rank), expected=f"one of {ranks}")


def _shards_by_rank(sources: Sources) -> dict[int, list[Shard]]:
    """Check the sources and write a tap's name, which stands for all of it, as its shard."""
    if not isinstance(cast("object", sources), Mapping):
        raise ConfigError("sources is no mapping", expected="producer rank -> names of taps")
    if len(sources) > MAX_LANES:
        raise ConfigError("too many lanes", seen=len(sources), expected=f"at most {MAX_LANES}")
    for rank in sources:
        checked_int("producer rank", rank, 0, MAX_RANK)
    return {rank: _shards(rank, sources[rank]) for rank in sorted(sources)}


def _shards(rank: int, shares: Sequence[str | Shard]) -> list[Shard]:
    # One bare name is a sequence of names to Python: of its letters.
    if isinstance(shares, str) or not isinstance(cast("object", shares), Sequence):
        raise ConfigError(
            "taps of a rank are no sequence of names", rank=rank, seen=reprlib.repr(shares)
        )
    if len(shares) > MAX_CELLS:
        raise ConfigError(
            "too many cells in a lane", rank=rank, seen=len(shares), expected=f"at most {MAX_CELLS}"
        )
    return [share if isinstance(share, Shard) else Shard(share) for share in shares]


def cells_of(
    shards: Sequence[Shard], taps: Mapping[str, Tap], group_of: Mapping[str, Group], max_rows: int
) -> tuple[Cell, ...]:
    """Give the cells of one lane, in the plan's order; the shards' taps must be in the plan."""
    in_order = sorted(shards, key=lambda shard: (taps[shard.tap].index, shard.rows, shard.columns))
    cells: list[Cell] = []
    for index, shard in enumerate(in_order):
        tap = taps[shard.tap]
        group = group_of[tap.group]
        width = tap.width // shard.columns[1]
        column = shard.columns[0] * width
        cells.append(
            Cell(
                index=index,
                tap=tap,
                shard=shard,
                byte_offset=group.offset + (tap.column + column) * tap.dtype.itemsize,
                row_bytes=width * tap.dtype.itemsize,
                pitch=group.row_bytes,
                row_limit=-(-max_rows // shard.rows[1]),
                column=column,
                width=width,
            )
        )
    return tuple(cells)


def _row(rank: int | None, expected: str, claimed: str, problem: str) -> PlanMismatchRow:
    return {"rank": rank, "expected": expected, "claimed": claimed, "problem": problem}


def _split_problems(tap: Tap, claims: Sequence[_Claim]) -> list[PlanMismatchRow]:
    """List the shares that cannot belong to one grid of row shares × column shares."""
    problems: list[PlanMismatchRow] = []
    for rank, shard in claims:
        first_rank, first = claims[0]
        if (shard.rows[1], shard.columns[1]) != (first.rows[1], first.columns[1]):
            expected = f"{first.rows[1]} × {first.columns[1]} shares, as rank {first_rank} says"
            problems.append(_row(rank, expected, str(shard), "another split of the tap"))
        elif tap.width % shard.columns[1]:
            expected = f"a divisor of width {tap.width}"
            problems.append(_row(rank, expected, str(shard), "columns do not split equally"))
    return problems


def _cover_problems(tap: Tap, claims: Sequence[_Claim]) -> list[PlanMismatchRow]:
    """List the shares of a tap that are pushed twice, and those that nobody pushes."""
    if not claims:
        return [_row(None, repr(tap.name), "nothing", "missing: no rank pushes it")]
    owner: dict[Shard, int] = {}
    problems: list[PlanMismatchRow] = []
    for rank, shard in claims:
        if shard in owner:
            problems.append(_row(rank, f"rank {owner[shard]} alone", str(shard), "pushed twice"))
        owner.setdefault(shard, rank)
    n, m = claims[0][1].rows[1], claims[0][1].columns[1]
    missing = n * m - len(owner)
    grid = (Shard(tap.name, (i, n), (j, m)) for i in range(n) for j in range(m))
    # A slip in n or m can make the grid vast: stop at the few that are listed.
    listed = islice((shard for shard in grid if shard not in owner), min(missing, _MISSING_LISTED))
    problems += [
        _row(None, str(shard), "nothing", "missing: no rank pushes it") for shard in listed
    ]
    if missing > _MISSING_LISTED:
        more = f"{missing - _MISSING_LISTED} more shares of {tap.name!r}"
        problems.append(_row(None, more, "nothing", "missing: no rank pushes them"))
    return problems


def _check_share(what: str, share: object) -> None:
    if not isinstance(share, tuple) or len(cast("tuple[object, ...]", share)) != 2:
        raise ConfigError(f"{what} is no share", expected="(index, count)")
    index, count = cast("tuple[int, int]", share)
    checked_int(f"count in {what}", count, 1, MAX_ROWS)
    checked_int(f"index in {what}", index, 0, count - 1)
