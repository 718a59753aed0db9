"""The tap plan as canonical JSON, and back from JSON that a peer wrote. No pickle, nothing trusted.

::

    {"groups": [{"dtype": "bfloat16", "name": "features", "taps": [{"name": …, "width": …}, …]}, …],
     "max_rows": 8192, "version": 1}
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import Final, cast

from .dtypes import dtype_of
from .errors import ConfigError
from .keys import checked_int
from .layout import MAX_BYTES, MAX_ROWS, Group, GroupSpec, checked_name

VERSION: Final = 1
MAX_TEXT: Final = 16 << 20


def encode(groups: Sequence[Group], max_rows: int) -> str:
    """Write a plan as ASCII with one spelling: keys sorted, no blanks."""
    document = {
        "version": VERSION,
        "max_rows": max_rows,
        "groups": [
            {
                "name": group.name,
                "dtype": group.dtype.name,
                "taps": [{"name": tap.name, "width": tap.width} for tap in group.taps],
            }
            for group in groups
        ],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def decode(text: str) -> tuple[list[GroupSpec], int]:
    """Read what a plan says, each field checked for its type and range.

    Raises:
        ConfigError: the text is no plan.
    """
    document = _object("plan", _parsed(text), {"groups", "max_rows", "version"})
    checked_int("version of the plan's JSON", document["version"], VERSION, VERSION)
    max_rows = checked_int("max_rows", document["max_rows"], 1, MAX_ROWS)
    return [_group(item) for item in _array("groups", document["groups"])], max_rows


def _group(item: object) -> GroupSpec:
    group = _object("group", item, {"dtype", "name", "taps"})
    dtype = group["dtype"]
    if not isinstance(dtype, str):
        raise ConfigError("dtype in the plan's JSON is no name", seen=reprlib.repr(dtype))
    taps = [_object("tap", tap, {"name", "width"}) for tap in _array("taps", group["taps"])]
    return GroupSpec(
        checked_name("group", group["name"]),
        dtype_of(dtype),
        tuple(
            (checked_name("tap", tap["name"]), checked_int("width", tap["width"], 1, MAX_BYTES))
            for tap in taps
        ),
    )


def _parsed(text: object) -> object:
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise ConfigError("plan is no JSON text", expected=f"at most {MAX_TEXT} characters")
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise ConfigError("plan is no JSON text", cause=str(error)) from error


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field stands twice in one object")
    return fields


def _object(what: str, value: object, names: set[str]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} in the plan's JSON is no object", seen=type(value).__name__)
    fields = cast("dict[str, object]", value)
    if fields.keys() != names:
        raise ConfigError(
            f"{what} in the plan's JSON has other fields than it should",
            seen=reprlib.repr(sorted(fields)),
            expected=sorted(names),
        )
    return fields


def _array(what: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise ConfigError(f"{what} in the plan's JSON is no array", seen=type(value).__name__)
    return cast("list[object]", value)
