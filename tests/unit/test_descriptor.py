"""What the two sides tell each other: every field checked, every proof bound to its handshake."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapchannel.descriptor import (
    MAX_DEPTH,
    MEMORIES,
    NONCE_BYTES,
    PROBE_BYTES,
    Challenge,
    Hello,
    Offer,
    proof,
    proven,
)
from tapchannel.errors import ConfigError, ProtocolError
from tapchannel.lanes import MAX_CELLS, MAX_LANES, Shard
from tapchannel.layout import MAX_BYTES, MAX_NAME
from tapchannel.refusal import Refusal
from tapchannel.wire import HELLO, Fields

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
CHALLENGE = Challenge(bytes(16), bytes(32), "draft", True)
HELLO_FRAME = Hello(
    "draft",
    7,
    4711,
    "n1",
    bytes(32),
    '{"version":1}',
    ("high", "low"),
    ("shm",),
    "1.19",
    bytes(range(32)),
)
OFFER = Offer(
    transport="cuda_ipc",
    refused={"shm": "why not"},
    lane=1,
    shards=(Shard("high"), Shard("low", (1, 2), (0, 4))),
    depth=2,
    slot_bytes=512,
    arena_bytes=8192,
    memory="vmm",
    device_uuid=bytes(16),
    handle=bytes(64),
    drop_newest=True,
    pid=1,
    host="n2",
    probe_offset=4096,
    probe=bytes(64),
    proof=None,
)
ROW = {"rank": 7, "expected": "width 8", "claimed": "width 9", "problem": "differs"}
REFUSED = {"cuda_ipc": "no driver"}
REFUSAL = Refusal("PlanMismatchError", "ranks disagree", "why", "agree", True, (ROW,), REFUSED)
FRAMES: list[Any] = [CHALLENGE, HELLO_FRAME, OFFER, REFUSAL]
EACH_FRAME = pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
EACH_FIELD = pytest.mark.parametrize(
    ("frame", "field"), [(frame, field) for frame in FRAMES for field in frame.body()]
)


def parsed(frame: Any, body: object) -> Any:
    """Send a body over JSON, as the wire does, and parse it as a frame of this kind."""
    return type(frame).parse(Fields(HELLO, json.loads(json.dumps(body))))


@EACH_FRAME
def test_frame_parses_to_itself(frame: Any) -> None:
    """A field that one side writes and the other reads under another name, or not at all."""
    assert parsed(frame, frame.body()) == frame


@EACH_FIELD
def test_every_field_is_needed(frame: Any, field: str) -> None:
    """A field that may be left out, as when a frame was cut short."""
    body = frame.body()
    del body[field]
    with pytest.raises(ProtocolError) as raised:
        parsed(frame, body)
    assert repr(field) in str(raised.value)
    assert raised.value.expected is not None


@EACH_FRAME
@given(data=st.data())
def test_altered_field_is_taken_or_refused(frame: Any, data: st.DataObject) -> None:
    """A value that raises what nobody catches: KeyError, TypeError, OverflowError."""
    body = frame.body()
    for field in data.draw(st.sets(st.sampled_from(sorted(body)), min_size=1)):
        body[field] = data.draw(JSON)
    with contextlib.suppress(ProtocolError, ConfigError):
        parsed(frame, body)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=8))
def test_foreign_body_is_refused(body: dict[str, object]) -> None:
    """An object that shares nothing with a frame, taken for one."""
    for frame in FRAMES:
        with pytest.raises(ProtocolError):
            parsed(frame, body)


@given(st.binary(min_size=1), st.data())
def test_altered_bytes_never_raise_anything_else(junk: bytes, data: st.DataObject) -> None:
    """A frame whose text was altered anywhere: a digit, a quote, a bracket."""
    frame = data.draw(st.sampled_from(FRAMES))
    text = bytearray(json.dumps(frame.body()).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at : at + len(junk)] = junk
    try:
        body = json.loads(bytes(text).decode("ascii"))
    except ValueError:
        return
    if isinstance(body, dict):
        with contextlib.suppress(ProtocolError, ConfigError):
            type(frame).parse(Fields(HELLO, body))


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 0},
        {"depth": MAX_DEPTH + 1, "arena_bytes": MAX_BYTES},
        {"slot_bytes": 0},
        {"slot_bytes": -512},
        {"depth": 4096, "slot_bytes": MAX_BYTES // 4096 + 1, "arena_bytes": MAX_BYTES},
        {"arena_bytes": 2 * 512 - 1},
        {"arena_bytes": MAX_BYTES + 1},
        {"probe_offset": 8192 - PROBE_BYTES + 1},
        {"probe_offset": -1},
        {"depth": 1, "slot_bytes": 1, "arena_bytes": PROBE_BYTES - 1, "probe_offset": 0},
        {"lane": MAX_LANES},
        {"lane": -1},
        {"memory": "nvm"},
        {"memory": ""},
        {"pid": -1},
        {"probe": "00" * (PROBE_BYTES - 1)},
        {"handle": "00" * 63},
        {"device_uuid": "00" * 17},
        {"proof": "00"},
        {"shards": [["high", 0, 1, 0, 1]] * (MAX_CELLS + 1)},
    ],
    ids=str,
)
def test_sizes_that_contradict_one_another_are_refused(changes: dict[str, object]) -> None:
    """A size, an offset or a count that would reach outside what was offered (I8)."""
    with pytest.raises(ProtocolError):
        parsed(OFFER, {**OFFER.body(), **changes})


def test_sizes_at_their_bounds_are_taken() -> None:
    """A check that is one too strict: the largest and the smallest mailbox must attach."""
    largest = {"depth": MAX_DEPTH, "slot_bytes": MAX_BYTES // MAX_DEPTH, "arena_bytes": MAX_BYTES}
    assert parsed(OFFER, {**OFFER.body(), **largest}).arena_bytes == MAX_BYTES
    smallest = {"depth": 1, "slot_bytes": 1, "arena_bytes": PROBE_BYTES, "probe_offset": 0}
    assert parsed(OFFER, {**OFFER.body(), **smallest}).depth == 1
    for memory in MEMORIES:
        assert parsed(OFFER, {**OFFER.body(), "memory": memory}).memory == memory


@pytest.mark.parametrize(
    "shard",
    [
        None,
        "high",
        [],
        ["high", 0, 1, 0],
        ["high", 0, 1, 0, 1, 0],
        [7, 0, 1, 0, 1],
        [["high"], 0, 1, 0, 1],
        ["high", "0", 1, 0, 1],
        ["high", 0.0, 1, 0, 1],
        ["high", True, 2, 0, 1],
        ["high", 1, 1, 0, 1],
        ["high", -1, 1, 0, 1],
        ["high", 0, 0, 0, 1],
        ["high", 0, 1, 0, 1 << 70],
        ["", 0, 1, 0, 1],
        ["a\nb", 0, 1, 0, 1],
        ["x" * (MAX_NAME + 1), 0, 1, 0, 1],
    ],
    ids=str,
)
def test_impossible_cell_is_refused(shard: object) -> None:
    """A share outside its grid, or something that is no share, used to reckon an offset."""
    with pytest.raises(ProtocolError, match="cell|name"):
        parsed(OFFER, {**OFFER.body(), "shards": [shard]})


@pytest.mark.parametrize(
    "row",
    [None, "row", [], [7, "a", "b"], ["7", "a", "b", "c"], [7, "a", "b", 5], [7.5, "", "", ""]],
)
def test_row_that_is_none_is_refused(row: object) -> None:
    """A refusal whose table breaks the error that prints it."""
    with pytest.raises(ProtocolError):
        parsed(REFUSAL, {**REFUSAL.body(), "rows": [row]})


@pytest.mark.parametrize("claimed", [[5], [None], [["high"]], "high", {"high": 1}])
def test_claims_that_are_no_names_are_refused(claimed: object) -> None:
    """A claim that breaks the comparison with the mailbox's sources."""
    with pytest.raises(ProtocolError):
        parsed(HELLO_FRAME, {**HELLO_FRAME.body(), "claimed": claimed})


