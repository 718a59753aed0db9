"""Leases: what they show, how they are waited for, and how their slot goes back."""

from __future__ import annotations

import pytest
import torch

from support.channels import Channel, Maker, granted, until
from support.payloads import payload, same_bits
from tapchannel import ConfigError, Key, StampTimeout, TapPlan, UsageError

PLAN = TapPlan({"pair": ["left", "right"], "single": ["single"]}, 4, "float32", 6)


def push(channel: Channel, microbatch: int, rows: int = 6) -> None:
    """Push all taps of a microbatch."""
    for tap in PLAN.taps:
        channel.producer.push(microbatch, tap.name, payload((microbatch, tap.name), rows, 4))


@pytest.mark.parametrize("wait", ["stream", "host"])
def test_both_waits_bring_what_was_pushed(channel_of: Maker, wait: str) -> None:
    """Bug: a wait that returns before the payload is there: the producer has not begun yet."""
    channel = channel_of(PLAN, depth=2)
    with channel.open_pass(1, 4):
        for microbatch in range(4):
            pushed = channel.producer.begin(push_later, microbatch)
            with channel.mailbox.recv(microbatch, wait=wait) as taps:
                for tap in PLAN.taps:
                    assert same_bits(taps[tap.name], payload((microbatch, tap.name), 6, 4))
            pushed()


def push_later(outbox: object, microbatch: int) -> None:
    """Push all taps of a microbatch."""
    device = str(outbox.info()["device"])  # type: ignore[attr-defined]
    for tap in PLAN.taps:
        tensor = payload((microbatch, tap.name), 6, 4).to(device)
        outbox.push(microbatch, tap.name, tensor)  # type: ignore[attr-defined]


def test_info_says_what_came_and_from_whom(channel_of: Maker) -> None:
    """Bug: facts of another tap or key, or the slot's limits instead of what was pushed."""
    sources = {3: ["single", "left"], 5: ["right"]}
    channel = channel_of(PLAN, sources)
    with channel.open_pass(6, 1):
        channel.producers[3].push(0, "single", payload("single", 6, 4).view(2, 3, 4))
        channel.producers[3].push(0, "left", payload("left", 2, 4))
        channel.producers[5].push(0, "right", payload("right", 2, 4))
        with channel.mailbox.recv(0) as taps:
            assert taps.key == Key(1, 6, 0)
            facts = {
                name: (info.rows, info.shape, info.rank, info.transport, info.dropped)
                for name, info in taps.info.items()
            }
            wire = channel_of.wire.transport
            assert facts == {
                "single": (6, (2, 3, 4), 3, wire, False),
                "left": (2, (2, 4), 3, wire, False),
                "right": (2, (2, 4), 5, wire, False),
            }
            assert set(taps) == {"pair", "single", "left", "right"}
            assert "single" in taps
            assert "other" not in taps


def test_rows_that_fit_are_taken_as_named(channel_of: Maker) -> None:
    """Bug: rows= that waits for the announce all the same, or is ignored."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 2):
        for microbatch, rows in ((0, 6), (1, 4)):
            push(channel, microbatch, rows)
            with channel.mailbox.recv(microbatch, rows=rows) as taps:
                assert same_bits(taps["left"], payload((microbatch, "left"), rows, 4))
                assert taps["pair"].shape == (rows, 8)


@pytest.mark.parametrize("named", [3, 6])
def test_rows_that_do_not_fit_are_an_error(channel_of: Maker, named: int) -> None:
    """Bug: a view over rows that nobody pushed for this key, or without some that were pushed."""
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(UsageError, match="rows") as wrong:
        with channel.open_pass(1, 2):
            push(channel, 0, 6)
            with channel.mailbox.recv(0) as taps:
                assert taps["left"].shape == (6, 4)
            push(channel, 1, 4)
            channel.mailbox.recv(1, wait="host", rows=named)
    assert (wrong.value.seen, wrong.value.expected) == (4, named)
    assert wrong.value.tap in {"left", "right", "single"}
    with channel.open_pass(2, 1):
        push(channel, 0, 2)
        with channel.mailbox.recv(0, rows=2) as taps:
            assert same_bits(taps["left"], payload((0, "left"), 2, 4))


def test_rows_beyond_the_plan_are_refused(channel_of: Maker) -> None:
    """Bug: a view that reaches into the next group or slot; the pass goes on after the refusal."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 1):
        for rows in (7, -1):
            with pytest.raises(ConfigError, match="rows"):
                channel.mailbox.recv(0, rows=rows)
        push(channel, 0)
        with channel.mailbox.recv(0, rows=6) as taps:
            assert same_bits(taps["single"], payload((0, "single"), 6, 4))


