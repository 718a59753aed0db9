"""Two hosts for each test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.children import Children
from support.hosts import Host, hosts
from support.workers import Worker

TEST_LIMIT = 55.0


@pytest.fixture
def pair() -> Iterator[tuple[Host, Host]]:
    """Give two hosts of this test's own; to make and to remove them takes a twentieth second."""
    with hosts(2) as (near, far):
        yield near, far


@pytest.fixture
def children(pair: tuple[Host, Host]) -> Iterator[Children]:
    """Give what starts this test's processes; they end before their hosts are removed."""
    with Children(TEST_LIMIT) as made:
        yield made


@pytest.fixture
def workers(pair: tuple[Host, Host], children: Children) -> Iterator[tuple[Worker, Worker]]:
    """Give a worker in each host."""
    near, far = (Worker(children, f"worker on {host.name}", host) for host in pair)
    yield near, far
    for worker in (near, far):
        if worker.child.exitcode is None:
            worker.dismiss()
