"""A producer that scribbles in the control block: nothing of it is used before it was checked (I8).

The plan has five taps and the mailbox three slots: for that shape the native module tells where the
stamps and the announces lie.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.children import Children
from support.link import Link
from support.small_channel import LIMIT, NAME, refused
from tapchannel import Mailbox, Outbox, TapPlan, _native
from tapchannel.errors import (
    ChecksumError,
    OverrunError,
    ProtocolError,
    StaleStampError,
    StampTimeout,
    TapChannelError,
)
from tapchannel.keys import POISON_BIT, Key
from tapchannel.telemetry import read_events

DEPTH, CELLS, MAX_ROWS, WIDTH = 3, 5, 4, 8
TAPS = [f"tap{index}" for index in range(CELLS)]
PLAN = TapPlan({"g": TAPS}, WIDTH, "float32", MAX_ROWS)
LAYOUT = _native.layout()
BRIEFLY = 0.05
ROWS = torch.ones(2, WIDTH)


@dataclass
class Announce:
    """An announce as it lies in the control block."""

    key: int
    rows: int
    row_begin: int
    dtype: int
    ndim: int
    shape: tuple[int, ...]
    flags: int
    checksum: int

    FORM = struct.Struct("<QQQII8QII")

    @classmethod
    def unpack(cls, data: bytes) -> Announce:
        """Read one."""
        key, rows, begin, dtype, ndim, *shape, flags, checksum = cls.FORM.unpack(data)
        return cls(key, rows, begin, dtype, ndim, tuple(shape), flags, checksum)

    def pack(self) -> bytes:
        """Write one."""
        return self.FORM.pack(
            self.key, self.rows, self.row_begin, self.dtype, self.ndim, *self.shape, self.flags,
            self.checksum,
        )  # fmt: skip


class Scribbler:
    """A mailbox, its honest outbox, and a hand in their control block."""

    def __init__(self, folder: Path) -> None:
        place: Any = {"store": f"file://{folder}", "name": NAME, "timeout": LIMIT}
        self.mailbox = Mailbox(PLAN, {4: TAPS}, depth=DEPTH, **place)
        self.outbox = Outbox(PLAN, 4, **place)
        self.step = 0
        fd = self.mailbox._made.core.block_fd(0)
        self.block = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)

    def stamp_at(self, slot: int, cell: int) -> int:
        """Give the offset of a stamp."""
        return LAYOUT["stamps_3_5"] + 8 * (slot * CELLS + cell)

    def announce_at(self, slot: int, cell: int) -> int:
        """Give the offset of an announce."""
        return LAYOUT["announces_3_5"] + LAYOUT["announce_bytes"] * (slot * CELLS + cell)

    def write(self, offset: int, data: bytes) -> None:
        """Scribble."""
        self.block[offset : offset + len(data)] = data

    def stamp(self, slot: int, cell: int, word: int) -> None:
        """Write a stamp."""
        self.write(self.stamp_at(slot, cell), struct.pack("<Q", word))

    def announced(self, slot: int, cell: int) -> Announce:
        """Read an announce."""
        offset = self.announce_at(slot, cell)
        return Announce.unpack(self.block[offset : offset + Announce.FORM.size])

    def announce(self, slot: int, cell: int, **changes: Any) -> None:
        """Change an announce."""
        changed = replace(self.announced(slot, cell), **changes)
        self.write(self.announce_at(slot, cell), changed.pack())

    def open_pass(self, microbatches: int = 1) -> Key:
        """Open the next pass on both sides; give its first key."""
        self.step += 1
        self.mailbox.open_pass(self.step, microbatches)
        self.outbox.open_pass(self.step, microbatches)
        return Key(1, self.step, 0)

    def push(self, microbatch: int = 0) -> None:
        """Push what is right."""
        for tap in TAPS:
            self.outbox.push(microbatch, tap, ROWS)

    def still_works(self) -> None:
        """End the pass, and carry another one."""
        for side in (self.mailbox, self.outbox):
            side.abort("the test has seen what it wanted")
        self.open_pass()
        self.push()
        with self.mailbox.recv(0, timeout=LIMIT) as taps:
            assert torch.equal(taps["g"], ROWS.repeat(1, CELLS))
        for side in (self.mailbox, self.outbox):
            side.abort("done")

    def close(self) -> None:
        """Close all."""
        self.outbox.close()
        self.mailbox.close()


@pytest.fixture
def scribbler(tmp_path: Path) -> Iterator[Scribbler]:
    """A hand in a control block."""
    made = Scribbler(tmp_path)
    yield made
    made.close()


def test_scribbling_hits_what_it_aims_at(scribbler: Scribbler) -> None:
    """The test of the tests: offsets that are off would let everything below pass."""
    key = scribbler.open_pass()
    scribbler.push()
    said = scribbler.announced(0, 3)
    assert (said.key, said.rows, said.row_begin, said.ndim) == (key.stamp(), 2, 0, 2)
    assert said.shape[:2] == (2, WIDTH)
    offset = scribbler.stamp_at(0, 4)
    assert scribbler.block[offset : offset + 8] == struct.pack("<Q", key.stamp())
    scribbler.still_works()


def test_newer_stamp_is_an_overrun(scribbler: Scribbler) -> None:
    """A slot that was written for a later key, read as this one's (I1, I2)."""
    key = scribbler.open_pass(5)
    scribbler.push()
    newer = Key(1, key.step, 3)
    scribbler.stamp(0, 2, newer.stamp())
    facts = {"tap": "tap2", "rank": 4, "lane": 0, "seen": ..., "expected": ..., "next_step": ...}
    with refused(OverrunError, channel=NAME, key=key, **facts) as caught:
        scribbler.mailbox.recv(0, timeout=LIMIT)
    assert str(newer) in str(caught[0].seen)
    assert str(key) in str(caught[0].expected)
    scribbler.still_works()


