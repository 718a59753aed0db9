"""A mailbox that does not follow the protocol: the outbox maps nothing of it, and says why."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.handmade_peers import (
    arena_fd,
    block_fd,
    challenge,
    impostor,
    offer_body,
    offering,
    receive,
    take_hello,
)
from support.small_channel import (
    LIMIT,
    NAME,
    PLAN,
    Footprint,
    attach,
    refused,
    small_channel,
)
from tapchannel import Outbox
from tapchannel.descriptor import PROBE_STRIDE
from tapchannel.errors import AttachError, AttachTimeout, ProtocolError, TapChannelError
from tapchannel.wire import CHALLENGE, HELLO, LIVE, OFFER, READY, REFUSAL, VERSION, send_frame

SOON = 0.3
SECRET = "correct horse battery"


def join(address: str, **settings: Any) -> Outbox:
    """Try to attach to an impostor."""
    limits = {"attach_timeout": SOON, "timeout": LIMIT}
    return Outbox(PLAN, 7, store=address, name=NAME, **{**limits, **settings})


def expect_refusal(folder: Path, act: Callable[[socket.socket], None], **settings: Any) -> str:
    """Expect a typed error in time, and nothing left open; give its text."""
    before = Footprint.at_rest()
    began = time.monotonic()
    with impostor(folder, act) as address:
        with pytest.raises(TapChannelError) as raised:
            join(address, **settings)
        text, where = str(raised.value), (raised.value.channel, raised.value.rank)
        del raised
    assert time.monotonic() - began < SOON + 2
    (folder / "impostor.sock").unlink()
    assert before.grown() is None
    assert where == (NAME, 7)
    return text


def sending(data: bytes) -> Callable[[socket.socket], None]:
    """Send this, and hang up."""
    return lambda link: link.sendall(data)


def challenging(**changes: Any) -> Callable[[socket.socket], None]:
    """Send a challenge with changes, and hang up."""
    return lambda link: send_frame(link, CHALLENGE, challenge(**changes))


def after_hello(data: bytes) -> Callable[[socket.socket], None]:
    """Take the hello, send this, and hang up."""

    def act(link: socket.socket) -> None:
        take_hello(link)
        link.sendall(data)

    return act


def frame(kind: int, body: bytes, version: int = VERSION, length: int | None = None) -> bytes:
    """Give the bytes of a frame that may lie about itself."""
    size = len(body) if length is None else length
    return struct.pack(">4sHHI", b"TAPC", version, kind, size) + body


WORDS = {
    "nothing": lambda link: receive(link, LIVE),
    "the end": lambda link: None,
    "random bytes": sending(os.urandom(999)),
    "another protocol": sending(b"HTTP/1.1 200 OK\r\n\r\n"),
    "a pickle": sending(pickle.dumps({"mailbox_id": "00"})),
    "two gigabytes announced": sending(frame(CHALLENGE, b"{}", length=1 << 31)),
    "another version": sending(frame(CHALLENGE, b"{}", version=9)),
    "live at once": sending(frame(LIVE, b"{}")),
    "half a challenge": sending(frame(CHALLENGE, b"{}", length=500)),
    "an empty challenge": sending(frame(CHALLENGE, b"{}")),
    "a short nonce": challenging(nonce="00"),
    "a name that is none": challenging(name=7),
    "a name too long": challenging(name="x" * 500),
    "a flag that is none": challenging(secret="yes"),
    "a refusal that is none": sending(frame(REFUSAL, b'{"error": 5}')),
    "random bytes for an offer": after_hello(os.urandom(999)),
    "the end for an offer": after_hello(b""),
    "an empty offer": after_hello(frame(OFFER, b"{}")),
    "half an offer": after_hello(frame(OFFER, b"{}", length=5000)),
    "the hello back": after_hello(frame(HELLO, b"{}")),
    "live for an offer": after_hello(frame(LIVE, b"{}")),
}


@pytest.mark.parametrize("words", WORDS)
def test_words_of_an_impostor_are_refused(tmp_path: Path, words: str) -> None:
    """Bytes that are believed, or that end in another error than ours."""
    text = expect_refusal(tmp_path, WORDS[words])
    assert text.replace("\n", "").isprintable()


def block_only() -> list[int]:
    """Give the control block alone."""
    return [block_fd()]


def both() -> list[int]:
    """Give what a right offer comes with."""
    return [block_fd(), arena_fd()]


def plain_file() -> int:
    """Give a descriptor that is no memory."""
    return os.open("/dev/null", os.O_RDWR)


def open_memory(size: int) -> int:
    """Give memory that its sender can still shrink."""
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


SIZE = PLAN.arena_bytes(2) + 2 * PROBE_STRIDE
ALTERED: dict[str, tuple[dict[str, Any], Callable[[], list[int]]]] = {
    "no descriptors": ({}, list),
    "no arena": ({}, block_only),
    "both in the other order": ({}, lambda: both()[::-1]),
    "block that is no memory": ({}, lambda: [plain_file(), arena_fd()]),
    "block that can shrink": ({}, lambda: [open_memory(8192), arena_fd()]),
    "block of another lane": ({}, lambda: [block_fd(lane=0), arena_fd()]),
    "block of another depth": ({}, lambda: [block_fd(depth=3), arena_fd()]),
    "block of more cells": ({}, lambda: [block_fd(cells=2), arena_fd()]),
    "block of another mailbox": ({}, lambda: [block_fd(mailbox_id=b"x" * 16), arena_fd()]),
    "arena that is no memory": ({}, lambda: [block_fd(), plain_file()]),
    "arena that can shrink": ({}, lambda: [block_fd(), open_memory(SIZE)]),
    "arena too small": ({}, lambda: [block_fd(), arena_fd(SIZE - 1)]),
    "arena too large": ({}, lambda: [block_fd(), arena_fd(SIZE + 1)]),
    "another lane": ({"lane": 0}, both),
    "another depth": ({"depth": 1}, both),
    "no depth": ({"depth": 0}, both),
    "smaller slots": ({"slot_bytes": PLAN.slot_bytes - 256}, both),
    "larger arena": ({"arena_bytes": SIZE + 4096}, both),
    "smaller arena": ({"arena_bytes": 64}, both),
    "probe behind the arena": ({"probe_offset": SIZE - 63}, both),
    "no cells": ({"shards": []}, both),
    "a cell too many": ({"shards": [["high", 0, 1, 0, 1], ["low", 0, 1, 0, 1]]}, both),
    "cell of no tap": ({"shards": [["nowhere", 0, 1, 0, 1]]}, both),
    "share that does not divide": ({"shards": [["high", 0, 1, 0, 3]]}, both),
    "one tap twice": (
        {"shards": [["high", 0, 1, 0, 1]] * 2},
        lambda: [block_fd(cells=2), arena_fd()],
    ),
    "memory of a GPU": ({"memory": "vmm"}, both),
    "memory of a GPU by handle": ({"memory": "ipc", "handle": "00" * 64}, block_only),
    "memory of this process": ({"memory": "local"}, block_only),
    "memory of no kind": ({"memory": "disk"}, both),
}


@pytest.mark.parametrize("altered", ALTERED)
def test_altered_offer_is_refused_and_closed(tmp_path: Path, altered: str) -> None:
    """A size, an offset or a descriptor that is used before it is checked (I8), or stays open."""
    changes, fds = ALTERED[altered]
    expect_refusal(tmp_path, offering(changes, fds), attach_timeout=2.0)


def test_right_offer_of_a_handmade_mailbox_is_taken(tmp_path: Path) -> None:
    """The test of the tests: what the altered offers differ from does attach."""
    with impostor(tmp_path, offering({}, both)) as address:
        join(address, attach_timeout=LIMIT).close()


def test_offer_cut_anywhere_is_never_taken(tmp_path: Path) -> None:
    """Half an offer that passes for a whole one."""
    whole = frame(OFFER, str(offer_body()).encode())
    for cut in (11, 13, len(whole) - 1):
        expect_refusal(tmp_path, after_hello(whole[:cut]))


def offer_by_hand(link: socket.socket, proof: str) -> None:
    """Send an offer with this proof, and keep none of its descriptors."""
    fds = both()
    send_frame(link, OFFER, {**offer_body(), "proof": proof}, fds)
    for fd in fds:
        os.close(fd)


def test_mailbox_that_only_claims_to_know_the_secret_is_refused(tmp_path: Path) -> None:
    """A job's hidden states, pushed to whoever listens: the proof must go both ways."""

    def act(link: socket.socket) -> None:
        take_hello(link, secret=True)
        offer_by_hand(link, "00" * 32)

    text = expect_refusal(tmp_path, act, secret=SECRET)
    assert "secret" in text
    assert SECRET not in text


