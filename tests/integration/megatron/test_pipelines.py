"""Every tap of a real Megatron pipeline, bit for bit, and the policy as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
    Pass([8] * 8, seed=3, forward_only=True, gradients=False),
    Pass([8] * 8, seed=4),
)
FULL: Any = {"recompute_granularity": "full", "recompute_num_layers": 1}
SELECTIVE: Any = {"recompute_granularity": "selective"}
PARALLEL: Any = {"sequence_parallel": True}
VARIABLE: Any = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}

TWO_RANKS = {
    "plain": Plan(Shape(), [1, 3, 4], PASSES, embedding=True),
    "full recompute, uniform": Plan(
        Shape(config=FULL | {"recompute_method": "uniform"}), [1, 2, 4], PASSES, embedding=True
    ),
    "full recompute, two layers a unit": Plan(
        Shape(config=FULL | {"recompute_method": "uniform", "recompute_num_layers": 2}),
        [1, 2, 3],
        PASSES,
    ),
    "full recompute, block": Plan(
        Shape(config=FULL | {"recompute_method": "block"}), [1, 2, 3], PASSES
    ),
    "selective recompute": Plan(
        Shape(config=SELECTIVE | {"recompute_modules": ["core_attn", "mlp"]}), [1, 2, 4], PASSES
    ),
    "interleaved": Plan(
        Shape(virtual=2, config=FULL | {"recompute_method": "uniform"}),
        [1, 2, 3],
        PASSES,
        embedding=True,
    ),
    "outputs deallocated, one slot": Plan(
        Shape(config={"deallocate_pipeline_outputs": True}), [1, 2, 3], PASSES, attach={"depth": 1}
    ),
    "variable lengths": Plan(
        Shape(config=VARIABLE),
        [1, 2],
        [Pass([8, 2, 6, 3]), Pass([4, 8, 1, 8, 5], seed=2)],
        embedding=True,
    ),
    "bfloat16, wrapped, copied": Plan(
        Shape(dtype=torch.bfloat16), [2, 3], PASSES, wrap="float16", attach={"copy": "always"}
    ),
    "residual of 32 bits": Plan(
        Shape(dtype=torch.bfloat16, config={"fp32_residual_connection": True}),
        [2, 3],
        PASSES,
        embedding=True,
        wrap="float16",
    ),
    "wrapped for data parallelism": Plan(Shape(), [1, 4], PASSES, wrap="ddp"),
    "multi-token prediction": Plan(
        Shape(config={"mtp_num_layers": 1}), [1, 2, 3, 4], PASSES, embedding=True
    ),
    "hybrid": Plan(Shape(pattern="*-|*-"), [1, 2, 3], PASSES, embedding=True),
    "hybrid, full recompute": Plan(
        Shape(pattern="*-|*-", config=FULL | {"recompute_method": "uniform"}), [1, 2, 4], PASSES
    ),
    "one stage, tensor parallel": Plan(
        Shape(pipeline=1, tensor=2), [1, 4], [*PASSES, Pass([8] * 4, forward_only=True)]
    ),
}

FOUR_RANKS = {
    "four stages": Plan(Shape(pipeline=4), [1, 2, 3, 4], PASSES, embedding=True),
    "four stages, one slot too few": Plan(
        Shape(pipeline=4), [1, 2, 3, 4], PASSES, attach={"depth": 3}
    ),
    "four stages, interleaved": Plan(
        Shape(pipeline=4, virtual=2, layers=8, config=FULL | {"recompute_method": "uniform"}),
        [1, 3, 5, 8],
        PASSES,
        embedding=True,
    ),
    "interleaved, one slot": Plan(
        Shape(pipeline=4, virtual=2, layers=8, config={"deallocate_pipeline_outputs": True}),
        [1, 3, 5, 8],
        PASSES,
        attach={"depth": 1},
    ),
    "a stage without layers": Plan(
        Shape(
            pipeline=4,
            config={
                "pipeline_model_parallel_layout": [
                    ["embedding", "decoder"],
                    ["decoder"] * 3,
                    [],
                    ["loss"],
                ]
            },
        ),
        [2, 4],
        PASSES,
        embedding=True,
    ),
    "tensor and sequence parallel": Plan(
        Shape(tensor=2, config=PARALLEL), [1, 2, 4], PASSES, embedding=True
    ),
    "tensor parallel": Plan(Shape(tensor=2), [1, 2, 4], PASSES, embedding=True),
    "tensor parallel, full recompute": Plan(
        Shape(tensor=2, config=PARALLEL | FULL | {"recompute_method": "uniform"}),
        [1, 2, 4],
        PASSES,
    ),
    "sequence parallel, shares": Plan(
        Shape(tensor=2, config=PARALLEL), [1, 2, 4], PASSES, attach={"layout": "share"}
    ),
    "tensor parallel, shares": Plan(Shape(tensor=2), [1, 2, 4], PASSES, attach={"layout": "share"}),
    "context parallel": Plan(Shape(context=2, pattern="--|--"), [1, 2, 4], PASSES, embedding=True),
    "data parallel": Plan(Shape(), [1, 2, 4], PASSES),
}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(crew: Crew, name: str) -> None:
    """Catches: a tap of a wrong layer, microbatch or pass."""
    plan = TWO_RANKS[name]
    check(plan, crew.run(2, train, plan))


def test_one_rank(crew: Crew) -> None:
    """Catches: the second embedding of a forward, that of multi-token prediction, pushed, too."""
    shape = Shape(pipeline=1, config={"mtp_num_layers": 1})
    plan = Plan(shape, [1, 4], PASSES, embedding=True)
    check(plan, crew.run(1, train, plan))


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(crew: Crew, name: str) -> None:
    """Catches: shares put together wrongly, peers of other coordinates, too little credit."""
    plan = FOUR_RANKS[name]
    check(plan, crew.run(4, train, plan))
