"""Create, attach, push, close: again and again, and nothing piles up on either side."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from stress.course import Leg
from stress.footprint import Footprint, assert_flat, footprint
from stress.producing import LIMIT, WIRES
from stress.words import Words
from support.workers import Worker
from tapchannel import Key, Lease, Mailbox, Outbox

MICROBATCHES = 3
WARM = 20  # cycles before which a process may still grow


def push_cycle(desk: SimpleNamespace, leg: Leg, store: str, name: str) -> None:
    """Attach, push a pass, and close; every other time the mailbox closes first."""
    words = Words(leg)
    place = {"store": store, "name": name, "transport": WIRES[leg.wire].transport}
    with Outbox(leg.plan, 0, timeout=LIMIT, **place) as outbox:
        with outbox.open_pass(0, MICROBATCHES):
            for microbatch in range(MICROBATCHES):
                for tap in leg.sources[0]:
                    key = Key(1, 0, microbatch)
                    outbox.push(microbatch, tap, words.of_tap(tap, key, leg.size.rows))
        outbox.flush()
        desk.link.receive()


def held(desk: object) -> Footprint:
    """Say what this process holds."""
    gc.collect()
    return footprint()


def run_cycle(leg: Leg, worker: Worker, store: str, name: str) -> None:
    """Make a mailbox, receive a pass, and close."""
    wire = WIRES[leg.wire]
    place = {"store": store, "name": name, "transport": wire.transport, "listen": wire.listen}
    worker.begin(push_cycle, leg, store, name)
    with Mailbox(leg.plan, leg.sources, timeout=LIMIT, **place) as mailbox:
        words = Words(leg)
        with mailbox.open_pass(0, MICROBATCHES):
            for microbatch in range(MICROBATCHES):
                with mailbox.recv(microbatch) as lease:
                    _check(words, leg, Key(1, 0, microbatch), lease)
        worker.send()
        if leg.chance(name).random() < 0.5:
            worker.finish()
    if worker.busy:
        worker.finish()


def _check(words: Words, leg: Leg, key: Key, lease: Lease) -> None:
    for group in leg.groups:
        if not torch.equal(lease[group], words.of_group(group, key, leg.size.rows)):
            pytest.fail(words.complaint(group, key, leg.size.rows, lease[group]))


def run_cycles(leg: Leg, worker: Worker, store: str, cycles: int) -> None:
    """Run cycles; see that both processes hold at the end what they held once they were warm."""
    for cycle in range(WARM + cycles):
        if cycle == WARM:
            here, there = held(None), worker.call(held)
        run_cycle(leg, worker, store, f"cycle {leg.wire} {cycle}")
    assert_flat(f"consumer after {cycles} cycles over {leg.wire}", here, held(None))
    assert_flat(f"producer after {cycles} cycles over {leg.wire}", there, worker.call(held))
