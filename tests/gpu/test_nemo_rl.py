"""NeMo-RL's draft capture between two processes on GPUs; the pipeline's own traffic left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu.pair import Pair, Peer
from support import nemo_worker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LAYERS = ((1, 2), (3, 4))
IDS = (0, 1, 2)
SHAPES = ((8, 2), (16, 1), (4, 3), (12, 2), (2, 2))  # more than there are slots
MAX_ROWS = 32
CONSUMER = "cuda:0"


@contextmanager
def _stage(folder: Path, number: int, device: str) -> Iterator[SimpleNamespace]:
    """Be a stage of a pipeline of two; gloo, since NCCL takes no GPU twice."""
    torch.cuda.set_device(device)
    meet = f"file://{folder}/ranks"
    dist.init_process_group("gloo", init_method=meet, rank=number, world_size=2)
    try:
        alone = [dist.new_group([rank]) for rank in range(2)]
        desk = SimpleNamespace(stage=number, tp_rank=0, tp_group=alone[number])
        desk.pp_group = dist.group.WORLD
        nemo_worker.set_up(desk, LAYERS)
        desk.policy.to(device)
        nemo_worker.register(desk, IDS, MAX_ROWS)
        with desk.taps:
            yield desk
            dist.barrier()  # the mailbox closes after the outbox
    finally:
        dist.destroy_process_group()


def _run_passes(desk: SimpleNamespace, device: str) -> list[Any]:
    """Run forwards as NeMo-RL's forward step does; return what each captured, as copies."""
    found: list[Any] = []
    for step in (1, 2):
        desk.records.seen.clear()
        found.clear()
        with desk.taps.run_pass(len(SHAPES), step=step):
            for length, batch in SHAPES:
                ids = torch.randint(nemo_worker.VOCABULARY, (batch, length), device=device)
                hidden = torch.rand(length, batch, nemo_worker.WIDTH, device=device)
                with desk.taps.capture():
                    desk.policy(ids, hidden)
                states = desk.taps.get_captured_states()
                if states.hidden_states is not None:
                    kept = (states.hidden_states, states.inputs_embeds, desk.taps.mask_row)
                    found.append([view.clone().cpu() for view in kept])
                    del states, kept
    torch.cuda.synchronize()
    return found


def _produce(peer: Peer, folder: Path, device: str) -> tuple[Any, torch.Tensor]:
    with _stage(folder, 0, device) as desk:
        _run_passes(desk, device)
        row = desk.policy.embedding.word_embeddings.weight[nemo_worker.MASK]
        seen = {name: [one.cpu() for one in made] for name, made in desk.records.seen.items()}
        return seen, row.detach().cpu()


def _consume(peer: Peer, folder: Path, producer: str) -> tuple[Any, Any, tuple[float, float]]:
    with _stage(folder, 1, CONSUMER) as desk:
        found = _run_passes(desk, CONSUMER)
        waited = desk.taps.pop_wait_seconds(), desk.taps.pop_wait_seconds()
        seen = {name: [one.cpu() for one in made] for name, made in desk.records.seen.items()}
        return found, seen, waited


def test_capture_between_gpus(pair: Pair, producer: str, tmp_path: Path) -> None:
    """Catches: a view of rows that have not landed, a mask row read too early, waits never read."""
    (found, own, waited), (made, row) = pair.run(_consume, _produce, tmp_path, producer)
    seen = made | own
    assert len(found) == len(SHAPES)
    for number, (hidden, embeds, mask) in enumerate(found):
        taps = [seen[f"layer{index + 1}"][number] for index in IDS]
        assert torch.equal(hidden, torch.cat(taps, dim=-1))
        assert torch.equal(embeds, made["embedding"][number])
        assert torch.equal(mask, row)
    assert waited[0] > 0.0
    assert waited[1] == 0.0
