"""I1, I2 and I4: what a lease may show, when its slot may be written, and what a failure leaves.

Each test names the mutation under which it was seen to fail; one watches a race, and names none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.blocks import LaneWords
from support.channels import BRIEFLY, CUDA_VMM, Channel, Maker, granted, until
from support.children import Children
from support.payloads import is_poison
from support.places import Apart
from tapchannel import (
    CreditTimeout,
    Key,
    Outbox,
    OverrunError,
    PassAborted,
    StaleStampError,
    StampTimeout,
    TapPlan,
    UsageError,
    WouldBlock,
)
from tapchannel.testing import FaultyOutbox

SMALL = TapPlan({"tap": ["tap"]}, 4, "float32", 6)


@pytest.fixture
def gpu_channel_of(tmp_path: Path) -> Iterator[Maker]:
    """Make channels on a GPU, their producers in another process."""
    with Children(60) as children:
        apart = Apart(children)
        with Maker(CUDA_VMM, apart, tmp_path) as maker:
            yield maker
        apart.end()


def push(channel: Channel, microbatch: int, rows: int = 6, value: float | None = None) -> None:
    """Push one tap, filled with its microbatch's number or a value."""
    filled = torch.full((rows, 4), float(microbatch if value is None else value))
    channel.producer.push(microbatch, "tap", filled)


# ---- I1


def test_i1_no_stamp_stands_before_its_payload(channel_of: Maker) -> None:
    """Bug: a stamp over half of its payload. Mutation: stamp-before-payload."""
    channel = channel_of(SMALL, name="held", attach=[])
    with FaultyOutbox(SMALL, 0, store=channel_of.store, name="held") as outbox:
        with channel.mailbox.open_pass(1, 1), outbox.open_pass(1, 1):
            outbox.faults.hold()
            outbox.push(0, "tap", torch.full((6, 4), 7.0))
            until(lambda: outbox.faults.held)
            with pytest.raises(WouldBlock):
                channel.mailbox.try_recv(0)
            outbox.faults.let_go()
            assert bool((channel.mailbox.recv(0).clone()["tap"] == 7).all())


def test_i1_a_landed_cell_is_whole(channel_of: Maker) -> None:
    """Bug: a stamp before its payload, on a wire without a seam; the test above is the sure one."""
    plan = TapPlan({"pair": ["left", "right"]}, 1024, "float32", 2048)
    channel = channel_of(plan, depth=2)
    with channel.open_pass(1, 10):
        pushed = channel.producer.begin(push_large, 10)
        for microbatch in range(10):
            while True:
                try:
                    lease = channel.mailbox.try_recv(microbatch)
                    break
                except WouldBlock:
                    continue  # no pause: the moment between stamp and payload is to be seen
            with lease as taps:
                pair = taps["pair"]
                assert pair[-1, -1] == microbatch + 1  # what is copied last
                assert bool((pair == microbatch + 1).all())
                del pair
        pushed()


def push_large(outbox: Outbox, microbatches: int) -> None:
    """Push pairs of 8 MiB, filled with one more than their microbatch's number."""
    for microbatch in range(microbatches):
        tensor = torch.full((2048, 1024), float(microbatch + 1))
        outbox.push(microbatch, "left", tensor)
        outbox.push(microbatch, "right", tensor)


def test_i1_an_older_microbatch_does_not_pass_for_the_one_awaited(channel_of: Maker) -> None:
    """Bug: the stamp of the slot's former key satisfies a wait. Mutation: older-stamp-accepted."""
    channel = channel_of(SMALL, depth=1)
    with channel.open_pass(1, 2):
        push(channel, 0)
        with channel.mailbox.recv(0):
            pass
        with pytest.raises(WouldBlock):
            channel.mailbox.try_recv(1)
        push(channel, 1)
        with channel.mailbox.recv(1) as taps:
            assert bool((taps["tap"] == 1).all())


