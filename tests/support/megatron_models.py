"""Small models of Megatron-Core, for CPU and for CUDA, and the schedule that trains them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from support.megatron_shim import import_megatron, on_this_device

VOCABULARY = 64
LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a policy is split and run."""

    pipeline: int = 2
    virtual: int | None = None
    tensor: int = 1
    context: int = 1
    layers: int = LAYERS
    hidden: int = 16
    length: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.float32
    pattern: str | None = None  # of a HybridModel; None makes a GPTModel
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Return the size of one replica."""
        return self.pipeline * self.tensor * self.context

    @property
    def rows(self) -> int:
        """Return the rows of one whole microbatch."""
        return self.length // self.context * self.batch

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the TransformerConfig."""
        given = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": 2 * self.hidden,
            "num_attention_heads": 4,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            "use_cpu_initialization": not torch.cuda.is_available(),
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual,
            "context_parallel_size": self.context,
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "bf16": self.dtype is torch.bfloat16,
        }
        return given | self.config


def start_groups(shape: Shape) -> None:
    """Let Megatron make its process groups; the default group stands already."""
    import_megatron()
    state: Any = importlib.import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor,
        pipeline_model_parallel_size=shape.pipeline,
        virtual_pipeline_model_parallel_size=shape.virtual,
        context_parallel_size=shape.context,
    )
    if torch.cuda.is_available():
        random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
        random.model_parallel_cuda_manual_seed(1)


def end_groups() -> None:
    """Undo `start_groups`."""
    state: Any = importlib.import_module("megatron.core.parallel_state")
    state.destroy_model_parallel()


class Norm(torch.nn.LayerNorm):
    """A layer norm that Megatron takes with sequence parallelism, too, where its own refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **others: object) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm a residual that may be wider than the weights."""
        return super().forward(hidden.to(self.weight.dtype))


def build(shape: Shape) -> list[torch.nn.Module]:
    """Build this rank's chunks; a rank's weights depend on nothing but its place."""
    config_type: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    state: Any = importlib.import_module("megatron.core.parallel_state")
    config = config_type.TransformerConfig(**shape.settings())
    make = _gpt if shape.pattern is None else _hybrid
    rank, last = state.get_pipeline_model_parallel_rank(), shape.pipeline - 1
    chunks: list[torch.nn.Module] = []
    for number in range(shape.virtual or 1):
        torch.manual_seed(100 * rank + number)
        first = rank == 0 and number == 0
        final = rank == last and number == (shape.virtual or 1) - 1
        stage = number if shape.virtual else None
        chunk = make(shape, config, pre_process=first, post_process=final, vp_stage=stage)
        chunks.append(chunk.cuda() if torch.cuda.is_available() else chunk)
    return chunks


def _layer_parts() -> Any:
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    parts = specs.get_gpt_layer_local_submodules()
    return dataclasses.replace(parts, input_layernorm=Norm, pre_mlp_layernorm=Norm)


def _gpt(shape: Shape, config: Any, **place: Any) -> Any:
    gpt: Any = importlib.import_module("megatron.core.models.gpt")
    block: Any = importlib.import_module("megatron.core.transformer.transformer_block")
    layer: Any = importlib.import_module("megatron.core.transformer.transformer_layer")
    spec: Any = importlib.import_module("megatron.core.transformer.spec_utils")
    block.LayerNormImpl = Norm
    one = spec.ModuleSpec(module=layer.TransformerLayer, submodules=_layer_parts())
    if config.mtp_num_layers:
        specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        place["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(
            config, one, use_transformer_engine=False, vp_stage=place["vp_stage"]
        )
    most = max(64, shape.length)
    return gpt.GPTModel(config, one, VOCABULARY, most, position_embedding_type="rope", **place)


def _hybrid(shape: Shape, config: Any, **place: Any) -> Any:
    model: Any = importlib.import_module("megatron.core.models.hybrid.hybrid_model")
    block: Any = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    layer: Any = importlib.import_module("megatron.core.transformer.transformer_layer")
    mlp: Any = importlib.import_module("megatron.core.ssm.mlp_layer")
    bda: Any = importlib.import_module("megatron.core.fusions.fused_bias_dropout")
    spec: Any = importlib.import_module("megatron.core.transformer.spec_utils")
    parts = _layer_parts()
    attention = layer.TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=parts.self_attention,
        self_attn_bda=bda.get_bias_dropout_add,
    )
    dense = layer.TransformerLayerSubmodules(
        pre_mlp_layernorm=Norm, mlp=parts.mlp, mlp_bda=bda.get_bias_dropout_add
    )
    stack = spec.ModuleSpec(
        module=block.HybridStack,
        params={"post_layer_norm": False},
        submodules=block.HybridStackSubmodules(
            attention_layer=spec.ModuleSpec(module=layer.TransformerLayer, submodules=attention),
            mlp_layer=spec.ModuleSpec(module=mlp.MLPLayer, submodules=dense),
        ),
    )
    return model.HybridModel(
        config, stack, VOCABULARY, 64, hybrid_layer_pattern=shape.pattern, **place
    )


# What a loss function is given: the microbatch's number and the policy's losses, token by token.
Loss = Callable[[torch.Tensor], torch.Tensor]


def run_schedule(
    shape: Shape,
    chunks: Sequence[torch.nn.Module],
    lengths: Sequence[int],
    loss: Loss,
    *,
    seed: int = 0,
    forward_only: bool = False,
) -> list[float]:
    """Run one forward_backward call over microbatches of these lengths; return the losses."""
    schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    random = torch.Generator().manual_seed(seed)
    tokens = [
        torch.randint(VOCABULARY, (shape.batch, length), generator=random) for length in lengths
    ]
    data = [iter(tokens) for _ in chunks]

    def forward_step(iterator: Any, model: Any) -> Any:
        ids = next(iterator).to("cuda" if torch.cuda.is_available() else "cpu")
        length = ids.shape[1] // shape.context
        ids = ids[:, :length]
        places = torch.arange(length, device=ids.device).expand(len(ids), length)
        later = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        output = model(ids, places, later[None, None], labels=ids)

        def reduce(output: torch.Tensor) -> Any:
            value = loss(output)
            return value, {"loss": value.detach().clone()}

        return output, reduce

    run = schedules.get_forward_backward_func()
    with on_this_device():
        found = run(
            forward_step_func=forward_step,
            data_iterator=data if shape.virtual else data[0],
            model=list(chunks) if shape.virtual else chunks[0],
            num_microbatches=len(lengths),
            seq_length=shape.length,
            micro_batch_size=shape.batch,
            forward_only=forward_only,
        )
    return [float(one["loss"]) for one in found]
