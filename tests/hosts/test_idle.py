"""A channel between two hosts that has nothing to do costs next to nothing."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from hosts.conftest import Channel

pytestmark = pytest.mark.ucx

IDLE_S = 3.0
SHARE = 0.01  # of one core


def idle(desk: SimpleNamespace) -> float:
    """Do nothing for a while; give the share of a core that this process took for it."""
    began, used = time.monotonic(), _cpu_seconds()
    time.sleep(IDLE_S)  # not synchronisation: the idle time that is measured
    return (_cpu_seconds() - used) / (time.monotonic() - began)


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def test_idle_channel_leaves_the_processor_alone(channel: Channel) -> None:
    """Catches a progress thread that spins, or heartbeats that come too often."""
    channel.serve()
    channel.attach()
    channel.carry(0)
    channel.producer.begin(idle)
    assert channel.consumer.call(idle) < SHARE
    assert channel.producer.finish() < SHARE
