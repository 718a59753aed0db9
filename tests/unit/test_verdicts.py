"""From a native verdict to the error that the caller sees: one list of faults, no fact lost."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tapchannel import errors, faults
from tapchannel.errors import PassAborted, TapChannelError
from tapchannel.keys import Key, describe
from tapchannel.verdicts import LaneFacts, Scene, error_from

HEADER = Path(__file__).parents[2] / "native" / "verdict.hpp"
KEY = Key(epoch=2, step=1201, microbatch=37)
SEEN = Key(epoch=2, step=1200, microbatch=36)
COUNT_MASK = (1 << 18) - 1


def native_faults() -> list[str]:
    """Read the list of faults from the native source."""
    source = HEADER.read_text()
    listed = source[source.index("#define TAPCHANNEL_FAULTS(X)") : source.index("enum class Fault")]
    return re.findall(r"\bX\((\w+)\)", listed.partition("\n")[2])


FAULTS = [name for name in native_faults() if name != "none"]
EACH_FAULT = pytest.mark.parametrize("fault", FAULTS)


@dataclass
class Holder:
    """What holds a slot, as the native core says it."""

    step: int = 1201
    microbatch: int = 35
    slot: int = 1
    leased: bool = True


@dataclass
class Verdict:
    """A native verdict with every field set to something that is not said by accident."""

    fault: str
    lane: int = 4
    cell: int = 1
    slot: int = 3
    key: int = KEY.stamp()
    seen: int = SEEN.stamp()
    expected: int = KEY.stamp()
    waited: float = 59.5
    limit: float = 61.0
    silent: float = 7.25
    reason: bytes = b""
    holders: list[Holder] = field(default_factory=list)


def lane_facts(index: int) -> LaneFacts | None:
    """Give the facts of a lane."""
    return LaneFacts(17, ["low", "high"], 7711, "node-three") if index == 4 else None


SCENE = Scene("draft", 2, lane_facts, "producer")


def error_of(fault: str, scene: Scene = SCENE, **changes: Any) -> TapChannelError:
    """Build the error of a verdict."""
    return error_from(Verdict(fault, **changes), scene, "recv(37)")  # type: ignore[arg-type]


def test_header_was_read() -> None:
    """A list of faults that is empty because the header changed its form."""
    assert {"closed", "peer_lost", "incomplete"} <= set(FAULTS)
    assert len(FAULTS) == len(set(FAULTS)) > 20


def test_every_fault_has_its_rule_and_no_other() -> None:
    """Two lists of the same codes that drift apart: a new fault would end as a KeyError."""
    assert set(faults.RULES) == set(FAULTS)


def test_sets_of_faults_name_real_ones() -> None:
    """A fault that was renamed in one list only: its seen and expected would be dropped."""
    for name, value in vars(faults).items():
        if isinstance(value, frozenset):
            assert value <= set(FAULTS), name


@EACH_FAULT
def test_error_of_every_fault_says_where(fault: str) -> None:
    """An error that does not say which call, channel, lane, rank, host and process it is about."""
    error = error_of(fault)
    assert type(error).__module__ == errors.__name__
    assert type(error) is not TapChannelError
    text = str(error)
    for said in ("recv(37)", "'draft'", "lane 4", "rank 17", "node-three", "7711"):
        assert said in text
    assert (error.channel, error.lane, error.rank) == ("draft", 4, 17)


@EACH_FAULT
def test_error_of_every_fault_says_what_to_do(fault: str) -> None:
    """An error that leaves its reader alone: who must act, and how."""
    if fault in ("would_block", "interrupted"):
        pytest.skip("nobody has to act: try_recv says that it is not yet, Ctrl-C was pressed")
    assert error_of(fault, holders=[Holder()]).next_step


@EACH_FAULT
def test_error_of_every_fault_survives_pickling(fault: str) -> None:
    """An error that a child process cannot hand to its parent."""
    error = error_of(fault, reason=b"because", holders=[Holder()])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


@EACH_FAULT
def test_error_of_every_fault_takes_bare_facts(fault: str) -> None:
    """A verdict with nothing in it that ends as a KeyError or an IndexError of its own."""
    bare = {"lane": -1, "cell": -1, "slot": -1, "key": 0, "seen": 0, "expected": 0, "silent": -1}
    error = error_of(fault, **bare)
    assert "recv(37)" in str(error)
    assert error.rank is None
    assert error.key is None


@pytest.mark.parametrize("cell", [-1, 2, 4096])
def test_cell_outside_the_lane_names_no_tap(cell: int) -> None:
    """A tap named by accident, or an IndexError in place of the error."""
    assert error_of("stamp_timeout", cell=cell).tap is None
    assert error_of("stamp_timeout", cell=1).tap == "high"


@pytest.mark.parametrize(
    "fault", ["stamp_timeout", "announce_timeout", "never_attached", "credit_timeout"]
)
def test_time_out_says_how_long_and_what_came_last(fault: str) -> None:
    """A time-out without its limit, its wait, or the last sign of the peer's life."""
    error = error_of(fault)
    assert isinstance(error, errors.TapTimeout)
    assert isinstance(error, TimeoutError)
    assert (error.waited, error.limit) == (59.5, 61.0)
    for said in ("59.5 s", "61.0 s", "7.25 s", "producer's last heartbeat"):
        assert said in str(error)