def test_clone_frees_the_slot_and_keeps_the_values(channel_of: Maker) -> None:
    """Bug: a clone that is a view, or that keeps the slot."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 2):
        push(channel, 0)
        lease = channel.mailbox.recv(0)
        copies = lease.clone()
        with pytest.raises(UsageError, match="released"):
            lease["pair"]
        push(channel, 1)
        with channel.mailbox.recv(1) as taps:
            assert same_bits(taps["left"], payload((1, "left"), 6, 4))
        assert set(copies) == {"pair", "left", "right", "single"}
        for tap in PLAN.taps:
            assert same_bits(copies[tap.name], payload((0, tap.name), 6, 4))
        assert copies["left"].untyped_storage().data_ptr() == copies["pair"].data_ptr()


def test_release_counts_the_views_that_are_alive(channel_of: Maker) -> None:
    """Bug: a release under a view that the draft still reads, or one refused without any view."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 2):
        push(channel, 0)
        lease = channel.mailbox.recv(0)
        for names in (["pair", "single"], ["single"]):
            views = [lease[name] for name in names]
            with pytest.raises(UsageError, match="alive") as held:
                lease.release()
            assert held.value.seen == f"{len(names)} live view{'s' if len(names) > 1 else ''}"
            assert same_bits(views[-1], payload((0, "single"), 6, 4))
            views.clear()
        part = lease["left"].detach()[1:3]
        with pytest.raises(UsageError, match="alive"):
            lease.release()
        assert same_bits(part.contiguous(), payload((0, "left"), 6, 4)[1:3])
        del part
        lease.release()
        until(lambda: granted(channel.mailbox, 1) == 2)
        push(channel, 1)
        with channel.mailbox.recv(1) as taps:
            assert same_bits(taps["left"], payload((1, "left"), 6, 4))


def test_a_released_lease_shows_nothing(channel_of: Maker) -> None:
    """Bug: a lease that goes on showing the slot, which by then is the next microbatch's."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 1):
        push(channel, 0)
        lease = channel.mailbox.recv(0)
        lease.release()
        for use in (
            lambda: lease["pair"],
            lambda: lease.info,
            lambda: lease.missing,
            lease.clone,
            lease.release,
            lease.__enter__,
        ):
            with pytest.raises(UsageError, match="released"):
                use()


def test_a_name_that_is_not_in_the_plan(channel_of: Maker) -> None:
    """Bug: an error that leaves the lease unusable."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 1):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            with pytest.raises(ConfigError, match="'lift'"):
                taps["lift"]
            assert same_bits(taps["left"], payload((0, "left"), 6, 4))


def test_a_microbatch_is_received_once(channel_of: Maker) -> None:
    """Bug: a second lease on a slot whose first is out, or on a slot that has moved on."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 2):
        push(channel, 0)
        lease = channel.mailbox.recv(0)
        for _ in ("held", "released"):
            with pytest.raises(UsageError, match="received already"):
                channel.mailbox.recv(0)
            if lease is not None:
                lease.release()
                lease = None
        push(channel, 1)
        with channel.mailbox.recv(1) as taps:
            assert same_bits(taps["left"], payload((1, "left"), 6, 4))


def test_what_lies_outside_the_pass_is_refused(channel_of: Maker) -> None:
    """Bug: a key of no pass that is waited for, or an error that ends the pass."""
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(UsageError, match="no pass"):
        channel.mailbox.recv(0)
    with channel.open_pass(1, 1):
        with pytest.raises(UsageError, match="outside") as outside:
            channel.mailbox.recv(1)
        assert outside.value.expected == "0 to 0"
        with pytest.raises(ConfigError):
            channel.mailbox.recv(-1)
        with pytest.raises(ConfigError, match="wait"):
            channel.mailbox.recv(0, wait="later")
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            assert same_bits(taps["left"], payload((0, "left"), 6, 4))


@pytest.mark.gpu
def test_a_stream_wait_that_fails_shows_nan_and_raises(channel_of: Maker) -> None:
    """Bug: a stream that is let go and reads the microbatch before; a lease that keeps silent."""
    if not channel_of.wire.on_gpu or channel_of.place.name == "here":
        pytest.skip("only between processes can a stream wait for what is not announced")
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(StampTimeout):
        with channel.open_pass(1, 2):
            push(channel, 0)
            with channel.mailbox.recv(0) as taps:
                assert same_bits(taps["left"], payload((0, "left"), 6, 4))
            until(lambda: granted(channel.mailbox, 1) == 2)
            lease = channel.mailbox.recv(1, rows=6, timeout=0.3)
            shown = lease["pair"] + 0.0
            torch.cuda.synchronize()
            assert shown.isnan().all()
            del shown
            lease.__exit__(None, None, None)
    with channel.open_pass(2, 1):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            assert same_bits(taps["left"], payload((0, "left"), 6, 4))
