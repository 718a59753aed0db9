"""Hosts for the tests of this folder, processes on them, and a channel between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hosts import roles
from support.children import Children
from support.hosts import Host, hosts
from support.workers import Worker

TEST_LIMIT = 55.0

Pair = tuple[Host, Host]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Give two hosts of this test's own; to make and to remove them takes a twentieth second."""
    with hosts(2) as (near, far):
        yield near, far


@pytest.fixture
def children(pair: Pair) -> Iterator[Children]:
    """Give what starts this test's processes; they end before their hosts are removed."""
    with Children(TEST_LIMIT) as made:
        yield made


@pytest.fixture
def workers(pair: Pair, children: Children) -> Iterator[tuple[Worker, Worker]]:
    """Give a worker on each host."""
    near, far = (Worker(children, f"worker on {host.name}", host) for host in pair)
    yield near, far
    for worker in (near, far):
        worker.dismiss()


class Steady(NamedTuple):
    """Two hosts with a worker each that outlive a test: to start one takes seconds."""

    pair: Pair
    children: Children
    workers: tuple[Worker, Worker]


@pytest.fixture(scope="package")
def steady() -> Iterator[Steady]:
    """Give the hosts and workers that serve all channels of this folder."""
    with hosts(2) as (near, far), Children() as children:
        workers = Worker(children, "consumer", near), Worker(children, "producer", far)
        yield Steady((near, far), children, workers)
        children.limit(TEST_LIMIT)
        for worker in workers:
            if worker.child.exitcode is None:
                worker.dismiss()


class Channel:
    """A consumer on the near host, a producer on the far one, and the store that both see."""

    def __init__(self, steady: Steady, children: Children, store: str) -> None:
        self.near, self.far = steady.pair
        self.store = store
        self._steady = steady.workers
        self._children = children
        self._victims: list[Worker] = []
        self.resume()

    def resume(self) -> None:
        """Give the roles to the workers that outlive the test."""
        self.consumer, self.producer = self._steady

    def risk_consumer(self) -> Worker:
        """Start a consumer that the test may kill."""
        self.consumer = self._victim("consumer to be lost", self.near)
        return self.consumer

    def risk_producer(self) -> Worker:
        """Start a producer that the test may kill."""
        self.producer = self._victim("producer to be lost", self.far)
        return self.producer

    def serve(self, version: int = 4, options: dict[str, Any] | None = None) -> None:
        """Make the mailbox, at its host's address of an IP version."""
        address = self.near.address if version == 4 else self.near.address6
        self.consumer.call(roles.serve, self.store, address, options or {})

    def attach(self, options: dict[str, Any] | None = None) -> None:
        """Attach the outbox."""
        self.producer.call(roles.attach, self.store, options or {})

    def carry(self, step: int, microbatches: int = 2) -> None:
        """See that a pass goes through whole."""
        self.producer.begin(roles.push_pass, step, microbatches)
        self.consumer.call(roles.receive_pass, step, microbatches)
        self.producer.finish()

    def clear(self) -> None:
        """Close what the test left open; kill what a failed test left in a call."""
        for worker in (*self._victims, *self._steady):
            if worker.child.exitcode is not None:
                continue
            if worker.busy or worker in self._victims:
                worker.child.kill()
            else:
                worker.call(roles.clear)

    def _victim(self, role: str, host: Host) -> Worker:
        self._victims.append(Worker(self._children, role, host))
        return self._victims[-1]


@pytest.fixture
def channel(steady: Steady, tmp_path: Path) -> Iterator[Channel]:
    """Give a consumer's and a producer's process on two hosts, with nothing made yet."""
    steady.children.limit(TEST_LIMIT)
    if any(worker.child.exitcode is not None for worker in steady.workers):
        pytest.fail("a test before this one has lost a worker that serves all", pytrace=False)
    with Children(TEST_LIMIT) as children:
        made = Channel(steady, children, f"file://{tmp_path}")
        yield made
        made.clear()
