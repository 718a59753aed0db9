"""Time-outs and aborts: a typed error that says who, and the next pass works."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from support.channels import BRIEFLY, Channel, Maker
from tapchannel import (
    AttachTimeout,
    CreditTimeout,
    Key,
    Outbox,
    PassAborted,
    StampTimeout,
    TapPlan,
    UsageError,
)

PLAN = TapPlan({"pair": ["left", "right"]}, 4, "float32", 2)
SOURCES = {2: ["left"], 9: ["right"]}


def push(channel: Channel, microbatch: int, *taps: str, value: float | None = None) -> None:
    """Push taps of a microbatch, all of them by default."""
    for rank, [tap] in SOURCES.items():
        if tap in (taps or ("left", "right")):
            filled = torch.full((2, 4), float(microbatch if value is None else value))
            channel.producers[rank].push(microbatch, tap, filled)


def works(channel: Channel, step: int) -> None:
    """Run one sound pass."""
    with channel.open_pass(step, 3):
        for microbatch in range(3):
            push(channel, microbatch, value=step + microbatch)
            with channel.mailbox.recv(microbatch) as taps:
                assert torch.equal(taps["pair"].cpu(), torch.full((2, 8), float(step + microbatch)))


@pytest.mark.parametrize("wait", ["stream", "host"])
def test_timeout_names_the_producer_and_fails_the_pass_only(channel_of: Maker, wait: str) -> None:
    """Bug: an error from which nobody can tell which rank is late; a late tap that is then used."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    with pytest.raises(StampTimeout) as again:
        with channel.open_pass(7, 3):
            push(channel, 0)
            with channel.mailbox.recv(0):
                pass
            push(channel, 1, "left")
            with pytest.raises(StampTimeout) as late:
                channel.mailbox.recv(1, wait=wait, timeout=BRIEFLY)
            push(channel, 1, "right")
            channel.mailbox.recv(1, wait=wait)  # one verdict a key, though it has come by now
    error = late.value
    assert error.key == again.value.key == Key(1, 7, 1)
    assert (error.rank, error.lane, error.tap) == (9, 1, "right")
    assert error.host == socket.gethostname()
    assert (error.pid == os.getpid()) == (channel_of.place.name == "here")
    assert error.limit == BRIEFLY
    assert BRIEFLY <= error.waited < BRIEFLY + 1
    assert "heartbeat" in error.last_progress
    works(channel, 8)


def test_a_producer_that_never_attached_is_named(channel_of: Maker) -> None:
    """Bug: a late tap blamed, when it is the producer's process that never came."""
    channel = channel_of(PLAN, SOURCES, attach=[2])
    with pytest.raises(AttachTimeout, match="rank 9"):
        channel.mailbox.wait_ready(BRIEFLY)
    with pytest.raises(AttachTimeout) as never:
        with channel.mailbox.open_pass(1, 1), channel.producers[2].open_pass(1, 1):
            push(channel, 0, "left")
            channel.mailbox.recv(0, timeout=BRIEFLY)
    assert (never.value.rank, never.value.tap) == (9, "right")
    channel_of.attach(channel, 9)
    channel.mailbox.wait_ready()
    works(channel, 2)


def test_credit_timeout_fails_the_producers_pass_only(channel_of: Maker) -> None:
    """Bug: a producer left waiting for ever by a consumer that never receives."""
    channel = channel_of(PLAN, SOURCES, depth=1, outbox={"timeout": BRIEFLY})
    with pytest.raises(PassAborted, match="no credit"):
        with channel.mailbox.open_pass(1, 2):
            with pytest.raises(CreditTimeout) as late, channel.producers[2].open_pass(1, 2):
                push(channel, 0, "left")
                push(channel, 1, "left")
                channel.producers[2].flush(20.0)
            channel.mailbox.recv(0)
    assert (late.value.rank, late.value.tap, late.value.key) == (2, "left", Key(1, 1, 1))
    # "producer rank 2 on host h (pid p)": p is the producer's, on whichever side it is said.
    assert late.value.pid == channel.producers[2].run(pid_of)
    assert late.value.limit == BRIEFLY
    assert BRIEFLY <= late.value.waited < BRIEFLY + 1
    works(channel, 2)


def pid_of(outbox: Outbox) -> int:
    """Return the process that an outbox lives in."""
    assert outbox.info()["role"] == "outbox"
    return os.getpid()


