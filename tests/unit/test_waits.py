"""How long the draft's stage waited, on a CPU; tests/gpu has the stream's side."""

from __future__ import annotations

import threading

import pytest

from tapchannel.integrations.waits import Waits


def test_a_wait_is_in_one_sum_only() -> None:
    """Catches: a metric that grows for ever, or loses what a block before had waited."""
    waits = Waits("cpu")
    assert waits.pop() == 0.0
    for _ in range(2):
        with waits.timed():
            threading.Event().wait(0.02)
    assert waits.pop() >= 0.04
    assert waits.pop() == 0.0


def test_a_wait_that_failed_counts() -> None:
    """Catches: the longest wait of all, the one that ran into its deadline, left out."""
    waits = Waits("cpu")
    with pytest.raises(TimeoutError), waits.timed():
        threading.Event().wait(0.02)
        raise TimeoutError
    assert waits.pop() >= 0.02
