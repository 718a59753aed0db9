"""A host, its wire or its process goes: both sides hear of it in time, and a new one takes over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from hosts.conftest import Channel
from support import remote_roles as roles
from support.hosts import Host

pytestmark = pytest.mark.ucx

Fault = Callable[[Host], AbstractContextManager[None]]

silent_cut = pytest.param(Host.silent_cut, id="silent cut")
link_down = pytest.param(Host.link_down, id="link down")


def test_killed_producer_is_named_to_a_waiting_consumer(channel: Channel) -> None:
    """Catches a wait that goes on to its deadline, and an error that names nobody."""
    channel.risk_producer()
    channel.start()
    channel.consumer.begin(roles.lose_producer, 0)
    channel.lose_producer()
    channel.replace_producer(channel.steady_producer)


def test_killed_producer_is_named_in_mid_flow(channel: Channel) -> None:
    """Catches half a microbatch that passes for a whole one, and puts whose end goes unnoticed."""
    channel.risk_producer()
    channel.flow()
    channel.lose_producer()
    channel.replace_producer(channel.steady_producer)


def test_killed_producer_is_named_outside_of_a_pass(channel: Channel) -> None:
    """Catches a death that only the next pass's wait brings out."""
    channel.risk_producer()
    channel.open()
    channel.carry(0)
    channel.consumer.begin(roles.lose_producer_idly)
    channel.lose_producer()
    channel.replace_producer(channel.steady_producer)


def test_killed_consumer_is_named_to_a_waiting_producer(channel: Channel) -> None:
    """Catches pushes that wait for a dead consumer's credit to their deadline."""
    channel.risk_consumer()
    channel.start()
    channel.fill()
    channel.producer.begin(roles.lose_consumer)
    channel.lose_consumer()
    channel.replace_consumer(channel.steady_consumer)


def test_killed_consumer_is_named_in_mid_flow(channel: Channel) -> None:
    """Catches puts into a dead process's memory that go on, or that end without a word."""
    channel.risk_consumer()
    channel.flow()
    channel.lose_consumer()
    channel.replace_consumer(channel.steady_consumer)


def test_killed_consumer_is_named_outside_of_a_pass(channel: Channel) -> None:
    """Catches a death that only the next push brings out."""
    channel.risk_consumer()
    channel.open()
    channel.carry(0)
    channel.producer.begin(roles.lose_consumer_idly)
    channel.lose_consumer()
    channel.replace_consumer(channel.steady_consumer)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [silent_cut, link_down])
def test_lost_wire_ends_the_waits_of_both_sides(channel: Channel, fault: Fault) -> None:
    """Catches a wait, for a stamp or for credit, that takes silence for a peer that is slow."""
    channel.start()
    channel.fill(["early"])
    channel.producer.begin(roles.lose_consumer)
    channel.consumer.begin(roles.lose_producer, 0)
    channel.lose_wire(fault(channel.far))
    channel.replace_producer(channel.producer)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [silent_cut, link_down])
def test_lost_wire_ends_the_flow_on_both_sides(channel: Channel, fault: Fault) -> None:
    """Catches puts on their way that nothing ends, and slots that stay taken by them."""
    channel.flow()
    channel.lose_wire(fault(channel.far))
    channel.replace_producer(channel.producer)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [silent_cut, link_down])
def test_lost_wire_is_noticed_outside_of_a_pass(channel: Channel, fault: Fault) -> None:
    """Catches a side that says nothing while it has nothing to send."""
    channel.open()
    channel.carry(0)
    channel.producer.begin(roles.lose_consumer_idly)
    channel.consumer.begin(roles.lose_producer_idly)
    channel.lose_wire(fault(channel.far))
    channel.replace_producer(channel.producer)
