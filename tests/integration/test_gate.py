"""The gate, between staging memory and the slots: what it lets through, when, and what it costs."""

from __future__ import annotations

import mmap
import os
import resource
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.blocks import LaneWords
from support.channels import BRIEFLY, STAGED_CPU, Channel, Maker, arena_of, landed, until
from support.places import Here
from support.small_channel import PLAN as SMALL_PLAN
from support.small_channel import Footprint, attach, refused, small_channel, states
from support.tap_pair import PLAN, SOURCES, push, works
from tapchannel import Key, TapPlan
from tapchannel.errors import PeerLostError, ProtocolError, TransportUnavailable

# A tap that keeps the gate busy for a tenth of a second: single words, every other one.
SLOW_ROWS = 1 << 24
SLOW_PLAN = TapPlan({"pair": ["slow", "rest"]}, 1, "int64", SLOW_ROWS)
SLOW_SOURCES = {0: ["slow"], 1: ["rest"]}
IDLE = 1.0  # seconds
IDLE_SHARE = 0.02  # of one core, all threads of a channel together


@pytest.fixture
def channel_of(tmp_path: Path) -> Iterator[Maker]:
    """Make channels by host_staged in host memory."""
    with Maker(STAGED_CPU, Here(), tmp_path) as maker:
        yield maker


class StagedLane:
    """One lane's words and staging cells, written past the protocol; its cell is one float32."""

    def __init__(self, channel: Channel, depth: int, lane: int = 0) -> None:
        self.words = LaneWords(channel.mailbox, lane, depth, 1)
        fd = channel.mailbox._core.arrivals_fd(lane, "tapchannel:arrivals")
        self._arrivals = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
        self._staging: Any = channel.mailbox._made.serving.staging.arena()

    def forge(self, slot: int, key: Key, **announce: int) -> None:
        """Have a tap of one row arrive, as a lane would that goes its own way."""
        self._staging.write_probe(slot * PLAN.slot_bytes, struct.pack("<4f", 7.0, 7.0, 7.0, 7.0))
        said = {"rows": 4, "row_begin": 0, "ndim": 2, **announce}
        self.words.write_announce(slot, key=key.stamp(), **said)
        struct.pack_into("<Q", self._arrivals, slot * 8, key.stamp())

    def close(self) -> None:
        """Unmap all."""
        self.words.close()
        self._arrivals.close()


@contextmanager
def forger(channel: Channel, depth: int) -> Iterator[StagedLane]:
    """Open a lane's words for as long as the block runs."""
    lane = StagedLane(channel, depth)
    try:
        yield lane
    finally:
        lane.close()


def slot_of(channel: Channel, slot: int) -> bytes:
    """Read a slot's first row, past the protocol."""
    return arena_of(channel.mailbox).read_probe(slot * PLAN.slot_bytes, 16)


def test_forged_arrival_with_credit_is_let_through(channel_of: Maker) -> None:
    """The test of the tests: a forgery that nobody would notice lets everything below pass."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    works(channel, 1)  # its announces say what dtype and shape are right
    with forger(channel, 1) as lane:
        channel.mailbox.open_pass(2, 1)
        lane.forge(0, Key(1, 2, 0))
        until(lambda: lane.words.stamp(0) == Key(1, 2, 0).stamp())
        assert slot_of(channel, 0) == struct.pack("<4f", 7.0, 7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    "key",
    [Key(1, 2, 2), Key(1, 1, 0), Key(1, 3, 0), Key(2, 2, 0), Key(1, 2, 1)],
    ids=["no credit yet", "pass before", "pass to come", "epoch to come", "another slot's"],
)
def test_arrival_without_credit_is_ignored(channel_of: Maker, key: Key) -> None:
    """Bug: a slot that is being read, or a newer pass's, overwritten by what came late (I2)."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    works(channel, 1)
    before = slot_of(channel, 0)
    with forger(channel, 2) as lane:
        stamp = lane.words.stamp(0)
        channel.mailbox.open_pass(2, 4)
        channel.producers[3].open_pass(2, 4)
        channel.producers[8].open_pass(2, 4)
        lane.forge(0, key)
        push(channel, 1)
        until(lambda: landed(channel.mailbox, 1))  # so the gate has looked after the forgery
        assert (lane.words.stamp(0), slot_of(channel, 0)) == (stamp, before)
        push(channel, 0)  # the forgery is overwritten: nothing is lost
        with channel.mailbox.recv(0) as taps:
            assert bool((taps["pair"] == 0).all())


def test_arrival_of_an_aborted_pass_is_ignored(channel_of: Maker) -> None:
    """Bug: a late copy of a dead pass that lands in the slot and counts as its tap (6b)."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    works(channel, 1)
    before = slot_of(channel, 0)
    with forger(channel, 2) as lane:
        stamp = lane.words.stamp(0)
        channel.mailbox.open_pass(2, 2)
        channel.mailbox.abort("the test wants it")
        lane.forge(0, Key(1, 2, 0))
        watched = time.monotonic() + BRIEFLY
        while time.monotonic() < watched:
            assert (lane.words.stamp(0), slot_of(channel, 0)) == (stamp, before)
        with channel.open_pass(3, 2):
            push(channel, 1)
            until(lambda: landed(channel.mailbox, 1))
            assert (lane.words.stamp(0), slot_of(channel, 0)) == (stamp, before)
            push(channel, 0)
            for microbatch in range(2):
                with channel.mailbox.recv(microbatch) as taps:
                    assert bool((taps["pair"] == microbatch).all())


@pytest.mark.parametrize(
    "slip",
    [{"rows": 5}, {"row_begin": 1 << 63}, {"row_begin": 3}, {"dtype": 99}, {"ndim": 0}],
    ids=str,
)
def test_announce_that_does_not_fit_ends_the_wait(channel_of: Maker, slip: dict[str, int]) -> None:
    """Bug: a peer's numbers used for the copy (I8), or a wait for a tap that never passes (I3)."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    works(channel, 1)
    before = slot_of(channel, 0)
    with forger(channel, 1) as lane:
        stamp = lane.words.stamp(0)
        channel.mailbox.open_pass(2, 1)
        lane.forge(0, Key(1, 2, 0), **slip)
        began = time.monotonic()
        with refused(ProtocolError, rank=3, tap="left", key=Key(1, 2, 0)):
            channel.mailbox.recv(0, timeout=10.0)
        assert time.monotonic() - began < 5.0
        assert (lane.words.stamp(0), slot_of(channel, 0)) == (stamp, before)
    channel.mailbox.abort("the test has seen what it wanted")
    works(channel, 3)


