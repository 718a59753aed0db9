"""Each field report has its test, by name."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = {f"a{number:02}" for number in range(1, 24)}
NEED_A_GPU_TOO = {"a01", "a02", "a03", "a04", "a05", "a13", "a14", "a17", "a18", "a21"}


def rows_in(folder: Path, pattern: str) -> set[str]:
    """Name the rows that the tests of a folder carry in their names."""
    sources = [path.read_text() for path in folder.glob(pattern)]
    return {row for text in sources for row in re.findall(r"^def test_field_(a\d\d)_", text, re.M)}


def test_every_row_has_a_test_that_runs_anywhere() -> None:
    """Catches a report that nobody tests, or only where there is a GPU."""
    assert rows_in(HERE, "test_*.py") == ROWS


def test_rows_about_cuda_have_one_on_a_gpu() -> None:
    """Catches a report on CUDA whose only test is of the protocol."""
    assert rows_in(HERE / "on_gpu", "test_*.py") == NEED_A_GPU_TOO
