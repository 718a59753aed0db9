"""Connecting: every address is tried, in time; and a link over a cut wire ends by itself."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.network import cut_wire, needs_ipv6, port_of
from tapchannel import sockets
from tapchannel.sockets import (
    USER_TIMEOUT_MS,
    bear_silence,
    connect,
    fresh_address,
    listen_local,
    other_user,
    tune,
)

LIMIT = 5.0
OPTIONS = {
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): sockets.KEEPALIVE_IDLE_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): sockets.KEEPALIVE_INTERVAL_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): sockets.KEEPALIVE_PROBES,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): sockets.USER_TIMEOUT_MS,
}


@contextmanager
def listener(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """Listen on a port of loopback."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as made:
        made.bind((host, 0))
        made.listen()
        yield made


def closed_port() -> int:
    """Give a port on which nobody listens any more."""
    with listener() as made:
        return port_of(made)


def resolving(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Have every name resolve to these addresses."""

    def getaddrinfo(_: str, port: int, **__: object) -> list[tuple[Any, ...]]:
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(family[":" in host], 0, 0, "", (host, port)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("bound", "address"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:{}"),
        ("127.0.0.1", "tcp://localhost:{}"),
        ("127.0.0.1", "tcp://[::ffff:127.0.0.1]:{}"),
        pytest.param("::1", "tcp://[::1]:{}", marks=needs_ipv6),
    ],
)
def test_connects_over_tcp_with_options_that_end_a_dead_link(bound: str, address: str) -> None:
    """A control link without keepalive, that outlives its peer's host for ever."""
    with listener(bound) as made, connect(address.format(port_of(made)), LIMIT) as link:
        assert {which: link.getsockopt(*which) for which in OPTIONS} == OPTIONS
        assert 0 < (link.gettimeout() or 0) <= LIMIT
        assert other_user(link) is None


def test_connects_to_a_unix_address() -> None:
    """The way that all attaches of one host go."""
    address = fresh_address()
    with listen_local(address), connect(address, LIMIT) as link:
        assert link.family == socket.AF_UNIX
        assert 0 < (link.gettimeout() or 0) <= LIMIT


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose first address is dead, and that is given up for it."""
    resolving(monkeypatch, "::1", "127.0.0.9", "127.0.0.1")
    with listener() as made, connect(f"tcp://draft.cluster:{port_of(made)}", LIMIT) as link:
        assert link.getpeername()[0] == "127.0.0.1"


def test_failure_tells_of_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last address's error, when it was the first that mattered."""
    resolving(monkeypatch, "127.0.0.9", "127.0.0.1")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionError) as raised:
        connect(f"tcp://draft.cluster:{closed_port()}", LIMIT)
    assert "127.0.0.9: " in str(raised.value)
    assert "127.0.0.1: " in str(raised.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_silent_address_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is off, listed first, that uses up the whole limit."""
    with socket.socket() as full, listener() as made:
        # A backlog of none, and one who waits in it: what comes after is not answered.
        full.bind(("127.0.0.9", port_of(made)))
        full.listen(0)
        with socket.create_connection(full.getsockname(), LIMIT):
            resolving(monkeypatch, "127.0.0.9", "127.0.0.1")
            began = time.monotonic()
            with connect(f"tcp://draft.cluster:{port_of(made)}", 1.0) as link:
                assert link.getpeername()[0] == "127.0.0.1"
            assert time.monotonic() - began < 1.0
            with pytest.raises(TimeoutError, match="127.0.0.9"):
                connect(f"tcp://127.0.0.9:{port_of(made)}", 0.2)


def test_slow_resolver_does_not_hold_up_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait without a limit of ours: a name server that does not answer."""
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(LIMIT) and [])
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="'draft.cluster' was not resolved"):
        connect("tcp://draft.cluster:47110", 0.2)
    assert time.monotonic() - began < LIMIT / 2
    answered.set()


@pytest.mark.parametrize("name", ["nowhere.invalid", "a..b", "x" * 100])
def test_unknown_name_may_be_tried_again(name: str) -> None:
    """A cluster's name that appears a second after its pod, and is given up before."""
    with pytest.raises(ConnectionError, match="is not known"):
        connect(f"tcp://{name}:47110", LIMIT)


@pytest.mark.parametrize("address", ["", "tcp://*:1", "tcp://host", "http://host:1", "/tmp/a"])
def test_impossible_address_is_told(address: str) -> None:
    """An address that is tried again until the deadline, though it never will do."""
    with pytest.raises(OSError, match="neither unix") as raised:
        connect(address, LIMIT)
    assert not isinstance(raised.value, ConnectionError | TimeoutError)


def test_link_that_met_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of this host that nobody listens on, until a socket connects to itself there."""

    class FromThere(socket.socket):
        def connect(self, address: Any) -> None:
            self.bind(address)
            super().connect(address)

    monkeypatch.setattr(socket, "socket", FromThere)
    with pytest.raises(ConnectionError, match="met itself"):
        connect(f"tcp://127.0.0.1:{closed_port()}", LIMIT)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with bytes on their way"])
def test_link_over_a_cut_wire_ends_by_itself(busy: bool) -> None:
    """A peer's host that lost its power, and whose lane stays taken for a quarter of an hour."""
    with listener() as made, connect(f"tcp://127.0.0.1:{port_of(made)}", LIMIT) as peer:
        link, _ = made.accept()
        with link:
            tune(link)
            cut_wire(peer)
            cut_wire(link)
            if busy:
                link.sendall(b"a word that never arrives")
            began = time.monotonic()
            link.settimeout(30)
            with pytest.raises(TimeoutError) as raised:
                link.recv(1)
            assert raised.value.errno == errno.ETIMEDOUT
            assert 6 < time.monotonic() - began < 14


def test_link_of_a_patient_lane_bears_a_longer_silence() -> None:
    """A lane that may be silent for a minute, whose link ends after eight seconds all the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as link:
            tune(link)
            bear_silence(link, 7.0)
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == USER_TIMEOUT_MS
            bear_silence(link, 60.0)
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
            idle = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            interval = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            probes = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            assert 60 <= idle + probes * interval <= 64