@pytest.mark.parametrize("way_out", ["leave", "release", "view"])
def test_older_stamp_in_an_open_lease_is_stale(scribbler: Scribbler, way_out: str) -> None:
    """A dead pass's late write into a slot that is being read, found by nobody (I1)."""
    scribbler.open_pass()
    scribbler.push()
    scribbler.mailbox.recv(0, timeout=LIMIT).release()
    for side in (scribbler.mailbox, scribbler.outbox):
        side.abort("the next pass, please")
    older, key = Key(1, scribbler.step, 0), scribbler.open_pass()
    scribbler.push()
    facts = {"tap": "tap3", "rank": 4, "lane": 0, "seen": ..., "expected": ..., "cause": ...}
    with refused(StaleStampError, channel=NAME, key=key, **facts) as caught:
        with scribbler.mailbox.recv(0, timeout=LIMIT) as taps:
            scribbler.stamp(0, 3, older.stamp())
            if way_out == "release":
                taps.release()
            elif way_out == "view":
                taps["tap0"]
    assert str(older) in str(caught[0].seen)
    assert str(key) in str(caught[0].expected)
    caught.clear()
    scribbler.still_works()


def test_newer_stamp_in_an_open_lease_is_an_overrun(scribbler: Scribbler) -> None:
    """A push without credit, into a slot that is being read, found by nobody (I2)."""
    key = scribbler.open_pass(5)
    scribbler.push()
    with refused(OverrunError, channel=NAME, key=key, tap="tap2", lane=0, seen=...) as caught:
        with scribbler.mailbox.recv(0, timeout=LIMIT):
            scribbler.stamp(0, 2, Key(1, key.step, 4).stamp())
    caught.clear()
    scribbler.still_works()


def test_poisoned_stamp_is_no_data(scribbler: Scribbler) -> None:
    """A word that ends every wait, taken for a stamp that landed."""
    key = scribbler.open_pass()
    scribbler.push()
    scribbler.stamp(0, 1, key.stamp() | POISON_BIT)
    with refused(
        StampTimeout, ProtocolError, channel=NAME, key=key, tap="tap1", seen=...
    ) as caught:
        scribbler.mailbox.recv(0, timeout=BRIEFLY)
    assert "poisoned" in str(caught[0].seen)
    scribbler.still_works()


BAD_ANNOUNCES = {
    "a row too many": {"rows": MAX_ROWS + 1},
    "all the rows there are": {"rows": (1 << 64) - 1},
    "rows past the end": {"row_begin": MAX_ROWS - 1},
    "rows that wrap around": {"row_begin": (1 << 64) - 1},
    "rows from far behind": {"row_begin": 1 << 63},
    "another dtype": {"dtype": 1 << 20},
    "too many dimensions": {"ndim": 9},
    "dimensions without end": {"ndim": (1 << 32) - 1},
    "a shape of more rows": {"shape": (3, WIDTH, 0, 0, 0, 0, 0, 0)},
    "a shape of another width": {"shape": (2, WIDTH + 1, 0, 0, 0, 0, 0, 0)},
    "a vast shape": {"shape": (1 << 63, 1 << 63, 0, 0, 0, 0, 0, 0)},
    "no shape": {"ndim": 0},
}


