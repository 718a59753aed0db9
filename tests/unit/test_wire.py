"""Frames of the handshake: what goes in comes out, and what else comes in is refused, typed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.small_channel import descriptors
from tapchannel.errors import ProtocolError
from tapchannel.wire import (
    HELLO,
    MAX_BODY,
    MAX_FDS,
    OFFER,
    READY,
    REFUSAL,
    VERSION,
    Fields,
    receive_frame,
    send_frame,
)

PATIENCE = 5.0
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection: ours, and the peer's."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        yield here, there


def header(
    magic: bytes = b"TAPC", version: int = VERSION, kind: int = HELLO, length: int = 2
) -> bytes:
    """Give a frame's header."""
    return struct.pack(">4sHHI", magic, version, kind, length)


def receive(link: socket.socket, limit: float = PATIENCE) -> tuple[Fields, list[int]]:
    """Receive a hello."""
    return receive_frame(link, time.monotonic() + limit, (HELLO,))


def received(data: bytes) -> Fields:
    """Receive a hello from a peer that sends these bytes and hangs up."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        sender = threading.Thread(target=send_and_end, args=(there, data))
        sender.start()
        try:
            fields, fds = receive(here)
        finally:
            here.close()
            sender.join(PATIENCE)
    assert not fds
    return fields


def send_and_end(link: socket.socket, data: bytes) -> None:
    """Send and hang up; the other side may hang up before."""
    with contextlib.suppress(ConnectionError):
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)


@given(st.dictionaries(st.text(max_size=12), JSON, max_size=6))
def test_frame_arrives_as_sent(body: dict[str, object]) -> None:
    """A body that the encoding bends: names or texts outside ASCII, big integers, nesting."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        send_frame(there, HELLO, body)
        fields, fds = receive(here)
    assert fields.kind == HELLO
    assert not fds
    # Compared as JSON: a float may be NaN, which equals nothing.
    assert json.dumps(fields._values, sort_keys=True) == json.dumps(body, sort_keys=True)


def test_frame_arrives_in_single_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    """A reader that takes one recv for one frame."""
    here, there = pair
    frame = header(length=9) + b'{"a":"b"}'

    def drip() -> None:
        for byte in frame:
            there.sendall(bytes([byte]))

    sender = threading.Thread(target=drip)
    sender.start()
    fields, _ = receive(here)
    sender.join(PATIENCE)
    assert fields.text("a", 1) == "b"


def test_two_frames_stay_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    """A reader that reads past its frame and loses the beginning of the next."""
    here, there = pair
    send_frame(there, HELLO, {"n": 1})
    send_frame(there, HELLO, {"n": 2})
    assert [receive(here)[0].integer("n", 0, 9) for _ in range(2)] == [1, 2]


def test_largest_frame_passes_and_one_byte_more_is_not_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A limit that is off by one, or that only one side keeps."""
    here, there = pair
    longest = "x" * (MAX_BODY - len('{"a":""}'))
    sender = threading.Thread(target=send_frame, args=(there, HELLO, {"a": longest}))
    sender.start()
    fields, _ = receive(here)
    sender.join(PATIENCE)
    assert fields.text("a", MAX_BODY) == longest
    with pytest.raises(ProtocolError) as raised:
        send_frame(there, HELLO, {"a": longest + "x"})
    assert str(MAX_BODY) in str(raised.value)


@pytest.mark.parametrize("count", [1, MAX_FDS])
def test_descriptors_travel_and_close_on_exec(
    pair: tuple[socket.socket, socket.socket], count: int
) -> None:
    """Descriptors that get lost, or that a later exec would hand to a stranger."""
    here, there = pair
    sent = [os.memfd_create(f"travels{index}") for index in range(count)]
    send_frame(there, HELLO, {}, sent)
    _, fds = receive(here)
    try:
        assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(fd).st_ino for fd in sent]
        assert not any(map(os.get_inheritable, fds))
    finally:
        for fd in (*fds, *sent):
            os.close(fd)


@pytest.mark.parametrize("counts", [[MAX_FDS + 1], [60], [1, MAX_FDS], [1, 1, 1, 1]], ids=str)
def test_too_many_descriptors_are_refused_and_closed(
    pair: tuple[socket.socket, socket.socket], counts: Sequence[int]
) -> None:
    """A peer that fills this process's table of descriptors, at once or byte by byte."""
    here, there = pair
    frame = header() + b"{}"
    stuff = os.memfd_create("stuff")
    before = descriptors()
    for index, count in enumerate(counts):
        rights = [
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{count}i", *[stuff] * count))
        ]
        there.sendmsg([frame[index : index + 1]], rights)
    there.sendall(frame[len(counts) :])
    with pytest.raises(ProtocolError, match="descriptors"):
        receive(here)
    assert descriptors() == before
    os.close(stuff)


@pytest.mark.parametrize(
    "body", [b"not json", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b"", b"{"]
)
def test_descriptors_of_a_bad_frame_are_closed(
    pair: tuple[socket.socket, socket.socket], body: bytes
) -> None:
    """A frame that is refused while the descriptors beside it stay open for ever."""
    here, there = pair
    before = descriptors()
    stuff = os.memfd_create("stuff")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", stuff))]
    there.sendmsg([header(length=len(body))], rights)
    os.close(stuff)
    sender = threading.Thread(target=send_and_end, args=(there, body))
    sender.start()
    with pytest.raises(ProtocolError):
        receive(here)
    sender.join(PATIENCE)
    assert descriptors() == before


