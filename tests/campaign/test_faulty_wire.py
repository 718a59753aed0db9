"""Faults on order: what each does on each wire, and what the protocol makes of it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.channels import BRIEFLY, CUDA_VMM, LIMIT, SHM, UCX, Wire, arena_of, until
from support.payloads import moved, payload, same_bits
from tapchannel import Mailbox, TapPlan
from tapchannel.errors import (
    AttachTimeout,
    ChecksumError,
    DeviceError,
    PassAborted,
    StampTimeout,
    WouldBlock,
)
from tapchannel.testing import FaultyOutbox

ROWS, WIDTH = 8, 16
PLAN = TapPlan(groups={"taps": ["low", "high"]}, width=WIDTH, dtype="float32", max_rows=ROWS)
WIRES = [
    pytest.param(SHM, id="shm"),
    pytest.param(UCX, id="ucx", marks=pytest.mark.ucx),
    pytest.param(CUDA_VMM, id="cuda_ipc", marks=pytest.mark.gpu),
]


class Pair:
    """A mailbox and a faulty outbox of one process."""

    def __init__(self, wire: Wire, store: str, depth: int = 2) -> None:
        self.wire, self.store = wire, store
        self.mailbox = Mailbox(
            PLAN,
            {0: ["low", "high"]},
            depth=depth,
            device=wire.device,
            memory=wire.memory,
            transport=wire.transport,
            listen=wire.listen,
            store=store,
            timeout=LIMIT,
        )
        self.outbox = self.attach()

    def attach(self, limit: float = LIMIT) -> FaultyOutbox:
        """Attach an outbox."""
        device = self.wire.device if self.wire.on_gpu else None
        return FaultyOutbox(
            PLAN,
            0,
            store=self.store,
            device=device,
            transport=self.wire.transport,
            timeout=LIMIT,
            attach_timeout=limit,
        )

    def open_pass(self, step: int, microbatches: int = 1) -> None:
        """Open a pass on both sides."""
        self.mailbox.open_pass(step, microbatches)
        self.outbox.open_pass(step, microbatches)
        self.heard()

    def heard(self) -> None:
        """Wait until each side knows what the other has said."""
        assert self.mailbox._core.carried(LIMIT)
        assert self.outbox._core.carried(LIMIT)

    def push(self, step: int, microbatch: int = 0) -> None:
        """Push both taps."""
        for tap in ("low", "high"):
            value = moved(self.value(step, microbatch, tap), self.wire.device)
            self.outbox.push(microbatch, tap, value)

    def value(self, step: int, microbatch: int, tap: str) -> torch.Tensor:
        """Give what a tap holds."""
        return payload((step, microbatch, tap), ROWS, WIDTH)

    def check(self, step: int, microbatch: int = 0) -> None:
        """Receive a microbatch; see that it is what was pushed."""
        with self.mailbox.recv(microbatch, wait="host") as taps:
            for tap in ("low", "high"):
                assert same_bits(taps[tap].cpu(), self.value(step, microbatch, tap))

    def abort(self) -> None:
        """End the pass on both sides."""
        self.outbox.abort("the test has seen what it wanted")
        self.mailbox.abort("the test has seen what it wanted")
        self.heard()

    def carry(self, step: int) -> None:
        """See that a whole pass goes through."""
        self.open_pass(step)
        self.push(step)
        self.check(step)
        self.abort()

    def close(self) -> None:
        """Close both sides."""
        self.outbox.close()
        self.mailbox.close()


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> Wire:
    """Give the wire under test."""
    return request.param


@pytest.fixture
def pair(wire: Wire, tmp_path: Path) -> Iterator[Pair]:
    """Give both sides, attached."""
    made = Pair(wire, tmp_path.as_uri())
    yield made
    made.close()


def test_without_faults_it_is_a_wire(pair: Pair) -> None:
    """Catches a wrapper that changes what it wraps, or sources that it never lets go of."""
    value = moved(pair.value(1, 0, "low"), pair.wire.device)
    source = weakref.ref(value)
    pair.open_pass(1)
    pair.outbox.push(0, "low", value)
    pair.outbox.push(0, "high", moved(pair.value(1, 0, "high"), pair.wire.device))
    del value
    pair.check(1)
    pair.outbox.flush()
    assert source() is None
    assert pair.outbox.faults.held == 0
    pair.abort()
    pair.carry(2)


def test_a_held_message_is_not_shown_by_halves(pair: Pair) -> None:
    """Catches a stamp that does not wait for all of its payload (I1)."""
    pair.outbox.faults.hold()
    pair.open_pass(1)
    pair.push(1)
    until(lambda: pair.outbox.faults.held == 4)  # its rest, its stamp, and the tap behind it
    if not pair.wire.on_gpu:
        half = pair.value(1, 0, "low")[: ROWS // 2].contiguous()
        until(lambda: same_bits(rows_in_slot(pair), half))
    with pytest.raises(WouldBlock):
        pair.mailbox.try_recv(0)
    pair.outbox.faults.let_go()
    pair.check(1)
    pair.abort()
    pair.carry(2)


def rows_in_slot(pair: Pair) -> torch.Tensor:
    """Read the first tap's first half of rows, past the protocol."""
    held = pair.mailbox._core.holders()
    assert not held
    pitch, size = PLAN.groups[0].row_bytes, WIDTH * 4
    octets = arena_of(pair.mailbox).read_probe(0, pitch * ROWS // 2)
    rows = torch.frombuffer(bytearray(octets), dtype=torch.uint8).view(ROWS // 2, pitch)
    return rows[:, :size].contiguous().view(torch.float32)


def test_what_is_held_does_not_land_over_a_later_pass(pair: Pair) -> None:
    """Catches a late half of a pass that was given up, in the slot of the next one (I1, I2)."""
    pair.outbox.faults.hold()
    pair.open_pass(1)
    pair.push(1)
    until(lambda: pair.outbox.faults.held > 0)
    with pytest.raises(StampTimeout):
        pair.mailbox.recv(0, wait="host", timeout=BRIEFLY)
    pair.abort()
    pair.open_pass(2)
    pair.push(2)  # into the very slot; the lane keeps its order
    with pytest.raises(WouldBlock):
        pair.mailbox.try_recv(0)
    pair.outbox.faults.let_go()
    pair.check(2)
    pair.abort()
    pair.carry(3)


def test_an_outbox_that_closes_over_what_is_held_leaves_its_lane_fenced(pair: Pair) -> None:
    """Catches a next outbox of the same process whose taps the late half could land over."""
    pair.outbox.faults.hold()
    pair.open_pass(1)
    pair.push(1)
    until(lambda: pair.outbox.faults.held > 0)
    pair.outbox.close()
    if pair.wire.transport == "ucx":  # the mailbox ends its endpoint: nothing can land any more
        pair.mailbox.abort("its outbox closed")
        pair.outbox = pair.attach()
        pair.carry(2)
    else:
        with pytest.raises(AttachTimeout, match="not fenced"):
            pair.attach(BRIEFLY)


def test_a_dropped_message_is_a_stamp_timeout(pair: Pair) -> None:
    """Catches a lost message that leaves its slot's former microbatch in its place (I4)."""
    pair.carry(1)
    pair.outbox.faults.drop()
    pair.open_pass(2)
    pair.push(2)
    with pytest.raises(StampTimeout) as late:
        pair.mailbox.recv(0, wait="host", timeout=2 * BRIEFLY)
    assert (late.value.rank, late.value.tap) == (0, "low")
    pair.outbox.flush()  # the producer's side cannot know
    pair.abort()
    pair.carry(3)


def test_a_doubled_message_does_no_harm(pair: Pair) -> None:
    """Catches a second delivery that counts twice, or frees a source too early."""
    for step in (1, 2):
        pair.outbox.faults.duplicate()
        pair.carry(step)
    pair.open_pass(3)
    pair.push(3)
    pair.check(3)
    pair.outbox.flush()
    assert pair.mailbox.info()["lanes"][0]["messages"] == 6  # type: ignore[index]


def test_a_torn_message_fails_the_pass_on_both_sides(pair: Pair) -> None:
    """Catches a failed put that is only logged: the consumer would wait for it to its deadline."""
    pair.outbox.faults.tear()
    pair.open_pass(1)
    pair.outbox.push(0, "low", moved(pair.value(1, 0, "low"), pair.wire.device))
    began = time.monotonic()
    with pytest.raises(PassAborted, match="tore in mid-payload") as told:
        pair.mailbox.recv(0, wait="host")
    assert time.monotonic() - began < LIMIT / 2
    assert told.value.rank == 0
    with pytest.raises(DeviceError, match="tore in mid-payload"):
        pair.outbox.flush()
    pair.abort()
    pair.carry(2)


def test_a_delayed_message_is_waited_for(pair: Pair) -> None:
    """Catches a wait that gives up on what is only late, and a push that waits for its wire."""
    pair.outbox.faults.pass_by()
    pair.outbox.faults.delay(2 * BRIEFLY)
    pair.open_pass(1)
    began = time.monotonic()
    pair.push(1)
    pushed = time.monotonic() - began
    pair.check(1)
    assert pushed < 2 * BRIEFLY < time.monotonic() - began
    pair.abort()


def test_a_stamp_that_overtook_its_payload_is_found(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a check mode that trusts the stamp."""
    monkeypatch.setenv("TAPCHANNEL_CHECK", "1")
    pair = Pair(wire, tmp_path.as_uri())
    pair.outbox.faults.pass_by()
    pair.outbox.faults.overtake()
    pair.open_pass(1)
    pair.push(1)
    with pytest.raises(ChecksumError) as found:
        pair.mailbox.recv(0, wait="host")
    assert (found.value.rank, found.value.tap) == (0, "high")
    del found  # the frames of its traceback hold views on the slot
    pair.abort()
    pair.carry(2)
    pair.close()
