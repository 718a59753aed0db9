"""What is measured. Each module has ``run``, and says in its first line what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..frame import Bench
from . import fan_in, interference, latency, pipeline, push_cost, ring, scale, stream

SCENARIOS: Final[dict[str, tuple[Callable[[Bench], None], str]]] = {
    "latency": (latency.run, "4 KiB: push, visible, release; p50, p99, p99.9"),
    "stream": (stream.run, "one producer, 4 KiB to 512 MiB"),
    "fan-in": (fan_in.run, "several producers, a draft's real taps"),
    "ring": (ring.run, "the number of slots"),
    "push-cost": (push_cost.run, "what a push costs the caller, in Python and natively"),
    "interference": (interference.run, "kernels of both sides, with taps and without"),
    "pipeline": (pipeline.run, "a simulated 1F1B step, with taps and without"),
    "scale": (scale.run, "1 to 64 producers in host memory: cost, memory, threads"),
}
