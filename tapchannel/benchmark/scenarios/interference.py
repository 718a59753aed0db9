"""interference: kernels that run on both sides, timed with taps passing and without."""

from __future__ import annotations

from typing import Final

from ..frame import Bench, Case, Figure, Measured, complain
from ..rounds import Round, Work
from ..samples import spread_of
from ..team import Team
from ..traffic import MIB, size_text, stream_traffic

PEERS: Final = ("tapchannel", "staging x2", "gloo", "nccl", "clone-gather")
KERNELS: Final = ("matmul", "memory")
_SIZES: Final = {"cpu": (4 * MIB,), "cuda": (64 * MIB,)}


def run(bench: Bench) -> None:
    """Measure both kernels: one that computes, one that is bound by memory."""
    options = bench.options
    count = 8 if options.quick else 40
    with bench.crew("interference", PEERS, 1, one_sided=False) as crew:
        for size in options.sizes or ((MIB,) if options.quick else _SIZES[options.place.device]):
            for kernel in KERNELS:
                traffic = stream_traffic(options.place, size)

                def once(team: Team, kernel: str = kernel) -> tuple[Measured, list[float]]:
                    return _once(team, kernel, count)

                about = {"size": size, "kernel": kernel, "messages": count}
                label = f"{kernel}, {size_text(size)} a kernel"
                bench.measure(crew, Case(label, traffic, once, about, options.rounds_of(5)))


def _once(team: Team, kernel: str, count: int) -> tuple[Measured, list[float]]:
    """Run the kernels without taps, then with them; neighbours, since the machine drifts."""
    figures: dict[str, Figure] = {}
    medians: dict[tuple[str, bool], float] = {}
    for taps in (False, True):
        answers = team.round(Round("work", team.next_step(), count, work=Work(kernel, taps)))
        complain(answers)
        sides = {"producer": answers.producers[0], "consumer": answers.consumer}
        for side, answer in sides.items():
            if answer is not None:
                medians[side, taps] = spread_of(answer.values).median
    for side in ("producer", "consumer"):
        alone, beside = medians[side, False], medians[side, True]
        figures[f"{side} alone"] = Figure("ms", "info", alone)
        figures[f"{side} with taps"] = Figure("ms", "latency", beside)
        figures[f"{side} slower by"] = Figure("%", "info", 100 * (beside / alone - 1))
    return figures, []
