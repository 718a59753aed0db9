"""What make sanitize counts as a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from sanitize import SUPPRESSIONS, reports_in

RACE = """==================
WARNING: ThreadSanitizer: data race (pid=7)
  Write of size 4 at 0x7f00 by thread T1:
SUMMARY: ThreadSanitizer: data race mailbox.cpp:3 in close
==================
"""
OVERRUN = """=================================================================
==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602
SUMMARY: AddressSanitizer: heap-buffer-overflow mailbox.cpp:3 in close
"""
UNDEFINED = (
    "native/block.hpp:7:3: runtime error: signed integer overflow: 2147483647 + 1\n    #0 at\n"
)
NOTE = "==7==WARNING: ASan is ignoring requested __asan_handle_no_return\n"


@pytest.mark.parametrize(
    ("text", "count"), [(RACE, 1), (OVERRUN, 1), (UNDEFINED, 1), (NOTE, 0), (RACE + RACE, 2)]
)
def test_reports_are_counted(tmp_path: Path, text: str, count: int) -> None:
    """Catches a report that passes for a clean run, and a note that fails one."""
    (tmp_path / "report.1").write_text(text)
    (tmp_path / "report.2").write_text("")
    assert len(reports_in(tmp_path)) == count


def test_every_suppression_has_its_reason() -> None:
    """Catches a report that is silenced without a word."""
    files = sorted(SUPPRESSIONS.iterdir())
    assert files
    for file in files:
        above = ""
        for line in file.read_text().splitlines():
            assert line.startswith("#") or not line or above.startswith("#"), f"{file}: {line}"
            above = line
