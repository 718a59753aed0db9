"""The tap plan: what all ranks agree on before the first pass, and the slot that follows from it.

A plan is plain data: it builds without torch, compares by value, and its fingerprint is equal on
two ranks exactly if every group, tap, dtype, width and the row limit are.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar, cast

from . import plan_json
from .dtypes import DTYPES, DType, dtype_of
from .error_text import aligned
from .errors import ConfigError
from .keys import checked_int
from .lanes import Cell, Lane, Shard, Sources, assign, cells_of
from .layout import (
    ALIGNMENT,
    MAX_BYTES,
    MAX_ROWS,
    Group,
    GroupSpec,
    Tap,
    aligned_up,
    checked_bytes,
    checked_name,
    lay_out,
    slot_bytes,
)

if TYPE_CHECKING:
    from .dtypes import DTypeLike

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "MAX_ROWS",
    "Cell",
    "DType",
    "Group",
    "Lane",
    "Shard",
    "Sources",
    "Tap",
    "TapPlan",
    "dtype_of",
]

_NAMES_SHOWN: Final = 4
_Setting = TypeVar("_Setting")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TapPlan:
    """Lay out taps in groups; build the same plan on every rank.

    A slot holds one region per group, ``[max_rows, sum of widths]``, and the taps of a group stand
    side by side in the order given. Nothing is reserved: `describe` says what a mailbox will.

    Parameters
    ----------
    groups
        Name of each group -> names of its taps. A tap is in one group only.
    width
        Elements in a row of a tap: one number for all, or tap -> width.
    dtype
        Element type: a name or a ``torch.dtype``, for all or as group -> dtype.
    max_rows
        The most rows (tokens) that one microbatch may have.

    Raises:
        ConfigError: a setting is impossible; a size too large is given with its arithmetic.
    """

    groups: tuple[Group, ...]
    taps: tuple[Tap, ...]
    max_rows: int
    slot_bytes: int
    fingerprint: str
    _group_of: dict[str, Group] = field(compare=False)
    _tap_of: dict[str, Tap] = field(compare=False)

    def __init__(
        self,
        groups: Mapping[str, Sequence[str]],
        width: int | Mapping[str, int],
        dtype: DTypeLike | Mapping[str, DTypeLike],
        max_rows: int,
    ) -> None:
        self._set(_specs(groups, width, dtype), max_rows)

    def _set(self, specs: Sequence[GroupSpec], max_rows: int) -> None:
        groups = lay_out(specs, max_rows)
        taps = tuple(tap for group in groups for tap in group.taps)
        put = object.__setattr__
        put(self, "groups", groups)
        put(self, "taps", taps)
        put(self, "max_rows", max_rows)
        put(self, "slot_bytes", slot_bytes(groups))
        put(self, "fingerprint", hashlib.sha256(self.to_json().encode("ascii")).hexdigest())
        put(self, "_group_of", {group.name: group for group in groups})
        put(self, "_tap_of", {tap.name: tap for tap in taps})

    def __repr__(self) -> str:
        return (
            f"TapPlan({len(self.taps)} taps in {len(self.groups)} groups, "
            f"max_rows={self.max_rows}, fingerprint={self.fingerprint[:12]}…)"
        )

    def group(self, name: str) -> Group:
        """Give the group of this name.

        Raises:
            ConfigError: the plan has none.
        """
        if name not in self._group_of:
            raise ConfigError(
                f"group {name!r} is not in the plan", expected=_joined(self._group_of, shown=32)
            )
        return self._group_of[name]

    def tap(self, name: str) -> Tap:
        """Give the tap of this name.

        Raises:
            ConfigError: the plan has none.
        """
        if name not in self._tap_of:
            raise ConfigError(
                f"tap {name!r} is not in the plan", expected=_joined(self._tap_of, shown=32)
            )
        return self._tap_of[name]

    def lanes(self, sources: Sources) -> tuple[Lane, ...]:
        """Give each producer rank its lane: the cells that it may write in every slot.

        ``sources`` names, for each rank, the taps or the `Shard` of taps that it pushes.

        Raises:
            ConfigError: a rank or a share is impossible.
            PlanMismatchError: a tap, or a share of one, is missing, doubled, unknown or uneven.
        """
        return assign(self.groups, self.max_rows, sources)

    def cells(self, shards: Sequence[Shard]) -> tuple[Cell, ...]:
        """Give the cells of one lane from the shares that it pushes, as `lanes` would.

        Raises:
            ConfigError: a share is not one of this plan's.
        """
        for shard in shards:
            if self.tap(shard.tap).width % shard.columns[1]:
                raise ConfigError(f"columns of {shard} do not split equally")
        return cells_of(shards, self._tap_of, self._group_of, self.max_rows)

    def arena_bytes(self, depth: int) -> int:
        """Give the bytes that a mailbox of ``depth`` slots reserves.

        Raises:
            ConfigError: they do not fit in a signed 64-bit integer.
        """
        checked_int("depth", depth, 1, MAX_BYTES)
        arithmetic = f"{depth} slots × {self.slot_bytes} B"
        return checked_bytes("arena", depth * self.slot_bytes, arithmetic)

    def describe(self, depth: int) -> str:
        """Say what the plan holds and what a mailbox of ``depth`` slots will reserve, and why."""
        arena = self.arena_bytes(depth)
        table = [("group", "dtype", "bytes of a row", "bytes of a slot", "from", "taps")]
        table += [
            (
                group.name,
                group.dtype.name,
                f"{group.width} × {group.dtype.itemsize} = {group.row_bytes}",
                f"{self.max_rows} rows × {group.row_bytes} = {group.bytes}",
                str(group.offset),
                _joined([tap.name for tap in group.taps], shown=_NAMES_SHOWN),
            )
            for group in self.groups
        ]
        parts = " + ".join(str(aligned_up(group.bytes)) for group in self.groups)
        lines = [
            f"tap plan {self.fingerprint[:12]}: {len(self.taps)} taps in {len(self.groups)} "
            f"groups, at most {self.max_rows} rows",
            *(f"  {line}" for line in aligned(table)),
            f"  slot   {parts} = {self.slot_bytes} B (groups aligned to {ALIGNMENT} B)",
            f"  arena  {depth} slots × {self.slot_bytes} B = {arena} B ({arena / 2**30:.3f} GiB)",
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Give the plan as canonical ASCII JSON: equal plans give equal text."""
        return plan_json.encode(self.groups, self.max_rows)

    @classmethod
    def from_json(cls, text: str) -> TapPlan:
        """Build a plan from a peer's JSON, which is checked in every field first.

        Raises:
            ConfigError: the text is no plan.
        """
        plan = cls.__new__(cls)
        plan._set(*plan_json.decode(text))
        return plan


