"""What training jobs set: one connection, lazy or eager loading, another allocator.

Which variables each environment sets stands in `environments`; here it is seen that they are in
force, and that what `test_order` shows in a plain environment holds in them.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.channel import Channel
from gpu.environments import environments
from gpu.pair import Pair, Peer, Role
from gpu.roles import BURST, WAYS, push_all_ways, push_burst, receive_all_ways, receive_burst

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
OTHERS = ["one connection", "eager"]


def _facts() -> dict[str, Any]:
    """Tell which environment this process really runs in."""
    torch.zeros(1, device="cuda")
    segments = torch.cuda.memory_snapshot()
    return {
        "variables": dict(os.environ),
        "expandable": any(segment.get("is_expandable", False) for segment in segments),
        "gpus": torch.cuda.device_count(),
    }


def _with_facts(peer: Peer, channel: Channel, role: Role) -> tuple[Any, dict[str, Any]]:
    return role(peer, channel), _facts()


def _check_in_force(name: str, consumer: dict[str, Any], producer: dict[str, Any]) -> None:
    for asked, found in zip(environments()[name], (consumer, producer), strict=True):
        seen = {variable: found["variables"].get(variable) for variable in asked}
        assert seen == dict(asked)
        assert found["expandable"] == (asked["PYTORCH_CUDA_ALLOC_CONF"] is not None)
        if "CUDA_VISIBLE_DEVICES" in asked:
            assert found["gpus"] == 1


@pytest.mark.parametrize("environment", OTHERS)
def test_push_behind_a_long_kernel(pair: Pair, tmp_path: Path, environment: str) -> None:
    """Catches streams that wait for each other where one connection serves them all, and more."""
    channel = Channel(tmp_path.as_uri(), depth=len(WAYS))
    consumer, producer = pair.run(
        partial(_with_facts, role=receive_all_ways),
        partial(_with_facts, role=push_all_ways),
        channel,
    )
    wrong, in_consumer = consumer
    returned_early, in_producer = producer
    assert wrong == [0] * 2 * len(WAYS)
    assert returned_early == [True] * 2 * len(WAYS)
    _check_in_force(environment, in_consumer, in_producer)


@pytest.mark.parametrize("environment", OTHERS)
def test_source_freed_while_it_is_copied(pair: Pair, tmp_path: Path) -> None:
    """Catches segments that the allocator unmaps under a copy."""
    channel = Channel(tmp_path.as_uri(), width=8192, rows=4096, depth=4)
    wrong, _ = pair.run(receive_burst, push_burst, channel)
    assert wrong == [0] * BURST
