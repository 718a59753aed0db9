"""A channel between two hosts: what is pushed on one arrives on the other, whatever the wire."""

from __future__ import annotations

import time

import pytest

from hosts.conftest import Channel
from support import remote_roles as roles
from support.hosts import CABLE

pytestmark = pytest.mark.ucx

PASSES, MICROBATCHES = 3, 4
SHORT_CUT = 2.5  # seconds: less than the silence after which a peer counts as lost
SLOW_MBIT = 4
SHORTEST_SILENCE = 2.0  # the least peer_timeout
SECONDS_A_TAP = 8 * roles.ROWS * roles.WIDTHS["early"] * 8 / (SLOW_MBIT * 1e6)


@pytest.mark.parametrize("version", [4, 6])
def test_every_tap_of_every_pass_arrives(channel: Channel, version: int) -> None:
    """Catches a byte that is lost, late or misplaced on its way, and a way that is not the wire."""
    channel.serve(channel.near.address if version == 4 else channel.near.address6)
    channel.attach()
    before = channel.far.sent_bytes()
    for step in range(PASSES):
        channel.carry(step, MICROBATCHES)
    sent = channel.far.sent_bytes() - before
    assert sent > PASSES * MICROBATCHES * roles.MICROBATCH_BYTES


def test_both_sides_say_that_they_use_the_wire(channel: Channel) -> None:
    """Catches a lane that goes through shared memory, or a side that cannot say how it goes."""
    channel.open()
    lane = channel.consumer.call(roles.facts)["lanes"][0]
    facts = channel.producer.call(roles.facts)
    assert (lane["transport"], facts["transport"]) == ("ucx", "ucx")
    assert f"tcp/{CABLE}" in str(facts["ucx_lanes"])


def test_short_cut_is_survived(channel: Channel) -> None:
    """Catches a peer that is given up for a pause, and data that a pause loses or repeats."""
    channel.open()
    channel.carry(0)
    with channel.far.silent_cut():
        channel.consumer.begin(roles.receive_pass, 1, MICROBATCHES)
        channel.producer.begin(roles.push_pass, 1, MICROBATCHES)
        time.sleep(SHORT_CUT)  # not synchronisation: the cut lasts this long
    channel.consumer.finish()
    channel.producer.finish()


@pytest.mark.slow
def test_slow_link_delivers_right_data(channel: Channel) -> None:
    """Catches a peer that is given up while its bytes still move, only slowly."""
    assert SECONDS_A_TAP > SHORTEST_SILENCE
    channel.serve(peer_timeout=SHORTEST_SILENCE)
    channel.attach(peer_timeout=SHORTEST_SILENCE)
    with channel.far.slow(SLOW_MBIT):
        began = time.monotonic()
        channel.carry(0)
        assert time.monotonic() - began > SECONDS_A_TAP
