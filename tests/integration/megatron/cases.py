"""Single cases, each run by all ranks of a small pipeline."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from integration.megatron.training import Draft, Recorder, policy_loss
from support.megatron_models import Shape, build, end_groups, run_schedule, start_groups
from tapchannel.errors import TapChannelError
from tapchannel.integrations.megatron import attach
from tapchannel.integrations.session import Session

Chunks = list[nn.Module]


def start(shape: Shape) -> Chunks:
    """Build this rank's part of the policy."""
    start_groups(shape)
    return build(shape)


def run_pass(
    shape: Shape, chunks: Chunks, session: Session, count: int, seed: int = 0, **options: Any
) -> dict[Any, Any]:
    """Run one step; give what the draft took, by pass, microbatch and tap."""
    taken: dict[Any, Any] = {}
    draft = Draft(session, 0, taken)
    loss = draft.loss if session.is_consumer else policy_loss
    with session.step(count):
        run_schedule(shape, chunks, [shape.length] * count, loss, seed=seed, **options)
    return taken


# ---- what cannot be served


def _set(name: str, value: object) -> Callable[[Chunks], Chunks]:
    def change(chunks: Chunks) -> Chunks:
        for chunk in chunks:
            setattr(chunk.config, name, value)
        return chunks

    return change


def _whole_embedding(chunks: Chunks) -> Chunks:
    chunk: Any = chunks[0]
    chunk.config.sequence_parallel = True
    chunk.embedding.scatter_to_sequence_parallel = False
    return chunks


UNSERVED: dict[str, Callable[[Chunks], Sequence[nn.Module]]] = {
    "full_iteration": _set("cuda_graph_impl", "full_iteration"),
    "local": _set("cuda_graph_impl", "local"),
    "transformer_engine": _set("cuda_graph_impl", "transformer_engine"),
    "overlap_moe_expert_parallel_comm": _set("overlap_moe_expert_parallel_comm", True),
    "hybrid_context_parallel": _set("hybrid_context_parallel", True),
    "without decoder.layers": lambda chunks: [nn.Linear(2, 2)],
    "leaves its rows whole": _whole_embedding,
}
BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "groups must hold": {"groups": {"features": ["layer1"]}},
    "layer99": {"layers": [1, 99]},
    "layer1, layer1": {"layers": [1, 1]},
    "a layer's number": {"layers": [0, 1]},
    "multi-module": {},
}


def refused(unserved: str) -> str:
    """Attach a pipeline whose first rank cannot be served; give what each rank is told."""
    chunks: Sequence[nn.Module] = start(Shape())
    if dist.get_rank() == 0:
        chunks = UNSERVED[unserved](list(chunks))
    said = _error_of(chunks, layers=[1, 4], embedding=True)
    end_groups()
    return said


def misused(argument: str) -> str:
    """Attach with a bad argument on all ranks; give what each rank is told."""
    chunks = start(Shape())
    arguments: dict[str, Any] = {"layers": [1, 4]} | BAD_ARGUMENTS[argument]
    if argument == "multi-module":
        groups: Any = importlib.import_module("megatron.core.process_groups_config")
        arguments["pp_group"] = groups.MultiModuleProcessGroupCollection(
            module_pgs={"llm": chunks[0].pg_collection}, language_model_module_name="llm"
        )
    said = _error_of(chunks, **arguments)
    end_groups()
    return said


def _error_of(chunks: Sequence[nn.Module], **arguments: Any) -> str:
    try:
        attach(list(chunks), max_rows=16, **arguments).close()
    except TapChannelError as error:
        return f"{type(error).__name__}: {error}"
    return "attached"


# ---- what attach does, and close undoes


def _hooks(chunks: Chunks) -> int:
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules)


