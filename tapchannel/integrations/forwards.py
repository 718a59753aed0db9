"""Which forward is running: only a chunk's real forward, inside a pass, may push."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import UsageError


def in_backward() -> bool:
    """Tell whether autograd is running a backward on this thread: then a forward is a replay."""
    ask = getattr(torch._C, "_current_graph_task_id", None)  # pyright: ignore[reportPrivateUsage]
    return ask is not None and ask() != -1


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward: the chunk, and its microbatch of the pass."""

    chunk: int
    microbatch: int


class Forwards:
    """Counts each chunk's forwards in a pass, and is armed while one of them runs.

    A replay of activation recompute enters below the chunk, or inside a backward: neither arms.
    """

    def __init__(self) -> None:
        self._microbatches = 0
        self._counts: dict[int, int] = {}
        self.running: Forward | None = None

    def begin(self, microbatches: int) -> None:
        """Begin a pass."""
        self._microbatches, self._counts, self.running = microbatches, {}, None

    def end(self) -> None:
        """End the pass: nothing arms until the next one."""
        self._microbatches, self.running = 0, None

    @property
    def open(self) -> bool:
        """Whether a pass is open."""
        return self._microbatches > 0

    def enter(self, chunk: int, said: int | None) -> None:
        """Arm for the chunk's next microbatch.

        Raises:
            UsageError: the pass has no more, or ``said`` names another one.
        """
        if not self.open or in_backward():
            return
        count = self._counts.get(chunk, 0)
        if count >= self._microbatches:
            raise UsageError(
                f"chunk {chunk} was forwarded more often than the pass has microbatches",
                expected=f"{self._microbatches} forwards",
                next_step="open one step() for each forward-backward call, and give it the number "
                "of microbatches of that call",
            )
        if said is not None and said != count:
            raise UsageError(
                f"chunk {chunk} is forwarded out of order",
                seen=f"microbatch {said}",
                expected=f"microbatch {count}, by the forwards counted in this pass",
                next_step="open one step() for each forward-backward call",
            )
        self._counts[chunk] = count + 1
        self.running = Forward(chunk, count)

    def leave(self, chunk: int) -> None:
        """Disarm."""
        if self.running is not None and self.running.chunk == chunk:
            self.running = None
