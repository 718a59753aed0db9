"""Waits on a stream that fail, against a stream that moves only when it is told to.

``tests/model`` found most of these; here the code itself is run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.cases import NATIVE, assert_every_case_is_run, compiled, outcome

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "cases.cpp"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases, compiled with the mailbox's native sources."""
    sources = [SOURCE, *NATIVE.glob("mailbox*.cpp"), NATIVE / "gate.cpp"]
    return compiled(tmp_path_factory.mktemp("streams") / "streams", sources, SANITIZED)


@pytest.fixture
def holds(program: Path) -> Callable[[str], bool]:
    """Runs a case, and tells whether it held."""
    return lambda case: outcome(program, case, 120) == 0


def test_poison_sticks(holds: Callable[[str], bool]) -> None:
    """Bug: a dead pass's late stamp over poison leaves a stream stuck. Mutation: poison-once."""
    assert holds("poison_sticks")


def test_poison_reaches_no_older_read(holds: Callable[[str], bool]) -> None:
    """Bug: poison under the reads of an older, good lease. Mutation: poison-under-a-reader."""
    assert holds("poison_reaches_no_older_read")


def test_poison_lets_no_older_wait_through(holds: Callable[[str], bool]) -> None:
    """Bug: a wait that is let through by a later one's poison. Mutation: poison-under-a-reader."""
    assert holds("poison_lets_no_older_wait_through")


def test_nothing_is_enqueued_ahead_of_poison(holds: Callable[[str], bool]) -> None:
    """Bug: a wait that poison put back would let through. Mutation: ahead-of-poison."""
    assert holds("nothing_is_enqueued_ahead_of_poison")


def test_closing_waits_for_the_pass_before(holds: Callable[[str], bool]) -> None:
    """Bug: credit of a pass lost to the next. Mutation: close-forgets-the-pass-before."""
    assert holds("closing_waits_for_the_pass_before")


def test_late_lane_keeps_the_closed_pass(holds: Callable[[str], bool]) -> None:
    """Bug: a closed pass lost to a lane that attaches late. Mutation: late-lane-owed-nothing."""
    assert holds("late_lane_keeps_the_closed_pass")


def test_restart_does_not_hide_a_loss(holds: Callable[[str], bool]) -> None:
    """Bug: a wait for a dead life that goes on to its deadline. Mutation: restart-hides-a-loss."""
    assert holds("restart_does_not_hide_a_loss")


def test_closing_the_mailbox_lets_all_through(holds: Callable[[str], bool]) -> None:
    """Bug: a stream that waits on a mailbox that is closed."""
    assert holds("closing_the_mailbox_lets_all_through")


def test_every_case_is_run(program: Path) -> None:
    """Bug: a case that was written and is not in the list."""
    assert_every_case_is_run(program, SOURCE, globals())
