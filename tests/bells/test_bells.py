"""Sleepers on a bell, and rings at the worst moment: none may be slept through.

The package's own waits sleep a tick at most, so a ring that is lost there costs time, and no test
of theirs fails. Here each sleep is so long that it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.cases import assert_every_case_is_run, compiled, outcome

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "cases.cpp"
NOT_HERE = 77
LIMIT = 40.0  # seconds; a case takes 10 to find that nobody was woken


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases, compiled."""
    return compiled(tmp_path_factory.mktemp("bells") / "bells", [SOURCE])


@pytest.fixture
def holds(program: Path) -> Callable[[str], bool]:
    """Runs a case, and tells whether it held."""

    def run(case: str) -> bool:
        code = outcome(program, case, LIMIT)
        if code == NOT_HERE:
            pytest.skip("this kernel sleeps on one bell at a time (no futex_waitv)")
        return code == 0

    return run


def test_what_came_before_is_not_slept_on(holds: Callable[[str], bool]) -> None:
    """Bug: a ring while nobody had announced himself yet. Mutation: last-look-left-out."""
    assert holds("what_came_before_is_not_slept_on")


def test_what_comes_after_the_look_is_not_slept_on(holds: Callable[[str], bool]) -> None:
    """Bug: a ring between the last look and the sleep. Mutation: count-read-after-the-look."""
    assert holds("what_comes_after_the_look_is_not_slept_on")


def test_a_ring_wakes_who_sleeps(holds: Callable[[str], bool]) -> None:
    """Bug: a ring that takes a sleeper for awake. Mutation: sleeper-unannounced."""
    assert holds("a_ring_wakes_who_sleeps")


def test_what_comes_soon_is_met_awake(holds: Callable[[str], bool]) -> None:
    """Bug: a sleep and a wake-up for what was a moment away. Mutation: asleep-at-once."""
    assert holds("what_comes_soon_is_met_awake")


def test_awake_time_ends(holds: Callable[[str], bool]) -> None:
    """Bug: a wait that stays awake past its limit. Mutation: awake-past-the-limit."""
    assert holds("awake_time_ends")


def test_several_bells_miss_no_ring(holds: Callable[[str], bool]) -> None:
    """Bug: a ring between the gate's look and its sleep. Mutation: bells-counted-late."""
    assert holds("several_bells_miss_no_ring")


def test_any_of_several_bells_wakes(holds: Callable[[str], bool]) -> None:
    """Bug: a gate that only its own bell wakes. Mutation: bells-unannounced."""
    assert holds("any_of_several_bells_wakes")


def test_every_case_is_run(program: Path) -> None:
    """Bug: a case that was written and is not in the list."""
    assert_every_case_is_run(program, SOURCE, globals())
