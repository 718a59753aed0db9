"""Lets Megatron-Core run on CPU and gloo. For tests only, and nothing in Megatron is edited.

Megatron asks torch.cuda for its device, synchronises it, and forks its random state. Where there is
no CUDA device those calls get answers that fit the CPU; dropout must be 0. Where there is one,
nothing is changed, but `carry_over_gloo` may be called for stages that share it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
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
    # Megatron compiles what it fuses: that takes seconds, and processes of its own.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
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


class _Received:
    """A request of tensors that come by way of host memory."""

    def __init__(self, requests: list[Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._requests, self._pairs = requests, pairs

    def wait(self) -> None:
        """Wait until they are there."""
        for request in self._requests:
            request.wait()
        for tensor, on_host in self._pairs:
            tensor.data.copy_(on_host)


def carry_over_gloo() -> None:
    """Let gloo carry the stages' CUDA tensors: NCCL refuses two ranks on one GPU."""
    p2p: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    bare = p2p._batched_p2p_ops
    if bare.__name__ == "staged":
        return

    def staged(**arguments: Any) -> list[_Received]:
        tensors = {name: one for name, one in arguments.items() if isinstance(one, torch.Tensor)}
        on_host = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        requests = bare(**arguments | on_host)
        pairs = [(tensors[name], on_host[name]) for name in tensors if "recv" in name]
        return [_Received(requests, pairs)] if requests else []

    p2p._batched_p2p_ops = staged