def test_i1_an_earlier_life_does_not_pass_for_this_one(channel_of: Maker) -> None:
    """Bug: what lies in the slots from before a reset is received. Mutation: reset-keeps-epoch."""
    channel = channel_of(SMALL, depth=1)
    with channel.open_pass(1, 1):
        push(channel, 0, value=5.0)
        with channel.mailbox.recv(0):
            pass
    channel.mailbox.reset()
    with channel.open_pass(1, 1):
        with pytest.raises(WouldBlock):
            channel.mailbox.try_recv(0)
        push(channel, 0, value=6.0)
        with channel.mailbox.recv(0) as taps:
            assert bool((taps["tap"] == 6).all())


def test_i1_a_newer_microbatch_does_not_pass_for_the_one_awaited(channel_of: Maker) -> None:
    """Bug: a cell overwritten without credit is received. Mutation: overrun-accepted."""
    channel = channel_of(SMALL, depth=2)
    with pytest.raises(OverrunError) as overrun:
        with channel.open_pass(1, 3):
            push(channel, 0)
            words = LaneWords(channel.mailbox, lane=0, depth=2, cells=1)
            assert words.stamp(slot=0) == Key(1, 1, 0).stamp()
            words.write_stamp(slot=0, word=Key(1, 1, 2).stamp())
            words.close()
            channel.mailbox.recv(0, timeout=BRIEFLY)
    assert overrun.value.seen == "pass 1, microbatch 2 (epoch 1)"


def test_i1_a_late_write_under_an_open_lease_is_noticed(channel_of: Maker) -> None:
    """Bug: a dead pass's write into a slot that is being read. Mutation: late-write-unseen."""
    channel = channel_of(SMALL, depth=1)
    with channel.open_pass(1, 1):
        push(channel, 0)
        channel.mailbox.recv(0).release()
    with pytest.raises(StaleStampError) as stale:
        with channel.open_pass(2, 1):
            push(channel, 0)
            with channel.mailbox.recv(0):
                words = LaneWords(channel.mailbox, lane=0, depth=1, cells=1)
                words.write_stamp(slot=0, word=Key(1, 1, 0).stamp())
                words.close()
    assert stale.value.seen == "pass 1, microbatch 0 (epoch 1)"


def test_i1_named_rows_show_no_row_that_was_not_pushed(channel_of: Maker) -> None:
    """Bug: rows= trusted, so that rows of an older key show. Mutation: named-rows-trusted."""
    channel = channel_of(SMALL, depth=1)
    with pytest.raises(UsageError, match="rows"):
        with channel.open_pass(1, 2):
            push(channel, 0, rows=6)
            with channel.mailbox.recv(0):
                pass
            push(channel, 1, rows=4)
            channel.mailbox.recv(1, rows=6)


# ---- I2


def test_i2_a_leased_slot_is_not_written(channel_of: Maker) -> None:
    """Bug: credit while a lease is open, given at another's end. Mutation: credit-under-lease."""
    channel = channel_of(SMALL, depth=2)
    with channel.open_pass(1, 4):
        for microbatch in range(4):
            push(channel, microbatch)
        held = channel.mailbox.recv(0)
        with channel.mailbox.recv(1):
            pass
        with pytest.raises(CreditTimeout):
            channel.producer.flush(BRIEFLY)
        with held as taps:
            assert bool((taps["tap"] == 0).all())
        for microbatch in (2, 3):
            with channel.mailbox.recv(microbatch) as taps:
                assert bool((taps["tap"] == microbatch).all())


def test_i2_nor_by_the_next_pass(channel_of: Maker) -> None:
    """Bug: a new pass grants all its slots, leased or not. Mutation: credit-over-passes."""
    channel = channel_of(SMALL, depth=1)
    with channel.open_pass(1, 1):
        push(channel, 0)
        lease = channel.mailbox.recv(0)
    with channel.open_pass(2, 1):
        push(channel, 0, value=9.0)
        with pytest.raises(CreditTimeout):
            channel.producer.flush(BRIEFLY)
        with lease as taps:
            assert bool((taps["tap"] == 0).all())
        with channel.mailbox.recv(0) as taps:
            assert bool((taps["tap"] == 9).all())


