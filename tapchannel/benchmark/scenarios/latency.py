"""latency: one small message at a time, to a consumer that waits for it."""

from __future__ import annotations

from typing import Final

from ..frame import Bench, Case, Figure, Measured, complain
from ..rounds import Round
from ..samples import quantile
from ..team import Team
from ..traffic import KIB, size_text, stream_traffic
from .stream import PEERS

_SHARES: Final = (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
_MESSAGES: Final = 1000


def run(bench: Bench) -> None:
    """Measure 4 KiB, or the sizes asked for."""
    options = bench.options
    count = 100 if options.quick else _MESSAGES
    with bench.crew("latency", PEERS, 1) as crew:
        for size in options.sizes or (4 * KIB,):
            traffic = stream_traffic(options.place, size)

            def once(team: Team) -> tuple[Measured, list[float]]:
                return _once(team, count)

            about = {"size": size, "messages": count}
            bench.measure(crew, Case(size_text(size), traffic, once, about, options.rounds_of(5)))


def _once(team: Team, count: int) -> tuple[Measured, list[float]]:
    answers = team.round(Round("ping", team.next_step(), count))
    complain(answers)
    producer, consumer = answers.producers[0], answers.consumer
    if consumer is None:
        return _figures("", producer.values), producer.values
    visible = _microseconds(producer.at, consumer.at)
    released = _microseconds(producer.at, consumer.released)
    return _figures("", visible) | _figures("released ", released), visible


def _microseconds(begun: list[int], ended: list[int]) -> list[float]:
    return [(end - begin) / 1e3 for begin, end in zip(begun, ended, strict=True)]


def _figures(what: str, values: list[float]) -> dict[str, Figure]:
    shares = _SHARES if len(values) >= 100 else _SHARES[:1]
    return {
        f"{what}{name}": Figure("µs", "latency", quantile(values, share))
        for name, share in shares
        if name == "p50" or not what
    }
