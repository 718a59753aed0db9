"""Passes and epochs: counted alike on all sides, to the very ends of their fields."""

from __future__ import annotations

import pytest
import torch

from support.channels import BRIEFLY, Channel, Maker
from tapchannel import (
    ConfigError,
    CreditTimeout,
    EpochMismatchError,
    Key,
    PassAborted,
    ProtocolError,
    TapPlan,
    UsageError,
)
from tapchannel.keys import MAX_EPOCH, MAX_MICROBATCHES, MAX_STEP

PLAN = TapPlan({"tap": ["tap"]}, 3, "int64", 2)


def push(channel: Channel, microbatch: int, value: int) -> None:
    """Push one tap full of a number."""
    channel.producer.push(microbatch, "tap", torch.full((2, 3), value))


def works(channel: Channel, step: int) -> None:
    """Run one sound pass."""
    with channel.open_pass(step, 3):
        for microbatch in range(3):
            push(channel, microbatch, step + microbatch)
            with channel.mailbox.recv(microbatch) as taps:
                assert taps.key == Key(channel.mailbox.epoch, step, microbatch)
                assert torch.equal(taps["tap"].cpu(), torch.full((2, 3), step + microbatch))


@pytest.mark.parametrize("first", ["push", "recv"])
def test_microbatch_counts_that_differ_are_an_error(channel_of: Maker, first: str) -> None:
    """Bug: the shorter side leaves, the longer one waits for what will never come."""
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(ProtocolError, match="counts") as differs:
        with channel.mailbox.open_pass(3, 2), channel.producer.open_pass(3, 4):
            if first == "push":
                push(channel, 0, 1)
            channel.mailbox.recv(0)
    assert {differs.value.seen, differs.value.expected} == {
        "pass 3 with 2 microbatches",
        "pass 3 with 4 microbatches",
    }
    works(channel, 4)


def test_a_producer_in_a_pass_that_is_over_is_told(channel_of: Maker) -> None:
    """Bug: a producer that counts its passes differently fills the queue of a pass long gone."""
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(ProtocolError, match="later pass"):
        with channel.mailbox.open_pass(3, 1), channel.producer.open_pass(2, 1):
            channel.heard()
            push(channel, 0, 1)
    works(channel, 4)


def test_a_pass_is_opened_once_and_steps_grow(channel_of: Maker) -> None:
    """Bug: a key used twice: stamps of the first use satisfy the waits of the second."""
    channel = channel_of(PLAN, depth=1)
    works(channel, 5)
    for role in (channel.mailbox, channel.producer):
        for step in (5, 4, 0):
            with pytest.raises(UsageError, match="larger"):
                role.open_pass(step, 1)
    with channel.open_pass(6, 1):
        for role in (channel.mailbox, channel.producer):
            with pytest.raises(UsageError, match="open already"):
                role.open_pass(7, 1)
        push(channel, 0, 1)
        with channel.mailbox.recv(0):
            pass
    works(channel, 7)


def test_an_incomplete_pass_is_an_error_of_whoever_leaves_it(channel_of: Maker) -> None:
    """Bug: a pass left half done, whose other side waits; the next pass begins in its slots."""
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(UsageError, match="not complete") as early:
        with channel.mailbox.open_pass(1, 3):
            with channel.producer.open_pass(1, 3):
                for microbatch in range(3):
                    push(channel, microbatch, 1)
            with channel.mailbox.recv(0):
                pass
    assert (early.value.seen, early.value.expected) == (1, 3)
    works(channel, 2)
    with pytest.raises(UsageError, match="not complete") as early:
        with channel.mailbox.open_pass(3, 2), channel.producer.open_pass(3, 2):
            push(channel, 1, 1)
    assert (early.value.key, early.value.tap) == (Key(1, 3, 0), "tap")
    works(channel, 4)


