"""A producer that comes back again and again: the mailbox serves it, and does not grow."""

from __future__ import annotations

import pytest

from hosts import restarts
from hosts.conftest import Channel
from support import remote_roles as roles

pytestmark = pytest.mark.ucx

WARM_UP = 5  # restarts after which all that a process makes once has been made
GROWTH = 4 << 20  # bytes that the allocator may hold back, however many restarts there are


@pytest.mark.parametrize(
    "times",
    [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def test_mailbox_outlives_its_producers(channel: Channel, times: int) -> None:
    """Catches a lane that stays dead, and descriptors, threads or memory that restarts cost."""
    channel.risk_producer()  # a new one: once torch has made threads, it hangs in a forked process
    channel.serve()
    restart(channel, 0, WARM_UP)
    descriptors, threads, resident = channel.consumer.call(roles.footprint)
    restart(channel, WARM_UP, times)
    seen = channel.consumer.call(roles.footprint)
    assert seen[:2] == (descriptors, threads)
    assert seen[2] < resident + GROWTH


def restart(channel: Channel, first: int, times: int) -> None:
    """Have a producer attach, push a pass and end, by SIGKILL every other time, again and again."""
    for step in range(first, first + times):
        channel.producer.begin(restarts.live_once, channel.store, step, step % 2 == 0)
        channel.consumer.call(roles.await_arrival)
        channel.consumer.call(roles.receive_pass, step, 1)
        channel.producer.finish()
        channel.consumer.call(roles.await_departure)
