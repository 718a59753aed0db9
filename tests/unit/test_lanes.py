"""Lanes and cells: who may write which bytes of a slot."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapchannel.errors import ConfigError, PlanMismatchError
from tapchannel.plan import MAX_ROWS, Cell, Lane, Shard, TapPlan

from .plan_examples import SharedPlan, Sources, example, shared


def cells_of(lanes: tuple[Lane, ...]) -> list[tuple[Lane, Cell]]:
    """Pair every cell with its lane."""
    return [(lane, cell) for lane in lanes for cell in lane.cells]


@given(shared())
def test_every_byte_of_a_row_belongs_to_one_cell(
    drawn: SharedPlan,
) -> None:
    """Bug: two lanes that may write one byte, or a byte that no lane may write."""
    plan, sources = drawn
    owners: dict[tuple[int, int], int] = {}
    grids = {cell.tap.name: cell.shard.rows[1] for _, cell in cells_of(plan.lanes(sources))}
    for _, cell in cells_of(plan.lanes(sources)):
        for byte in range(cell.byte_offset, cell.byte_offset + cell.row_bytes):
            assert (cell.shard.rows[0], byte) not in owners
            owners[cell.shard.rows[0], byte] = 1
    expected = {
        (i, plan.group(tap.group).offset + tap.column * tap.dtype.itemsize + byte)
        for tap in plan.taps
        for i in range(grids[tap.name])
        for byte in range(tap.width * tap.dtype.itemsize)
    }
    assert owners.keys() == expected


@given(shared())
def test_a_cell_agrees_with_its_tap_and_group(
    drawn: SharedPlan,
) -> None:
    """Bug: a pitch, column or row limit with which the copy would leave its cell."""
    plan, sources = drawn
    for _, cell in cells_of(plan.lanes(sources)):
        group, size = plan.group(cell.tap.group), cell.tap.dtype.itemsize
        (i, n), (j, m) = cell.shard.rows, cell.shard.columns
        assert cell.tap == plan.tap(cell.shard.tap)
        assert (cell.pitch, cell.row_bytes) == (group.row_bytes, cell.width * size)
        assert (cell.width * m, cell.column) == (cell.tap.width, cell.width * j)
        assert cell.byte_offset == group.offset + (cell.tap.column + cell.column) * size
        assert (cell.row_limit - 1) * n < plan.max_rows <= cell.row_limit * n
        assert 0 <= i < n


@given(shared(), st.randoms(use_true_random=False))
def test_lanes_do_not_depend_on_the_order_of_sources(drawn: SharedPlan, random: Random) -> None:
    """Bug: two sides that read one config in two orders number lanes or cells differently."""
    plan, sources = drawn
    lanes = plan.lanes(sources)
    items = [(rank, random.sample(shares, len(shares))) for rank, shares in sources.items()]
    random.shuffle(items)
    assert plan.lanes(dict(items)) == lanes
    assert [lane.rank for lane in lanes] == sorted(sources)
    assert [lane.index for lane in lanes] == list(range(len(lanes)))
    for lane in lanes:
        assert [cell.index for cell in lane.cells] == list(range(len(lane.cells)))


@given(shared(), st.data())
def test_a_share_left_out_is_named(drawn: SharedPlan, data: st.DataObject) -> None:
    """Bug: a plan with a hole, at which recv would wait for ever for a stamp that nobody stores."""
    plan, sources = drawn
    rank = data.draw(st.sampled_from(sorted(sources)))
    absent = sources[rank].pop(data.draw(st.integers(0, len(sources[rank]) - 1)))
    with pytest.raises(PlanMismatchError) as refusal:
        plan.lanes({rank: shares for rank, shares in sources.items() if shares})
    (row,) = refusal.value.rows
    name = absent if isinstance(absent, str) else absent.tap
    assert row["rank"] is None
    assert row["problem"].startswith("missing")
    assert repr(name) in row["expected"]


@given(shared(), st.data())
def test_a_share_pushed_twice_is_named(drawn: SharedPlan, data: st.DataObject) -> None:
    """Bug: two ranks, or one rank twice, that overwrite each other's cell."""
    plan, sources = drawn
    share = data.draw(st.sampled_from([share for shares in sources.values() for share in shares]))
    other = data.draw(st.sampled_from([*sources, 1 << 20]))
    sources.setdefault(other, []).append(share)
    with pytest.raises(PlanMismatchError) as refusal:
        plan.lanes(sources)
    (row,) = refusal.value.rows
    assert row["problem"] == "pushed twice"
    owners = [rank for rank, shares in sources.items() if share in shares]
    assert row["rank"] in owners


