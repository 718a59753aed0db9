"""I3, I5 and I6: every wait ends by a full account; a push waits for nothing; nothing deadlocks.

Each test names the mutation of tests/support/mutations under which it was seen to fail.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from support.channels import BRIEFLY, CUDA_VMM, SHM, Maker
from support.children import Children
from support.link import Link
from support.places import Apart, Here, in_background
from support.tap_pair import PLAN, SOURCES, push
from tapchannel import (
    AttachTimeout,
    CreditTimeout,
    Key,
    Outbox,
    PeerLostError,
    StampTimeout,
    TapPlan,
    TapTimeout,
    UsageError,
    _native,
)

PROMPTLY = 10.0  # seconds; for waits whose own limit is a tenth of a second


# ---- I3


def check_account(error: TapTimeout, key: Key, rank: int) -> None:
    """Check that an error says where, whom, how long, and what was seen last."""
    text = str(error)
    assert (error.key, error.rank, error.lane) == (key, rank, list(SOURCES).index(rank))
    assert (error.host, error.pid) == (socket.gethostname(), os.getpid())
    assert error.limit == BRIEFLY
    assert error.waited is not None
    assert BRIEFLY <= error.waited < PROMPTLY
    assert "heartbeat" in str(error.last_progress)
    assert error.channel is not None
    wanted = (error.channel, str(key), f"lane {error.lane}", f"rank {rank}", "of 100 ms")
    assert [part for part in wanted if part not in text] == []


@pytest.mark.parametrize("wait", ["host", "stream"])
def test_i3_a_wait_for_a_stamp_ends(channel_of: Maker, wait: str) -> None:
    """Bug: a wait without end, or for nobody knows whom. Mutations: endless-recv, nameless-lane."""
    channel = channel_of(PLAN, SOURCES, timeout=BRIEFLY)
    with pytest.raises(StampTimeout) as late:
        with channel.open_pass(5, 2):
            push(channel, 1, "left")
            push(channel, 1, "right")
            push(channel, 0, "left")
            in_background(channel.mailbox.recv, 0, wait)(PROMPTLY)
    check_account(late.value, Key(1, 5, 0), 8)
    assert late.value.tap == "right"


def test_i3_a_queued_push_does_not_wait_for_ever(channel_of: Maker) -> None:
    """Bug: a queue that only grows. Mutation: endless-queue."""
    channel = channel_of(PLAN, SOURCES, depth=1, outbox={"timeout": BRIEFLY})
    with pytest.raises(CreditTimeout) as late:
        with channel.mailbox.open_pass(5, 2), channel.producers[8].open_pass(5, 2):
            push(channel, 0, "right")
            push(channel, 1, "right")
            channel.producers[8].flush(PROMPTLY)
    check_account(late.value, Key(1, 5, 1), 8)
    assert late.value.tap == "right"


def test_i3_a_flush_ends(channel_of: Maker) -> None:
    """Bug: flush waits for credit for ever. Mutation: endless-flush."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    channel.mailbox.open_pass(5, 2)
    with channel.producers[8].open_pass(5, 2):
        push(channel, 0, "right")
        push(channel, 1, "right")
        with pytest.raises(CreditTimeout) as late:
            channel.producers[8].begin(Outbox.flush, BRIEFLY)(PROMPTLY)
    check_account(late.value, Key(1, 5, 1), 8)


