"""The ranks that the Megatron tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import processes
from support.crew import Crew

ENDING_LIMIT = 2.0  # seconds for processes whose parent has just ended to follow it


@pytest.fixture(scope="package")
def crew() -> Iterator[Crew]:
    """Give four ranks, until the last of these tests: idle ones still take a third of a core."""
    crew = Crew(4)
    yield crew
    crew.close()


@pytest.fixture(autouse=True)
def _no_child_left(crew: Crew) -> Iterator[None]:
    """End every process that a test left behind, but for the crew, and fail the test for it."""
    before = processes.running_children()
    yield
    new = processes.running_children() - before - crew.pids()
    left = processes.wait_until_ended(new, ENDING_LIMIT)
    if left:
        lines = "\n  ".join(processes.end(left))
        pytest.fail(f"the test left processes behind:\n  {lines}", pytrace=False)
