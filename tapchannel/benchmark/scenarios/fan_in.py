"""fan-in: a draft's real taps from several producers into one mailbox."""

from __future__ import annotations

from itertools import product
from typing import Final

from ..frame import Bench, Case, stream_once
from ..traffic import PLANS, plan_traffic
from .stream import PEERS as _STREAMED

PEERS: Final = tuple(name for name in _STREAMED if name != "ucx_perftest")
_HIDDEN: Final = {"cpu": (4096, 7168), "cuda": (4096, 5120, 7168)}
_ROWS: Final = {"cpu": (512,), "cuda": (512, 4096, 32768)}


def run(bench: Bench) -> None:
    """Measure every shape, by every number of producers."""
    options = bench.options
    place = options.place
    several = (max(2, place.gpus - 1),) if place.on_gpu else (2, 4)
    hidden = options.hidden or ((4096,) if options.quick else _HIDDEN[place.device])
    rows = options.rows or ((64,) if options.quick else _ROWS[place.device])
    for producers in options.producers or ((2,) if options.quick else several):
        with bench.crew("fan-in", PEERS, producers) as crew:
            for plan, width, count in product(PLANS, hidden, rows):
                traffic = plan_traffic(place, plan, width, count, producers)
                if traffic.producers != producers:
                    continue  # fewer taps than producers
                messages = options.count_of(traffic.message_bytes, traffic.depth, 256)
                about = {
                    "plan": plan,
                    "hidden": width,
                    "rows": count,
                    "producers": producers,
                    "size": traffic.message_bytes,
                    "depth": traffic.depth,
                    "messages": messages,
                }
                label = f"{plan} {count} × {width} from {producers}"
                once = stream_once(traffic, messages)
                rounds = options.rounds_of(3)
                bench.measure(crew, Case(label, traffic, once, about, rounds, against="GB/s"))
