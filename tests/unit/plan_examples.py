"""Tap plans to test with: the one of the documentation, and drawn ones."""

from __future__ import annotations

from typing import TypeAlias

from hypothesis import strategies as st

from tapchannel.plan import DTYPES, MAX_ROWS, Shard, TapPlan

Sources: TypeAlias = "dict[int, list[str | Shard]]"
SharedPlan: TypeAlias = tuple[TapPlan, Sources]


def example(**changes: object) -> TapPlan:
    """Build the plan of the documentation, with some settings changed."""
    settings = {
        "groups": {"features": ["layer1", "layer17", "layer32"], "embedding": ["embedding"]},
        "width": 4096,
        "dtype": "bfloat16",
        "max_rows": 8192,
    }
    return TapPlan(**{**settings, **changes})  # pyright: ignore[reportArgumentType]


@st.composite
def plans(draw: st.DrawFn, max_rows: int = MAX_ROWS) -> TapPlan:
    """Draw a plan of a few groups of a few taps, widths and dtypes mixed."""
    names = draw(st.lists(st.text("abé✓ '\"\\", min_size=1, max_size=5), min_size=1, unique=True))
    cuts = draw(st.lists(st.integers(1, 3), min_size=len(names), max_size=len(names)))
    groups: dict[str, list[str]] = {}
    for index, cut in enumerate(cuts):
        taps, names = names[:cut], names[cut:]
        if taps:
            groups[f"group{index}"] = taps
    taps = [tap for members in groups.values() for tap in members]
    return TapPlan(
        groups,
        {tap: draw(st.integers(1, 300)) for tap in taps},
        {group: draw(st.sampled_from(sorted(DTYPES))) for group in groups},
        draw(st.integers(1, max_rows)),
    )


@st.composite
def shared(draw: st.DrawFn) -> SharedPlan:
    """Draw a small plan and ranks that push all of it, each tap cut in rows and columns."""
    plan = draw(plans(max_rows=5))
    shares: list[str | Shard] = []
    for tap in plan.taps:
        n = draw(st.integers(1, 3))
        m = draw(st.sampled_from([m for m in (1, 2, 3, 5) if tap.width % m == 0]))
        if (n, m) == (1, 1) and draw(st.booleans()):
            shares.append(tap.name)
        else:
            shares += [Shard(tap.name, (i, n), (j, m)) for i in range(n) for j in range(m)]
    sources: Sources = {}
    for share in draw(st.permutations(shares)):
        sources.setdefault(draw(st.sampled_from([7, 0, 3, 1 << 30])), []).append(share)
    return plan, sources
