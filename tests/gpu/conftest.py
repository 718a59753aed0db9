"""The pairs of processes that the GPU tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu.environments import environments
from gpu.pair import Pair, Pairs
from support import processes

ENDING_LIMIT = 2.0  # seconds for processes whose parent has just ended to follow it


@pytest.fixture(scope="session")
def pairs() -> Iterator[Pairs]:
    """Give the pairs, by environment."""
    pairs = Pairs(environments())
    yield pairs
    pairs.close()


@pytest.fixture(autouse=True)
def _no_child_left(pairs: Pairs) -> Iterator[None]:
    """End every process that a test left behind, but for the pairs, and fail the test for it."""
    before = processes.running_children()
    yield
    new = processes.running_children() - before - pairs.pids()
    left = processes.wait_until_ended(new, ENDING_LIMIT)
    if left:
        lines = "\n  ".join(processes.end(left))
        pytest.fail(f"the test left processes behind:\n  {lines}", pytrace=False)


@pytest.fixture
def environment() -> str:
    """Name the pair's environment; a test may choose another by parametrizing this name."""
    return "plain"


@pytest.fixture
def pair(pairs: Pairs, environment: str) -> Pair:
    """Give the two processes of the environment."""
    return pairs.get(environment)


@pytest.fixture(params=["cuda:0", pytest.param("cuda:1", marks=pytest.mark.two_gpus)])
def producer(request: pytest.FixtureRequest) -> str:
    """Name the producer's device; the consumer's is cuda:0."""
    return request.param