@pytest.mark.parametrize(
    ("sources", "rank", "claimed", "problem"),
    [
        ({0: ["layer1", "layer17", "layer32", "embedding"], 1: ["layer2"]}, 1, "'layer2'", "plan"),
        ({0: ["features", "embedding"]}, 0, "'features'", "name its taps"),
        ({0: ["layer1", "layer17", "layer32", "embedding"], 1: []}, 1, "no tap", "leave the rank"),
        (
            {
                0: ["layer1", "layer17", "embedding"],
                1: [Shard("layer32", (0, 2))],
                2: [Shard("layer32", (1, 3))],
            },
            2,
            "'layer32' rows=(1, 3)",
            "another split",
        ),
        (
            {
                0: ["layer1", "layer17", "embedding"],
                1: ["layer32"],
                2: [Shard("layer32", columns=(1, 2))],
            },
            2,
            "'layer32' columns=(1, 2)",
            "another split",
        ),
        (
            {
                0: ["layer1", "layer17", "embedding"],
                1: [Shard("layer32", columns=(j, 3)) for j in range(3)],
            },
            1,
            "'layer32' columns=(0, 3)",
            "do not split equally",
        ),
        (
            {
                0: ["layer1", "layer17", "embedding"],
                1: [
                    Shard("layer32", (0, 2), (0, 2)),
                    Shard("layer32", (1, 2), (1, 2)),
                    Shard("layer32", (0, 2), (1, 2)),
                ],
            },
            None,
            "nothing",
            "missing",
        ),
        ({}, None, "nothing", "missing"),
    ],
)
def test_sources_that_do_not_fit_are_told_rank_by_rank(
    sources: Sources, rank: int | None, claimed: str, problem: str
) -> None:
    """Bug: sources that cannot work are taken, or refused without naming the guilty rank."""
    with pytest.raises(PlanMismatchError) as refusal:
        example().lanes(sources)
    assert any(
        row["rank"] == rank and row["claimed"] == claimed and problem in row["problem"]
        for row in refusal.value.rows
    )
    assert claimed in str(refusal.value)


def test_a_vast_split_is_refused_at_once() -> None:
    """Bug: a slip in a share's count that walks, or stores, every share of the grid."""
    sources = {0: ["layer1", "layer17", "embedding", Shard("layer32", (5, MAX_ROWS), (1, 4096))]}
    with pytest.raises(PlanMismatchError) as refusal:
        example().lanes(sources)
    assert len(refusal.value.rows) < 20
    assert f"{MAX_ROWS * 4096 - 1 - 8} more" in str(refusal.value)


@pytest.mark.parametrize(
    "sources",
    [
        ["layer1"],
        {0: "layer1"},
        {0: None},
        {0: [None]},
        {0: [["layer1"]]},
        {-1: ["layer1"]},
        {1 << 31: ["layer1"]},
        {"0": ["layer1"]},
        {True: ["layer1"]},
        {0: ["layer1"], "1": ["layer17"]},
    ],
    ids=str,
)
def test_sources_of_a_wrong_form_are_refused(sources: Sources) -> None:
    """Bug: a bare name taken letter by letter; a rank "1" that no outbox will ever claim."""
    with pytest.raises(ConfigError):
        example().lanes(sources)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((1, 1), (0, 1)),
        ((0, 1), (2, 2)),
        ((-1, 2), (0, 1)),
        ((0, 0), (0, 1)),
        ((0, 1, 2), (0, 1)),
        ([0, 1], (0, 1)),
        ((0, 1), 1),
        ((0.0, 1), (0, 1)),
        ((False, True), (0, 1)),
        ((0, MAX_ROWS + 1), (0, 1)),
    ],
)
def test_an_impossible_share_is_refused(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    """Bug: a share counted from one, or a share number that reaches the arithmetic unchecked."""
    with pytest.raises(ConfigError, match="'layer1'"):
        Shard("layer1", rows, columns)


def test_the_promised_number_of_lanes_and_cells_works_and_one_more_is_refused() -> None:
    """Bug: a limit that is off by one, or a cost that grows with its square."""
    names = [f"tap{index}" for index in range(4097)]
    most = TapPlan({"g": names[:4096]}, 1, "int8", 1)
    assert len(most.lanes({0: names[:4096]})[0].cells) == 4096
    assert len(most.lanes({rank: [name] for rank, name in enumerate(names[:4096])})) == 4096
    over = TapPlan({"g": names}, 1, "int8", 1)
    with pytest.raises(ConfigError, match="too many cells"):
        over.lanes({0: names})
    with pytest.raises(ConfigError, match="too many lanes"):
        over.lanes({rank: [name] for rank, name in enumerate(names)})