def test_no_claim_is_told_from_a_claim_of_nothing() -> None:
    """A rank that claims no tap, taken for one that leaves the check out."""
    silent = dataclasses.replace(HELLO_FRAME, claimed=None)
    nothing = dataclasses.replace(HELLO_FRAME, claimed=())
    assert parsed(silent, silent.body()).claimed is None
    assert parsed(nothing, nothing.body()).claimed == ()


def test_long_refusal_still_parses() -> None:
    """A refusal that its reader refuses, since one side's bound is tighter than the other's."""
    long_row = dict.fromkeys(("expected", "claimed", "problem"), "x" * 10000) | {"rank": 7}
    long = Refusal("E" * 64, "w" * 9000, "r" * 9000, "n" * 9000, False, (long_row,) * 300)
    understood = parsed(long, long.body())
    assert understood.what.startswith("www")
    assert understood.rows


def altered(change: str) -> bytes:
    """Give a proof made with one thing changed."""
    secret, role, challenge, nonce, rank = b"secret-1", "outbox", CHALLENGE, bytes(32), 7
    changes: dict[str, Callable[[], bytes]] = {
        "secret": lambda: proof(b"secret-2", role, challenge, nonce, rank),
        "role": lambda: proof(secret, "mailbox", challenge, nonce, rank),
        "nonce": lambda: proof(secret, role, challenge, b"\1" * 32, rank),
        "rank": lambda: proof(secret, role, challenge, nonce, 8),
        "mailbox": lambda: proof(
            secret, role, dataclasses.replace(challenge, mailbox_id=b"\1" * 16), nonce, rank
        ),
        "challenge": lambda: proof(
            secret, role, dataclasses.replace(challenge, nonce=b"\1" * 32), nonce, rank
        ),
        "name": lambda: proof(
            secret, role, dataclasses.replace(challenge, name="other"), nonce, rank
        ),
        "nothing": lambda: proof(secret, role, challenge, nonce, rank),
    }
    return changes[change]()


@pytest.mark.parametrize(
    "change", ["secret", "role", "nonce", "rank", "mailbox", "challenge", "name"]
)
def test_proof_is_bound_to_its_handshake(change: str) -> None:
    """A proof that can be replayed: later, to another mailbox, or to its own sender."""
    right = altered("nothing")
    assert len(right) == NONCE_BYTES
    assert proven(right, altered("nothing"))
    assert not proven(right, altered(change))


def test_missing_proof_proves_nothing() -> None:
    """A peer that leaves the proof out, and is let in."""
    assert not proven(altered("nothing"), None)
