"""How many slots a schedule needs, so that no push ever waits for a slot that cannot come back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Action(NamedTuple):
    """One step of a rank's schedule: the forward or a backward of a microbatch in a chunk."""

    forward: bool
    chunk: int
    microbatch: int


def slots_needed(order: Iterable[Action]) -> int:
    """Give the most microbatches that a chunk of this rank has forwarded and nobody has finished.

    ``order`` is one rank's own. A gradient comes back from the draft stage, so the first backward
    of a microbatch here proves that the draft stage has finished with it, its slot included (the
    draft's backward runs with it). Until then its slot may be taken. In a pass without backwards
    nothing is proved: every microbatch counts, and a smaller mailbox is slower, never wrong.
    """
    finished: set[int] = set()
    unfinished: dict[int, set[int]] = {}
    most = 0
    for action in order:
        if action.forward:
            held = unfinished.setdefault(action.chunk, set())
            held.add(action.microbatch)
            held -= finished
            most = max(most, len(held))
        else:
            finished.add(action.microbatch)
    return most
