"""I8: what arrives from a peer is checked before it is used as size, offset, index or pointer.

Each test names the mutation of tests/support/mutations under which it was seen to fail.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct

import pytest

from support.blocks import LaneWords
from support.channels import Maker, until
from support.tap_pair import PLAN, SOURCES, push, works
from tapchannel import OverrunError, ProtocolError, StampTimeout, _native
from tapchannel.descriptor import MAX_BYTES, Hello, Offer
from tapchannel.plan import Shard
from tapchannel.refusal import Refusal
from tapchannel.sockets import native_address
from tapchannel.wire import HELLO, MAGIC, MAX_BODY, OFFER, READY, REFUSAL, VERSION, Fields

# ---- the control block


FORGED = {
    "more rows than the cell has": {"rows": 5},
    "more rows than 32 bits count": {"rows": 1 << 40},
    "rows that overflow with their begin": {"rows": 2, "row_begin": (1 << 64) - 1},
    "a begin behind the tap's end": {"rows": 0, "row_begin": 1 << 32},
    "a begin that pushes the rows over the end": {"rows": 4, "row_begin": 1},
    "another dtype": {"dtype": 14},
    "no dtype at all": {"dtype": 0xFFFFFFFF},
    "more dimensions than there is room for": {"ndim": 9},
}


@pytest.mark.parametrize("name", FORGED)
def test_i8_an_announce_is_checked_before_it_sizes_a_view(channel_of: Maker, name: str) -> None:
    """Bug: a view outside its cell, or a crash. Mutation: announce-unchecked."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    with pytest.raises(ProtocolError) as forged:
        with channel.open_pass(1, 1):
            push(channel, 0)
            words = LaneWords(channel.mailbox, lane=1, depth=1, cells=1)
            assert words.announce(slot=0)["rows"] == 4
            words.write_announce(slot=0, **FORGED[name])
            words.close()
            with channel.mailbox.recv(0) as taps:
                print(taps["right"])
    assert (forged.value.rank, forged.value.tap) == (8, "right")
    works(channel, 2)


NO_STAMPS = {
    0: StampTimeout,
    1: StampTimeout,
    1 << 62: StampTimeout,  # the poison bit alone
    (1 << 63) - 1: StampTimeout,
    1 << 63: OverrunError,  # to a signed compare it is ahead of every stamp
    (1 << 64) - 1: StampTimeout,
}


def test_i8_a_stamp_that_is_none_is_not_data(channel_of: Maker) -> None:
    """Bug: any large word taken for a stamp that has landed. Mutation: poison-is-data."""
    channel = channel_of(PLAN, SOURCES, depth=1)
    for step, (word, error) in enumerate(NO_STAMPS.items()):
        with pytest.raises(error):
            with channel.open_pass(step, 1):
                push(channel, 0)
                words = LaneWords(channel.mailbox, lane=0, depth=1, cells=1)
                words.write_stamp(0, word)
                words.close()
                channel.mailbox.recv(0, timeout=0.0)


# ---- the handshake


