"""One rank of a two-stage pipeline fails in the middle of a step; the next step is as any other."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from integration.megatron.cases import from_first_rank, run_pass, start
from integration.megatron.training import Recorder
from support.crew import PEER_LIMIT
from support.megatron_models import Shape, end_groups, start_groups
from tapchannel.integrations.megatron import attach
from tapchannel.integrations.session import Session

SHAPE = Shape()
FAILING = 3  # the microbatch's forward, counted from 1


def fail_and_go_on(failing: int, how: str) -> tuple[str, bool]:
    """Fail one rank in mid-step, make the process groups anew, and run the next step.

    Give what this rank saw, and whether the taps of the next step were right.
    """
    chunks = start(SHAPE)
    recorder = Recorder(chunks)
    session = attach(chunks, [1, 2, 4], True, max_rows=16)
    run_pass(SHAPE, chunks, session, 4)
    seen = _broken_pass(chunks, session, dist.get_rank() == failing, how)
    _make_groups_anew()
    recorder.record.made.clear()
    taken = run_pass(SHAPE, chunks, session, 4, seed=5)
    session.close()
    made = from_first_rank(recorder.record.made) | recorder.record.made
    right = all((rows == made[key]).all() for key, rows in taken.items())
    end_groups()
    return seen, right and len(taken) == (16 if session.is_consumer else 0)


def _broken_pass(chunks: list[nn.Module], session: Session, fails: bool, how: str) -> str:
    hooks = Trouble(chunks[0], how) if fails else Patience(chunks[0])
    try:
        run_pass(SHAPE, chunks, session, 6)
    except Exception as error:  # noqa: BLE001 - what it was is what the test is after
        return f"{type(error).__name__}: {error}"
    finally:
        hooks.handle.remove()
        if fails:
            _release_the_other()
    return "nothing"


class Trouble:
    """Fails in a microbatch's forward: by itself, or because it takes itself for another one."""

    def __init__(self, chunk: Any, how: str) -> None:
        self._layer: Any = chunk.decoder.layers[0]
        self._how, self._calls = how, 0
        self.handle = chunk.register_forward_pre_hook(self._act, prepend=True)

    def _act(self, *call: object) -> None:
        self._calls += 1
        if self._calls == FAILING and self._how == "exception":
            raise ValueError("this microbatch's forward failed")
        if self._calls == FAILING:
            self._layer.current_microbatch = 0


class Patience:
    """Holds the first stage, one microbatch later, until the other has failed.

    It would go on to wait for a gradient otherwise, which gloo does not end before its deadline.
    """

    def __init__(self, chunk: Any) -> None:
        self._calls = 0
        self.handle = chunk.register_forward_pre_hook(self._act, prepend=True)

    def _act(self, *call: object) -> None:
        self._calls += 1
        if self._calls == FAILING + 1 and dist.get_rank() == 0:
            _store().wait(["failed"], timedelta(seconds=15))


def _release_the_other() -> None:
    """Let the other rank come as far as its session."""
    if dist.get_rank() == 1:
        _store().set("failed", "")
        return
    # The last stage waits for the tensor that was not sent, and has a gradient to send.
    state: Any = importlib.import_module("megatron.core.parallel_state")
    group = state.get_pipeline_model_parallel_group()
    tensor = torch.zeros(SHAPE.length, SHAPE.batch, SHAPE.hidden)
    sent = dist.P2POp(dist.isend, tensor, 1, group=group)
    received = dist.P2POp(dist.irecv, torch.empty_like(tensor), 1, group=group)
    # Not waited for: it may have given up before it came so far.
    dist.batch_isend_irecv([sent, received])


def _make_groups_anew() -> None:
    """Do as a trainer would: messages of the broken step may still be under way."""
    end_groups()
    rank, store = dist.get_rank(), dist.PrefixStore("again", _store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PEER_LIMIT)
    start_groups(SHAPE)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