@pytest.mark.parametrize(
    "fault",
    [
        "stamp_timeout",
        "announce_timeout",
        "never_attached",
        "credit_timeout",
        "overrun",
        "stale_stamp",
        "pass_over",
    ],
)
def test_stamps_are_said_in_words(fault: str) -> None:
    """A 64-bit number where the pass and the microbatch should stand."""
    error = error_of(fault)
    for word in (SEEN, KEY):
        assert describe(word.stamp()) in str(error)
        assert str(word.stamp()) not in str(error)


def test_nothing_landed_and_poison_are_said_in_words() -> None:
    """A cell that was never written, or was poisoned, described as some pass."""
    assert "nothing yet" in str(error_of("stamp_timeout", seen=0).seen)
    assert "poisoned" in str(error_of("stamp_timeout", seen=KEY.stamp() | 1 << 62).seen)


def test_pass_mismatch_says_both_counts() -> None:
    """Counts of microbatches read from the wrong bits."""
    of_pass = KEY.stamp() & ~COUNT_MASK
    error = error_of("pass_mismatch", seen=of_pass | 4, expected=of_pass | 8)
    assert error.seen == "pass 1201 with 4 microbatches"
    assert error.expected == "pass 1201 with 8 microbatches"


def test_one_microbatch_is_no_plural() -> None:
    """Carelessness in the one place where the user is already annoyed."""
    of_pass = KEY.stamp() & ~COUNT_MASK
    error = error_of("pass_mismatch", seen=of_pass | 1, expected=of_pass | 8)
    assert error.seen == "pass 1201 with 1 microbatch"


def test_microbatch_outside_the_pass_says_the_range() -> None:
    """A range that is off by one, or the pass's word taken for a key."""
    error = error_of("bad_microbatch", key=(KEY.stamp() & ~COUNT_MASK) | 8)
    assert error.expected == "0 to 7"
    assert error.key is None


@pytest.mark.parametrize("fault", ["held", "credit_timeout"])
def test_held_slot_names_its_holder_and_a_depth_that_would_do(fault: str) -> None:
    """A deadlock report without the culprit: which slot, since when, and the way out."""
    error = error_of(fault, holders=[Holder(slot=2, microbatch=5), Holder(slot=1, microbatch=6)])
    assert "slot 2 is still held by a live tensor view since pass 1201, microbatch 5" in str(error)
    assert "slot 1" in str(error)
    assert "depth=4" in str(error)
    unread = error_of(fault, holders=[Holder(slot=2, microbatch=5, leased=False)])
    assert "microbatch 5, in slot 2, has not been received" in str(unread)


def test_many_holders_stay_readable() -> None:
    """A text of a thousand lines, or one that hides that there are more."""
    error = error_of("held", holders=[Holder(slot=n, microbatch=n) for n in range(100)])
    assert len(str(error)) < 1500
    assert "depth=102" in str(error)


@pytest.mark.parametrize(
    ("fault", "peer", "who"),
    [
        ("aborted_by_peer", "producer", "the producer"),
        ("aborted_by_peer", "consumer", "the consumer"),
        ("aborted_here", "consumer", "this side"),
    ],
)
def test_abort_says_who_and_why(fault: str, peer: str, who: str) -> None:
    """An aborted pass blamed on the side that was told of it."""
    scene = Scene("draft", 2, lane_facts, peer)
    error = error_of(fault, scene, reason=b"loss is not finite")
    assert isinstance(error, PassAborted)
    assert (error.who, error.reason) == (who, "loss is not finite")
    assert "loss is not finite" in str(error)


@pytest.mark.parametrize(
    "reason", [b"\x1b[31mred\r\n\0", b"\xff\xfe", "cut off \u6e21".encode()[:-1]]
)
def test_words_of_a_peer_are_made_printable(reason: bytes) -> None:
    """A peer's bytes that move the cursor of a terminal, or that do not decode."""
    for fault in ("aborted_by_peer", "device_error"):
        text = str(error_of(fault, reason=reason))
        assert text.isprintable()
