"""Strangers at the mailbox's socket: whatever they send, they get nothing and cost next to nothing.

After each attack the channel carries a pass, and no descriptor, thread or lane is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import select
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from support.attacks import ATTACKS, Marker, body, frame
from support.children import Children
from support.handmade_peers import HandmadeOutbox, challenge, dial, ended, hello, receive
from support.link import Link
from support.small_channel import (
    LIMIT,
    NAME,
    PLAN,
    SOURCES,
    Footprint,
    SmallChannel,
    attach,
    refused,
    small_channel,
    states,
)
from tapchannel import Mailbox, Outbox, service
from tapchannel.errors import AttachError, AttachTimeout, PeerLostError, TapChannelError
from tapchannel.sockets import fresh_address, native_address
from tapchannel.stores import rendezvous
from tapchannel.wire import CHALLENGE, HELLO, LIVE, REFUSAL, send_frame

HANDSHAKE = 0.5  # seconds that a handshake may take in these tests
SOON = 0.2


@pytest.fixture
def channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallChannel]:
    """A channel that rank 7 has not attached to; afterwards it attaches, and a pass is carried."""
    monkeypatch.setattr(service, "HANDSHAKE_LIMIT_S", HANDSHAKE)
    with small_channel(tmp_path, ranks=(3,), listen="tcp://127.0.0.1") as made:
        attach(tmp_path, 7).close()  # a lane keeps its last peer's pidfd until the next one comes
        resource_tracker.ensure_running()  # the first child would start it, and it stays
        before = Footprint.at_rest()
        yield made
        assert before.grown() is None
        made.outboxes[7] = attach(tmp_path, 7)
        made.carry()


@pytest.fixture(params=["unix", "tcp"])
def door(channel: SmallChannel, request: pytest.FixtureRequest) -> str:
    """Give one of the mailbox's addresses: a stranger may come from this host or from another."""
    found = [one for one in channel.mailbox.addresses if one.startswith(request.param)]
    return found[0]


def say_no_more(link: socket.socket) -> None:
    """End this direction, unless the mailbox has ended the whole connection already."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("attack", ATTACKS)
def test_bytes_of_a_stranger_are_refused(
    door: str, caplog: pytest.LogCaptureFixture, attack: str
) -> None:
    """Bytes that are believed: a size reserved, a thread that dies, a log that is written into."""
    tracemalloc.start()
    try:
        with dial(door) as link:
            receive(link, CHALLENGE)
            with contextlib.suppress(ConnectionError):
                link.sendall(ATTACKS[attack])
            say_no_more(link)
            assert ended(link)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.parametrize("wrapped", [False, True])
def test_pickle_is_never_loaded(door: str, tmp_path: Path, wrapped: bool) -> None:
    """A peer's pickle that runs in the mailbox's process."""
    evil = pickle.dumps(Marker(tmp_path / "owned"))
    with dial(door) as link:
        receive(link, CHALLENGE)
        link.sendall(frame(HELLO, evil) if wrapped else evil)
        say_no_more(link)
        assert ended(link)
    assert pickle.loads(evil) is None  # it would have worked
    (tmp_path / "owned").rmdir()


JUNK: list[Any] = [
    None,
    True,
    -1,
    1 << 31,
    1 << 80,
    1.5,
    "",
    "x" * 200_000,
    "\ud800",
    "\x1b[2J\n",
    [],
    {},
    [[]],
    [None],
    ["high"] * 5000,
    {"a": {"b": {}}},
]


@pytest.mark.parametrize("field", sorted(hello()))
def test_junk_in_any_field_is_refused_or_taken_for_what_it_is(
    door: str, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    """A value that ends a handshake's thread by an error that nobody catches."""
    for junk in JUNK:
        with dial(door) as link:
            receive(link, CHALLENGE)
            with contextlib.suppress(ConnectionError, TapChannelError):
                send_frame(link, HELLO, hello(**{field: junk}))
                _, fds = receive_or_end(link)
                for fd in fds:
                    os.close(fd)
    assert all(record.getMessage().isprintable() for record in caplog.records)


def receive_or_end(link: socket.socket) -> tuple[Any, list[int]]:
    """Receive whatever the mailbox answers."""
    return receive(link, *range(1, 7))


@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_descriptors_of_a_stranger_are_closed(channel: SmallChannel, count: int) -> None:
    """A peer that fills the mailbox's table of descriptors."""
    stuff = os.memfd_create("stuff")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{count}i", *[stuff] * count))]
    for _ in range(5):
        with dial(channel.mailbox.address) as link:
            receive(link, CHALLENGE)
            link.sendmsg([frame(HELLO, body(rank=5))], rights)
            assert ended(link)
    os.close(stuff)