def _specs(
    groups: Mapping[str, Sequence[str]],
    width: int | Mapping[str, int],
    dtype: DTypeLike | Mapping[str, DTypeLike],
) -> list[GroupSpec]:
    if not isinstance(cast("object", groups), Mapping):
        raise ConfigError("groups is no mapping", expected="name of group -> names of its taps")
    for name, taps in groups.items():
        # One bare name is a sequence of names to Python: of its letters.
        if isinstance(taps, str) or not isinstance(cast("object", taps), Sequence):
            raise ConfigError(f"taps of group {name!r} are no sequence", seen=reprlib.repr(taps))
    names = {
        checked_name("group", name): [checked_name("tap", tap) for tap in taps]
        for name, taps in groups.items()
    }
    widths = _spread("width", width, [tap for taps in names.values() for tap in taps], "tap")
    dtypes = _spread("dtype", dtype, list(names), "group")
    return [
        GroupSpec(name, dtype_of(dtypes[name]), tuple((tap, widths[tap]) for tap in taps))
        for name, taps in names.items()
    ]


def _spread(
    setting: str, value: _Setting | Mapping[str, _Setting], names: Sequence[str], kind: str
) -> dict[str, _Setting]:
    """Give each name its value: one value for all, or a mapping that names exactly these."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    given = dict(cast("Mapping[str, _Setting]", value))
    wanted = set(names)
    if given.keys() != wanted:
        missing = _joined([name for name in names if name not in given])
        unknown = _joined([name for name in given if name not in wanted])
        raise ConfigError(
            f"{setting} does not name every {kind} of the plan and no other",
            seen=f"missing: {missing}; unknown: {unknown}",
        )
    return given


def _joined(names: Sequence[str] | Mapping[str, object], shown: int = _NAMES_SHOWN) -> str:
    listed = list(names)
    if len(listed) <= shown:
        return ", ".join(map(str, listed)) or "none"
    return ", ".join(map(str, listed[: shown - 1])) + f", … {listed[-1]} ({len(listed)} in all)"
