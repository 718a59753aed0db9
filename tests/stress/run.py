"""Runs legs until enough messages have come or the time is over, then the cycles."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stress.consuming import Receiver
from stress.course import Leg
from stress.cycles import held, run_cycles
from stress.footprint import Footprint, assert_flat
from stress.producing import Pushed, be_quiet, begin_life, join_leg, leave_leg, push_life
from support.children import Children
from support.workers import Worker

SPARE = 300.0  # seconds for the leg during which the time runs out
WARM_LEGS = 60  # legs before which a process may still grow: each size and wire has been then


@dataclass(frozen=True)
class Orders:
    """How much to do."""

    seed: int = 1
    messages: int = 10_000_000
    producers: int = 8
    seconds: float = 1800.0
    cycles: int = 1_000
    wires: tuple[str, ...] = ("shm", "ucx")
    longest: bool = True


def legs(orders: Orders) -> Iterator[Leg]:
    """Give legs without end: one with each of the counters near its limit first, then any."""
    chance = random.Random(orders.seed)
    some = range(1, orders.producers + 1)
    yield Leg(chance.getrandbits(32), "shm", chance.choice(some), aged=True)
    yield Leg(chance.getrandbits(32), "shm", chance.choice(some), last_epochs=True)
    if orders.longest:
        yield Leg(chance.getrandbits(32), "shm", 1, longest=True)
    while True:
        wire = chance.choice((*["shm"] * 4, *orders.wires))
        # Over UCX each side has bells and recorders of its own.
        aged = wire == "shm" and chance.random() < 0.3
        last = chance.random() < 0.05
        yield Leg(chance.getrandbits(32), wire, chance.choice(some), False, last, aged)


def run_leg(leg: Leg, workers: list[Worker], store: str) -> Counter[str]:
    """Run one channel from its making to its end; return what was counted."""
    crew = workers[: leg.producers]
    receiver = Receiver(leg, crew, store)
    _all(crew, lambda rank, worker: worker.begin(join_leg, leg, rank, store))
    for life in range(len(leg.lives)):
        epoch = receiver.begin_life(life)
        _all(crew, lambda _, worker, life=life: worker.begin(begin_life, life))
        for worker in crew:
            worker.begin(push_life, life, epoch)
        try:
            receiver.run_life(life)
        except Exception:
            _tell_theirs(crew)
            raise
        for worker in crew:
            pushed: Pushed = worker.finish()
            receiver.count["pushes"] += pushed.pushes
    receiver.close()
    _all(crew, lambda _, worker: worker.begin(leave_leg))
    receiver.count["legs"] += 1
    receiver.count[f"legs over {leg.wire}"] += 1
    return receiver.count


def _all(crew: list[Worker], begin: Callable[[int, Worker], None]) -> None:
    """Let all producers do something at once, and wait for it."""
    for rank, worker in enumerate(crew):
        begin(rank, worker)
    for worker in crew:
        worker.finish()


def _tell_theirs(crew: list[Worker]) -> None:
    """Tell what the producers have raised, or where they wait: it explains the consumer's error."""
    for worker in crew:
        try:
            worker.finish(0.5)
        except Exception as error:  # noqa: BLE001 - told beside the consumer's
            print(f"{worker.child.name}: {error!r}\n{error}", file=sys.stderr)


def run(orders: Orders, store: str, tell: Callable[[str], None] = print) -> Counter[str]:
    """Run all of it; raise at the first message that is not what it should be."""
    began = time.monotonic()
    total: Counter[str] = Counter()
    with Children(limit=orders.seconds + SPARE) as children:
        workers = [Worker(children, f"producer {rank}") for rank in range(orders.producers)]
        _all(workers, lambda _, worker: worker.begin(be_quiet))
        for leg in legs(orders):
            total += run_leg(leg, workers, store)
            if total["legs"] == WARM_LEGS:
                warm = _footprints(workers)
            over = time.monotonic() - began > orders.seconds
            if over or total["messages"] >= orders.messages:
                break
            if total["legs"] % 20 == 0:
                tell(f"{time.monotonic() - began:6.0f} s  {said(total)}")
        if total["legs"] > WARM_LEGS:
            for name, one, other in zip(_names(workers), warm, _footprints(workers), strict=True):
                assert_flat(name, one, other)
        for wire in orders.wires if orders.cycles else ():
            children.limit(SPARE + orders.cycles)
            run_cycles(Leg(orders.seed, wire, 1), workers[0], store, orders.cycles)
            total[f"cycles over {wire}"] += orders.cycles
        for worker in workers:
            worker.dismiss()
    return total


def said(total: Counter[str]) -> str:
    """Give counts as text."""
    return ", ".join(f"{count} {what}" for what, count in total.items())


def _names(workers: list[Worker]) -> list[str]:
    return ["consumer", *(worker.child.name for worker in workers)]


def _footprints(workers: list[Worker]) -> list[Footprint]:
    return [held(None), *(worker.call(held) for worker in workers)]
