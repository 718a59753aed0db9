"""How long the draft's stage stood still for its taps, measured without making it wait."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch


class Waits:
    """A sum of seconds: of the host on a CPU; of the current stream on a GPU, read later."""

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self) -> Generator[None, None, None]:
        """Add what the block waits, or what it makes the stream wait.

        Blocks:     never by itself: a GPU records two events.
        """
        if not self._on_gpu:
            began = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - began
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        try:
            yield
        finally:
            after.record()
            self._pending.append((before, after))

    def pop(self) -> float:
        """Give the sum since the last call, and begin anew.

        Blocks:     never. What the GPU has not come to yet is in the next call's sum.
        """
        seconds, self._seconds = self._seconds, 0.0
        while self._pending and self._pending[0][1].query():
            before, after = self._pending.pop(0)
            seconds += before.elapsed_time(after) / 1000
        return seconds