def push_slowly_and_close(channel: Channel) -> None:
    """Push both taps and end the slow one's outbox as soon as its source has been read."""
    for rank, [tap] in SLOW_SOURCES.items():
        channel.producers[rank].open_pass(1, 1)
        rows = torch.full((SLOW_ROWS if tap == "slow" else 1, 1), 5)
        channel.producers[rank].push(0, tap, rows)
    channel.producers[0].close()


def test_tap_that_has_arrived_outlives_its_outbox(channel_of: Maker) -> None:
    """Bug: a producer that closes in good order, and its last taps are reported as lost."""
    channel = channel_of(SLOW_PLAN, SLOW_SOURCES, depth=1)
    with channel.mailbox.open_pass(1, 1):
        push_slowly_and_close(channel)
        assert states(channel.mailbox) == {0: "away", 1: "attached"}
        with channel.mailbox.recv(0) as taps:  # the gate is still at its copy
            assert bool((taps["slow"] == 5).all())


def test_tap_that_has_not_arrived_is_lost_with_its_outbox(channel_of: Maker) -> None:
    """Bug: a wait to the deadline for what can never come (I3)."""
    channel = channel_of(PLAN, SOURCES)
    with pytest.raises(PeerLostError), channel.mailbox.open_pass(1, 1):
        channel.producers[3].open_pass(1, 1)
        channel.producers[3].close()
        channel.mailbox.recv(0)


def test_lane_may_come_back_by_another_transport(tmp_path: Path) -> None:
    """Bug: what the gate still carries of a lane lands over a tap of its next life."""
    with small_channel(tmp_path, ()) as channel:
        lanes: Any = channel.mailbox.info
        for transports in (("host_staged", "shm"), ("shm", "host_staged")):
            for rank, transport in zip((3, 7), transports, strict=True):
                channel.outboxes[rank] = attach(tmp_path, rank, transport=transport)
            assert tuple(lane["transport"] for lane in lanes()["lanes"]) == transports
            channel.carry()
            for outbox in channel.outboxes.values():
                outbox.close()


def test_lane_is_let_in_once_the_gate_has_carried_its_taps(channel_of: Maker) -> None:
    """Bug: the next life of a lane writes the slot while the gate is still copying into it."""
    channel = channel_of(SLOW_PLAN, SLOW_SOURCES, depth=1)
    with channel.mailbox.open_pass(1, 1):
        push_slowly_and_close(channel)
        until(lambda: channel.mailbox._core.may_attach(0) == 0)
        assert landed(channel.mailbox, 0)
        with channel.mailbox.recv(0) as taps:
            assert bool((taps["slow"] == 5).all())


@pytest.mark.parametrize("granted", [False, True], ids=["between passes", "nothing pushed yet"])
def test_gate_that_waits_leaves_the_processor_alone(channel_of: Maker, granted: bool) -> None:
    """Bug: a gate that polls while nothing can come, or where a lane would ring."""
    channel = channel_of(PLAN, SOURCES)
    works(channel, 1)
    if granted:
        channel.mailbox.open_pass(2, 4)
    before, began = cpu_seconds(), time.monotonic()
    time.sleep(IDLE)  # not synchronisation, but what is measured: a while in which nothing happens
    assert cpu_seconds() - before < IDLE_SHARE * (time.monotonic() - began)


def cpu_seconds() -> float:
    """Give the processor time that this process has used so far, all its threads together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def test_staging_memory_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    """Bug: an outbox that waits to its deadline, and nobody says for what."""
    with small_channel(tmp_path, ()) as channel:
        channel.mailbox._made.serving.staging.drop()
        with refused(TransportUnavailable, channel="draft", rank=7) as caught:
            attach(tmp_path, 7, transport="host_staged")
        assert "closed" in caught[0].refused["host_staged"]  # type: ignore[attr-defined]
        channel.outboxes = {rank: attach(tmp_path, rank, transport="shm") for rank in (3, 7)}
        channel.carry()


def test_nothing_is_left_of_closed_channels(tmp_path: Path) -> None:
    """Bug: a gate's thread, its staging memory or its arrival words kept after close."""
    for index in range(3):
        with small_channel(tmp_path / str(index), transport="host_staged") as channel:
            channel.carry()
        if index == 0:
            before = Footprint.at_rest()
    assert before.grown() is None


def test_staging_memory_is_reserved_only_for_lanes_that_need_it(tmp_path: Path) -> None:
    """Bug: every mailbox pays for host memory as large as its slots."""
    with small_channel(tmp_path) as channel:
        channel.carry()
        assert channel.mailbox._made.serving.staging._arena is None
        channel.outboxes.pop(7).close()
        channel.outboxes[7] = attach(tmp_path, 7, SMALL_PLAN, transport="host_staged")
        channel.carry()
        assert channel.mailbox._made.serving.staging._arena is not None
