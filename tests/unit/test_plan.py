"""The tap plan: its slot layout, its arithmetic, its fingerprint, the settings it refuses."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapchannel.errors import ConfigError
from tapchannel.plan import ALIGNMENT, MAX_ROWS, TapPlan

from .plan_examples import example, plans

MAX_INT64 = (1 << 63) - 1


@given(plans())
def test_groups_are_aligned_and_apart_and_inside_the_slot(plan: TapPlan) -> None:
    """Bug: two groups that share bytes, a misaligned one, or one that ends behind the slot."""
    end = 0
    for index, group in enumerate(plan.groups):
        assert group.index == index
        assert group.offset % ALIGNMENT == 0
        assert 0 <= group.offset - end < ALIGNMENT
        assert group.bytes == plan.max_rows * group.row_bytes
        end = group.offset + group.bytes
    assert 0 <= plan.slot_bytes - end < ALIGNMENT
    assert plan.slot_bytes % ALIGNMENT == 0


@given(plans())
def test_taps_of_a_group_stand_side_by_side(plan: TapPlan) -> None:
    """Bug: a gap or an overlap between taps: the group would not be their concatenation."""
    assert [tap.index for tap in plan.taps] == list(range(len(plan.taps)))
    assert plan.taps == tuple(tap for group in plan.groups for tap in group.taps)
    for group in plan.groups:
        column = 0
        for tap in group.taps:
            assert (tap.group, tap.column, tap.dtype) == (group.name, column, group.dtype)
            column += tap.width
        assert group.width == column
        assert group.row_bytes == column * group.dtype.itemsize


@given(plans())
def test_taps_and_groups_are_found_by_name(plan: TapPlan) -> None:
    """Bug: a lookup that gives a namesake."""
    assert tuple(plan.tap(tap.name) for tap in plan.taps) == plan.taps
    assert tuple(plan.group(group.name) for group in plan.groups) == plan.groups
    for look_up in (plan.tap, plan.group):
        with pytest.raises(ConfigError, match="no such"):
            look_up("no such")


def test_sizes_beyond_32_bits_are_exact() -> None:
    """Bug: a size kept in 32 bits or in a float."""
    plan = example(width=3, dtype="uint8", max_rows=MAX_ROWS)
    assert plan.group("features").bytes == 9 * (1 << 40)
    assert plan.group("embedding").offset == 9 * (1 << 40)
    assert plan.slot_bytes == 12 * (1 << 40)
    assert plan.arena_bytes(7) == 84 * (1 << 40)


def test_the_largest_slot_fits_and_one_more_byte_does_not() -> None:
    """Bug: a size that wraps to a negative number in native code."""
    widest = (MAX_INT64 - ALIGNMENT + 1) // (1 << 20)
    groups = {"g": ["t"]}
    assert TapPlan(groups, widest, "uint8", 1 << 20).slot_bytes <= MAX_INT64
    with pytest.raises(ConfigError) as refusal:
        TapPlan(groups, widest + 1, "uint8", 1 << 20)
    assert f"{1 << 20} rows × {widest + 1} elements × 1 B" in str(refusal.value)


def test_groups_that_fit_alone_but_not_together_are_refused() -> None:
    """Bug: only single groups are checked, and the sum wraps."""
    with pytest.raises(ConfigError, match="slot is too large"):
        TapPlan({"a": ["x"], "b": ["y"]}, 1 << 22, "uint8", MAX_ROWS)


def test_arena_too_large_says_the_arithmetic() -> None:
    """Bug: depth × slot that wraps, or a refusal that does not say what was multiplied."""
    plan = TapPlan({"a": ["x"]}, 1 << 20, "uint8", MAX_ROWS)
    with pytest.raises(ConfigError) as refusal:
        plan.arena_bytes(8)
    assert f"8 slots × {1 << 60} B = {1 << 63} B" in str(refusal.value)
    for depth in (0, -1, True, 2.0):
        with pytest.raises(ConfigError):
            plan.arena_bytes(depth)  # pyright: ignore[reportArgumentType]


@given(plans(max_rows=1 << 20), st.integers(1, 64))
def test_describe_names_every_group_and_the_bytes(plan: TapPlan, depth: int) -> None:
    """Bug: a statement of what will be reserved that differs from what is reserved."""
    text = plan.describe(depth)
    numbers = {int(number) for number in re.findall(r"\d+", text)}
    assert {plan.arena_bytes(depth), plan.slot_bytes, depth, plan.max_rows} <= numbers
    for group in plan.groups:
        line = next(line for line in text.splitlines() if line.split()[0] == group.name)
        figures = {int(number) for number in re.findall(r"\d+", line)}
        assert {group.bytes, group.row_bytes, group.offset} <= figures
        assert group.dtype.name in line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"groups": {}}, "no group"),
        ({"groups": {"g": []}}, "no tap"),
        ({"groups": {"g": "tap"}}, "no sequence"),
        ({"groups": {"g": 7}}, "no sequence"),
        ({"groups": ["g"]}, "no mapping"),
        ({"groups": {"g": ["a", "a"]}}, "'a' stands twice"),
        ({"groups": {"g": ["a"], "h": ["a"]}}, "'a' stands twice"),
        ({"groups": {"a": ["b"], "h": ["a"]}}, "a group and for a tap"),
        ({"groups": {"a": ["a", "b"]}}, "a group and for a tap"),
        ({"groups": {"": ["a"]}}, "group name"),
        ({"groups": {"g": [""]}}, "tap name"),
        ({"groups": {"g": ["a" * 129]}}, "tap name"),
        ({"groups": {"g": ["a\n"]}}, "tap name"),
        ({"groups": {"g": ["\x1b[2J"]}}, "tap name"),
        ({"groups": {"g": ["\ud800"]}}, "tap name"),
        ({"groups": {"g": [3]}}, "tap name"),
        ({"groups": {"g": [["a"]]}}, "tap name"),
        ({"groups": {7: ["a"]}}, "group name"),
        ({"width": 0}, "width"),
        ({"width": -4}, "width"),
        ({"width": True}, "width"),
        ({"width": 2.0}, "width"),
        ({"width": {"layer1": 4}}, "missing: layer17"),
        (
            {"width": {"layer1": 4, "layer17": 4, "layer32": 4, "embedding": 4, "x": 1}},
            "unknown: x",
        ),
        ({"dtype": "float31"}, "float31"),
        ({"dtype": {"features": "int8"}}, "missing: embedding"),
        ({"dtype": {"features": "int8", "embedding": "int8", "layer1": "int8"}}, "unknown: layer1"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": MAX_ROWS + 1}, "max_rows"),
        ({"max_rows": 10**5000}, "max_rows"),
        ({"max_rows": "9"}, "max_rows"),
    ],
)
def test_an_impossible_setting_is_named(changes: dict[str, object], told: str) -> None:
    """Bug: a wrong setting that passes, or fails later as something that does not name it."""
    with pytest.raises(ConfigError) as refusal:
        example(**changes)
    assert told in str(refusal.value)


def test_a_group_may_be_named_like_its_only_tap() -> None:
    """Bug: the plan of the documentation is refused; it names a group like its tap."""
    plan = example()
    assert plan.group("embedding").taps == (plan.tap("embedding"),)


@given(plans())
def test_a_plan_comes_back_from_json_pickle_and_copy(plan: TapPlan) -> None:
    """Bug: a plan that reaches a spawned producer, or a peer, as another plan."""
    for twin in (
        TapPlan.from_json(plan.to_json()),
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
    ):
        assert twin == plan
        assert hash(twin) == hash(plan)
        assert twin.fingerprint == plan.fingerprint
        assert twin.to_json() == plan.to_json()
        assert twin.tap(plan.taps[-1].name) == plan.taps[-1]


@given(plans(max_rows=50), plans(max_rows=50))
def test_fingerprints_are_equal_exactly_if_plans_are(one: TapPlan, other: TapPlan) -> None:
    """Bug: a setting that the fingerprint leaves out, so that two ranks differ unseen."""
    assert (one.fingerprint == other.fingerprint) == (one == other)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_rows": 8193},
        {"width": 4097},
        {"width": {"layer1": 4096, "layer17": 4095, "layer32": 4097, "embedding": 4096}},
        {"dtype": "float16"},
        {"dtype": {"features": "bfloat16", "embedding": "float16"}},
        {"groups": {"features": ["layer17", "layer1", "layer32"], "embedding": ["embedding"]}},
        {"groups": {"embedding": ["embedding"], "features": ["layer1", "layer17", "layer32"]}},
        {"groups": {"feature5": ["layer1", "layer17", "layer32"], "embedding": ["embedding"]}},
    ],
    ids=str,
)
def test_every_setting_and_every_order_changes_the_fingerprint(changes: dict[str, object]) -> None:
    """Bug: two ranks that lay a slot out differently and agree by fingerprint."""
    assert example(**changes).fingerprint != example().fingerprint
    assert example(**changes) != example()


def test_settings_spelt_in_another_way_give_the_same_plan() -> None:
    """Bug: a fingerprint that depends on how the config was written, not on what it says."""
    taps = ["embedding", "layer32", "layer17", "layer1"]
    spelt_out = example(
        groups={"features": ("layer1", "layer17", "layer32"), "embedding": ("embedding",)},
        width=dict.fromkeys(taps, 4096),
        dtype={"embedding": torch.bfloat16, "features": "torch.bfloat16"},
    )
    assert spelt_out == example()
    assert spelt_out.fingerprint == example().fingerprint


def test_the_fingerprint_is_stable() -> None:
    """Bug: a canonical form that changes between releases, so that mixed jobs cannot attach."""
    assert example().to_json() == (
        '{"groups":[{"dtype":"bfloat16","name":"features","taps":[{"name":"layer1","width":4096},'
        '{"name":"layer17","width":4096},{"name":"layer32","width":4096}]},'
        '{"dtype":"bfloat16","name":"embedding","taps":[{"name":"embedding","width":4096}]}],'
        '"max_rows":8192,"version":1}'
    )
    assert re.fullmatch("b8ec919e26a5[0-9a-f]{52}", example().fingerprint)


@given(plans())
def test_a_plan_cannot_be_changed(plan: TapPlan) -> None:
    """Bug: a plan changed after its fingerprint was compared."""
    with pytest.raises(AttributeError):
        plan.max_rows = 1  # pyright: ignore[reportAttributeAccessIssue]
