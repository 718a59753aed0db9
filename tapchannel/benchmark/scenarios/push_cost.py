"""push-cost: the caller's microseconds a call, its tensor ready and its credit there."""

from __future__ import annotations

from typing import Final

from ..frame import Bench, Case, Figure, Measured
from ..rounds import Round
from ..samples import quantile
from ..team import Team
from ..traffic import KIB, MIB, size_text, stream_traffic

PEERS: Final = ("tapchannel", "tapchannel native", "gloo", "nccl")
_PUSHES: Final = 64  # and as many slots: every push has credit
_SIZES: Final = {"cpu": (4 * KIB,), "cuda": (4 * KIB, MIB)}
# Long enough for the lane's own thread to fall asleep, as it has in training.
_PAUSES: Final = (("back to back", 0.0), ("1 ms apart", 0.001))


def run(bench: Bench) -> None:
    """Measure both paces."""
    options = bench.options
    pushes = _PUSHES // 4 if options.quick else _PUSHES
    with bench.crew("push-cost", PEERS, 1, one_sided=False) as crew:
        for size in options.sizes or _SIZES[options.place.device]:
            for pace, pause in _PAUSES:
                traffic = stream_traffic(options.place, size, pushes)

                def once(team: Team, pause: float = pause) -> tuple[Measured, list[float]]:
                    return _once(team, pushes, pause)

                about = {"size": size, "pushes": pushes, "pause": pause}
                label = f"{size_text(size)}, {pace}"
                bench.measure(crew, Case(label, traffic, once, about, options.rounds_of(10)))


def _once(team: Team, pushes: int, pause: float) -> tuple[Measured, list[float]]:
    costs = team.round(Round("cost", team.next_step(), pushes, pause=pause)).producers[0].values
    figures = {
        f"{name} a call": Figure("µs", "latency", quantile(costs, share))
        for name, share in (("p50", 0.5), ("p90", 0.9))
    }
    return figures, costs