def test_i3_a_wait_for_a_slot_ends(channel_of: Maker) -> None:
    """Bug: a host wait for a slot that is never released. Mutation: endless-recv."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    with pytest.raises(CreditTimeout) as late:
        with channel.open_pass(5, 2):
            for microbatch in range(2):
                push(channel, microbatch, "left", "right")
            lease = channel.mailbox.recv(0)
            in_background(channel.mailbox.recv, 1, "host", None, BRIEFLY)(PROMPTLY)
    assert late.value.key == Key(1, 5, 1)
    assert late.value.limit == BRIEFLY
    assert "microbatch 0" in str(late.value.cause)
    lease.release()


def test_i3_waiting_for_producers_ends(channel_of: Maker) -> None:
    """Bug: a job that hangs at its start for a rank that lacks. Mutation: endless-wait-ready."""
    channel = channel_of(PLAN, SOURCES, attach=[3])
    with pytest.raises(AttachTimeout) as late:
        in_background(channel.mailbox.wait_ready, BRIEFLY)(PROMPTLY)
    assert late.value.limit == BRIEFLY
    assert "rank 8 (right)" in str(late.value)


def test_i3_attaching_ends(tmp_path: Path) -> None:
    """Bug: an outbox that waits for ever for a mailbox. Mutation: endless-attach."""
    options = {"store": f"file://{tmp_path}", "name": "nobody", "attach_timeout": BRIEFLY}

    def attach() -> Outbox:
        return Outbox(PLAN, 3, **options)

    with pytest.raises(AttachTimeout) as late:
        in_background(attach)(PROMPTLY)
    assert (late.value.rank, late.value.limit) == (3, BRIEFLY)
    assert "nobody" in str(late.value)


def test_i3_a_wait_for_a_dead_producer_ends(tmp_path: Path) -> None:
    """Bug: a producer's death found out by the time-out only. Mutation: death-unnoticed."""
    with Children() as children, Maker(SHM, Here(), tmp_path) as channel_of:
        channel = channel_of(PLAN, SOURCES, attach=[3])
        producer = children.start(
            attach_and_stay, channel_of.store, channel.mailbox.info()["channel"]
        )
        channel.mailbox.wait_ready()
        with pytest.raises(PeerLostError) as lost:
            with channel.mailbox.open_pass(1, 1), channel.producers[3].open_pass(1, 1):
                push(channel, 0, "left")
                received = in_background(channel.mailbox.recv, 0)
                producer.kill()
                received(PROMPTLY)
        assert (lost.value.rank, lost.value.tap, lost.value.pid) == (8, "right", producer.pid)


def attach_and_stay(link: Link, store: str, name: str) -> None:
    """Attach as rank 8 and wait to be killed."""
    outbox = Outbox(PLAN, 8, store=store, name=name)
    link.receive()
    outbox.close()


# ---- I5


def test_i5_a_push_waits_for_no_credit(channel_of: Maker) -> None:
    """Bug: a push that blocks its caller. Mutations: push-waits-for-credit, push-flushes.

    The credit can come from this very thread only, and after the pushes: they must return first.
    """
    channel = channel_of(PLAN, SOURCES, depth=1)
    passes = [producer.open_pass(1, 4) for producer in channel.producers.values()]
    for microbatch in range(4):
        for rank, tap in ((3, "left"), (8, "right")):
            pushed = channel.producers[rank].begin(push_one, microbatch, tap)
            pushed(PROMPTLY / 2)
    for opened in passes:
        opened.close()
    with channel.mailbox.open_pass(1, 4):
        for microbatch in range(4):
            with channel.mailbox.recv(microbatch) as taps:
                assert bool((taps["pair"] == microbatch).all())


def push_one(outbox: Outbox, microbatch: int, tap: str) -> None:
    """Push one tap, filled with its microbatch's number."""
    device = str(outbox.info()["device"])
    outbox.push(microbatch, tap, torch.full((4, 4), float(microbatch), device=device))


def test_i5_no_kernel_of_ours_can_be_launched() -> None:
    """Bug: a kernel that takes an SM from the producer. Mutation: kernel-launched."""
    module = Path(str(_native.__file__)).read_bytes()
    assert b"cuStreamWriteValue64" in module  # the names of the driver's calls are in there
    for call in (b"cuLaunch", b"cudaLaunch", b"cuModuleLoad", b"cuLibraryLoad", b"cuGraphLaunch"):
        assert call not in module


@pytest.fixture
def gpu_channel_of(tmp_path: Path) -> Iterator[Maker]:
    """Make channels on a GPU, their producers in another process."""
    with Children(60) as children:
        apart = Apart(children)
        with Maker(CUDA_VMM, apart, tmp_path) as maker:
            yield maker
        apart.end()


@pytest.mark.gpu
def test_i5_a_push_does_not_wait_for_the_stream_nor_hold_it_up(gpu_channel_of: Maker) -> None:
    """Bug: a push that makes host or stream wait. Mutation: push-synchronises."""
    plan = TapPlan({"tap": ["tap"]}, 1024, "float32", 1024)
    channel = gpu_channel_of(plan, depth=1, outbox={"credit_wait": 0.001})
    with channel.open_pass(1, 2):
        returned_early, went_on = channel.producer.run(push_behind_a_kernel)
        assert returned_early == [True, True]
        assert went_on
        for microbatch in range(2):
            with channel.mailbox.recv(microbatch) as taps:
                assert bool((taps["tap"] == microbatch + 1).all())


