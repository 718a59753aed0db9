"""NeMo-RL's draft capture on a real Megatron pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

from integration.megatron.training import Bytes, Key, Pass, Plan, Recorder, bytes_of, policy_loss
from support.crew import Crew
from support.megatron_models import Shape, build, end_groups, run_schedule, start_groups
from tapchannel.integrations import nemo_rl

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

MASK = 61
PASSES = (Pass([8] * 6, seed=1), Pass([8] * 4, seed=2))
FULL: Any = {
    "recompute_granularity": "full",
    "recompute_num_layers": 1,
    "recompute_method": "uniform",
}
PLANS = {
    "recomputed": Plan(Shape(config=FULL), [1, 2, 4], PASSES, embedding=True),
    "interleaved": Plan(Shape(virtual=2), [1, 2, 3], PASSES, embedding=True),
    "sequence parallel": Plan(
        Shape(tensor=2, config={"sequence_parallel": True}), [2, 3], PASSES, embedding=True
    ),
}


class Capturing(nn.Module):
    """A chunk as NeMo-RL's forward step runs it."""

    def __init__(self, chunk: nn.Module, taps: nemo_rl.DraftCapture, found: list[Any]) -> None:
        super().__init__()
        self.module, self.taps, self.found = chunk, taps, found

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Capture one microbatch; keep what comes of it where the draft is."""
        with self.taps.capture():
            output = self.module(*inputs, **named)
        states = self.taps.get_captured_states()
        if states.hidden_states is not None and states.inputs_embeds is not None:
            assert states.inputs_embeds.shape == (8, 2, 16)
            views = (states.hidden_states, states.inputs_embeds, self.taps.mask_row[None])
            self.found.append([bytes_of(view) for view in views])
        return output


def run(plan: Plan) -> tuple[dict[Key, Bytes], list[list[list[Bytes]]], Bytes | None]:
    """Run the passes; give what hooks recorded, what each pass captured, and the mask's row."""
    start_groups(plan.shape)
    chunks = build(plan.shape)
    recorder = Recorder(chunks)
    ids = [number - 1 for number in plan.layers]
    captured: list[list[list[Bytes]]] = []
    with nemo_rl.register(chunks, ids, max_rows=plan.shape.rows, mask_token_id=MASK) as taps:
        for number, one in enumerate(plan.passes):
            recorder.number = number
            captured.append([])
            watched = [Capturing(chunk, taps, captured[-1]) for chunk in chunks]
            with taps.run_pass(len(one.lengths)):
                run_schedule(plan.shape, watched, one.lengths, policy_loss, seed=one.seed)
    row = mask_row(chunks[0], plan.shape)
    end_groups()
    return recorder.record.made, captured, row


def mask_row(chunk: Any, shape: Shape) -> Bytes | None:
    """Give the mask token's row where this rank has it."""
    if not chunk.pre_process:
        return None
    table = chunk.embedding.word_embeddings
    tensor_rank = dist.get_rank() % shape.tensor
    place = MASK - tensor_rank * table.weight.shape[0]
    return bytes_of(table.weight[place][None]) if 0 <= place < table.weight.shape[0] else None


@pytest.mark.parametrize("name", PLANS)
def test_capture_on_megatron(crew: Crew, name: str) -> None:
    """Catches: replays captured, another chunk's forward taken for the last one's, shards."""
    plan = PLANS[name]
    results = crew.run(plan.shape.ranks, run, plan)
    tensor = plan.shape.tensor
    made = [joined([seen for seen, _, _ in results[first::tensor]]) for first in range(tensor)]
    rows = [row for _, _, row in results if row is not None]
    assert len(rows) == 1
    drafts = [captured for _, captured, _ in results if any(captured)]
    assert len(drafts) == tensor
    for captured in drafts:
        assert [len(one) for one in captured] == [6, 4]
        for number, microbatches in enumerate(captured):
            for microbatch, (hidden, embeds, mask) in enumerate(microbatches):
                taps = [whole(made, number, microbatch, f"layer{n}") for n in plan.layers]
                assert np.array_equal(hidden, np.concatenate(taps, axis=1))
                assert np.array_equal(embeds, whole(made, number, microbatch, "embedding"))
                assert np.array_equal(mask, rows[0])


def joined(stages: list[dict[Key, Bytes]]) -> dict[Key, Bytes]:
    """Put together what the stages of one pipeline recorded."""
    return {key: rows for stage in stages for key, rows in stage.items()}


def whole(made: list[dict[Key, Bytes]], number: int, microbatch: int, tap: str) -> Bytes:
    """Give all rows of a tap: the tensor ranks' shards of the sequence, in order."""
    return np.concatenate([seen[number, microbatch, tap] for seen in made])