def attach_twice() -> tuple[list[int], bool]:
    """Attach, close, attach again with the groups named; give the hooks, and whether taps came."""
    shape = Shape()
    chunks = start(shape)
    state: Any = importlib.import_module("megatron.core.parallel_state")
    hooks = [_hooks(chunks)]
    attach(chunks, [1, 4], max_rows=16, microbatches=4).close()
    hooks.append(_hooks(chunks))
    groups = {
        "pp_group": state.get_pipeline_model_parallel_group(),
        "tp_group": state.get_tensor_model_parallel_group(),
    }
    with attach(chunks[0], [1, 4], max_rows=16, **groups) as session:
        hooks.append(_hooks(chunks))
        taken = run_pass(shape, chunks, session, 4)
        came = not session.is_consumer or len(taken) == 8
    hooks.append(_hooks(chunks))
    end_groups()
    return hooks, came


def notes(copy: str) -> dict[str, object]:
    """Attach to a policy whose config says that activations are offloaded; give the info."""
    chunks = start(Shape())
    _set("fine_grained_activation_offloading", True)(chunks)
    with attach(chunks, [1, 4], max_rows=16, copy=copy) as session:
        info = session.info()
    end_groups()
    return info


def overwritten() -> bool:
    """Overwrite a tap behind torch's back once the next layer has read it: does the copy hold?"""
    shape = Shape()
    chunks = start(shape)
    recorder = Recorder(chunks)
    outputs: list[torch.Tensor] = []
    taken: dict[Any, Any] = {}
    with attach(chunks, [], True, max_rows=16, copy="always", depth=1) as session:
        if not session.is_consumer:
            model: Any = chunks[0]
            model.embedding.register_forward_hook(lambda *call: outputs.append(call[2]))
            model.decoder.layers[0].register_forward_hook(lambda *call: _spoil(outputs.pop()))
        with torch.no_grad():
            taken = run_pass(shape, chunks, session, 8, forward_only=True)
        dist.barrier()
    made = from_first_rank(recorder.record.made)
    end_groups()
    return bool(made) and all((rows == made[key]).all() for key, rows in taken.items())


def layer_in_loss() -> int:
    """Let the loss function run a tapped layer once more, as a draft may that shares it."""
    shape = Shape(pattern="*-|*-")
    chunks = start(shape)
    policy: Any = chunks[0]
    taken: dict[Any, Any] = {}
    with attach(chunks, [2, 4], max_rows=16) as session:
        draft = Draft(session, 0, taken)

        def loss(output: torch.Tensor) -> torch.Tensor:
            if session.is_consumer:
                policy.decoder.layers[-1](hidden_states=torch.zeros(8, 2, 16), attention_mask=None)
            return draft.loss(output) if session.is_consumer else policy_loss(output)

        with session.step(4):
            run_schedule(shape, chunks, [8] * 4, loss)
    end_groups()
    return len(taken)


def _spoil(output: torch.Tensor) -> None:
    output.data.fill_(torch.nan)


def from_first_rank(value: object) -> Any:
    """Give what the first rank has."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


# ---- how many microbatches


def ramp_up() -> tuple[str, list[int]]:
    """Leave the count to Megatron's calculator, once it is set up, while a batch ramps up."""
    shape = Shape()
    chunks = start(shape)
    calculator: Any = importlib.import_module("megatron.core.num_microbatches_calculator")
    taken: list[int] = []
    with attach(chunks, [1, 4], max_rows=16) as session:
        try:
            with session.step():
                said = "a step began"
        except TapChannelError as error:
            said = str(error)
        calculator.init_num_microbatches_calculator(
            rank=0,
            step_batch_size_schedule="0:4 12:8 36:12",
            micro_batch_size=2,
            data_parallel_size=1,
        )
        for samples in (0, 12, 36):
            calculator.update_num_microbatches(samples, verbose=False)
            count = calculator.get_num_microbatches()
            found: dict[Any, Any] = {}
            draft = Draft(session, 0, found)
            loss = draft.loss if session.is_consumer else policy_loss
            with session.step():
                run_schedule(shape, chunks, [8] * count, loss)
            taken.append(len(found) // 2)
        calculator.destroy_num_microbatches_calculator()
    end_groups()
    return said, taken
