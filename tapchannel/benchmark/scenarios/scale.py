"""scale: many producers of one mailbox in host memory: cost of a message, memory, threads."""

from __future__ import annotations

from typing import Final

from ..frame import Bench, Case, Figure, Measured, complain
from ..rounds import Round
from ..team import Team
from ..traffic import KIB, MIB, Place, stream_traffic

PEERS: Final = ("tapchannel",)
_PRODUCERS: Final = (1, 2, 4, 8, 16, 32, 64)
_SIZE: Final = 16 * KIB
_MESSAGES: Final = 2048  # from all producers together


def run(bench: Bench) -> None:
    """Measure every number of producers; always in host memory."""
    options = bench.options
    if options.place.on_gpu:
        bench.console.print("scale: only in host memory; run it with --device cpu", style="dim")
        return
    total = _MESSAGES // 8 if options.quick else _MESSAGES
    size = (options.sizes or (_SIZE,))[0]
    for producers in options.producers or ((1, 4) if options.quick else _PRODUCERS):
        with bench.crew("scale", PEERS, producers, one_sided=False) as crew:
            traffic = stream_traffic(Place("cpu"), size, producers=producers)
            count = max(4, total // producers)

            def once(team: Team, count: int = count) -> tuple[Measured, list[float]]:
                return _once(team, count)

            about = {"producers": producers, "size": size, "messages": count * producers}
            label = f"{producers} producer{'s' if producers > 1 else ''}"
            bench.measure(crew, Case(label, traffic, once, about, options.rounds_of(5)))


def _once(team: Team, count: int) -> tuple[Measured, list[float]]:
    answers = team.round(Round("stream", team.next_step(), count))
    complain(answers)
    messages = count * len(answers.producers)
    usage = team.usage()[-1]
    consumer = answers.consumer.cpu if answers.consumer is not None else 0.0
    producers = sum(one.cpu for one in answers.producers)
    return {
        "a message": Figure("µs", "latency", answers.seconds / messages * 1e6),
        "consumer's CPU": Figure("µs", "latency", consumer / messages * 1e6),
        "producer's CPU": Figure("µs", "info", producers / messages * 1e6),
        "consumer's memory": Figure("MiB", "info", usage.private / MIB),
        "shared memory": Figure("MiB", "info", usage.shared / MIB),
        "consumer's threads": Figure("", "info", usage.threads),
    }, []
