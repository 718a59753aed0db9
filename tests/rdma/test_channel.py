"""Taps over rc: written into a process that does nothing, in order, and no fault goes unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import roles
from hosts.roles import Lost
from rdma import wire
from rdma.conftest import assert_all_rc, device
from support.children import Children
from support.workers import Worker

pytestmark = pytest.mark.rdma

LIMIT = 240.0
KILLED_LIMIT = 5.0  # seconds; an emulated processor takes its time to see a socket's end
CUT_LIMIT = 15.0
LOOPBACK = "127.0.0.1"  # of the handshake alone: what is carried goes by the devices


Pair = tuple[Worker, Worker]


@pytest.fixture(scope="module")
def steady() -> Iterator[tuple[Children, Pair]]:
    """Give workers that outlive a test: one takes half a minute to start on such a processor."""
    with Children(LIMIT) as children:
        workers = started(children, 0), started(children, 1)
        yield children, workers
        children.limit(LIMIT)
        for worker in workers:
            worker.dismiss()


@pytest.fixture
def pair(steady: tuple[Children, Pair], tmp_path: Path) -> Iterator[Pair]:
    """Give a consumer and its producer, attached, each with a device of its own."""
    children, workers = steady
    children.limit(LIMIT)
    join(workers, tmp_path)
    yield workers
    clear(workers)


def started(children: Children, number: int) -> Worker:
    """Start the consumer, 0, or the producer, 1."""
    return Worker(children, ("consumer", "producer")[number], env=device(number))


def join(workers: Pair, folder: Path) -> None:
    """Make the mailbox and attach the outbox; no slower wire may stand in."""
    consumer, producer = workers
    store = f"file://{folder}"
    consumer.call(roles.serve, store, LOOPBACK, {})
    producer.call(roles.attach, store, {})
    assert_all_rc(producer.call(roles.facts)["ucx_lanes"], 1)


def clear(workers: Pair) -> None:
    """Close what those that are alive have open."""
    for worker in reversed(workers):
        if worker.child.exitcode is None:
            worker.call(roles.clear)


def test_taps_cross_the_wire_and_nothing_but_the_wire(pair: Pair) -> None:
    """Catches a lane that is rc by name and carries its bytes by something else."""
    consumer, producer = pair
    before = wire.sent_bytes(wire.ENDS[1])
    producer.begin(roles.push_pass, 0, 8)
    consumer.call(roles.receive_pass, 0, 8)
    producer.finish()
    assert wire.sent_bytes(wire.ENDS[1]) - before > 8 * roles.MICROBATCH_BYTES


def test_a_stopped_consumer_is_written_all_the_same(pair: Pair) -> None:
    """Catches a put or a stamp that needs the consumer's process to make progress."""
    consumer, producer = pair
    consumer.call(roles.open_for_receiving, 0, roles.DEPTH)
    producer.call(roles.open_for_pushing, 0, roles.DEPTH)
    producer.call(roles.await_credit, roles.DEPTH - 1)
    consumer.child.stop()
    try:
        for microbatch in range(roles.DEPTH):
            producer.call(roles.push, microbatch)
        producer.call(roles.flush)  # each flush has completed in the stopped process's memory
    finally:
        consumer.child.resume()
    for microbatch in range(roles.DEPTH):
        consumer.call(roles.receive_at_once, microbatch)


def test_no_stamp_overtakes_its_payload(pair: Pair) -> None:
    """Catches a stamp that becomes visible before the last word of its payload."""
    consumer, producer = pair
    producer.begin(roles.push_pass, 0, 40)
    consumer.call(roles.receive_pass, 0, 40)  # looks at every word
    producer.finish()
    assert consumer.call(roles.facts)["lanes"][0]["messages"] == 40 * len(roles.WIDTHS)


def test_a_killed_producer_is_lost(steady: tuple[Children, Pair], tmp_path: Path) -> None:
    """Catches a consumer that waits for a dead process, whose device answers on."""
    steady[0].limit(LIMIT)
    consumer = steady[1][0]
    with Children(LIMIT) as victims:
        producer = started(victims, 1)
        join((consumer, producer), tmp_path)
        consumer.call(roles.open_for_receiving, 0, 4)
        consumer.begin(roles.lose_producer, 0)
        killed_at = kill(producer)
        lost: Lost = consumer.finish()
    clear((consumer, producer))
    assert lost.at - killed_at < KILLED_LIMIT
    assert lost.error.rank == 0


def test_a_killed_consumer_is_lost(steady: tuple[Children, Pair], tmp_path: Path) -> None:
    """Catches puts into the memory of a dead process that never end."""
    steady[0].limit(LIMIT)
    producer = steady[1][1]
    with Children(LIMIT) as victims:
        consumer = started(victims, 0)
        join((consumer, producer), tmp_path)
        producer.call(roles.open_for_pushing, 0, 4)
        producer.call(roles.push, 0)
        producer.begin(roles.lose_consumer)
        killed_at = kill(consumer)
        lost: Lost = producer.finish()
    clear((consumer, producer))
    assert lost.at - killed_at < KILLED_LIMIT


def test_a_link_that_goes_down_is_a_lost_peer(pair: Pair) -> None:
    """Catches a wait for a device that repeats its packets into a dead wire for ever."""
    consumer, producer = pair
    producer.begin(roles.push_pass, 0, 2)
    consumer.call(roles.receive_pass, 0, 2)
    producer.finish()
    consumer.begin(roles.lose_producer_idly)
    producer.begin(roles.lose_consumer_idly)
    with wire.link_down():
        down_at = wire.now()
        for worker in pair:
            lost: Lost = worker.finish()
            assert lost.at - down_at < CUT_LIMIT


def kill(worker: Worker) -> float:
    """Kill a worker; give the time at which it was done."""
    killed_at = wire.now()
    worker.child.kill()
    return killed_at
