"""The tapped modules among a rank's stages, and what shape their outputs have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar, cast

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from .wiring import TapShape

# A module by its name in its stage, or (stage index, name) where several stages have the name.
Place: TypeAlias = "str | tuple[int, str]"
DType: TypeAlias = "torch.dtype | str"

_T = TypeVar("_T")
# The attributes by which a module says how wide its output is: Linear, Embedding, norms.
_WIDTHS: Final = ("out_features", "embedding_dim", "normalized_shape")


@dataclass(frozen=True)
class Tapped:
    """A module whose output is a tap, and the index of its stage."""

    stage: int
    module: nn.Module
    shape: TapShape


def find(
    stages: Sequence[PipelineStage],
    taps: Mapping[Place, str],
    width: int | Mapping[str, int] | None,
    dtype: DType | Mapping[str, DType] | None,
) -> tuple[dict[str, Tapped], list[str]]:
    """Give the taps that these stages make, and what is wrong with any, in words."""
    found: dict[str, Tapped] = {}
    wrong: list[str] = []
    for place, tap in taps.items():
        where = [(s, module) for s in stages if (module := _module_at(s, place)) is not None]
        if len(where) > 1 or (where and tap in found):
            indices = ", ".join(str(s.stage_index) for s, _ in where)
            wrong.append(
                f"tap {tap!r} would be module {place!r} of stages {indices} at once: "
                f"say which by (stage index, name), each with a tap name of its own"
            )
        elif where:
            [(stage, module)] = where
            shape = _shape(stage, module, _chosen(width, tap), _chosen(dtype, tap))
            if isinstance(shape, TapShape):
                found[tap] = Tapped(stage.stage_index, module, shape)
            else:
                wrong.append(f"tap {tap!r}, module {place!r}: {shape}")
    return found, wrong


def _module_at(stage: PipelineStage, place: Place) -> nn.Module | None:
    """Give the module of this name in a stage, None where it has none or is not the one meant."""
    index, name = (stage.stage_index, place) if isinstance(place, str) else place
    if index != stage.stage_index:
        return None
    root: nn.Module = stage.submod
    if isinstance(root, DistributedDataParallel):
        root = cast("nn.Module", root.module)
    try:
        return root.get_submodule(name)
    except AttributeError:  # also where another stage's layer is None here
        return None


def _chosen(setting: _T | Mapping[str, _T] | None, tap: str) -> _T | None:
    if isinstance(setting, Mapping):
        return cast("Mapping[str, _T]", setting).get(tap)
    return setting


def _shape(
    stage: PipelineStage, module: nn.Module, width: int | None, dtype: DType | None
) -> TapShape | str:
    """Give a tap's shape, or say why it is not known."""
    width = _width_of(module) if width is None else width
    if width is None:
        return f"a {type(module).__name__} does not say how wide its output is: pass width="
    dtype = (_dtype_of(module) or _dtype_of(stage.submod)) if dtype is None else dtype
    if dtype is None:
        return "there are no parameters to read its dtype from: pass dtype="
    return TapShape(width, str(dtype).removeprefix("torch."))


def _width_of(module: nn.Module) -> int | None:
    for name in _WIDTHS:
        value = getattr(module, name, None)
        if isinstance(value, tuple | list) and value:
            value = cast("object", value[-1])
        if isinstance(value, int):
            return value
    return None


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    dtypes = (weight.dtype for weight in module.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)