EARLY: dict[str, Callable[[HandmadeOutbox], object]] = {
    "at once": lambda peer: None,
    "in the hello's header": lambda peer: peer.link.sendall(frame(HELLO, body())[:5]),
    "in the hello's body": lambda peer: peer.link.sendall(frame(HELLO, body())[:50]),
    "after the hello": lambda peer: peer.link.sendall(frame(HELLO, body())),
}
STAGES: dict[str, Callable[[HandmadeOutbox], object]] = {
    **EARLY,
    "after the offer": lambda peer: peer.ask(),
    "after the self-test": lambda peer: peer.write_probe(peer.ask()),
}
# The later stages need descriptors, which do not cross a network.
STAGES_AT_DOORS = [*((stage, "unix") for stage in STAGES), *((stage, "tcp") for stage in EARLY)]


@pytest.mark.parametrize(("stage", "door"), STAGES_AT_DOORS, indirect=["door"])
def test_peer_that_hangs_up_leaves_nothing(channel: SmallChannel, door: str, stage: str) -> None:
    """A lane that stays taken by, or a descriptor that stays open for, a peer that went away."""
    for _ in range(5):
        with HandmadeOutbox(door) as peer:
            STAGES[stage](peer)
    assert states(channel.mailbox)[7] == "away"


@pytest.mark.parametrize(("stage", "door"), STAGES_AT_DOORS, indirect=["door"])
def test_peer_that_falls_silent_is_cut_off(door: str, stage: str) -> None:
    """A handshake without end: one such peer for each thread, and nobody gets in any more."""
    with HandmadeOutbox(door) as peer:
        began = time.monotonic()
        STAGES[stage](peer)
        assert ended(peer.link)
        assert time.monotonic() - began < HANDSHAKE + 1


def test_peer_that_drips_is_cut_off(door: str) -> None:
    """A deadline that every byte puts off."""
    with dial(door) as link:
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            for byte in frame(HELLO, body()):
                link.sendall(bytes([byte]))
                select.select([], [], [], HANDSHAKE / 20)
        assert time.monotonic() - began < HANDSHAKE + 1


def test_crowd_of_silent_peers_is_bounded_and_passes(door: str, tmp_path: Path) -> None:
    """A thread for each of a thousand silent peers; or an honest rank that is refused for good."""
    crowd = [dial(door) for _ in range(service.MAX_HANDSHAKES + 10)]
    handshakes = [one for one in threading.enumerate() if one.name == "tapchannel-handshake"]
    assert len(handshakes) <= service.MAX_HANDSHAKES
    attach(tmp_path, 7).close()
    for link in crowd:
        with link:
            assert ended(link)


def test_silent_peer_holds_up_its_own_lane_only(channel: SmallChannel, tmp_path: Path) -> None:
    """One half-dead rank that keeps all others from attaching."""
    channel.outboxes.pop(3).close()
    with HandmadeOutbox(channel.mailbox.address) as peer:
        peer.ask()
        began = time.monotonic()
        channel.outboxes[3] = attach(tmp_path, 3)
        assert time.monotonic() - began < HANDSHAKE / 2
        with ThreadPoolExecutor() as pool:
            coming = pool.submit(attach, tmp_path, 7)
            coming.result(LIMIT).close()
        assert ended(peer.link)


def test_mailbox_closes_at_once_with_peers_in_mid_handshake(tmp_path: Path) -> None:
    """A `close` that waits for a stranger's deadline."""
    with small_channel(tmp_path, ranks=()) as channel:
        with HandmadeOutbox(channel.mailbox.address) as silent:
            with HandmadeOutbox(channel.mailbox.address) as peer:
                peer.write_probe(peer.ask())
                began = time.monotonic()
                channel.mailbox.close()
                assert time.monotonic() - began < 1
                peer.ready()
                with contextlib.suppress(ConnectionError):
                    fields, _ = receive(peer.link, REFUSAL, LIVE)
                    assert fields.kind == REFUSAL
            silent.close()


def test_self_test_that_was_not_written_is_refused(channel: SmallChannel) -> None:
    """A lane that goes live over memory which the peer cannot reach."""
    with HandmadeOutbox(channel.mailbox.address) as peer:
        peer.ask()
        peer.ready()
        fields, _ = receive(peer.link, REFUSAL)
        assert fields.text("error", 64) == "TransportUnavailable"
        assert "self-test" in fields.text("what", 512)


def test_words_of_a_peer_are_not_written_raw(
    channel: SmallChannel, caplog: pytest.LogCaptureFixture
) -> None:
    """A line of a log, or of an error, that a peer has forged."""
    forged = "x\n2026-01-01 INFO all is well \x1b[2J"
    refusal = {
        "error": "TransportUnavailable",
        "what": forged,
        "reason": forged,
        "next_step": forged,
        "again": False,
        "rows": [],
        "refused": [],
    }
    with HandmadeOutbox(channel.mailbox.address) as peer:
        peer.ask(host=forged)
        send_frame(peer.link, REFUSAL, refusal)
        assert ended(peer.link)
    with refused(AttachTimeout) as caught:
        channel.mailbox.wait_ready(SOON)
    assert "all is well" in str(caught[0])
    assert str(caught[0]).isprintable()
    assert caplog.records
    assert all(record.getMessage().isprintable() for record in caplog.records)
    json.dumps(channel.mailbox.info()).encode()


