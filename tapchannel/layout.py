"""The layout of a slot: groups one after the other, the taps of a group side by side.

::

    slot   | group 0: [max_rows, width 0 + width 1 + …] | pad | group 1: … | pad |
    row    | tap 0: width 0 | tap 1: width 1 | …                  (one row of group 0)

A group is one contiguous region, so the concatenation of its taps *is* the region. Groups begin
at multiples of `ALIGNMENT` and so do slots. All sizes are exact integers that fit in 64 bits.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .dtypes import DType
from .errors import ConfigError
from .keys import checked_int

ALIGNMENT: Final = 256
MAX_ROWS: Final = 1 << 40
MAX_BYTES: Final = (1 << 63) - 1
MAX_NAME: Final = 128


@dataclass(frozen=True, slots=True)
class Tap:
    """One tap: where it stands in the plan and, by ``column`` (in elements), in its group."""

    name: str
    index: int
    group: str
    width: int
    column: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Group:
    """One group: ``width`` counts elements, ``offset``, ``row_bytes`` and ``bytes`` count bytes."""

    name: str
    index: int
    taps: tuple[Tap, ...]
    dtype: DType
    width: int
    offset: int
    row_bytes: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What the plan says of a group before it has a place; ``taps`` are names and widths."""

    name: str
    dtype: DType
    taps: tuple[tuple[str, int], ...]


def lay_out(specs: Sequence[GroupSpec], max_rows: int) -> tuple[Group, ...]:
    """Give every group and tap its place in a slot of ``max_rows`` rows.

    Raises:
        ConfigError: a name, a width or a size is impossible; sizes come with their arithmetic.
    """
    checked_int("max_rows", max_rows, 1, MAX_ROWS)
    if not specs:
        raise ConfigError("tap plan has no group")
    _check_names(specs)
    groups: list[Group] = []
    offset = tap_index = 0
    for index, spec in enumerate(specs):
        taps = _side_by_side(spec, tap_index)
        width = sum(tap.width for tap in taps)
        row_bytes = width * spec.dtype.itemsize
        size = checked_bytes(
            f"group {spec.name!r}",
            max_rows * row_bytes,
            f"{max_rows} rows × {width} elements × {spec.dtype.itemsize} B",
        )
        groups.append(Group(spec.name, index, taps, spec.dtype, width, offset, row_bytes, size))
        offset = aligned_up(offset + size)
        tap_index += len(taps)
    return tuple(groups)


def slot_bytes(groups: Sequence[Group]) -> int:
    """Give the bytes of one slot, the padding behind every group included.

    Raises:
        ConfigError: they do not fit in a signed 64-bit integer.
    """
    size = aligned_up(groups[-1].offset + groups[-1].bytes)
    return checked_bytes(
        "slot", size, " + ".join(f"{aligned_up(group.bytes)} B" for group in groups)
    )


def aligned_up(size: int) -> int:
    """Round a size up to the next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def checked_bytes(what: str, size: int, arithmetic: str) -> int:
    """Give back a size that fits in a signed 64-bit integer, or say how it came about.

    Raises:
        ConfigError: it does not fit.
    """
    if size > MAX_BYTES:
        raise ConfigError(
            f"{what} is too large",
            seen=f"{arithmetic} = {size} B",
            expected=f"at most {MAX_BYTES} B",
        )
    return size


def checked_name(kind: str, name: object) -> str:
    """Give back a name of 1 to `MAX_NAME` printable characters.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ConfigError(
            f"{kind} name is impossible",
            seen=reprlib.repr(name),
            expected=f"1 to {MAX_NAME} printable characters",
        )
    return name


def _side_by_side(spec: GroupSpec, first_index: int) -> tuple[Tap, ...]:
    if not spec.taps:
        raise ConfigError(f"group {spec.name!r} has no tap")
    taps: list[Tap] = []
    column = 0
    for index, (name, width) in enumerate(spec.taps, first_index):
        checked_int(f"width of tap {name!r}", width, 1, MAX_BYTES)
        taps.append(Tap(name, index, spec.name, width, column, spec.dtype))
        column += width
    return tuple(taps)


def _check_names(specs: Sequence[GroupSpec]) -> None:
    """Refuse a name that stands for two things; a group may be named like its only tap."""
    group_of: dict[str, str] = {}
    for spec in specs:
        for name, _ in spec.taps:
            if name in group_of:
                raise ConfigError(
                    f"tap {name!r} stands twice in the plan",
                    seen=f"in group {group_of[name]!r} and in group {spec.name!r}",
                    expected="one place",
                )
            group_of[name] = spec.name
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ConfigError(f"group {spec.name!r} stands twice in the plan")
        seen.add(spec.name)
        if spec.name in group_of and [name for name, _ in spec.taps] != [spec.name]:
            raise ConfigError(
                f"name {spec.name!r} stands for a group and for a tap",
                expected="two names, or a group of exactly that tap",
            )
