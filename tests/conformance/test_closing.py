"""Closing: from any state, in any order, twice; and whoever waits for the closed side is woken."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from support.channels import Channel, Maker, until
from support.places import in_background
from tapchannel import (
    ChannelClosed,
    Lease,
    Mailbox,
    Outbox,
    PassAborted,
    PeerLostError,
    TapChannelError,
    TapPlan,
    UsageError,
)

PLAN = TapPlan({"tap": ["tap"]}, 3, "float32", 2)


def push(channel: Channel, microbatch: int) -> None:
    """Push one tap full of its microbatch's number."""
    channel.producer.push(microbatch, "tap", torch.full((2, 3), float(microbatch)))


def test_after_close_every_call_of_the_mailbox_says_so(channel_of: Maker) -> None:
    """Bug: a call on freed memory, or one that waits for a producer of a closed mailbox."""
    channel = channel_of(PLAN)
    mailbox = channel.mailbox
    mailbox.close()
    mailbox.close()
    for call in (
        lambda: mailbox.open_pass(1, 1),
        lambda: mailbox.recv(0),
        lambda: mailbox.try_recv(0),
        lambda: mailbox.wait_ready(0.0),
        mailbox.reset,
    ):
        with pytest.raises(ChannelClosed):
            call()
    mailbox.abort("too late, and harmless")
    assert mailbox.info()["role"] == "mailbox"


def test_after_close_every_call_of_the_outbox_says_so(channel_of: Maker) -> None:
    """Bug: a push into memory that is mapped no more."""
    channel = channel_of(PLAN)
    channel.producer.run(use_after_close)


def use_after_close(outbox: Outbox) -> None:
    """Close an outbox twice, and call everything it has."""
    tensor = torch.zeros(2, 3, device=str(outbox.info()["device"]))
    outbox.close()
    outbox.close()
    for call in (
        lambda: outbox.open_pass(1, 1),
        lambda: outbox.push(0, "tap", tensor),
        lambda: outbox.flush(0.0),
    ):
        with pytest.raises(ChannelClosed):
            call()
    outbox.abort("too late, and harmless")
    assert outbox.info()["role"] == "outbox"


def test_closing_the_mailbox_wakes_who_waits_in_it(channel_of: Maker) -> None:
    """Bug: a thread left waiting to its deadline for a mailbox that is gone."""
    channel = channel_of(PLAN)
    with pytest.raises(ChannelClosed):
        with channel.mailbox.open_pass(1, 1):
            waiting = threading.Event()
            received = in_background(receive, channel.mailbox, waiting)
            waiting.wait(10)
            channel.mailbox.close()
            received()


def test_closing_the_mailbox_wakes_who_waits_for_producers(channel_of: Maker) -> None:
    """Bug: a job that goes on waiting for ranks to attach to a mailbox that is gone."""
    channel = channel_of(PLAN, attach=[])
    ready = in_background(channel.mailbox.wait_ready)
    channel.mailbox.close()
    with pytest.raises(ChannelClosed):
        ready(10)


def receive(mailbox: Mailbox, waiting: threading.Event) -> Lease:
    """Receive microbatch 0, and say when about to."""
    waiting.set()
    return mailbox.recv(0)


def test_closing_the_mailbox_wakes_its_producer(channel_of: Maker) -> None:
    """Bug: a producer that waits for credit of a mailbox that is gone, or goes on pushing."""
    channel = channel_of(PLAN, depth=1)
    channel.mailbox.open_pass(1, 3)
    with pytest.raises(TapChannelError):
        with channel.producer.open_pass(1, 3):
            push(channel, 0)
            push(channel, 1)
            flushed = channel.producer.begin(Outbox.flush, None)
            channel.mailbox.close()
            # The pass ends a moment before the mailbox: either may be heard of first.
            with pytest.raises((PeerLostError, PassAborted), match="closed"):
                flushed()
            with pytest.raises((PeerLostError, PassAborted), match="closed"):
                push(channel, 2)
    steps = itertools.count(2)
    until(lambda: no_pass_opens(channel, next(steps)))


def no_pass_opens(channel: Channel, step: int) -> bool:
    """Tell whether the producer has heard that its mailbox is closed."""
    try:
        channel.producer.open_pass(step, 1)
    except PeerLostError:
        return True
    channel.producer.abort("the mailbox is not closed yet")
    return False


def test_closing_the_outbox_wakes_the_consumer(channel_of: Maker) -> None:
    """Bug: a consumer that waits to its deadline for a producer that said goodbye."""
    channel = channel_of(PLAN, depth=2)
    with pytest.raises(PeerLostError, match="closed its end") as gone:
        with channel.mailbox.open_pass(1, 2):
            channel.producer.open_pass(1, 2)
            push(channel, 0)
            channel.producer.flush()
            closed = in_background(channel.producer.close)
            with channel.mailbox.recv(0) as taps:  # what it had pushed stays good
                assert torch.equal(taps["tap"].cpu(), torch.zeros(2, 3))
            closed()
            channel.mailbox.recv(1)
    assert (gone.value.rank, gone.value.tap) == (0, "tap")
    channel_of.attach(channel, 0)
    with channel.open_pass(2, 1):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            assert torch.equal(taps["tap"].cpu(), torch.zeros(2, 3))


def test_a_view_outlives_its_mailbox(channel_of: Maker) -> None:
    """Bug: memory that is unmapped under a tensor that still shows it."""
    channel = channel_of(PLAN)
    channel.mailbox.open_pass(1, 1)
    with channel.producer.open_pass(1, 1):
        push(channel, 0)
    with channel.mailbox.recv(0) as taps:
        view = taps["tap"]
    channel.close()
    assert torch.equal(view.cpu(), torch.zeros(2, 3))


def test_closing_in_mid_pass_with_pushes_queued(channel_of: Maker) -> None:
    """Bug: a close that waits for credit which will never come."""
    channel = channel_of(PLAN, depth=1)
    channel.mailbox.open_pass(1, 4)
    channel.producer.open_pass(1, 4)
    for microbatch in range(4):
        push(channel, microbatch)
    lease = channel.mailbox.recv(0)
    channel.producer.close()
    channel.mailbox.close()
    assert torch.equal(lease["tap"].cpu(), torch.zeros(2, 3))
    lease.release()


def test_a_second_outbox_for_a_lane_is_refused_until_the_first_is_closed(channel_of: Maker) -> None:
    """Bug: two producers that write the same cells, or a lane that is never free again."""
    channel = channel_of(PLAN)
    first = channel.producer
    with pytest.raises(UsageError, match="already"):
        channel_of.attach(channel, 0)
    first.close()
    channel_of.attach(channel, 0)
    until(lambda: channel.mailbox.info()["lanes"][0]["state"] == "attached")  # type: ignore[index]
    with channel.open_pass(1, 1):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            assert torch.equal(taps["tap"].cpu(), torch.zeros(2, 3))
