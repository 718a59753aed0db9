"""The short form of make stress, and that what it looks with sees what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stress.course import Leg
from stress.footprint import SLACK, Footprint, assert_flat
from stress.run import Orders, legs, run
from stress.words import Words
from support import machine
from tapchannel import Key
from tapchannel.keys import MAX_EPOCH, MAX_MICROBATCHES, MAX_STEP

SHORT = Orders(seed=7, messages=20_000, producers=3, seconds=6.0, cycles=10, longest=False)


@pytest.mark.timeout(120)
def test_short_stress(tmp_path: Path) -> None:
    """Catches a stale, mixed, lost or doubled message near a counter's end, behind an abort or a
    reset, or under a lease that is kept; and what a channel leaves behind when it closes.
    """
    wires = ("shm",) if machine.lacks("ucx") else SHORT.wires
    orders = Orders(**{**vars(SHORT), "wires": wires})
    total = run(orders, f"file://{tmp_path}", tell=lambda _: None)
    assert total["messages"] > 1_000
    assert total["pushes"] >= total["messages"]
    assert total["whole"] > 0
    assert total["aborted"] > 0
    assert total["resets"] > 0
    assert total["wraps"] > 0
    assert [total[f"cycles over {wire}"] for wire in wires] == [SHORT.cycles] * len(wires)


def test_legs_reach_the_ends_of_all_counters() -> None:
    """Catches a stress that stays in the middle of every counter's range."""
    made = [leg for leg, _ in zip(legs(Orders()), range(200), strict=False)]
    steps = {turn.step for leg in made for life in leg.lives for turn in life}
    counts = {turn.microbatches for leg in made for life in leg.lives for turn in life}
    last = {leg.first_epoch + len(leg.lives) - 1 for leg in made if leg.last_epochs}
    assert {0, MAX_STEP} <= steps
    assert max(counts) == MAX_MICROBATCHES
    assert last == {MAX_EPOCH}
    assert any(leg.aged for leg in made)
    assert {leg.producers for leg in made} == set(range(1, 9))
    assert {leg.wire for leg in made} == {"shm", "ucx"}


def test_both_sides_draw_the_same_leg() -> None:
    """Catches chances that differ from one process to the next: the sides would not meet."""
    one, other = Leg(5, "shm", 3), Leg(5, "shm", 3)
    assert one.lives == other.lives
    assert one.plan == other.plan
    turn = one.lives[0][0]
    assert one.rows(turn) == other.rows(turn)
    assert Leg(6, "shm", 3).lives != one.lives


def test_wrong_word_names_the_key_that_it_was_pushed_for() -> None:
    """Catches a check that takes one key's words, or one tap's, for another's."""
    leg = Leg(5, "shm", 2)
    words = Words(leg)
    due, stale = Key(1, 7, 3), Key(1, 7, 2)
    [group, *_] = leg.groups
    rows = leg.size.rows
    seen = words.of_group(group, due, rows)
    parts = [words.of_tap(tap, due, rows) for tap in leg.groups[group]]
    assert torch.equal(seen, torch.cat(parts, 1))
    seen[0, 0] = words.of_group(group, stale, rows)[0, 0]
    said = words.complaint(group, due, rows, seen)
    assert "words of 2 keys" in said
    assert "pass 7, microbatch 2 (epoch 1)" in said
    seen[0, 0] = 0
    assert "no key" in words.complaint(group, due, rows, seen)
    assert f"for {rows} rows" in words.complaint(group, due, rows, seen[:0])


@pytest.mark.parametrize("field", Footprint._fields)
def test_growth_is_seen(field: str) -> None:
    """Catches a footprint that is compared with nothing."""
    warm = Footprint(1 << 20, 10, 4)
    assert_flat("the same", warm, warm)
    grown = warm._replace(**{field: getattr(warm, field) + SLACK})
    with pytest.raises(AssertionError, match="became"):
        assert_flat("grown", warm, grown)
