"""Hosts for the tests of this folder, processes on them, and a channel between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support import remote_roles as roles
from support.children import Children
from support.hosts import Host, hosts
from support.remote_channel import End, RemoteChannel
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


class Channel(RemoteChannel):
    """A channel whose consumer is on the near host, and whose producer is on the far one."""

    def __init__(self, steady: Steady, children: Children, store: str) -> None:
        self.near, self.far = steady.pair
        ends = (End(host.name, host.address) for host in steady.pair)
        super().__init__(*steady.workers, store, *ends)
        self.steady_consumer, self.steady_producer = steady.workers
        self._children = children
        self._victims: list[Worker] = []

    def risk_consumer(self) -> None:
        """Start a consumer that the test may kill."""
        self.consumer = self._victim("consumer to be lost", self.near)

    def risk_producer(self) -> None:
        """Start a producer that the test may kill."""
        self.producer = self._victim("producer to be lost", self.far)

    def clear(self) -> None:
        """Close what the test left open; kill what a failed test left in a call."""
        for worker in (*self._victims, self.steady_consumer, self.steady_producer):
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
