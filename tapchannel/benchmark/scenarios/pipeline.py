"""pipeline: a 1F1B step whose stages compute for given milliseconds, with taps and without."""

from __future__ import annotations

from typing import Final

from ..frame import Bench, Case, Figure, Measured, complain
from ..rounds import Round, Work
from ..team import Answers, Team
from ..traffic import plan_traffic

PEERS: Final = ("tapchannel", "staging x2", "clone-gather")
_FORWARD_MS: Final = 4.0
_DRAFT_MS: Final = 2.0
_MICROBATCHES: Final = 8


def run(bench: Bench) -> None:
    """Measure a step of every number of stages; the last one is the draft's."""
    options = bench.options
    place = options.place
    usual = (max(1, place.gpus - 1),) if place.on_gpu else (3,)
    width = (options.hidden or ((1024,) if options.quick else (4096,)))[0]
    rows = (options.rows or ((64,) if options.quick else (8192 if place.on_gpu else 512,)))[0]
    scale = 0.25 if options.quick else 1.0
    for producers in options.producers or ((1,) if options.quick else usual):
        with bench.crew("pipeline", PEERS, producers, one_sided=False) as crew:
            wait = "stream" if place.on_gpu else "host"
            traffic = plan_traffic(place, "eagle3", width, rows, producers, wait)
            times = {"forward_ms": _FORWARD_MS * scale, "draft_ms": _DRAFT_MS * scale}
            about = {"stages": producers + 1, "microbatches": _MICROBATCHES, **times}
            label = f"{producers + 1} stages, {rows} × {width}"

            def once(team: Team, scale: float = scale) -> tuple[Measured, list[float]]:
                return _once(team, _FORWARD_MS * scale, _DRAFT_MS * scale)

            bench.measure(crew, Case(label, traffic, once, about, options.rounds_of(8)))


def _step_ms(answers: Answers) -> float:
    began = min(one.began for one in answers.all)
    return (max(one.ended for one in answers.all) - began) / 1e6


def _once(team: Team, forward: float, draft: float) -> tuple[Measured, list[float]]:
    """Run a step without taps, then one with them."""
    steps: list[float] = []
    waited = 0.0
    for taps in (False, True):
        work = Work("sleep", taps, forward, draft, after=team.peer.blocking)
        answers = team.round(Round("pipeline", team.next_step(), _MICROBATCHES, work=work))
        complain(answers)
        steps.append(_step_ms(answers))
        waited = answers.consumer.waited if answers.consumer is not None else 0.0
    alone, beside = steps
    return {
        "step without taps": Figure("ms", "info", alone),
        "step with taps": Figure("ms", "latency", beside),
        "longer by": Figure("%", "info", 100 * (beside / alone - 1)),
        "draft waits": Figure("ms", "info", waited * 1e3),
    }, []
