"""Channels between the two devices: this process has the first, the producers the second."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdma import wire
from support.channels import UCX, Channel, Maker, Wire
from support.children import Children
from support.places import Apart


def device(number: int) -> dict[str, str | None]:
    """Give the environment of a process that has one of the devices."""
    return {"UCX_NET_DEVICES": f"{wire.DEVICES[number]}:1"}


def assert_all_rc(lanes: list[str], number: int) -> None:
    """See that a channel puts by rc, on the device that was given; ud only connects."""
    port = f"{wire.DEVICES[number]}:1"
    assert lanes[0] == f"rc_verbs/{port}"
    assert set(lanes) <= {f"rc_verbs/{port}", f"ud_verbs/{port}"}


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
    with Children() as children:
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