def frame(kind: int, body: bytes, magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    """Build a handshake frame."""
    return struct.pack(">4sHHI", magic, version, kind, len(body)) + body


def hello(**changes: object) -> bytes:
    """Build a hello that is right but for these fields."""
    body = (
        Hello("x", 3, 1, "host", bytes(32), PLAN.to_json(), None, ("shm",), "", None).body()
        | changes
    )
    return frame(HELLO, json.dumps(body).encode())


HOSTILE = {
    "silence, then the end": b"",
    "noise": bytes(range(256)) * 64,
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another version": frame(HELLO, b"{}", version=VERSION + 1),
    "a kind that is not due": frame(READY, b"{}"),
    "a length beyond all bounds": struct.pack(">4sHHI", MAGIC, VERSION, HELLO, 0xFFFFFFFF),
    "a length just beyond its bound": struct.pack(">4sHHI", MAGIC, VERSION, HELLO, MAX_BODY + 1),
    "no JSON": frame(HELLO, b"\xff\xfe"),
    "no object": frame(HELLO, b"[1, 2]"),
    "nesting without end": frame(HELLO, b"[" * 100_000),
    "a number too large to print": frame(HELLO, b'{"rank": ' + b"9" * 10_000 + b"}"),
    "no fields": frame(HELLO, b"{}"),
    "a rank below all": hello(rank=-1),
    "a rank that is no number": hello(rank="3"),
    "a rank that is a truth value": hello(rank=True),
    "a nonce of another length": hello(nonce="00"),
    "a plan that is none": hello(plan="{}"),
    "another channel's name": hello(name="other"),
    "claims that are no list": hello(claimed={"left": 1}),
    "a claim that is no name": hello(claims=True, claimed=[["left"]]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_i8_a_hostile_handshake_harms_nobody(channel_of: Maker, name: str) -> None:
    """Bug: a peer's length or field believed. Mutation: handshake-length-believed."""
    channel = channel_of(PLAN, SOURCES, attach=[])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(5.0)
        link.connect(native_address(channel.mailbox.address))
        link.recv(1 << 16)  # the challenge
        try:
            link.sendall(HOSTILE[name])
            if not HOSTILE[name]:
                link.shutdown(socket.SHUT_WR)
            while link.recv(1 << 16):
                pass  # a refusal, perhaps; then the end, and soon
        except (BrokenPipeError, ConnectionResetError):
            pass
    for rank in SOURCES:
        channel_of.attach(channel, rank)
    works(channel, 1)


def test_i8_descriptors_that_a_peer_sends_are_closed(channel_of: Maker) -> None:
    """Bug: descriptors piled up by a peer until the mailbox can open none. Mutation: fds-kept."""
    channel = channel_of(PLAN, SOURCES, attach=[])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(5.0)
            link.connect(native_address(channel.mailbox.address))
            link.recv(1 << 16)
            socket.send_fds(link, [hello(name="other")], [0, 1])
            while link.recv(1 << 16):
                pass
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    for rank in SOURCES:
        channel_of.attach(channel, rank)
    works(channel, 1)


# ---- what a mailbox offers


OFFERED = Offer(
    transport="shm",
    refused={},
    lane=0,
    shards=(Shard("left"),),
    depth=2,
    slot_bytes=PLAN.slot_bytes,
    arena_bytes=2 * PLAN.slot_bytes + 4096,
    memory="host",
    device_uuid=None,
    handle=None,
    drop_newest=False,
    pid=1,
    host="host",
    probe_offset=2 * PLAN.slot_bytes,
    probe=bytes(64),
    proof=None,
)
NOT_OFFERED: dict[str, list[object]] = {
    "transport": [None, 7, "t" * 33],
    "refused": [None, {}, [["shm"]], [["shm", 7]]],
    "lane": [-1, 1 << 20, None, "0", 0.0, True],
    "shards": [
        None,
        {},
        [["left"]],
        [["left", 1, 1, 0, 1]],
        [["left", 0, 0, 0, 1]],
        [[7, 0, 1, 0, 1]],
    ],
    "depth": [0, -1, 1 << 40, None, "2"],
    "slot_bytes": [0, -256, MAX_BYTES, 1 << 70, None],
    "arena_bytes": [0, -1, 2 * PLAN.slot_bytes - 1, 1 << 64, None],
    "memory": ["disk", "", None, 3, "h" * 99],
    "device_uuid": ["00", "zz" * 16, None, 5],
    "handle": ["00", None, 5],
    "drop_newest": [None, 1, "true"],
    "pid": [-1, 1 << 80, None],
    "host": [None, 7, "h" * 256],
    "probe_offset": [-1, 1 << 62, 2 * PLAN.slot_bytes + 4096 - 63, None],
    "probe": ["", "00", None],
    "proof": ["00", None],
}


def test_i8_a_sound_offer_is_read_back_whole() -> None:
    """Bug: a check so strict that no offer passes, so that the next test proves nothing."""
    assert Offer.parse(Fields(OFFER, OFFERED.body())) == OFFERED


@pytest.mark.parametrize("field", NOT_OFFERED)
def test_i8_every_field_of_an_offer_is_checked(field: str) -> None:
    """Bug: a field taken without its type or its bounds."""
    for value in NOT_OFFERED[field]:
        with pytest.raises(ProtocolError):
            Offer.parse(Fields(OFFER, OFFERED.body() | {field: value}))
    body = OFFERED.body()
    del body[field]
    with pytest.raises(ProtocolError):
        Offer.parse(Fields(OFFER, body))


def test_i8_the_sizes_of_an_offer_must_fit_together() -> None:
    """Bug: slots that reach over the end of the arena. Mutation: offer-size-believed."""
    smaller = {"arena_bytes": 2 * PLAN.slot_bytes - 256, "probe_offset": 0}
    larger = {"depth": 4096}
    endless = {"depth": 4096, "slot_bytes": MAX_BYTES // 2}
    for sizes in (smaller, larger, endless):
        with pytest.raises(ProtocolError):
            Offer.parse(Fields(OFFER, OFFERED.body() | sizes))


NO_REFUSAL: dict[str, list[object]] = {
    "error": [None, 7, "x" * 65],
    "what": [None, 7, "x" * 513],
    "reason": [None, 7, "x" * 2049],
    "next_step": [None, 7, "x" * 513],
    "again": [None, 1, "no"],
    "rows": [None, "rows", ["row"], [["r", "a", "b", "c"]], [[1, 2, 3, 4]], [[1, "a", "b"]]],
    "refused": [None, "shm", ["shm"], [["shm"]], [["shm", 7]], [["shm", "x" * 513]], [[]] * 9],
}


def test_i8_every_field_of_a_refusal_is_checked() -> None:
    """Bug: an error text without bounds, or a table of anything, taken from a peer."""
    body = Refusal("AttachError", "what", "why", "how", False).body()
    assert Refusal.parse(Fields(REFUSAL, body)).what == "what"
    assert set(NO_REFUSAL) == set(body)
    for field, values in NO_REFUSAL.items():
        for value in values:
            with pytest.raises(ProtocolError):
                Refusal.parse(Fields(REFUSAL, body | {field: value}))


def memory_of(size: int, seals: int) -> int:
    """Make a memfd."""
    fd = os.memfd_create("offered", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_i8_offered_memory_must_have_its_size_and_its_seals() -> None:
    """Bug: memory that its owner can cut short under us (SIGBUS). Mutation: seals-unchecked."""
    sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    assert _native.Arena.adopt_host(memory_of(8192, sealed), 8192).bytes == 8192
    for size, seals in ((4096, sealed), (16384, sealed), (8192, fcntl.F_SEAL_GROW), (8192, 0)):
        with pytest.raises(ValueError, match="bytes|sealed"):
            _native.Arena.adopt_host(memory_of(size, seals), 8192)
    reader, writer = os.pipe()
    with pytest.raises((ValueError, OSError)):
        _native.Arena.adopt_host(reader, 8192)
    os.close(writer)


def test_i8_an_outbox_takes_no_block_of_another_shape(channel_of: Maker) -> None:
    """Bug: offsets from a foreign header believed. Mutation: block-header-believed."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    core = channel.mailbox._core
    identity = channel.mailbox._made.mailbox_id
    assert _native.ControlBlock.adopt(core.block_fd(1), 1, 2, 1, identity)
    for lane, depth, cells, own in (
        (0, 2, 1, identity),
        (1, 3, 1, identity),
        (1, 2, 2, identity),
        (1, 2, 1, bytes(16)),
        (1, 0, 1, identity),
        (1, 1 << 20, 1, identity),
        (1, 2, 1 << 20, identity),
    ):
        with pytest.raises(ValueError, match="block|bytes"):
            _native.ControlBlock.adopt(core.block_fd(1), lane, depth, cells, own)
