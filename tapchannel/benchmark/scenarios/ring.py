"""ring: what more slots bring."""

from __future__ import annotations

from typing import Final

from ..frame import Bench, Case, stream_once
from ..traffic import KIB, MIB, size_text, stream_traffic

PEERS: Final = ("tapchannel", "gloo", "nccl", "nixl")
_DEPTHS: Final = (1, 2, 4, 8, 16)
_SIZES: Final = {"cpu": (64 * KIB, 4 * MIB), "cuda": (64 * KIB, 8 * MIB)}


def run(bench: Bench) -> None:
    """Measure every depth at every size."""
    options = bench.options
    sizes = options.sizes or ((64 * KIB,) if options.quick else _SIZES[options.place.device])
    with bench.crew("ring", PEERS, 1) as crew:
        for size in sizes:
            for depth in (1, 4) if options.quick else _DEPTHS:
                traffic = stream_traffic(options.place, size, depth)
                count = options.count_of(size, depth)
                about = {"size": size, "depth": depth, "messages": count}
                label = f"{size_text(size)}, {depth} slot{'s' if depth > 1 else ''}"
                once = stream_once(traffic, count)
                bench.measure(crew, Case(label, traffic, once, about, options.rounds_of(5)))