@pytest.mark.parametrize(
    "start",
    [
        header(magic=b"HTTP"),
        header(version=0),
        header(version=VERSION + 1),
        header(kind=0),
        header(kind=OFFER),
        header(kind=REFUSAL + 1),
        header(length=MAX_BODY + 1),
        header(length=1 << 31),
        header(length=(1 << 32) - 1),
        pickle.dumps({"a": 1}),
    ],
)
def test_header_that_is_not_due_is_refused_before_its_body_is_read(start: bytes) -> None:
    """A length that is believed: two gigabytes reserved, or waited for."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as raised:
            received(start + bytes(64))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert "no handshake frame due here" in str(raised.value)
    assert f"version {VERSION}" in str(raised.value)
    assert raised.value.cause is not None


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    """Bytes that raise what nobody catches: only two errors may come of a stranger's bytes."""
    with pytest.raises((ProtocolError, ConnectionError)):
        received(data)


@given(st.binary(max_size=120))
def test_random_body_is_an_object_or_refused(body: bytes) -> None:
    """A body that raises what nobody catches, or that is taken for an object."""
    try:
        fields = received(header(length=len(body)) + body)
    except ProtocolError:
        return
    assert isinstance(json.loads(body), dict)
    assert fields.kind == HELLO


@given(JSON, st.integers(min_value=0))
def test_truncated_frame_is_the_end_of_the_connection(value: object, cut: int) -> None:
    """Half a frame that passes for a whole one."""
    body = json.dumps({"a": value}).encode()
    frame = header(length=len(body)) + body
    with pytest.raises(ConnectionError):
        received(frame[: cut % len(frame)])


def test_slow_peer_meets_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    """A deadline counted anew for every byte: one byte now and then would hold it open for ever."""
    here, there = pair
    frame = header(length=4) + b"null"
    stop = threading.Event()

    def drip() -> None:
        for byte in frame:
            there.sendall(bytes([byte]))
            if stop.wait(0.05):
                return

    sender = threading.Thread(target=drip)
    sender.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(here, limit=0.2)
    assert 0.2 <= time.monotonic() - began < 0.7
    stop.set()
    sender.join(PATIENCE)


def test_ended_connection_is_told_from_a_late_one(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A reader that spins, or waits to its deadline, on a connection that has ended."""
    here, there = pair
    there.close()
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        receive(here)
    assert time.monotonic() - began < 1


def test_sending_does_not_touch_the_link_after_the_last_byte(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A peer that reads the whole frame and hangs up at once: it was sent, no broken pipe."""
    here, there = pair

    class HangsUpOnceRead:
        """A link whose peer has read everything, and is gone, when sendmsg returns."""

        def sendmsg(self, *arguments: object) -> int:
            sent = here.sendmsg(*arguments)  # type: ignore[arg-type]
            there.recv(65536)
            there.close()
            return sent

        def sendall(self, rest: bytes) -> None:
            here.sendall(rest)

    send_frame(HangsUpOnceRead(), READY, {})  # type: ignore[arg-type]


def fields(**values: object) -> Fields:
    """Give a body's fields."""
    return Fields(HELLO, values)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [1], -1, 11, 1 << 70])
def test_integer_field_is_checked(value: object) -> None:
    """A bool, a float or a text that passes for an integer; a bound that is off by one."""
    with pytest.raises(ProtocolError, match="'n'"):
        fields(n=value).integer("n", 0, 10)
    assert fields(n=0).integer("n", 0, 10) == 0
    assert fields(n=10).integer("n", 0, 10) == 10


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_flag_field_is_checked(value: object) -> None:
    """A number that passes for a flag."""
    with pytest.raises(ProtocolError, match="true or false"):
        fields(n=value).flag("n")
    assert fields(n=False).flag("n") is False


@pytest.mark.parametrize("value", [0, None, "four", ["a"]])
def test_text_field_is_checked(value: object) -> None:
    """A text of any length, or something else in its place."""
    with pytest.raises(ProtocolError, match="3 characters"):
        fields(n=value).text("n", 3)
    assert fields(n="abc").text("n", 3) == "abc"


@pytest.mark.parametrize(
    "value", ["", "0", "0g", "ABCD", "abc", "abcde", "ab cd", "abcd\n", 5, None]
)
def test_raw_field_is_checked(value: object) -> None:
    """Digits that are too few, too many or none, which `bytes.fromhex` would accept."""
    with pytest.raises(ProtocolError, match="2 bytes"):
        fields(n=value).raw("n", 2)
    assert fields(n="abcd").raw("n", 2) == b"\xab\xcd"
    assert fields(n="abcd").optional_raw("n", 2) == b"\xab\xcd"
    assert fields(n="").optional_raw("n", 2) is None


@pytest.mark.parametrize("value", ["abc", {}, None, [1, 2, 3, 4]])
def test_items_field_is_checked(value: object) -> None:
    """A text or an object that passes for a list; a list without end."""
    with pytest.raises(ProtocolError, match="at most 3"):
        fields(n=value).items("n", 3)
    assert fields(n=[1]).items("n", 3) == [1]


@given(JSON)
def test_any_value_in_any_field_is_taken_or_refused(value: object) -> None:
    """A value that raises what nobody catches."""
    for take in (
        lambda body: body.integer("n", 0, 10),
        lambda body: body.flag("n"),
        lambda body: body.text("n", 10),
        lambda body: body.raw("n", 2),
        lambda body: body.optional_raw("n", 2),
        lambda body: body.items("n", 2),
    ):
        with contextlib.suppress(ProtocolError):
            take(fields(n=value))


@pytest.mark.parametrize("take", ["flag", "text", "raw", "optional_raw", "items", "integer"])
def test_missing_field_is_refused(take: str) -> None:
    """A field that is left out, which a default would fill."""
    bounds = {"flag": (), "integer": (0, 1)}.get(take, (4,))
    with pytest.raises(ProtocolError, match="'n'"):
        getattr(fields(), take)("n", *bounds)
