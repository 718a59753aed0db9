"""A host, its wire or its process goes: both sides hear of it in time, and a new one takes over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest

from hosts import roles
from hosts.conftest import Channel
from hosts.roles import Lost
from support.hosts import Host
from support.workers import Worker

pytestmark = pytest.mark.ucx

Fault = Callable[[Host], AbstractContextManager[None]]

KILLED_LIMIT = 1.0  # seconds until a side knows that the other one's process has ended
CUT_LIMIT = 10.0  # and that the wire between them is cut, by default

silent_cut = pytest.param(Host.silent_cut, id="silent cut")
link_down = pytest.param(Host.link_down, id="link down")


def test_killed_producer_is_named_to_a_waiting_consumer(channel: Channel) -> None:
    """Catches a wait that goes on to its deadline, and an error that names nobody."""
    channel.risk_producer()
    start(channel)
    channel.consumer.begin(roles.lose_producer, 0)
    lost = after_kill(channel.producer, channel.consumer)
    assert_names_producer(lost, channel.producer, channel.far)
    take_over_producing(channel)


def test_killed_producer_is_named_in_mid_flow(channel: Channel) -> None:
    """Catches half a microbatch that passes for a whole one, and puts whose end goes unnoticed."""
    channel.risk_producer()
    open_channel(channel)
    flow(channel)
    lost = after_kill(channel.producer, channel.consumer)
    assert_names_producer(lost, channel.producer, channel.far)
    take_over_producing(channel)


def test_killed_producer_is_named_outside_of_a_pass(channel: Channel) -> None:
    """Catches a death that only the next pass's wait brings out."""
    channel.risk_producer()
    open_channel(channel)
    channel.carry(0)
    channel.consumer.begin(roles.lose_producer_idly)
    lost = after_kill(channel.producer, channel.consumer)
    assert_names_producer(lost, channel.producer, channel.far)
    take_over_producing(channel)


def test_killed_consumer_is_named_to_a_waiting_producer(channel: Channel) -> None:
    """Catches pushes that wait for a dead consumer's credit to their deadline."""
    channel.risk_consumer()
    start(channel)
    fill(channel)
    channel.producer.begin(roles.lose_consumer)
    lost = after_kill(channel.consumer, channel.producer)
    assert_names_consumer(lost, channel.consumer, channel.near)
    take_over_consuming(channel)


def test_killed_consumer_is_named_in_mid_flow(channel: Channel) -> None:
    """Catches puts into a dead process's memory that go on, or that end without a word."""
    channel.risk_consumer()
    open_channel(channel)
    flow(channel)
    lost = after_kill(channel.consumer, channel.producer)
    assert_names_consumer(lost, channel.consumer, channel.near)
    take_over_consuming(channel)


def test_killed_consumer_is_named_outside_of_a_pass(channel: Channel) -> None:
    """Catches a death that only the next push brings out."""
    channel.risk_consumer()
    open_channel(channel)
    channel.carry(0)
    channel.producer.begin(roles.lose_consumer_idly)
    lost = after_kill(channel.consumer, channel.producer)
    assert_names_consumer(lost, channel.consumer, channel.near)
    take_over_consuming(channel)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [silent_cut, link_down])
def test_lost_wire_ends_the_waits_of_both_sides(channel: Channel, fault: Fault) -> None:
    """Catches a wait, for a stamp or for credit, that takes silence for a peer that is slow."""
    start(channel)
    fill(channel, ["early"])
    channel.producer.begin(roles.lose_consumer)
    channel.consumer.begin(roles.lose_producer, 0)
    both_lose(channel, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [silent_cut, link_down])
def test_lost_wire_ends_the_flow_on_both_sides(channel: Channel, fault: Fault) -> None:
    """Catches puts on their way that nothing ends, and slots that stay taken by them."""
    open_channel(channel)
    flow(channel)
    both_lose(channel, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [silent_cut, link_down])
def test_lost_wire_is_noticed_outside_of_a_pass(channel: Channel, fault: Fault) -> None:
    """Catches a side that says nothing while it has nothing to send."""
    open_channel(channel)
    channel.carry(0)
    channel.producer.begin(roles.lose_consumer_idly)
    channel.consumer.begin(roles.lose_producer_idly)
    both_lose(channel, fault)


def open_channel(channel: Channel) -> None:
    """Make the mailbox and attach the outbox."""
    channel.serve()
    channel.attach()


def start(channel: Channel) -> None:
    """The same, with a pass open on both sides that neither will end by itself."""
    open_channel(channel)
    channel.consumer.call(roles.open_for_receiving, 0, roles.ENDLESS)
    channel.producer.call(roles.open_for_pushing, 0, roles.ENDLESS)


def fill(channel: Channel, taps: Sequence[str] = tuple(roles.WIDTHS)) -> None:
    """Push these taps of one microbatch more than there is credit for."""
    for microbatch in range(roles.DEPTH + 1):
        channel.producer.call(roles.push, microbatch, taps)


def flow(channel: Channel) -> None:
    """Have one microbatch after the other pushed and received, until the peer is lost."""
    channel.producer.begin(roles.lose_consumer_pushing, 0)
    channel.consumer.begin(roles.lose_producer_receiving, 0)
    channel.producer.wait_for("flowing")
    channel.consumer.wait_for("flowing")


def after_kill(victim: Worker, survivor: Worker) -> Lost:
    """Kill one side; give how the other one's wait ended, which was in time."""
    killed = time.monotonic()
    victim.child.kill()
    lost: Lost = survivor.finish()
    assert lost.at - killed < KILLED_LIMIT
    return lost


def both_lose(channel: Channel, fault: Fault) -> None:
    """Break the producer's wire; see both waits end in time, and the next producer take over."""
    with fault(channel.far):
        cut = time.monotonic()
        told: Lost = channel.producer.finish()
        heard: Lost = channel.consumer.finish()
    assert told.at - cut < CUT_LIMIT
    assert heard.at - cut < CUT_LIMIT
    assert_names_consumer(told, channel.consumer, channel.near)
    assert_names_producer(heard, channel.producer, channel.far)
    channel.producer.call(roles.clear)
    channel.consumer.call(roles.abort)
    channel.attach()
    channel.carry(1)


def assert_names_producer(lost: Lost, producer: Worker, host: Host) -> None:
    """See that the error says who was lost, in its fields and in its text."""
    assert (lost.error.rank, lost.error.pid, lost.error.host) == (0, producer.pid, host.name)
    for fact in ("rank 0", f"pid {producer.pid}", host.name, roles.NAME):
        assert fact in str(lost.error)


def assert_names_consumer(lost: Lost, consumer: Worker, host: Host) -> None:
    """See that the error says who was lost; its fields are the lane's, and so the producer's."""
    assert f"consumer (pid {consumer.pid} on host {host.name})" in str(lost.error)


def take_over_producing(channel: Channel) -> None:
    """See that the mailbox goes on with another producer."""
    channel.consumer.call(roles.abort)
    channel.resume()
    channel.attach()
    channel.carry(1)


def take_over_consuming(channel: Channel) -> None:
    """See that the producer's process goes on with another mailbox."""
    channel.producer.call(roles.clear)
    channel.resume()
    open_channel(channel)
    channel.carry(0)