def _claim_another_pid(link: Link, address: str, pid: int) -> None:
    """Attach under the mailbox's own pid, end the socket, and live on."""
    with HandmadeOutbox(address) as peer:
        peer.go_live(pid=pid)
    link.reach("left")
    link.receive()


def test_claimed_pid_does_not_lift_the_fence(channel: SmallChannel, tmp_path: Path) -> None:
    """A peer of another PID namespace that has the mailbox's pid there, and is never fenced."""
    with Children(limit=30) as children:
        child = children.start(_claim_another_pid, channel.mailbox.address, os.getpid())
        child.wait_for("left")
        with refused(AttachTimeout):
            attach(tmp_path, 7, attach_timeout=SOON)
        child.kill()


def _run_short_of_descriptors(link: Link, folder: Path) -> None:
    """Be a mailbox whose process has no descriptor left for a while."""
    with Mailbox(PLAN, SOURCES, store=f"file://{folder}", name=NAME) as mailbox:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        link.reach("listening", mailbox.address)
        link.receive()
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, hard))
        link.reach("short")
        link.receive()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        link.reach("well again")
        mailbox.wait_ready(LIMIT)


def test_service_survives_a_shortage_of_descriptors(tmp_path: Path) -> None:
    """A service that stops listening for good, without a word, at the first EMFILE."""
    with Children(limit=30) as children:
        child = children.start(_run_short_of_descriptors, tmp_path)
        address = child.wait_for("listening")
        child.send()
        child.wait_for("short")
        crowd = [dial(address) for _ in range(8)]
        select.select(crowd[-1:], [], [], SOON)  # the last ones find no descriptor
        for link in crowd:
            link.close()
        child.send()
        child.wait_for("well again")
        outboxes = [attach(tmp_path, rank) for rank in SOURCES]
        child.result()
        for outbox in outboxes:
            outbox.close()


# ---- other users

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def _knock_as_nobody(link: Link, address: str) -> tuple[Exception, bytes]:
    """Try to attach as another user; give the error, and what a plain connection gets to read."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    read = b""
    with contextlib.suppress(OSError), dial(address) as plain:
        read = plain.recv(1)
    try:
        Outbox(PLAN, 7, store=told(address), name=NAME, attach_timeout=1)
    except TapChannelError as error:
        return error, read
    raise AssertionError("another user was let in")


@as_root
@pytest.mark.parametrize("kind", ["own address", "path", "open path"])
def test_other_user_is_refused_and_told_nothing(tmp_path: Path, kind: str) -> None:
    """Another user of the host who reads hidden states, or learns the channel's name."""
    store = f"file://{tmp_path}"
    if kind != "own address":
        os.chmod(tmp_path.parents[1], 0o711)
        os.chmod(tmp_path.parents[0], 0o711)
        os.chmod(tmp_path, 0o711)
        store = f"unix://{tmp_path}/mailbox.sock"
    try:
        with Mailbox(PLAN, SOURCES, store=store, name=NAME) as mailbox:
            if kind == "open path":
                os.chmod(tmp_path / "mailbox.sock", 0o666)
            with Children(limit=20) as children:
                child = children.start(_knock_as_nobody, mailbox.address)
                error, read = child.result()
            assert NAME.encode() not in read
            assert isinstance(error, AttachError | AttachTimeout | PeerLostError)
            assert "user" in str(error) or "permission" in str(error).lower()
            assert states(mailbox)[7] == "away"
            if kind != "path":
                assert any("another user" in line for line in mailbox._service.refusals)
    finally:
        if kind != "own address":
            os.chmod(tmp_path.parents[1], 0o700)
            os.chmod(tmp_path.parents[0], 0o700)


def told(address: str) -> HashStore:
    """Give a store that tells this address."""
    store = HashStore()
    rendezvous(store, NAME).publish([address])
    return store


def _listen_as_nobody(link: Link) -> bytes:
    """Be a mailbox of another user; give what the outbox says to it."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    address = fresh_address()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(native_address(address))
        listener.listen()
        listener.settimeout(LIMIT)
        link.reach("listening", address)
        accepted, _ = listener.accept()
        with accepted, contextlib.suppress(OSError):
            accepted.settimeout(LIMIT)
            send_frame(accepted, CHALLENGE, challenge())
            return accepted.recv(65536)
    return b""


@as_root
def test_mailbox_of_another_user_is_not_believed() -> None:
    """A user who writes an address into a shared folder, and gets every hidden state."""
    with Children(limit=20) as children:
        child = children.start(_listen_as_nobody)
        address = child.wait_for("listening")
        with refused(AttachError, channel=NAME, rank=7, next_step=...) as caught:
            attach(Path("/nowhere"), 7, store=told(address), attach_timeout=1)
        assert "user" in str(caught[0])
        assert child.result() == b""
