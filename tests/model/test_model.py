"""The protocol's model: every state of many small channels, and faults that it must find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model import runs

PAGE = Path(__file__).parents[2] / "docs" / "model.md"
LONGEST_TRACE = 45

pytestmark = [pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, compiled."""
    return runs.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def explored(program: Path) -> dict[str, dict[str, Any]]:
    """What was found in each configuration."""
    return runs.run_all(program)


@pytest.mark.slow
def test_all_states_hold(explored: dict[str, dict[str, Any]]) -> None:
    """Bug: an order of steps and faults that no test thinks of, and that breaks an invariant."""
    broken = {
        settings: (facts["broken"], facts["trace"])
        for settings, facts in explored.items()
        if facts["broken"]
    }
    assert broken == {}
    for settings, facts in explored.items():
        assert facts["complete"], settings
        assert facts["states"] > 1000, settings
        assert facts["steps"] > facts["states"], settings
        assert facts["ends"] > 0, settings


@pytest.mark.slow
def test_the_page_says_what_was_explored(explored: dict[str, dict[str, Any]]) -> None:
    """Bug: another model's counts. ``python tests/model/runs.py`` prints these."""
    assert runs.table(explored) in PAGE.read_text()


@pytest.mark.parametrize("seeded", runs.SEEDED, ids=lambda seeded: seeded.bug)
def test_seeded_bug_is_found(program: Path, seeded: runs.Seeded) -> None:
    """Bug: a model that holds whatever its rules are: each one left out must show."""
    found = runs.run(program, f"{seeded.settings} bug={seeded.bug}", "--shortest")
    assert found["broken"] in seeded.broken
    assert 0 < len(found["trace"]) <= LONGEST_TRACE
    sound = runs.run(program, seeded.settings)
    assert sound["complete"]
    assert sound["states"] > 0


def test_every_bug_of_the_model_is_seeded(program: Path) -> None:
    """Bug: a rule that can be left out, and no run that leaves it out."""
    text = (runs.FOLDER / "rules.hpp").read_text()
    named = {line.split("X(")[1].split(")")[0] for line in text.splitlines() if "  X(" in line}
    assert {seeded.bug for seeded in runs.SEEDED} == named - {"none"}
    assert f"{len(named) - 1} rules" in PAGE.read_text()


def test_traces_carry_the_designs_steps(program: Path) -> None:
    """Bug: a trace in words of the model's own."""
    found = runs.run(program, "lanes=1 depth=1 width=1 faults=0 bug=stamp_early", "--shortest")
    steps = [text.split(")")[0].lstrip("(") for text in found["trace"] if text.startswith("(")]
    assert {"1", "3", "5", "6", "7"} <= set(steps)


@pytest.mark.parametrize(
    "setting", ["depth=9", "width=0", "wire=tcp", "bug=none_such", "colour=red", "depth"]
)
def test_what_the_model_has_not_is_refused(program: Path, setting: str) -> None:
    """Bug: a misspelt setting, and the run that was wanted never made."""
    with pytest.raises(runs.subprocess.CalledProcessError) as caught:
        runs.run(program, setting)
    assert "model:" in caught.value.stderr
