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


@pytest.fixture(scope="module")
def steady() -> Iterator[tuple[Children, list[Worker]]]:
    """Give the workers of all tests here: one takes half a minute to start on such a processor.

    A test that kills one puts another in its place.
    """
    with Children(LIMIT) as children:
        workers = [Worker(children, "consumer", env=device(0))]
        workers.append(Worker(children, "producer", env=device(1)))
        yield children, workers
        children.limit(LIMIT)
        for worker in workers:
            worker.dismiss()


@pytest.fixture
def pair(steady: tuple[Children, list[Worker]], tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    """Give a consumer and its producer, attached, each with a device of its own."""
    children, workers = steady
    children.limit(LIMIT)
    for number, name in enumerate(("consumer", "producer")):
        if workers[number].child.exitcode is not None:
            workers[number] = Worker(children, name, env=device(number))
    consumer, producer = workers
    store = f"file://{tmp_path}"
    consumer.call(roles.serve, store, LOOPBACK, {})
    producer.call(roles.attach, store, {})
    assert_all_rc(producer.call(roles.facts)["ucx_lanes"], 1)
    yield consumer, producer
    for worker in (producer, consumer):
        if worker.child.exitcode is None:
            worker.call(roles.clear)


def test_taps_cross_the_wire_and_nothing_but_the_wire(pair: tuple[Worker, Worker]) -> None:
    """Catches a lane that is rc by name and carries its bytes by something else."""
    consumer, producer = pair
    before = wire.sent_bytes(wire.ENDS[1])
    producer.begin(roles.push_pass, 0, 8)
    consumer.call(roles.receive_pass, 0, 8)
    producer.finish()
    assert wire.sent_bytes(wire.ENDS[1]) - before > 8 * roles.MICROBATCH_BYTES


def test_a_stopped_consumer_is_written_all_the_same(pair: tuple[Worker, Worker]) -> None:
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


def test_no_stamp_overtakes_its_payload(pair: tuple[Worker, Worker]) -> None:
    """Catches a stamp that becomes visible before the last word of its payload."""
    consumer, producer = pair
    producer.begin(roles.push_pass, 0, 40)
    consumer.call(roles.receive_pass, 0, 40)  # looks at every word
    producer.finish()
    assert consumer.call(roles.facts)["lanes"][0]["messages"] == 40 * len(roles.WIDTHS)


def test_a_killed_producer_is_lost(pair: tuple[Worker, Worker]) -> None:
    """Catches a consumer that waits for a dead process, whose device answers on."""
    consumer, producer = pair
    consumer.call(roles.open_for_receiving, 0, 4)
    consumer.begin(roles.lose_producer, 0)
    killed_at = kill(producer)
    lost: Lost = consumer.finish()
    assert lost.at - killed_at < KILLED_LIMIT
    assert lost.error.rank == 0


def test_a_killed_consumer_is_lost(pair: tuple[Worker, Worker]) -> None:
    """Catches puts into the memory of a dead process that never end."""
    consumer, producer = pair
    producer.call(roles.open_for_pushing, 0, 4)
    producer.call(roles.push, 0)
    producer.begin(roles.lose_consumer)
    killed_at = kill(consumer)
    lost: Lost = producer.finish()
    assert lost.at - killed_at < KILLED_LIMIT


def test_a_link_that_goes_down_is_a_lost_peer(pair: tuple[Worker, Worker]) -> None:
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