def test_abort_by_the_consumer_ends_the_pass_of_its_producers(channel_of: Maker) -> None:
    """Bug: producers that go on pushing into a dead pass, or whose next pass is dead too."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    with pytest.raises(PassAborted) as told:
        with channel.open_pass(1, 4):
            for microbatch in range(3):
                push(channel, microbatch)
            with channel.mailbox.recv(0):
                pass
            channel.mailbox.abort("loss is not finite")
            channel.heard()
            with pytest.raises(UsageError, match="no pass"):
                channel.mailbox.recv(1)
            push(channel, 3)
    assert "consumer" in told.value.who
    assert told.value.reason == "loss is not finite"
    works(channel, 2)


def test_abort_by_a_producer_ends_the_pass_of_the_consumer(channel_of: Maker) -> None:
    """Bug: a consumer that waits to its deadline for a producer that has given up."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    with pytest.raises(PassAborted) as told:
        with channel.mailbox.open_pass(1, 4), channel.producers[2].open_pass(1, 4):
            push(channel, 0, "left")
            with channel.producers[9].open_pass(1, 4):
                push(channel, 0, "right")
                with channel.mailbox.recv(0):
                    pass
                aborted = channel.producers[9].begin(Outbox.abort, "gradient overflow")
                channel.mailbox.recv(1)
    aborted()
    assert (told.value.rank, told.value.reason) == (9, "gradient overflow")
    assert "producer" in told.value.who
    works(channel, 2)


def test_nothing_of_a_pass_that_a_producer_aborted_is_received(channel_of: Maker) -> None:
    """Bug: a tap of a pass that its producer took back, because it had landed before."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    with pytest.raises(PassAborted, match="taken back"):
        with channel.open_pass(1, 2):
            push(channel, 0)
            push(channel, 1)
            for producer in channel.producers.values():
                producer.flush()
            channel.producers[9].abort("taken back")
            channel.heard()
            channel.mailbox.recv(0)
    works(channel, 2)


def test_producers_that_run_ahead_lose_only_the_aborted_pass(channel_of: Maker) -> None:
    """Bug: pushes of the next pass dropped from the queue together with those of the dead one."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    channel.mailbox.open_pass(1, 2)
    passes = [producer.open_pass(1, 2) for producer in channel.producers.values()]
    push(channel, 0)
    push(channel, 1)
    for opened in passes:
        opened.close()
    passes = [producer.open_pass(2, 1) for producer in channel.producers.values()]
    push(channel, 0, value=5.0)
    channel.mailbox.abort("only this pass")
    with channel.mailbox.open_pass(2, 1):
        with channel.mailbox.recv(0) as taps:
            assert torch.equal(taps["pair"].cpu(), torch.full((2, 8), 5.0))
    for opened in passes:
        opened.close()
    works(channel, 3)


def test_abort_by_the_consumer_wakes_a_producer_that_flushes(channel_of: Maker) -> None:
    """Bug: a flush that reports pushes as copied which the abort has dropped."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    channel.mailbox.open_pass(1, 2)
    with pytest.raises(PassAborted, match="out of memory"):
        with channel.producers[2].open_pass(1, 2):
            push(channel, 0, "left")
            push(channel, 1, "left")
            flushed = channel.producers[2].begin(Outbox.flush, None)
            channel.mailbox.abort("out of memory")
            flushed()
    works(channel, 2)


def test_abort_ends_a_closed_pass_that_waits_for_credit(channel_of: Maker) -> None:
    """Bug: pushes of a pass that was given up, whose time-out then fails the next one."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    producer = channel.producers[2]
    with producer.open_pass(1, 2):
        push(channel, 0, "left")
        push(channel, 1, "left")
    with pytest.raises(CreditTimeout):
        producer.flush(BRIEFLY)
    producer.abort("nobody received it")
    assert producer.info()["queued"] == 0
    channel.heard()
    with pytest.raises(PassAborted, match="nobody received it"), channel.mailbox.open_pass(1, 2):
        channel.mailbox.recv(0)
    works(channel, 2)


@pytest.mark.parametrize("side", ["consumer", "producer"])
def test_abort_when_nothing_is_wrong_changes_nothing(channel_of: Maker, side: str) -> None:
    """Bug: an abort between passes that ends the next one, or a pass of the past."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    role = channel.mailbox if side == "consumer" else channel.producers[2]
    role.abort("before the first pass")
    works(channel, 0)
    role.abort("between two passes")
    works(channel, 1)