def push_behind_a_kernel(outbox: Outbox) -> tuple[list[bool], bool]:
    """Push behind a long kernel, with credit and without; tell whether the stream noticed."""
    device = str(outbox.info()["device"])
    torch.cuda._sleep(1)
    torch.zeros(8, device=device).add_(1)  # both kernels are loaded before time matters
    torch.cuda.synchronize()
    returned_early: list[bool] = []
    for microbatch in range(2):
        hidden = torch.zeros(1024, 1024, device=device)
        torch.cuda._sleep(100_000_000)  # some 50 ms
        hidden += microbatch + 1
        computed = torch.cuda.Event()
        computed.record()
        outbox.push(microbatch, "tap", hidden)
        returned_early.append(not computed.query())
    behind = torch.ones(8, device=device) + 1  # no credit yet for the second push
    torch.cuda.synchronize()
    queued = int(str(outbox.info()["queued"]))
    return returned_early, bool((behind == 2).all()) and queued == 1


@pytest.mark.gpu
def test_i5_a_push_runs_no_kernel(gpu_channel_of: Maker) -> None:
    """Bug: a copy made by a kernel where the copy engine would do."""
    plan = TapPlan({"pair": ["left", "right"]}, 512, "bfloat16", 512)
    channel = gpu_channel_of(plan, depth=1)
    with channel.open_pass(1, 1):
        work = channel.producer.run(push_profiled)
        with channel.mailbox.recv(0):
            pass
    assert sum("memcpy" in name.lower() for name in work) == 2
    assert [name for name in work if "mem" not in name.lower()] == []


def push_profiled(outbox: Outbox) -> list[str]:
    """Push a plain tensor and a column slice; return what the GPU did for it."""
    hidden = torch.ones(512, 1024, dtype=torch.bfloat16, device=str(outbox.info()["device"]))
    plain = hidden[:, :512].contiguous()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        outbox.push(0, "left", plain)
        outbox.push(0, "right", hidden[:, 512:])
        outbox.flush()
    return [event.name for event in profiled.events() if "CUDA" in str(event.device_type)]


# ---- I6


@pytest.mark.parametrize("reason", ["held", "not received"])
def test_i6_a_stream_is_not_made_to_wait_for_its_own_release(
    channel_of: Maker, reason: str
) -> None:
    """Bug: a wait enqueued in front of the release it needs. Mutation: stream-waits-for-itself."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    with channel.open_pass(1, 2):
        for microbatch in range(2):
            push(channel, microbatch, "left", "right")
        lease = channel.mailbox.recv(0) if reason == "held" else None
        with pytest.raises(UsageError, match="for ever") as never:
            in_background(channel.mailbox.recv, 1, "stream", None, BRIEFLY)(PROMPTLY)
        assert never.value.key == Key(1, 1, 1)
        assert "slot 0" in str(never.value.cause)
        assert "microbatch 0" in str(never.value.cause)
        if lease is not None:
            lease.release()
        else:
            with channel.mailbox.recv(0):
                pass
        with channel.mailbox.recv(1) as taps:  # the refusal has changed nothing
            assert bool((taps["pair"] == 1).all())


@pytest.mark.gpu
@pytest.mark.parametrize("connections", ["1", None])
def test_i6_both_roles_in_one_process_do_not_block_each_other(connections: str | None) -> None:
    """Bug: a stream wait in front of the copy that it waits for. Mutation: wait-before-own-push."""
    with Children(60) as children:
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        passed = children.start(receive_before_push, env=environment).result()
    assert passed == 6


def receive_before_push(link: Link) -> int:
    """Receive with rows named before the push is made, by another thread; count what came."""
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        with Maker(CUDA_VMM, Here(), Path(folder)) as channel_of:
            channel = channel_of(PLAN, SOURCES, depth=2)
            with channel.open_pass(1, 6):
                for microbatch in range(6):
                    asked = in_background(channel.mailbox.recv, microbatch, "stream", 4)
                    push(channel, microbatch, "left", "right")
                    with asked() as taps:
                        right += bool((taps["pair"] == microbatch).all())
                    del taps, asked
    return right