def test_proof_of_the_outbox_cannot_be_reflected(tmp_path: Path) -> None:
    """A mailbox that sends the outbox's own proof back, and is believed."""

    def act(link: socket.socket) -> None:
        send_frame(link, CHALLENGE, challenge(secret=True))
        fields, _ = receive(link, HELLO)
        offer_by_hand(link, fields.text("proof", 64))

    assert "secret" in expect_refusal(tmp_path, act, secret=SECRET)


def test_name_that_does_not_encode_is_a_typed_error(tmp_path: Path) -> None:
    """A lone surrogate in a challenge, which the proof cannot encode."""
    expect_refusal(tmp_path, challenging(name="\ud800", secret=True), secret=SECRET)


def test_text_of_a_refusal_is_made_printable(tmp_path: Path) -> None:
    """A terminal that a foreign mailbox writes into."""
    body = {
        "error": "AttachError",
        "what": "no\x1b[2J",
        "reason": "\r\nforged",
        "next_step": "\ud800",
        "again": False,
        "rows": [],
        "refused": [],
    }
    text = expect_refusal(tmp_path, lambda link: send_frame(link, REFUSAL, body))
    assert text.isprintable() or text.replace("\n", "").isprintable()
    assert "\x1b" not in text
    assert "\r" not in text


