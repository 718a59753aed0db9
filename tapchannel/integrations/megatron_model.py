"""What a rank's part of a Megatron-Core model holds: its layers, its widths, what cannot be served.

Nothing of Megatron is imported here: a chunk is read by the attributes that GPTModel and
HybridModel share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn

from ..errors import ConfigError
from ..keys import checked_int
from .wiring import TapShape

EMBEDDING: Final = "embedding"
MAX_LAYER: Final = 1 << 20
_WHOLE_EMBEDDING: Final = (
    "the embedding leaves its rows whole, where sequence parallelism scatters those of the layers"
)


@dataclass(frozen=True)
class Chunk:
    """One model chunk, its wrappers taken off."""

    model: nn.Module
    decoder: nn.Module
    layers: tuple[tuple[int, nn.Module], ...]  # by global layer number, from 1
    embedding: nn.Module | None  # on the first stage only

    @property
    def config(self) -> Any:
        """The TransformerConfig."""
        return self.model.config


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> tuple[list[Chunk], list[str]]:
    """Give this rank's chunks in order, and why some of them cannot be served."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ConfigError("no model chunk was given", next_step="pass this rank's list of chunks")
    chunks: list[Chunk] = []
    refused: list[str] = []
    for index, wrapped in enumerate(models):
        inner = _unwrapped(wrapped)
        if inner is None:
            refused.append(
                f"chunk {index} is a {type(wrapped).__name__} without decoder.layers: only a "
                "GPTModel or a HybridModel is served; of a multi-module pipeline, or of a model "
                "that holds one, pass the language model"
            )
        else:
            chunks.append(_read(inner))
    return chunks, refused


def _unwrapped(model: Any) -> Any:
    """Take off wrappers such as DDP and Float16Module; None if no decoder is below them."""
    while not isinstance(getattr(getattr(model, "decoder", None), "layers", None), nn.ModuleList):
        model = getattr(model, "module", None)
        if model is None:
            return None
    return model


def _read(model: Any) -> Chunk:
    # The layers of multi-token prediction are not among these: they count from 1 again.
    layers = cast("Iterable[Any]", model.decoder.layers)
    numbered = tuple((int(layer.layer_number), layer) for layer in layers)
    # The stage of multi-token prediction has an embedding of its own.
    embedding = model.embedding if model.pre_process else None
    return Chunk(model, model.decoder, numbered, embedding)


class Taps:
    """What was asked for: layers by their global numbers, the embedding, in which groups."""

    def __init__(
        self,
        layers: Sequence[int],
        embedding: bool,
        groups: Mapping[str, Sequence[str]] | None,
    ) -> None:
        numbers = [checked_int("a layer's number", number, 1, MAX_LAYER) for number in layers]
        self.layers = {number: f"layer{number}" for number in numbers}
        self.embedding = embedding
        self._asked = [f"layer{number}" for number in numbers] + [EMBEDDING] * embedding
        self.groups = self._default_groups() if groups is None else groups

    def _default_groups(self) -> dict[str, list[str]]:
        groups = {"features": list(self.layers.values())} if self.layers else {}
        return groups | ({EMBEDDING: [EMBEDDING]} if self.embedding else {})

    def refusals(self) -> list[str]:
        """Say if the groups do not hold just what was asked for."""
        held = [tap for taps in self.groups.values() for tap in taps]
        if sorted(self._asked) == sorted(held):
            return []
        return [f"groups must hold each of {', '.join(self._asked)} once, and nothing else"]

    def made_by(self, chunks: Iterable[Chunk]) -> dict[str, TapShape]:
        """Give the taps that these chunks make."""
        made: dict[str, TapShape] = {}
        for chunk in chunks:
            shape = _shape_of(chunk.config)
            if self.embedding and chunk.embedding is not None:
                made[EMBEDDING] = shape
            numbers = [number for number, _ in chunk.layers if number in self.layers]
            made.update({self.layers[number]: shape for number in numbers})
        return made


def refusals(chunks: Iterable[Chunk], embedding: bool) -> list[str]:
    """Say why these chunks cannot be served."""
    found: dict[str, None] = {}
    for chunk in chunks:
        found.update(dict.fromkeys(_refusals_of(chunk.config)))
        scattered = getattr(chunk.embedding, "scatter_to_sequence_parallel", True)
        if embedding and chunk.config.sequence_parallel and not scattered:
            found[_WHOLE_EMBEDDING] = None
    return list(found)


def _refusals_of(config: Any) -> list[str]:
    found: list[str] = []
    graphs = getattr(config, "cuda_graph_impl", "none")
    if graphs == "full_iteration":
        found.append(
            "cuda_graph_impl=full_iteration: a replay runs no Python, and would push every "
            "microbatch under the captured one's number"
        )
    elif graphs != "none":
        found.append(f"cuda_graph_impl={graphs}: a layer's replay calls no forward hook")
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        found.append(
            "overlap_moe_expert_parallel_comm: its schedule runs parts of layers, and calls "
            "neither the chunk's nor the layer's forward"
        )
    if getattr(config, "hybrid_context_parallel", False):
        found.append("hybrid_context_parallel: ranks share a microbatch's rows anew in every step")
    return found


def _shape_of(config: Any) -> TapShape:
    """Give the width and dtype of hidden states between layers."""
    if config.fp32_residual_connection:
        dtype = torch.float32
    elif config.bf16:
        dtype = torch.bfloat16
    else:
        dtype = torch.float16 if config.fp16 else config.params_dtype
    return TapShape(int(config.hidden_size), str(dtype).removeprefix("torch."))


def copy_reason(chunks: Iterable[Chunk]) -> str | None:
    """Say why a hidden state may be gone before its push has been copied; None: it stays."""
    for chunk in chunks:
        for name in ("fine_grained_activation_offloading", "cpu_offloading"):
            if getattr(chunk.config, name, False):
                return f"{name} frees a layer's input or output while the copy may still read it"
    return None


def device_of(models: Iterable[Chunk]) -> torch.device:
    """Give the device that the chunks compute on."""
    for chunk in models:
        for parameter in chunk.model.parameters():
            return parameter.device
    # A stage may have no parameters at all.
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
