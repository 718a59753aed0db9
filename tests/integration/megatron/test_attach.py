"""What attach refuses, on every rank; what it leaves behind; what a step does after a failure."""

from __future__ import annotations

import pytest

from integration.megatron import cases, failures
from support.crew import Crew

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]


@pytest.mark.parametrize("unserved", cases.UNSERVED)
def test_what_cannot_be_served_is_refused_on_every_rank(crew: Crew, unserved: str) -> None:
    """Catches: a mode whose hooks never run, or a rank that waits for one that gave up."""
    said = crew.run(2, cases.refused, unserved)
    for text in said:
        assert text.startswith("ConfigError: ")
        assert unserved in text
        assert "rank 0: " in text
        assert "rank 1: " not in text


@pytest.mark.parametrize("argument", cases.BAD_ARGUMENTS)
def test_bad_arguments_are_refused_on_every_rank(crew: Crew, argument: str) -> None:
    """Catches: taps that no stage makes, or that the draft was not told of."""
    for text in crew.run(2, cases.misused, argument):
        assert text.startswith("ConfigError: ")
        assert argument in text


def test_close_takes_the_hooks_off(crew: Crew) -> None:
    """Catches: hooks that outlive their session, or a name that cannot be used again."""
    for hooks, came in crew.run(2, cases.attach_twice):
        before, closed, attached, after = hooks
        assert before == closed == after
        assert attached > before
        assert came


def test_offloaded_activations_are_copied(crew: Crew) -> None:
    """Catches: a tap whose memory Megatron gives away before it was pushed."""
    for copy, copied in (("auto", True), ("never", False)):
        for info in crew.run(2, cases.notes, copy):
            assert info["copy"] is copied
            reason = str(info.get("copy_reason"))
            assert ("fine_grained_activation_offloading" in reason) is copied
    assert crew.run(2, cases.overwritten) == [True, True]


def test_layer_that_runs_beside_the_policy_pushes_nothing(crew: Crew) -> None:
    """Catches: a chunk whose taps stay armed once its forward has ended."""
    assert crew.run(2, cases.layer_in_loss) == [0, 8]


def test_megatron_counts_the_microbatches(crew: Crew) -> None:
    """Catches: a batch ramp-up that is not followed, or a missing calculator that is a riddle."""
    (said, _), (_, taken) = crew.run(2, cases.ramp_up)
    assert "calculator is not set up" in said
    assert taken == [2, 4, 6]


@pytest.mark.parametrize("how", ["exception", "number"])
@pytest.mark.parametrize("failing", [0, 1])
def test_next_step_works_after_a_failure(crew: Crew, failing: int, how: str) -> None:
    """Catches: a step that broke on one rank and leaves the session of another unusable."""
    outcomes = crew.run(2, failures.fail_and_go_on, failing, how)
    expected = {
        "exception": "ValueError: this microbatch's forward failed",
        "number": "UsageError: chunk 0 is forwarded out of order",
    }
    assert outcomes[failing][0].startswith(expected[how])
    assert outcomes[1 - failing][0].startswith("PassAborted: ")
    assert [right for _, right in outcomes] == [True, True]
