"""What must hold of every training run, whatever its shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from integration.megatron.training import Bytes, Key, Plan, Record


def expected(plan: Plan, records: Sequence[Record], tensor_rank: int) -> dict[Key, Bytes]:
    """Put together what a replica's draft rank must get, from what its layers put out."""
    names = [f"layer{number}" for number in plan.layers] + ["embedding"] * plan.embedding
    passes = [number for number, one in enumerate(plan.passes) if one.tapped]
    parts: dict[Key, list[Bytes]] = {}
    for record in sorted(records, key=lambda record: record.tensor_rank):
        for key, rows in record.made.items():
            if key[0] in passes and key[2] in names:
                parts.setdefault(key, []).append(rows)
    return {key: _seen(plan, shares, tensor_rank) for key, shares in parts.items()}


def _seen(plan: Plan, shares: list[Bytes], tensor_rank: int) -> Bytes:
    sharded = plan.shape.config.get("sequence_parallel", False)
    if plan.attach.get("layout") == "share":
        shares = shares if sharded else np.split(shares[0], plan.shape.tensor)
        return shares[tensor_rank]
    return np.concatenate(shares) if sharded else shares[0]


def check(plan: Plan, records: Sequence[Record]) -> None:
    """Compare what each replica's layers put out with what its draft stage took."""
    replicas = {record.replica for record in records}
    assert len(replicas) == len(records) // (plan.shape.pipeline * plan.shape.tensor)
    for replica in replicas:
        _check_replica(plan, [record for record in records if record.replica == replica])
    assert all(record.same_losses for record in records)
    assert all(record.same_gradients for record in records)
    assert any(record.gradients for record in records)


def _check_replica(plan: Plan, records: Sequence[Record]) -> None:
    lengths = [len(one.lengths) for one in plan.passes]
    keys = sum(count for count, one in zip(lengths, plan.passes, strict=True) if one.tapped)
    keys *= len(plan.layers) + plan.embedding
    consumers = [record for record in records if record.is_consumer]
    assert len(consumers) == plan.shape.tensor
    shares = 1 if plan.attach.get("layout") == "share" else plan.shape.tensor
    for record in consumers:
        wanted = expected(plan, records, record.tensor_rank)
        assert len(wanted) == keys
        assert record.taken.keys() == wanted.keys()
        for key, rows in record.taken.items():
            assert np.array_equal(rows, wanted[key]), key
        # Once for each key and tensor rank: no replay, no evaluation. Each row once in all.
        assert record.messages == keys * shares
        assert record.bytes == sum(rows.nbytes for rows in wanted.values())
        assert [len(losses) for losses in record.losses] == lengths
