"""Credit: what a producer may write, when, and what becomes of what it may not write yet."""

from __future__ import annotations

import pytest
import torch

from support.channels import BRIEFLY, Channel, Maker, granted, until
from tapchannel import (
    CreditTimeout,
    Key,
    Outbox,
    PassAborted,
    TapPlan,
    UsageError,
    WouldBlock,
)

PLAN = TapPlan({"tap": ["tap"]}, 4, "float32", 3)


def tap_of(microbatch: int, rows: int = 3) -> torch.Tensor:
    """Return the tap of a microbatch; its number says which."""
    return torch.full((rows, 4), float(microbatch))


def push(channel: Channel, *microbatches: int) -> None:
    """Push the taps of microbatches, in this order."""
    for microbatch in microbatches:
        channel.producer.push(microbatch, "tap", tap_of(microbatch))


def shows(taps: object, microbatch: int) -> bool:
    """Tell whether a lease shows the tap of a microbatch."""
    view = taps["tap"]  # type: ignore[index]
    return torch.equal(view.cpu(), tap_of(microbatch))


def test_pushes_without_credit_are_queued_and_then_drained(channel_of: Maker) -> None:
    """Bug: a push that waits for credit, is lost without it, or overwrites a slot without it."""
    channel = channel_of(PLAN, depth=2)
    with channel.open_pass(1, 8):
        push(channel, *range(8))
        assert channel.producer.info()["deferred"] == 6
        for microbatch in range(8):
            waiting = max(0, 6 - microbatch)
            until(lambda: channel.producer.info()["queued"] == waiting)  # noqa: B023
            if waiting:
                with pytest.raises(CreditTimeout) as late:
                    channel.producer.flush(BRIEFLY / 10)
                assert late.value.key == Key(1, 1, microbatch + 2)
            with channel.mailbox.recv(microbatch) as taps:
                assert shows(taps, microbatch)
        channel.producer.flush()


def test_full_queue_refuses_a_push_that_may_be_made_again(channel_of: Maker) -> None:
    """Bug: a queue without a bound, or a refused push that counts as made."""
    channel = channel_of(PLAN, depth=1, outbox={"queue_limit": 2})
    with channel.open_pass(1, 4):
        push(channel, 0)
        channel.producer.flush()
        push(channel, 1, 2)
        with pytest.raises(CreditTimeout, match="queue"):
            push(channel, 3)
        for microbatch in range(4):
            with channel.mailbox.recv(microbatch) as taps:
                assert shows(taps, microbatch)
            if microbatch == 1:
                until(lambda: channel.producer.info()["queued"] < 2)
                push(channel, 3)


def test_single_slot(channel_of: Maker) -> None:
    """Bug: an index that is right only for a depth of two or more."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 5):
        push(channel, 0, 1)
        for microbatch in range(5):
            with channel.mailbox.recv(microbatch) as taps:
                assert shows(taps, microbatch)
            if microbatch < 3:
                push(channel, microbatch + 2)


def test_slots_come_back_in_any_order_and_credit_in_key_order(channel_of: Maker) -> None:
    """Bug: credit for a key whose slot is free although an earlier key's is not."""
    channel = channel_of(PLAN, depth=3)
    with channel.open_pass(1, 6):
        push(channel, *range(6))
        leases = [channel.mailbox.recv(microbatch) for microbatch in range(3)]
        leases[2].release()
        leases[1].release()
        with pytest.raises(CreditTimeout) as late:
            channel.producer.flush(BRIEFLY)
        assert late.value.key == Key(1, 1, 3)
        assert granted(channel.mailbox, 1) == 3
        assert shows(leases[0], 0)
        leases.pop(0).release()
        until(lambda: granted(channel.mailbox, 1) == 6)
        for microbatch in range(3, 6):
            with channel.mailbox.recv(microbatch) as taps:
                assert shows(taps, microbatch)


def test_pushes_out_of_order(channel_of: Maker) -> None:
    """Bug: a slot chosen by the order of pushes, or a push held up by one that has no credit."""
    channel = channel_of(PLAN, depth=2)
    with channel.open_pass(1, 4):
        push(channel, 1, 3, 0, 2)
        with channel.mailbox.recv(0) as taps:
            assert shows(taps, 0)
        held = channel.mailbox.recv(1)  # microbatch 3 needs its slot, 2 does not
        with channel.mailbox.recv(2, wait="host") as taps:
            assert shows(taps, 2)
        assert shows(held, 1)
        held.release()
        with channel.mailbox.recv(3) as taps:
            assert shows(taps, 3)


def test_microbatches_received_out_of_order(channel_of: Maker) -> None:
    """Bug: a lease that is given the slot whose turn it is, rather than its key's."""
    channel = channel_of(PLAN, depth=3)
    with channel.open_pass(1, 3):
        push(channel, 0, 1, 2)
        for microbatch in (2, 0, 1):
            with channel.mailbox.recv(microbatch) as taps:
                assert shows(taps, microbatch)


def test_try_recv_takes_only_what_has_landed(channel_of: Maker) -> None:
    """Bug: a refused try that waits, takes the slot, or fails the pass."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 2):
        for microbatch in range(2):
            with pytest.raises(WouldBlock):
                channel.mailbox.try_recv(microbatch)
            push(channel, microbatch)
            until(lambda: received(channel, microbatch))  # noqa: B023


def received(channel: Channel, microbatch: int) -> bool:
    """Receive a microbatch, unless it has not landed."""
    try:
        lease = channel.mailbox.try_recv(microbatch)
    except WouldBlock:
        return False
    with lease as taps:
        assert shows(taps, microbatch)
    return True


def test_a_source_modified_while_it_waits_for_credit_is_a_loud_error(channel_of: Maker) -> None:
    """Bug: the tap holds what a layer wrote in place after the push, and one side is not told."""
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(PassAborted, match="in place"):
        with channel.mailbox.open_pass(1, 2):
            with pytest.raises(UsageError, match="in place"):
                with channel.producer.open_pass(1, 2):
                    channel.producer.run(push_and_modify)
                    with channel.mailbox.recv(0) as taps:
                        assert shows(taps, 0)
                    until(lambda: channel.producer.flush())  # ends by the error
            channel.heard()
            channel.mailbox.recv(1)
    with channel.open_pass(2, 1):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            assert shows(taps, 0)


def test_a_modified_source_ends_its_own_pass_though_its_producer_went_on(
    channel_of: Maker,
) -> None:
    """Bug: the producer's open pass is ended instead, and the wrong tap is received."""
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(PassAborted, match="in place"):
        with channel.mailbox.open_pass(1, 2):
            with channel.producer.open_pass(1, 2):
                channel.producer.run(push_and_modify)
            with pytest.raises(UsageError, match="in place"):
                with channel.producer.open_pass(2, 1):
                    with channel.mailbox.recv(0) as taps:
                        assert shows(taps, 0)
                    until(lambda: channel.producer.flush())  # ends by the error
            channel.heard()
            channel.mailbox.recv(1)
    with channel.open_pass(3, 1):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            assert shows(taps, 0)


def push_and_modify(outbox: Outbox) -> None:
    """Push one tap with credit and one without, which a later layer then changes in place."""
    device = str(outbox.info()["device"])
    outbox.push(0, "tap", tap_of(0).to(device))
    hidden = tap_of(1).to(device)
    outbox.push(1, "tap", hidden)
    hidden.add_(1)
