"""Lets Megatron-Core run on CPU and gloo. For tests only, and nothing in Megatron is edited.

Megatron asks torch.cuda for its device, synchronises it, and forks its random state. Where there is
no CUDA device those calls get answers that fit the CPU; dropout must be 0. Where there is one,
nothing is changed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# The one module of Megatron-Core 0.19 that imports Triton as a matter of course.
NEEDS_TRITON = "megatron.core.transformer.moe.ops.paged_stash"
KERNELS = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")


def import_megatron() -> None:
    """Import Megatron-Core, quietly; with stand-ins for CUDA if there is none."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron|torch")
    if importlib.util.find_spec("triton") is None:
        stub = types.ModuleType(NEEDS_TRITON)
        stub.__dict__.update(dict.fromkeys(KERNELS))
        sys.modules[NEEDS_TRITON] = stub
    if not torch.cuda.is_available():
        _answer_for_cuda()
    importlib.import_module("megatron.core.pipeline_parallel.schedules")
    if not torch.cuda.is_available():
        _fork_nothing()


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what is asked for on a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def on_this_device() -> contextlib.AbstractContextManager[object]:
    """Give the context that a schedule runs in."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _OnCpu()


def _answer_for_cuda() -> None:
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.random.get_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)


def _fork_nothing() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")

    class Tracker(random.CudaRNGStatesTracker):
        """A tracker of random states whose forks change nothing."""

        def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
            """Go on with the state that there is."""
            return contextlib.nullcontext()

    random._CUDA_RNG_STATE_TRACKER = Tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._set_cuda_rng_state = lambda *args, **kwargs: None
