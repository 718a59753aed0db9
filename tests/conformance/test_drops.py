"""when_full="drop_newest": a push without credit is dropped, counted, and named by the lease."""

from __future__ import annotations

import pytest
import torch

from support.channels import Channel, Maker, granted, until
from support.payloads import EVERY_DTYPE, is_poison, moved, payload, same_bits
from tapchannel import ConfigError, Outbox, TapPlan

PLAN = TapPlan({"pair": ["kept", "lost"]}, 4, "float32", 3)
SOURCES = {0: ["kept"], 1: ["lost"]}


def push(channel: Channel, microbatch: int, *taps: str) -> None:
    """Push taps of a microbatch, filled with its number."""
    for tap in taps:
        rank = 0 if tap == "kept" else 1
        channel.producers[rank].push(microbatch, tap, torch.full((3, 4), float(microbatch)))


def test_push_without_credit_is_dropped_and_counted(channel_of: Maker) -> None:
    """Bug: a drop that nobody counts, or that leaves the tap of an earlier microbatch in view."""
    channel = channel_of(PLAN, SOURCES, depth=1, when_full="drop_newest")
    with channel.open_pass(1, 3):
        push(channel, 0, "kept", "lost")
        push(channel, 1, "lost")  # slot 0 is still microbatch 0's
        with channel.mailbox.recv(0) as taps:
            assert taps.missing == frozenset()
        until(lambda: granted(channel.mailbox, 1) == 2)
        channel.heard()
        push(channel, 1, "kept")
        with channel.mailbox.recv(1) as taps:
            assert taps.missing == {"lost"}
            assert taps.info["lost"].dropped
            assert not taps.info["kept"].dropped
            assert torch.equal(taps["kept"].cpu(), torch.ones(3, 4))
            assert is_poison(taps["lost"])
            assert taps["lost"].isnan().all()
            assert taps["pair"].shape == (3, 8)
        until(lambda: granted(channel.mailbox, 1) == 3)
        channel.heard()
        push(channel, 2, "kept", "lost")
        with channel.mailbox.recv(2) as taps:
            assert taps.missing == frozenset()
            assert torch.equal(taps["pair"].cpu(), torch.full((3, 8), 2.0))
    assert [producer.info()["dropped"] for producer in channel.producers.values()] == [0, 1]
    until(lambda: dropped_of(channel) == [0, 1])


def dropped_of(channel: Channel) -> list[int]:
    """Return the drops that the mailbox has counted, by lane."""
    return [lane["dropped"] for lane in channel.mailbox.info()["lanes"]]  # type: ignore[attr-defined]


def test_a_dropped_tap_reads_as_the_poison_of_its_dtype(channel_of: Maker) -> None:
    """Bug: a pattern that is a plain number in some dtype, so that a drop goes unseen."""
    names = list(EVERY_DTYPE)
    plan = TapPlan({name: [name] for name in names}, 6, {name: name for name in names}, 2)
    channel = channel_of(plan, depth=1, when_full="drop_newest")
    with channel.open_pass(1, 2):
        channel.producer.run(push_all, names, 0)
        channel.producer.run(push_all, names, 1)
        with channel.mailbox.recv(0) as taps:
            for name in names:
                assert same_bits(taps[name], payload((0, name), 2, 6, name)), name
        with channel.mailbox.recv(1) as taps:
            assert taps.missing == set(names)
            not_poison = [name for name in names if not is_poison(taps[name])]
            floats = [name for name in names if taps[name].is_floating_point()]
            # float4 has no NaN to show.
            finite = [
                name
                for name in floats
                if name != "float4_e2m1fn_x2" and not taps[name].float().isnan().all()
            ]
    assert not not_poison
    assert not finite


def push_all(outbox: Outbox, names: list[str], microbatch: int) -> None:
    """Push one tap of each dtype."""
    device = str(outbox.info()["device"])
    for name in names:
        outbox.push(microbatch, name, moved(payload((microbatch, name), 2, 6, name), device))


def test_dropped_pushes_leave_nothing_queued(channel_of: Maker) -> None:
    """Bug: dropped taps that still keep their tensors alive, or that fill the queue up."""
    channel = channel_of(PLAN, SOURCES, depth=1, when_full="drop_newest", outbox={"queue_limit": 1})
    with channel.open_pass(1, 6):
        for microbatch in range(6):
            push(channel, microbatch, "kept", "lost")
        for microbatch in range(6):
            with channel.mailbox.recv(microbatch) as taps:
                assert taps.missing == (frozenset() if microbatch == 0 else {"kept", "lost"})
    assert [producer.info()["dropped"] for producer in channel.producers.values()] == [5, 5]


def test_wait_is_the_default(channel_of: Maker) -> None:
    """Bug: taps dropped by a mailbox that was never told that it may."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    with channel.open_pass(1, 4):
        for microbatch in range(4):
            push(channel, microbatch, "kept", "lost")
        for microbatch in range(4):
            with channel.mailbox.recv(microbatch) as taps:
                assert taps.missing == frozenset()
                assert torch.equal(taps["pair"].cpu(), torch.full((3, 8), float(microbatch)))


def test_an_unknown_policy_is_refused(channel_of: Maker) -> None:
    """Bug: a policy misspelt, and the channel silently waits."""
    with pytest.raises(ConfigError, match="when_full"):
        channel_of(PLAN, SOURCES, when_full="drop_oldest")
