"""Trains a policy without and with taps, in one rank of a pipeline, and records both."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from support.megatron_models import Shape, build, end_groups, run_schedule, start_groups
from tapchannel.integrations.megatron import attach
from tapchannel.integrations.session import Session

Key = tuple[int, int, str]  # pass, microbatch, tap
Bytes = np.ndarray[Any, Any]  # [rows, bytes of a row]


@dataclass(frozen=True)
class Pass:
    """One forward_backward call."""

    lengths: Sequence[int]
    forward_only: bool = False
    gradients: bool = True
    tapped: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """A policy, its taps and its passes."""

    shape: Shape
    layers: Sequence[int]
    passes: Sequence[Pass]
    embedding: bool = False
    attach: Mapping[str, Any] = field(default_factory=dict)
    wrap: str | None = None


@dataclass
class Record:
    """What one rank saw."""

    made: dict[Key, Bytes] = field(default_factory=dict)
    taken: dict[Key, Bytes] = field(default_factory=dict)
    fires: int = 0  # calls of the recorder's hooks: replays included
    same_losses: bool = False
    same_gradients: bool = False
    losses: list[list[float]] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    depth: int = 0
    is_consumer: bool = False
    tensor_rank: int = 0
    replica: tuple[int, int] = (0, 0)  # data and context coordinates
    gradients: int = 0


def bytes_of(hidden: torch.Tensor) -> Bytes:
    """Copy rows as bytes; Megatron changes how torch pickles tensors, so none may leave a rank."""
    rows = hidden.detach().flatten(0, -2).contiguous()
    return rows.view(torch.uint8).cpu().numpy().copy()


class Recorder:
    """Hooks of its own on the layers: what each put out, the first time for its microbatch.

    A replay comes after its forward, whatever microbatch it takes itself for.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.record, self.number = Record(), 0
        for chunk in chunks:
            inner: Any = chunk
            while hasattr(inner, "module"):
                inner = inner.module
            for layer in inner.decoder.layers:
                self._watch(layer, layer, f"layer{layer.layer_number}")
            if inner.pre_process:
                self._watch(inner.embedding, inner.decoder.layers[0], "embedding")

    def _watch(self, module: nn.Module, layer: Any, name: str) -> None:
        def keep(module: nn.Module, arguments: object, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self.record.fires += 1
            key = (self.number, layer.current_microbatch, name)
            if key not in self.record.made:
                self.record.made[key] = bytes_of(hidden)

        module.register_forward_hook(keep)


def wrapped(chunks: list[nn.Module], how: str) -> list[nn.Module]:
    """Wrap the chunks as Megatron's trainer does."""
    if how == "float16":
        module: Any = importlib.import_module("megatron.core.transformer.module")
        return [module.Float16Module(chunk.config, chunk) for chunk in chunks]
    ddp: Any = importlib.import_module("megatron.core.distributed")
    settings = ddp.DistributedDataParallelConfig()
    return [ddp.DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]


def train(plan: Plan) -> Record:
    """Run all passes without taps, then again with them."""
    start_groups(plan.shape)
    chunks = build(plan.shape)
    if plan.wrap is not None:
        chunks = wrapped(chunks, plan.wrap)
    plain, gradients = _passes(plan, chunks, None, None)
    recorder = Recorder(chunks)
    with attach(
        chunks,
        plan.layers,
        plan.embedding,
        **{"max_rows": plan.shape.rows, "microbatches": 1} | dict(plan.attach),
    ) as session:
        record = recorder.record
        record.losses, tapped = _passes(plan, chunks, session, recorder)
        record.same_losses = record.losses == plain
        record.same_gradients = all(map(torch.equal, gradients, tapped))
        record.gradients = len(tapped)
        record.depth, record.is_consumer = session.depth, session.is_consumer
        if session.mailbox is not None:
            lanes: Any = session.mailbox.info()["lanes"]
            record.messages = sum(lane["messages"] for lane in lanes)
            record.bytes = sum(lane["bytes"] for lane in lanes)
    state: Any = importlib.import_module("megatron.core.parallel_state")
    record.tensor_rank = state.get_tensor_model_parallel_rank()
    record.replica = state.get_data_parallel_rank(), state.get_context_parallel_rank()
    end_groups()
    return record


def _passes(
    plan: Plan, chunks: Sequence[nn.Module], session: Session | None, recorder: Recorder | None
) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Run the passes; return the losses, and the gradients that all passes add up to."""
    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
        if plan.wrap == "ddp":
            chunk.zero_grad_buffer()
    losses = [
        _one_pass(plan, one, number, chunks, session, recorder)
        for number, one in enumerate(plan.passes)
    ]
    parameters: Any = [parameter for chunk in chunks for parameter in chunk.parameters()]
    gradients = [one.main_grad if plan.wrap == "ddp" else one.grad for one in parameters]
    return losses, [gradient.clone() for gradient in gradients if gradient is not None]


def _one_pass(
    plan: Plan,
    one: Pass,
    number: int,
    chunks: Sequence[nn.Module],
    session: Session | None,
    recorder: Recorder | None,
) -> list[float]:
    draft = Draft(session, number, recorder.record.taken) if session and recorder else None
    if recorder is not None:
        recorder.number = number
    for chunk in chunks:
        chunk.train(not one.forward_only)
    run = plan.shape, chunks, one.lengths
    options: Any = {"seed": one.seed, "forward_only": one.forward_only}
    with torch.set_grad_enabled(one.gradients):
        if session is None or draft is None or not one.tapped:
            return run_schedule(*run, policy_loss, **options)
        with session.step(len(one.lengths)):
            return run_schedule(*run, draft.loss if session.is_consumer else policy_loss, **options)


def policy_loss(output: torch.Tensor) -> torch.Tensor:
    """Give the policy's loss."""
    return output.float().mean()


class Draft:
    """A draft that trains on each microbatch's taps, inside the policy's own backward."""

    def __init__(self, session: Session, number: int, taken: dict[Key, Bytes]) -> None:
        self._session, self._number, self._taken = session, number, taken
        self._seen = 0

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """Give the policy's loss, the draft's added to what backward starts from."""
        policy = policy_loss(output)
        with self._session.take() as taps:
            assert taps.key.microbatch == self._seen
            self._seen += 1
            for tap in self._session.plan.taps:
                self._taken[self._number, taps.key.microbatch, tap.name] = bytes_of(taps[tap.name])
            features = taps[self._session.plan.groups[0].name]
            weight = torch.ones(features.shape[1], 1, dtype=features.dtype, device=features.device)
            draft = (features @ weight.requires_grad_()).float().square().mean()
        return policy + (draft - draft.detach())  # the same value, and both gradients
