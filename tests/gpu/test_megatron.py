"""Two stages of a real Megatron pipeline on one GPU, their p2p by gloo; a single connection.

Where Megatron-Core cannot be installed, unzip its wheel into a folder and put that on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu.pair import Pair, Peer
from integration.megatron.checks import check
from integration.megatron.training import Draft, Pass, Plan, Record, policy_loss, train, wrapped
from support.megatron_models import Shape, build, end_groups, run_schedule, start_groups
from support.megatron_shim import carry_over_gloo, import_megatron
from tapchannel.integrations.megatron import attach

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.megatron,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("environment", ["one connection"]),
]
LIMIT = 200.0  # with two cold imports of Megatron and Triton
LENGTH, BATCH, HIDDEN = 128, 2, 256
SIZE: Any = {"length": LENGTH, "batch": BATCH, "hidden": HIDDEN, "dtype": torch.bfloat16}
PASSES = (
    Pass([LENGTH] * 6, seed=1),
    Pass([LENGTH] * 4, seed=2, forward_only=True, tapped=False),
    Pass([LENGTH] * 8, seed=3, forward_only=True, gradients=False),
    Pass([LENGTH] * 8, seed=4),
)
FULL: Any = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PLANS = {
    "plain": Plan(Shape(**SIZE), [1, 2, 4], PASSES, embedding=True, wrap="float16"),
    "interleaved, full recompute, deallocated outputs": Plan(
        Shape(virtual=2, config=FULL | {"deallocate_pipeline_outputs": True}, **SIZE),
        [1, 2, 3],
        PASSES,
        embedding=True,
        wrap="float16",
    ),
    "copied": Plan(Shape(**SIZE), [1, 2, 4], PASSES, wrap="float16", attach={"copy": "always"}),
    "one slot too few": Plan(
        Shape(**SIZE), [1, 2, 4], PASSES[-1:], wrap="float16", attach={"depth": 1}
    ),
}


@contextmanager
def stage(peer: Peer, rank: int) -> Iterator[None]:
    """Be a stage: the consumer's process is the last one."""
    torch.cuda.set_device(0)
    import_megatron()
    carry_over_gloo()
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        peer.tell("port", store.port)
    else:
        store = dist.TCPStore("127.0.0.1", peer.wait("port", 120.0), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
        dist.barrier()
    finally:
        torch.use_deterministic_algorithms(before)
        dist.destroy_process_group()


def _train_last(peer: Peer, plan: Plan) -> Record:
    with stage(peer, 1):
        return train(plan)


def _train_first(peer: Peer, plan: Plan) -> Record:
    with stage(peer, 0):
        return train(plan)


@pytest.mark.parametrize("name", PLANS)
def test_every_tap_arrives_bit_for_bit(pair: Pair, name: str) -> None:
    """Catches: a tap read too late or too early, and a policy that feels its taps."""
    plan = PLANS[name]
    last, first = pair.run(_train_last, _train_first, plan, limit=LIMIT)
    check(plan, [first, last])


def _watched(peer: Peer, rank: int) -> int:
    """Train while torch turns each synchronisation within a hook into an error."""
    shape = Shape(**SIZE)
    with stage(peer, rank):
        start_groups(shape)
        [chunk] = wrapped(build(shape), "float16")
        model: Any = chunk.module
        tapped = ([model.embedding] if rank == 0 else []) + list(model.decoder.layers)
        calls: list[int] = []

        def watch(*call: object) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def relax(*call: object) -> None:
            torch.cuda.set_sync_debug_mode("default")
            calls.append(1)

        for module in tapped:
            module.register_forward_hook(watch)
        with attach(chunk, [1, 2, 3, 4], True, max_rows=shape.rows) as session:
            for module in tapped:
                module.register_forward_hook(relax)
            draft = Draft(session, 0, {})
            with session.step(4):
                loss = draft.loss if session.is_consumer else policy_loss
                run_schedule(shape, [chunk], [LENGTH] * 4, loss)
        end_groups()
    return len(calls)


def _watched_last(peer: Peer) -> int:
    return _watched(peer, 1)


def _watched_first(peer: Peer) -> int:
    return _watched(peer, 0)


def test_hooks_do_not_wait_for_the_device(pair: Pair) -> None:
    """Catches: a hook that synchronises the host with the device."""
    last, first = pair.run(_watched_last, _watched_first, limit=LIMIT)
    assert (first, last) == (4 * 3, 4 * 2)
