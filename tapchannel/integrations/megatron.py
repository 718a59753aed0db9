"""Taps on a Megatron-Core pipeline: GPTModel and HybridModel, interleaved or not.

    session = attach(model_chunks, layers=[2, 16, 30], max_rows=seq_length * micro_batch_size)

    def loss_func(mask, output):                # runs on the last stage
        with session.take() as taps:            # this microbatch's
            draft_loss = draft(taps["features"], …)
        …

    with session.step():
        forward_backward_func(forward_step_func=…, model=model_chunks, …)

Nothing of Megatron is patched. Outside ``session.step()`` nothing is pushed: an evaluation that
shall have taps gets a step of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict

import torch.distributed as dist
from torch import nn

from ..errors import ConfigError, UsageError
from ..settings import checked_choice
from . import megatron_model
from .megatron_hooks import hook_up
from .megatron_model import Chunk, Taps
from .megatron_schedule import slots
from .opening import open_session
from .session import Session
from .wiring import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attach"]

# Without a backward, Megatron keeps a microbatch's graph, and by it the slot, into the next one.
LEAST_SLOTS: Final = 2


class ChannelOptions(TypedDict, total=False):
    """What a session's channels may be told, as `tapchannel.Mailbox` has it."""

    name: str
    timeout: float
    transport: str
    store: object
    secret: str | bytes | None
    listen: str | None


def attach(
    model: nn.Module | Sequence[nn.Module],
    layers: Sequence[int],
    embedding: bool = False,
    *,
    max_rows: int,
    groups: Mapping[str, Sequence[str]] | None = None,
    pp_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
    microbatches: int | Callable[[], int] | None = None,
    depth: int | None = None,
    copy: str = "auto",
    layout: str = "whole",
    **channel: Unpack[ChannelOptions],
) -> Session:
    """Tap the layers of a pipeline for a draft on its last stage.

    Every rank calls it, with the same arguments, once the model is on its device; wrapped (DDP,
    Float16Module) or not makes no difference. The session's `close` takes the hooks off again.

    Parameters
    ----------
    model
        This rank's model chunks, in order; or the one that it has.
    layers
        Global numbers of the layers whose outputs are tapped, from 1, as ``layer.layer_number``
        has them. Tap ``layer8`` is the output of layer 8. Multi-token prediction has no taps.
    embedding
        Tap the embedding's output, too, as ``embedding``.
    max_rows
        The most rows (tokens) of one whole microbatch: length / context-parallel ranks × batch.
        Tensor parallelism does not divide it.
    groups
        Name of each group -> its taps. By default ``features`` has the layers in the order given,
        and ``embedding`` the embedding.
    pp_group, tp_group
        The groups of this rank; by default those that the model was built with.
    microbatches
        Microbatches of a step: a number, or what to call for it. By default Megatron's own
        ``get_num_microbatches``, asked at every step: a batch ramp-up is followed.
    depth
        Slots. By default as many as the schedule runs ahead of the draft.
    copy
        ``"auto"``: taps are copied on the compute stream before they are pushed where the config
        says that Megatron may free them early (activation offload). ``"always"``, ``"never"``.
    layout
        ``"whole"``: each draft rank sees all rows of a microbatch. ``"share"``: its tensor-parallel
        share of them.
    channel
        ``name``, ``timeout``, ``transport``, ``store``, ``secret``, ``listen``, as
        `tapchannel.Mailbox` has them. The store is torch's own by default.

    Blocks:     until all ranks of the pipeline have called it and are connected.

    Raises:
        ConfigError: some rank cannot be served (the text says which and why), or a setting is
            impossible. It is raised on every rank.
    """
    checked_choice("copy", copy, ("auto", "always", "never"))
    chunks, refused = megatron_model.chunks_of(model)
    taps = Taps(layers, embedding, groups)
    reason = megatron_model.copy_reason(chunks)
    reach, rest = _split(channel)
    pipeline, tensor = groups_of(chunks, pp_group, tp_group)
    copied = copy == "always" or (copy == "auto" and reason is not None)
    sharded = any(chunk.config.sequence_parallel for chunk in chunks)
    session = open_session(
        Settings(taps.groups, max_rows, sharded, layout, copied, **rest),
        taps.made_by(chunks),
        pp_group=pipeline,
        tp_group=tensor,
        device=megatron_model.device_of(chunks),
        depth=depth,
        needs=_needs(chunks, pipeline, depth),
        microbatches=_ask_megatron if microbatches is None else microbatches,
        refusals=[*refused, *taps.refusals(), *megatron_model.refusals(chunks, embedding)],
        **reach,
    )
    hook_up(session, chunks, taps)
    if copy == "auto" and reason is not None:
        session.notes["copy_reason"] = reason
    return session


def _split(channel: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part what a rank has for itself from what all must have alike."""
    own = {name: value for name, value in channel.items() if name in ("store", "secret", "listen")}
    return own, {name: value for name, value in channel.items() if name not in own}


def groups_of(
    chunks: Sequence[Chunk],
    pp_group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup | None,
) -> tuple[Any, Any]:
    """Give the pipeline and the tensor group: those given, the model's, or Megatron's own."""
    held: Any = getattr(chunks[0].model, "pg_collection", None) if chunks else None
    if any(hasattr(group, "module_pgs") for group in (held, pp_group)):
        raise ConfigError(
            "a multi-module pipeline cannot be served: its stages run different models",
            next_step="give the language model and its own pp_group and tp_group",
        )
    pipeline = pp_group or getattr(held, "pp", None) or _global_group("pipeline")
    tensor = tp_group or getattr(held, "tp", None) or _global_group("tensor")
    return pipeline, tensor


def _global_group(kind: str) -> Any:
    state: Any = importlib.import_module("megatron.core.parallel_state")
    return getattr(state, f"get_{kind}_model_parallel_group")()


def _needs(chunks: Sequence[Chunk], pipeline: dist.ProcessGroup, depth: int | None) -> int | None:
    """Give the slots that this rank's schedule needs to run as it would without taps.

    None where the model is only like one of Megatron's, and its schedule some trainer's own.
    """
    if not chunks:
        return LEAST_SLOTS
    config = chunks[0].config
    if depth is not None and not hasattr(config, "virtual_pipeline_model_parallel_size"):
        return None
    virtual = config.virtual_pipeline_model_parallel_size
    interleaved = pipeline.size() > 1 and (len(chunks) > 1 or virtual is not None)
    group_size = config.microbatch_group_size_per_vp_stage or pipeline.size()
    return max(LEAST_SLOTS, slots(pipeline, len(chunks), interleaved, group_size))


def _ask_megatron() -> int:
    calculator: Any = importlib.import_module("megatron.core.num_microbatches_calculator")
    try:
        return int(calculator.get_num_microbatches())
    except AttributeError:  # there is no calculator
        raise UsageError(
            "how many microbatches this step has is not known: Megatron's calculator is not set up",
            next_step="give the number to session.step(), or give attach() microbatches",
        ) from None
