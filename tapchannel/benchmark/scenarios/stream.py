"""stream: one producer sends as fast as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ..frame import Bench, Case, stream_once
from ..traffic import KIB, MIB, size_text, stream_traffic

PEERS: Final = (
    "tapchannel",
    "bare copy",
    "tapchannel host_staged",
    "tapchannel ucx",
    "staging",
    "staging x2",
    "gloo",
    "nccl",
    "symmetric memory",
    "clone-gather",
    "nixl",
    "mooncake",
    "ucx_perftest",
)
_CPU: Final = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_GPU: Final = (4 * KIB, 64 * KIB, MIB, 8 * MIB, 32 * MIB, 64 * MIB, 256 * MIB, 512 * MIB)
_QUEUED: Final = (MIB, 8 * MIB, 64 * MIB, 256 * MIB)
_QUEUED_BYTES: Final = 2048 * MIB
_SLOTS: Final = 128  # more would fill the launch queue while the gate is shut
_QUICK: Final = (4 * KIB, MIB)


def run(bench: Bench) -> None:
    """Measure every size."""
    options = bench.options
    usual = _GPU if options.place.on_gpu else _CPU
    with bench.crew("stream", PEERS, 1) as crew:
        for size in options.sizes or (_QUICK if options.quick else usual):
            traffic = stream_traffic(options.place, size)
            count = options.count_of(size, traffic.depth)
            about = {"size": size, "depth": traffic.depth, "messages": count}
            once = stream_once(traffic, count)
            rounds = options.rounds_of(7)
            bench.measure(crew, Case(size_text(size), traffic, once, about, rounds, against="GB/s"))
    if options.place.on_gpu:
        _queued(bench, options.sizes or _QUEUED[: 1 if options.quick else None])


def _queued(bench: Bench, sizes: Sequence[int]) -> None:
    """Measure what the wire makes of pushes that are all queued, a slot each, before the clock."""
    options = bench.options
    with bench.crew("queued", ("tapchannel", "bare copy"), 1, others=False) as crew:
        for size in sizes:
            count = max(2, min(_SLOTS, _QUEUED_BYTES // size))
            traffic = replace(stream_traffic(options.place, size), depth=count)
            once = stream_once(traffic, count, gate=True)
            about = {"size": size, "depth": count, "messages": count}
            label, rounds = size_text(size), options.rounds_of(20)
            bench.measure(crew, Case(label, traffic, once, about, rounds, 3, against="GB/s"))