@pytest.mark.parametrize("slip", BAD_ANNOUNCES)
def test_announce_that_does_not_fit_the_plan_is_refused(scribbler: Scribbler, slip: str) -> None:
    """A size that a peer wrote, used for a view."""
    key = scribbler.open_pass()
    scribbler.push()
    scribbler.announce(0, 3, **BAD_ANNOUNCES[slip])
    with refused(ProtocolError, key=key, tap="tap3") as caught:
        with scribbler.mailbox.recv(0, timeout=LIMIT) as taps:
            assert taps.info["tap3"].shape == (2, WIDTH)
            taps["tap3"]
    assert "tap3" in str(caught[0])
    caught.clear()
    scribbler.still_works()


@pytest.mark.parametrize("slip", BAD_ANNOUNCES)
def test_announce_altered_after_it_was_checked_is_not_used(scribbler: Scribbler, slip: str) -> None:
    """A check on one reading of a word, and a use of the next."""
    scribbler.open_pass()
    scribbler.push()
    lease = scribbler.mailbox.recv(0, timeout=LIMIT)
    scribbler.announce(0, 3, **BAD_ANNOUNCES[slip])
    try:
        info, view = lease.info["tap3"], lease["tap3"]
        assert info.rows == 2
        assert info.shape == (2, WIDTH)
        assert torch.equal(view, ROWS)
    except ProtocolError:
        pass
    lease = info = view = None  # type: ignore[assignment]
    scribbler.still_works()


def test_changed_byte_is_found_in_check_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are not those which were pushed, handed out as data."""
    monkeypatch.setenv("TAPCHANNEL_CHECK", "1")
    scribbler = Scribbler(tmp_path)
    key = scribbler.open_pass()
    scribbler.push()
    arena = scribbler.mailbox._made.reservation.arena
    at = PLAN.group("g").row_bytes + PLAN.tap("tap3").column * 4
    assert arena.read_probe(at, 4) == struct.pack("<f", 1.0)
    arena.write_probe(at, struct.pack("<f", 2.0))
    facts = {"key": key, "tap": "tap3", "rank": 4, "lane": 0, "seen": ..., "expected": ...}
    with refused(ChecksumError, channel=NAME, **facts) as caught:
        scribbler.mailbox.recv(0, timeout=LIMIT)
    caught.clear()
    scribbler.still_works()
    scribbler.close()


def _use(scribbler: Scribbler) -> None:
    """Do with the channel what can be done; only our own errors may come of it."""
    mailbox, outbox = scribbler.mailbox, scribbler.outbox
    calls = [
        lambda: mailbox.recv(0, timeout=BRIEFLY / 5),
        lambda: mailbox.try_recv(1),
        lambda: outbox.push(1, "tap0", ROWS),
        lambda: outbox.flush(BRIEFLY / 5),
        lambda: mailbox.wait_ready(0),
        lambda: mailbox.info(),
        lambda: outbox.info(),
        lambda: read_events(mailbox),
        lambda: mailbox.abort("fuzzed"),
        lambda: outbox.abort("fuzzed"),
        lambda: mailbox.open_pass(1 << 20, 2),
        lambda: mailbox.reset(),
    ]
    for call in calls:
        try:
            lease = call()
            if hasattr(lease, "info"):
                dict(lease.info)
                lease["g"].sum()
            del lease
        except TapChannelError as error:
            str(error)


def _fuzz(link: Link, folder: Path, seed: int, rounds: int) -> int:
    """Scribble anywhere in the block, use the channel, and begin anew."""
    count = 0

    @settings(max_examples=rounds, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal count
        count += 1
        scribbler = Scribbler(folder)
        try:
            scribbler.open_pass(2)
            scribbler.push()
            words = len(scribbler.block) // 8
            rings = 2 * (64 + LAYOUT["ring_entries"] * LAYOUT["event_bytes"])
            for _ in range(data.draw(st.integers(1, 12))):
                word = data.draw(st.integers(0, words - rings // 8 - 1) | st.integers(0, words - 1))
                value = data.draw(st.sampled_from(VALUES) | st.integers(0, (1 << 64) - 1))
                scribbler.write(word * 8, struct.pack("<Q", value))
            _use(scribbler)
        finally:
            scribbler.close()

    run()
    return count


VALUES = [
    0,
    1,
    2,
    (1 << 64) - 1,
    1 << 63,
    POISON_BIT,
    Key(1, 1, 0).stamp(),
    Key(1, 1, 1).stamp(),
    Key(1, 2, 1).stamp(),
    Key(2, 1, 0).stamp(),
    Key(1, 1, 0).stamp() | POISON_BIT,
    int(math.pow(2, 40)),
    ctypes.c_uint64(-2).value,
]


@pytest.mark.timeout(60)
def test_scribbles_anywhere_end_in_our_own_errors(tmp_path: Path) -> None:
    """A word that a peer wrote, used as a size or an index: a crash, or a wait without end."""
    with Children(limit=50) as children:
        assert children.start(_fuzz, tmp_path, 1, 60).result() == 60
