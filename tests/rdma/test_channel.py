"""ucx over RDMA verbs: reliable connections, one-sided, and what comes of them if a side goes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from rdma import wire
from rdma.conftest import RdmaChannel
from support import remote_roles as roles
from tapchannel.errors import AttachTimeout, TransportUnavailable

pytestmark = pytest.mark.rdma

Fault = Callable[[], AbstractContextManager[None]]

PASSES, MICROBATCHES = 2, 20
ATTACH_LIMIT = 15.0  # seconds

silent_cut = pytest.param(wire.silent_cut, id="silent cut")
link_down = pytest.param(wire.link_down, id="link down")


def test_every_tap_of_every_pass_arrives_by_the_wire(channel: RdmaChannel) -> None:
    """Catches a stamp that overtakes its payload, and bytes that are carried by something else."""
    channel.open()
    before = wire.sent_bytes(wire.ENDS[1])
    for step in range(PASSES):
        channel.carry(step, MICROBATCHES)
    sent = wire.sent_bytes(wire.ENDS[1]) - before
    assert sent > PASSES * MICROBATCHES * roles.MICROBATCH_BYTES


def test_stopped_consumer_is_written_all_the_same(channel: RdmaChannel) -> None:
    """Catches a lane that needs its target's processor, which a training step keeps busy."""
    channel.start()
    channel.producer.call(roles.await_credit, roles.DEPTH - 1)
    channel.consumer.child.stop()
    for microbatch in range(roles.DEPTH):
        channel.producer.call(roles.push, microbatch)
    channel.producer.call(roles.flush)  # each has completed in the stopped process's memory
    channel.consumer.child.resume()
    for microbatch in range(roles.DEPTH):
        channel.consumer.call(roles.receive_at_once, microbatch)


def test_killed_producer_is_named_in_mid_flow(channel: RdmaChannel) -> None:
    """Catches half a microbatch that passes for a whole one, and a lane that stays dead."""
    channel.flow()
    channel.lose_producer()
    channel.replace_producer(channel.new_producer())


def test_killed_consumer_is_named_in_mid_flow(channel: RdmaChannel) -> None:
    """Catches puts into a dead process's memory that are retried until their own deadline."""
    channel.flow()
    channel.lose_consumer()
    channel.replace_consumer(channel.new_consumer())


@pytest.mark.parametrize("fault", [silent_cut, link_down])
def test_lost_wire_ends_the_flow_on_both_sides(channel: RdmaChannel, fault: Fault) -> None:
    """Catches a lane that lives as long as its socket: that one does not take the wire."""
    channel.flow()
    channel.lose_wire(fault())
    channel.replace_producer(channel.producer)


@pytest.mark.parametrize("fault", [silent_cut, link_down])
def test_lost_wire_is_noticed_outside_of_a_pass(channel: RdmaChannel, fault: Fault) -> None:
    """Catches a side that puts nothing while it has nothing to say."""
    channel.open()
    channel.carry(0)
    channel.producer.begin(roles.lose_consumer_idly)
    channel.consumer.begin(roles.lose_producer_idly)
    channel.lose_wire(fault())
    channel.replace_producer(channel.producer)


def test_attach_over_a_lost_wire_is_an_error(channel: RdmaChannel) -> None:
    """Catches a process that UCX ends because a connection that it never had is closed."""
    channel.serve()
    channel.attach()
    channel.producer.call(roles.clear)
    with wire.silent_cut(), pytest.raises((AttachTimeout, TransportUnavailable)):
        channel.attach(attach_timeout=ATTACH_LIMIT)
    channel.attach()
    channel.carry(0)