def test_pass_numbers_reach_the_end_of_their_field(channel_of: Maker) -> None:
    """Bug: a step that runs over into the epoch's bits, or into the sign of the compare."""
    channel = channel_of(PLAN, depth=2)
    for step in (0, MAX_STEP // 2, MAX_STEP // 2 + 1, MAX_STEP - 1, MAX_STEP):
        works(channel, step)
    for role in (channel.mailbox, channel.producer):
        with pytest.raises(ConfigError, match="range"):
            role.open_pass(MAX_STEP + 1, 1)
    channel.mailbox.reset()
    channel.heard()
    works(channel, 0)


def test_a_pass_may_have_as_many_microbatches_as_their_field_counts(channel_of: Maker) -> None:
    """Bug: the last microbatch's stamp runs over into the next pass."""
    channel = channel_of(PLAN, depth=2, outbox={"timeout": BRIEFLY})
    for role in (channel.mailbox, channel.producer):
        for count in (0, MAX_MICROBATCHES + 1):
            with pytest.raises(ConfigError, match="range"):
                role.open_pass(1, count)
    with pytest.raises(CreditTimeout) as late:
        with channel.mailbox.open_pass(1, MAX_MICROBATCHES):
            with channel.producer.open_pass(1, MAX_MICROBATCHES):
                push(channel, 0, 7)
                with channel.mailbox.recv(0) as taps:
                    assert torch.equal(taps["tap"].cpu(), torch.full((2, 3), 7))
                push(channel, MAX_MICROBATCHES - 1, 8)
                with pytest.raises(UsageError, match="outside"):
                    push(channel, MAX_MICROBATCHES, 9)
                channel.producer.flush(20.0)
    assert late.value.key == Key(1, 1, MAX_MICROBATCHES - 1)
    works(channel, 2)


def test_reset_begins_a_new_epoch(channel_of: Maker) -> None:
    """Bug: a push of the old epoch taken for one of the new; an open lease that is cut off."""
    channel = channel_of(PLAN, depth=1)
    works(channel, 40)
    channel.mailbox.open_pass(41, 2)
    with pytest.raises(PassAborted, match="reset"):
        with channel.producer.open_pass(41, 2):
            push(channel, 0, 3)
            lease = channel.mailbox.recv(0, wait="host")
            channel.mailbox.reset()
            channel.mailbox.open_pass(1, 1)
            channel.heard()
            push(channel, 1, 4)
    assert channel.mailbox.epoch == channel.mailbox.info()["epoch"] == 2
    with channel.producer.open_pass(1, 1):
        push(channel, 0, 5)  # its slot is still the old lease's
        assert torch.equal(lease["tap"].cpu(), torch.full((2, 3), 3))
        lease.release()
        with channel.mailbox.recv(0) as taps:
            assert torch.equal(taps["tap"].cpu(), torch.full((2, 3), 5))
    channel.mailbox.abort("done")
    works(channel, 2)


def test_a_producer_that_is_ahead_of_a_reset_is_told(channel_of: Maker) -> None:
    """Bug: pushes of a pass of the old epoch that wait for a credit which can never come."""
    channel = channel_of(PLAN, depth=1)
    works(channel, 3)
    with pytest.raises(EpochMismatchError):
        with channel.producer.open_pass(4, 2):
            push(channel, 0, 1)
            channel.mailbox.reset()
            channel.heard()
            push(channel, 1, 1)
    works(channel, 1)


def test_epochs_reach_the_end_of_their_field_and_no_further(channel_of: Maker) -> None:
    """Bug: an epoch that runs over into the poison bit: every wait is satisfied by nothing."""
    channel = channel_of(PLAN, depth=1)
    works(channel, 1)
    for _ in range(MAX_EPOCH - 1):
        channel.mailbox.reset()
    channel.heard()
    assert channel.mailbox.epoch == MAX_EPOCH
    works(channel, MAX_STEP)
    with pytest.raises(UsageError, match="epoch"):
        channel.mailbox.reset()
    assert channel.mailbox.epoch == MAX_EPOCH
