"""I7: an exception in the middle of a pass leaves the channel usable.

Each test names the mutation of tests/support/mutations under which it was seen to fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.channels import BRIEFLY, Channel, Maker, until
from support.tap_pair import PLAN, SOURCES, push, works
from tapchannel import PassAborted, StampTimeout, TapChannelError


class Overflow(Exception):
    """What a trainer raises in the middle of a pass."""


def nothing_pushed(channel: Channel) -> None:
    """Raise before anything was pushed."""
    raise Overflow


def half_a_microbatch(channel: Channel) -> None:
    """Raise when one of two taps was pushed."""
    push(channel, 0, "left")
    raise Overflow


def pushes_queued(channel: Channel) -> None:
    """Raise when pushes wait for credit."""
    for microbatch in range(4):
        push(channel, microbatch)
    with channel.mailbox.recv(0):
        pass
    raise Overflow


def lease_open(channel: Channel) -> None:
    """Raise inside the block of a lease."""
    push(channel, 0)
    with channel.mailbox.recv(0) as taps:
        assert bool((taps["pair"] == 0).all())
        raise Overflow


def wait_failed(channel: Channel) -> None:
    """Raise because a wait failed."""
    try:
        channel.mailbox.recv(0, timeout=0.0)
    except StampTimeout as late:
        raise Overflow from late


BREAKS = (nothing_pushed, half_a_microbatch, pushes_queued, lease_open, wait_failed)


@pytest.mark.parametrize("first_to_leave", ["consumer", "producers"])
@pytest.mark.parametrize("breaks", BREAKS, ids=lambda breaks: breaks.__name__)
def test_i7_the_pass_after_an_exception_works(
    channel_of: Maker, breaks: Callable[[Channel], None], first_to_leave: str
) -> None:
    """Bug: a pass that stays open or failed. Mutations: exception-keeps-pass, abort-keeps-fault."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    works(channel, 1)
    if first_to_leave == "consumer":
        with pytest.raises(Overflow):
            with channel.producers[3].open_pass(2, 4), channel.producers[8].open_pass(2, 4):
                with channel.mailbox.open_pass(2, 4):
                    breaks(channel)
    else:
        with pytest.raises(Overflow):
            with channel.open_pass(2, 4):
                breaks(channel)
    works(channel, 3)
    works(channel, 4)


def test_i7_an_exception_on_one_side_is_heard_on_the_others(channel_of: Maker) -> None:
    """Bug: sides left waiting in a pass that is over elsewhere. Mutation: abort-unheard."""
    channel = channel_of(PLAN, SOURCES, depth=2, timeout=BRIEFLY * 10)
    opened = channel.producers[3].open_pass(1, 2)
    with pytest.raises(PassAborted, match="Overflow") as heard:
        with channel.mailbox.open_pass(1, 2):
            with pytest.raises(Overflow):
                with channel.producers[8].open_pass(1, 2):
                    push(channel, 0)
                    raise Overflow
            channel.mailbox.recv(1)
    assert heard.value.rank == 8
    with pytest.raises(PassAborted):
        push(channel, 1, "left")
    with pytest.raises(PassAborted):
        opened.close()
    works(channel, 2)


def test_i7_nothing_stays_queued_of_a_dead_pass(channel_of: Maker) -> None:
    """Bug: sources kept alive, and sent late, for a pass that is over. Mutation: queue-survives."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    with pytest.raises(TapChannelError):
        with channel.open_pass(1, 4):
            for microbatch in range(4):
                push(channel, microbatch)
            channel.mailbox.abort("enough")
            until(lambda: all_queues_are_empty(channel))
            push(channel, 0)
    works(channel, 2)


def all_queues_are_empty(channel: Channel) -> bool:
    """Tell whether no producer has a push that waits for credit."""
    return not any(producer.info()["queued"] for producer in channel.producers.values())
