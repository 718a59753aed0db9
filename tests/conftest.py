"""Skips for missing hardware, and the rule that no test leaves a process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from support import machine, processes

# No time limit for one example: a busy machine is not a bug. Under CI the same examples every time.
hypothesis.settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")

ENDING_LIMIT = 2.0  # seconds for processes whose parent has just ended to follow it


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --require."""
    parser.addoption(
        "--require",
        action="append",
        default=[],
        choices=sorted(machine.NEEDS),
        help="fail, rather than skip, the tests with this marker that cannot run here",
    )


def pytest_configure() -> None:
    """See to it that what a killed child had started is found too."""
    processes.adopt_orphans()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose hardware is not here, or fail it if that hardware is required."""
    required: list[str] = item.config.getoption("--require")
    for marker in machine.NEEDS:
        if item.get_closest_marker(marker) is None:
            continue
        reason = machine.lacks(marker)
        if reason is None:
            continue
        if marker in required:
            pytest.fail(f"--require {marker}: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    """End every process that a test left behind, and fail the test for it."""
    before = processes.running_children()
    yield
    left = processes.wait_until_ended(processes.running_children() - before, ENDING_LIMIT)
    if left:
        lines = "\n  ".join(processes.end(left))
        pytest.fail(f"the test left processes behind:\n  {lines}", pytrace=False)
