"""Every tap of a real Megatron pipeline, bit for bit, and the policy as without them."""

from __future__ import annotations

import pytest

from integration.megatron.checks import check
from integration.megatron.training import Pass, Plan, train
from support.crew import Crew
from support.megatron_models import Shape

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

# Training, evaluation without and with taps in between, the same iteration once more, a ramp-up.
PASSES = (
    Pass([8] * 4, seed=1),
    Pass([8] * 4, seed=2, forward_only=True, tapped=False),
    Pass([8] * 4, seed=1),
    Pass([8] * 6, seed=3, forward_only=True),
    Pass([8] * 8, seed=4),
)


def test_two_stages(crew: Crew) -> None:
    """Catches: a tap of a wrong layer, microbatch or pass."""
    plan = Plan(Shape(), [1, 3, 4], PASSES, embedding=True)
    check(plan, crew.run(2, train, plan))