def test_i2_nor_before_its_microbatch_was_received(channel_of: Maker) -> None:
    """Bug: a slot that landed, but was never read, is granted anew. Mutation: unread-granted."""
    channel = channel_of(SMALL, depth=1)
    with channel.open_pass(1, 2):
        push(channel, 0)
        push(channel, 1)
        with pytest.raises(CreditTimeout):
            channel.producer.flush(BRIEFLY)
        for microbatch in range(2):
            with channel.mailbox.recv(microbatch) as taps:
                assert bool((taps["tap"] == microbatch).all())


@pytest.mark.gpu
def test_i2_a_slot_whose_reads_are_queued_is_not_written(gpu_channel_of: Maker) -> None:
    """Bug: credit when the host, not the GPU, is done. Mutation: credit-before-queued-reads."""
    channel = gpu_channel_of(SMALL, depth=1)
    with channel.open_pass(1, 2):
        push(channel, 0)
        push(channel, 1)
        with channel.mailbox.recv(0) as taps:
            torch.cuda._sleep(200_000_000)  # some 100 ms, and the reads behind it
            copy = taps["tap"].clone()
        with channel.mailbox.recv(1, wait="host") as taps:
            assert bool((copy == 0).all())
            assert bool((taps["tap"] == 1).all())


# ---- I4


def test_i4_a_failed_wait_is_not_mended_by_what_comes_late(channel_of: Maker) -> None:
    """Bug: two verdicts for one key. Mutation: failure-forgotten."""
    channel = channel_of(SMALL, depth=1)
    with pytest.raises(StampTimeout):
        with channel.open_pass(1, 2):
            with pytest.raises(StampTimeout):
                channel.mailbox.recv(0, timeout=0.0)
            push(channel, 0)
            channel.producer.flush()
            for call in (channel.mailbox.recv, channel.mailbox.try_recv):
                with pytest.raises(StampTimeout):
                    call(0)
            channel.mailbox.recv(1)
    with channel.open_pass(2, 1):
        push(channel, 0, value=3.0)
        with channel.mailbox.recv(0) as taps:
            assert bool((taps["tap"] == 3).all())


def test_i4_a_dropped_tap_is_poison_and_not_the_microbatch_before(channel_of: Maker) -> None:
    """Bug: a stamp for a drop, and the old bytes under it. Mutation: drop-leaves-old-bytes."""
    channel = channel_of(SMALL, depth=1, when_full="drop_newest")
    with channel.open_pass(1, 2):
        push(channel, 0, value=7.0)
        push(channel, 1)
        with channel.mailbox.recv(0) as taps:
            assert bool((taps["tap"] == 7).all())
        with channel.mailbox.recv(1) as taps:
            assert is_poison(taps["tap"])
            assert bool(taps["tap"].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("end", ["timeout", "abort"])
def test_i4_a_stream_that_is_let_go_sees_nan_and_its_lease_raises(
    gpu_channel_of: Maker, end: str
) -> None:
    """Bug: the stream reads the old bytes. Mutations: no-poison-pattern, failed-lease-silent."""
    channel = gpu_channel_of(SMALL, depth=1)
    failure = StampTimeout if end == "timeout" else PassAborted
    with pytest.raises(failure):
        with channel.open_pass(1, 2):
            push(channel, 0, value=7.0)
            with channel.mailbox.recv(0) as taps:
                # Both kernels are loaded here: to load one waits for the GPU, and so would poison.
                assert bool((taps["tap"] + 1.0 == 8).all())
                assert not bool(taps["tap"].isnan().any())
            until(lambda: granted(channel.mailbox, 1) == 2)
            with channel.mailbox.recv(1, rows=6, timeout=0.3) as taps:
                shown = taps["tap"] + 1.0  # queued behind the wait
                if end == "abort":
                    channel.mailbox.abort("given up")
                torch.cuda.synchronize()
                assert bool(shown.isnan().all())
                for use in (taps.__getitem__, taps.get):
                    with pytest.raises(failure):
                        use("tap")
                with pytest.raises(failure):
                    taps.clone()
    with channel.open_pass(2, 1):
        push(channel, 0, value=3.0)
        with channel.mailbox.recv(0) as taps:
            assert bool((taps["tap"] == 3).all())