@pytest.mark.parametrize("error", ["KeyError", "SystemExit", "TapChannelError", "__init__", ""])
def test_refusal_becomes_one_of_our_errors_only(tmp_path: Path, error: str) -> None:
    """A class that the peer names and this side makes."""

    def act(link: socket.socket) -> None:
        body = {
            "what": "w",
            "reason": "r",
            "next_step": "n",
            "again": False,
            "rows": [],
            "refused": [],
        }
        send_frame(link, REFUSAL, {"error": error, **body})

    with impostor(tmp_path, act) as address, refused(AttachError, channel=NAME, rank=7):
        join(address)


def test_mailbox_that_never_says_live_is_given_up(tmp_path: Path) -> None:
    """An outbox that waits for the last word for ever; its mapping must be gone."""

    def act(link: socket.socket) -> None:
        take_hello(link)
        fds = both()
        send_frame(link, OFFER, offer_body(), fds)
        for fd in fds:
            os.close(fd)
        receive(link, READY)
        receive(link, READY)  # nothing comes: until the other side hangs up

    text = expect_refusal(tmp_path, act)
    assert "deadline" in text or "timed out" in text


def test_honest_mailbox_is_found_after_an_impostor(tmp_path: Path) -> None:
    """A state that a bad peer leaves behind in this process."""
    with impostor(tmp_path, sending(b"junk" * 10)) as address:
        with pytest.raises((ProtocolError, AttachError, AttachTimeout)):
            join(address)
    with small_channel(tmp_path, ranks=(3,)) as channel:
        channel.outboxes[7] = attach(tmp_path, 7)
        channel.carry()
