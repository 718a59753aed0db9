"""The campaign itself: what it counts as a failure, and its short form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from campaign.cells import FAULTS, MOMENTS, SHORT, VICTIMS, WIRES, Cell, cells_of
from campaign.report import entry, keep, kept, section, sections_of, write
from campaign.run import Result

TESTS = Path(__file__).parents[1]
LIMIT = 150.0


def test_every_fault_is_crossed_with_every_moment() -> None:
    """Catches a cell that is left out without a word."""
    for wire in WIRES:
        cells = list(cells_of(wire))
        assert len(cells) == len(set(cells)) == len(FAULTS) * len(VICTIMS) * len(MOMENTS)
        impossible = {cell.fault for cell in cells if cell.impossible}
        assert impossible == (set() if wire == "ucx" else {"cut"})


def test_short_form_has_each_fault_victim_and_moment() -> None:
    """Catches a short form that never meets one of them."""
    assert {cell.fault for cell in SHORT} == set(FAULTS)
    assert {cell.victim for cell in SHORT} == set(VICTIMS)
    assert {cell.moment for cell in SHORT} == set(MOMENTS)
    assert not any(cell.impossible for cell in SHORT)


def test_table_tells_failures_from_ends(tmp_path: Path) -> None:
    """Catches a page on which a failed cell looks like any other, or that loses another wire's."""
    good = Result(Cell("shm", "kill", "producer", "put"), {"consumer": "PeerLostError"})
    both = {"producer": "PassAborted", "consumer": "StampTimeout"}
    lived = Result(Cell("shm", "stop", "producer", "put"), both)
    bad = Result(Cell("shm", "slow", "consumer", "read"), {"producer": "data"}, ["WRONG DATA"])
    assert entry(good.cell, good) == "PeerLostError"
    assert entry(lived.cell, lived) == "StampTimeout / PassAborted"
    assert entry(bad.cell, bad) == "**FAILED**"
    page = tmp_path / "campaign.md"
    write(page, {"shm": section("shm", [good, lived, bad], "a minute")})
    write(page, {"ucx": section("ucx", [], "no time")})
    assert set(sections_of(page.read_text())) == {"shm", "ucx"}
    assert "3 cells run, 1 failed" in page.read_text()


def test_parts_make_a_page_only_together(tmp_path: Path) -> None:
    """Catches results that are lost on their way to the page, or a page of a part."""
    file = tmp_path / "part.jsonl"
    results = [
        Result(
            Cell("shm", "kill", "producer", "put"), {"consumer": "PeerLostError"}, ["late"], 1.5
        ),
        Result(Cell("shm", "kill", "producer", "wait"), {"consumer": "PeerLostError"}),
    ]
    for result in results:
        keep(file, [result])
    assert kept(file) == results
    command = [sys.executable, "-m", "campaign", "--page-of", str(file)]
    ended = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 1
    assert "88 cells are missing" in ended.stderr


def test_page_is_the_whole_campaign_s() -> None:
    """Catches a page in docs/ that was written of a part, or with a failed cell."""
    sections = sections_of((TESTS.parent / "docs" / "campaign.md").read_text())
    for wire in WIRES:
        cells = [cell for cell in cells_of(wire) if not cell.impossible]
        assert f"{len(cells)} cells run, 0 failed" in sections[wire]


@pytest.mark.slow
@pytest.mark.ucx
@pytest.mark.timeout(LIMIT + 10)
def test_short_form_passes() -> None:
    """Catches a side that hangs, an error that names nobody, a survivor that cannot go on, a leak.

    In a process of its own: the sides are forked, and torch hangs in what is forked from a process
    that has used it.
    """
    command = [sys.executable, "-m", "campaign", "--short"]
    done = subprocess.run(
        command,
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": ok\n") == len(SHORT), done.stdout
