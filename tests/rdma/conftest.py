"""Channels between the two devices, from process to process and for the conformance suite.

All processes are forked, since to import torch takes half a minute here: before this one uses torch
itself, as it does for the conformance suite, whose tests come last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rdma import wire
from support import remote_roles as roles
from support.channels import UCX, Channel, Maker, Wire
from support.children import Children
from support.places import Apart
from support.remote_channel import End, RemoteChannel
from support.workers import Worker

TEST_LIMIT = 280.0


def device(number: int) -> dict[str, str | None]:
    """Give the environment of a process that has one of the devices."""
    return {"UCX_NET_DEVICES": f"{wire.DEVICES[number]}:1"}


def assert_all_rc(lanes: list[str], number: int) -> None:
    """See that a channel puts by rc, on the device that was given; ud only connects."""
    port = f"{wire.DEVICES[number]}:1"
    assert lanes[0] == f"rc_verbs/{port}"
    assert set(lanes) <= {f"rc_verbs/{port}", f"ud_verbs/{port}"}


class RdmaChannel(RemoteChannel):
    """A process for each device; both are on one host, but what they put crosses the wire."""

    def __init__(self, children: Children, store: str) -> None:
        self._children = children
        ends = (End("guest", address) for address in wire.ADDRESSES)
        super().__init__(self.new_consumer(), self.new_producer(), store, *ends)

    def new_consumer(self) -> Worker:
        """Start a process for the mailbox."""
        return Worker(self._children, "consumer", env=device(0))

    def new_producer(self) -> Worker:
        """Start a process for the outbox."""
        return Worker(self._children, "producer", env=device(1))

    def attach(self, **options: Any) -> None:
        """Attach the outbox, and look at its lanes: no slower wire may stand in."""
        super().attach(**options)
        assert_all_rc(self.producer.call(roles.facts)["ucx_lanes"], 1)

    def clear(self) -> None:
        """Close what the test left open; kill what a failed test left in a call."""
        for worker in (self.producer, self.consumer):
            if worker.busy:
                worker.child.kill()
            elif worker.child.exitcode is None:
                worker.call(roles.clear)
                worker.dismiss()


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[RdmaChannel]:
    """Give a consumer's and a producer's process, with nothing made yet."""
    with Children(TEST_LIMIT, method="fork") as children:
        made = RdmaChannel(children, f"file://{tmp_path}")
        yield made
        made.clear()


class RdmaMaker(Maker):
    """Makes channels whose every lane is looked at: no slower wire may stand in."""

    def attach(self, channel: Channel, rank: int) -> None:
        """Attach the producer of a rank."""
        super().attach(channel, rank)
        assert_all_rc(channel.producers[rank].info()["ucx_lanes"], 1)


@pytest.fixture(scope="session")
def place() -> Iterator[Apart]:
    """Give the producers' process."""
    os.environ.update({name: value for name, value in device(0).items() if value})
    with Children(method="fork") as children:
        apart = Apart(children, device(1))
        yield apart
        apart.end()


@pytest.fixture(name="wire")
def ucx_wire() -> Wire:
    """Give the transport under test."""
    return UCX


@pytest.fixture
def channel_of(place: Apart, tmp_path: Path) -> Iterator[Maker]:
    """Make channels over RDMA; all are closed after the test."""
    with RdmaMaker(UCX, place, tmp_path) as maker:
        yield maker
