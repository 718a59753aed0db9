"""Compute that runs beside the messages, as a stage's own kernels do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from .traffic import MIB

_MATRIX: Final = {"cpu": 384, "cuda": 8192}
_MEMORY: Final = {"cpu": 16 * MIB, "cuda": 1024 * MIB}
_TUNING: Final = 20


class Kernel:
    """A kernel of one kind on one device."""

    def __init__(self, kind: str, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._run = self._made(kind, device)

    def _made(self, kind: str, device: str) -> Callable[[], object]:
        of = "cuda" if self._on_gpu else "cpu"
        if kind == "matmul":
            dtype = torch.bfloat16 if self._on_gpu else torch.float32
            left = torch.randn(_MATRIX[of], _MATRIX[of], device=device).to(dtype)
            out = torch.empty_like(left)
            return lambda: torch.mm(left, left, out=out)
        source = torch.zeros(_MEMORY[of], dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    def enqueue(self, times: int = 1) -> None:
        """Run it; on a GPU, queue it."""
        for _ in range(times):
            self._run()

    def timed(self) -> Callable[[], float]:
        """Run it; the answer gives its milliseconds, once they are asked for."""
        if not self._on_gpu:
            began = time.perf_counter_ns()
            self._run()
            took = (time.perf_counter_ns() - began) / 1e6
            return lambda: took
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._run()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return elapsed


class Stage:
    """Computes for given milliseconds. On a GPU by matmuls; else it sleeps, as a host then does."""

    def __init__(self, device: str) -> None:
        self._kernel = Kernel("matmul", device) if device.startswith("cuda") else None
        self._one = self._tuned() if self._kernel is not None else 0.0

    def _tuned(self) -> float:
        kernel = self._kernel
        if kernel is None:
            return 0.0
        kernel.enqueue(3)
        torch.cuda.synchronize()
        began = time.perf_counter()
        kernel.enqueue(_TUNING)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3 / _TUNING

    def compute(self, milliseconds: float) -> None:
        """Compute; on a GPU, queue it."""
        if self._kernel is None:
            time.sleep(milliseconds / 1e3)
        else:
            self._kernel.enqueue(max(1, round(milliseconds / self._one)))

    def settle(self) -> None:
        """Wait until what was queued is done."""
        if self._kernel is not None:
            torch.cuda.current_stream().synchronize()
