"""What must hold of every training run, whatever its shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from integration.megatron.training import Bytes, Key, Plan, Record


def expected(plan: Plan, records: Sequence[Record]) -> dict[Key, Bytes]:
    """Put together what the layers put out: whole microbatches, from the tensor ranks' shares."""
    names = [f"layer{number}" for number in plan.layers] + ["embedding"] * plan.embedding
    passes = [number for number, one in enumerate(plan.passes) if one.tapped]
    parts: dict[Key, dict[int, Bytes]] = {}
    for record in records:
        for key, rows in record.made.items():
            if key[0] in passes and key[2] in names:
                parts.setdefault(key, {})[record.tensor_rank] = rows
    sharded = plan.shape.config.get("sequence_parallel", False)
    ranks = range(plan.shape.tensor if sharded else 1)
    return {key: np.concatenate([shares[rank] for rank in ranks]) for key, shares in parts.items()}


def check(plan: Plan, records: Sequence[Record]) -> None:
    """Compare one replica's records."""
    wanted = expected(plan, records)
    microbatches = sum(len(one.lengths) for one in plan.passes if one.tapped)
    taps = len(plan.layers) + plan.embedding
    assert len(wanted) == microbatches * taps
    consumers = [record for record in records if record.is_consumer]
    assert len(consumers) == plan.shape.tensor
    for record in consumers:
        assert record.taken.keys() == wanted.keys()
        for key, rows in record.taken.items():
            assert np.array_equal(rows, wanted[key]), key
        # Once a pass, microbatch, tap and tensor rank; no replay, no evaluation.
        assert record.messages == microbatches * taps * plan.shape.tensor
        assert record.bytes == sum(rows.nbytes for rows in wanted.values())
        assert all(
            len(losses) == len(one.lengths)
            for losses, one in zip(record.losses, plan.passes, strict=True)
        )
    assert all(record.same_losses for record in records)
    assert all(record.same_gradients for record in records)
