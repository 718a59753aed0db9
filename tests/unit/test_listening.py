"""Where a mailbox listens: what was asked for, what others can reach, and never unguarded."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest

from support.children import Children
from support.link import Link
from support.network import needs_ipv6, port_of, taken_ports
from tapchannel import interfaces
from tapchannel.endpoints import IP
from tapchannel.errors import ConfigError
from tapchannel.listening import Listener, open_all, where_to_listen
from tapchannel.sockets import connect, fresh_address

SECRET = b"correct horse"


@contextmanager
def listening(url: str | None, transport: str = "auto") -> Iterator[list[Listener]]:
    """Listen on this host and at ``url``."""
    opened = open_all(where_to_listen(fresh_address(), url, transport, SECRET, False))
    try:
        yield opened
    finally:
        for listener in opened:
            listener.close()


def refusal(url: str, secret: bytes | None = SECRET) -> ConfigError:
    """Give the error with which a mailbox refuses to listen there."""
    with pytest.raises(ConfigError) as raised:
        for listener in open_all(where_to_listen(fresh_address(), url, "auto", secret, False)):
            listener.close()
    assert raised.value.next_step
    return raised.value


def hosts(opened: list[Listener]) -> list[str]:
    """Give the published addresses but for this host's own."""
    assert [listener.local for listener in opened] == [True] + [False] * (len(opened) - 1)
    return [address for listener in opened[1:] for address in listener.addresses]


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Have every name resolve to these addresses."""

    def getaddrinfo(host: str, port: object, **_: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (answer, port)) for answer in answers]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_nothing_asked_for_is_this_host_only() -> None:
    """A port that opens on the network unasked."""
    with listening(None) as opened:
        assert hosts(opened) == []
        connect(opened[0].addresses[0], 5.0).close()


def test_transport_of_the_network_listens_on_the_network() -> None:
    """A forced ``ucx`` that no other host can attach to; or one that is open without a secret."""
    with listening(None, "ucx") as opened:
        assert hosts(opened)
    with pytest.raises(ConfigError, match="secret"):
        where_to_listen(fresh_address(), None, "ucx", None, False)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("tcp://127.0.0.1", "127.0.0.1"),
        ("tcp://127.0.0.2", "127.0.0.2"),
        pytest.param("tcp://[::1]", "[::1]", marks=needs_ipv6),
        ("tcp://[::ffff:127.0.0.1]", "127.0.0.1"),
        ("tcp://localhost", "127.0.0.1"),
        ("tcp://lo", "127.0.0.1"),
    ],
)
def test_kernel_picks_the_port_that_is_published(url: str, host: str) -> None:
    """A published port that nobody listens on: 0, or one that was picked and let go."""
    with listening(url) as opened:
        published = hosts(opened)
        assert any(address.startswith(f"tcp://{host}:") for address in published)
        for address in published:
            connect(address, 5.0).close()


@pytest.mark.parametrize("url", ["tcp://*", "tcp://0.0.0.0", "tcp://[::]"])
def test_all_interfaces_are_published_as_addresses_of_this_host(url: str) -> None:
    """``tcp://0.0.0.0:…`` in a store, which every other host takes for itself."""
    with listening(url) as opened:
        published = hosts(opened)
        assert published
        own = {ip for _, ip in interfaces.addresses()}
        for address in published:
            ip = ip_address(address.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
            assert ip in own
            assert ip.is_loopback <= all(one.is_loopback for one in own)
            connect(address, 5.0).close()
        port = port_of(opened[1].link)
        connect(f"tcp://127.0.0.1:{port}", 5.0).close()
        if url != "tcp://0.0.0.0" and opened[1].link.family == socket.AF_INET6:
            connect(f"tcp://[::1]:{port}", 5.0).close()


def entries(*texts: str) -> list[tuple[str, IP]]:
    """Read "interface address" pairs."""
    return [(text.split()[0], ip_address(text.split()[1])) for text in texts]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (["lo 127.0.0.1"], ["127.0.0.1"]),
        (["lo 127.0.0.1", "lo 127.0.1.1", "eth0 10.0.0.1"], ["10.0.0.1"]),
        (["docker0 172.17.0.1", "ib0 10.1.0.1", "eth0 10.0.0.1"], ["10.1.0.1"]),
        (["docker0 172.17.0.1"], ["172.17.0.1"]),
        (["eth0 169.254.3.4", "eth1 10.0.0.1", "eth1 fd00::2"], ["10.0.0.1", "fd00::2"]),
        (["lo ::1", "eth0 fd00::2"], ["fd00::2"]),
    ],
)
def test_without_a_route_an_interface_is_published(
    monkeypatch: pytest.MonkeyPatch, own: list[str], expected: list[str]
) -> None:
    """A closed-off cluster whose mailbox is published as loopback, or as a container's bridge."""
    monkeypatch.setattr(interfaces, "_FAR_AWAY", ())
    monkeypatch.setattr(interfaces, "addresses", lambda: entries(*own))
    assert [str(ip) for ip in interfaces.reachable()] == expected


def test_route_decides_not_the_order_of_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A management network that comes first in a list and leads nowhere."""
    own = entries("lo 127.0.0.1", "eth0 10.0.0.1")
    monkeypatch.setattr(interfaces, "addresses", lambda: own)
    monkeypatch.setattr(interfaces, "_FAR_AWAY", ((socket.AF_INET, "127.0.0.1"),))
    assert interfaces.reachable((4,)) == (own[1][1],)  # a route over loopback leads nowhere
    sources = {"1": IPv4Address("10.9.0.1"), "2": IPv6Address("fd00::9")}
    monkeypatch.setattr(interfaces, "_FAR_AWAY", ((4, "1"), (6, "2")))
    monkeypatch.setattr(interfaces, "_source_towards", lambda _, far: sources[far])
    assert interfaces.reachable() == (IPv4Address("10.9.0.1"), IPv6Address("fd00::9"))
    assert interfaces.reachable((4,)) == (IPv4Address("10.9.0.1"),)


def test_own_name_that_means_loopback_is_published_as_reachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's 127.0.1.1, by which each host of a cluster finds itself and no other."""
    resolving(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    with listening("tcp://node7") as opened:
        published = hosts(opened)
        assert published
        assert not any("127.0.1.1" in address for address in published)
        for address in published:
            connect(address, 5.0).close()


def test_another_name_that_means_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in /etc/hosts that quietly keeps a mailbox from all other hosts."""
    resolving(monkeypatch, "127.0.1.1")
    text = str(refusal("tcp://draft.cluster"))
    assert "loopback only: 127.0.1.1" in text


def test_name_with_several_addresses_listens_on_those_of_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name of several hosts that cannot be listened on; or loopback beside a real address."""
    own = interfaces.reachable((4,))[0]
    resolving(monkeypatch, "198.51.100.7", str(own), "127.0.0.1", "fe80::1%lo", str(own))
    with listening("tcp://draft.cluster") as opened:
        assert len(hosts(opened)) == 1
        assert hosts(opened)[0].startswith(f"tcp://{own}:")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("tcp://198.51.100.7", "belongs to another host"),
        ("tcp://[2001:db8::7]", "belongs to another host"),
        ("tcp://[fe80::1]", "link-local"),
        ("tcp://nowhere.invalid", "no interface has this name"),
        ("tcp://" + "x" * 100, "no interface has this name"),
        ("tcp://a..b", "no interface has this name"),
    ],
)
def test_host_that_leads_nowhere_is_refused_with_what_there_is(url: str, told: str) -> None:
    """A bare errno, from which nobody learns which names would do."""
    error = refusal(url)
    assert told in str(error)
    assert "127.0.0.1 (lo)" in str(error)
    assert "tcp://*" in str(error)


def test_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that is down, and is then asked of the resolver."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    assert "interface ib0 has no address" in str(refusal("tcp://ib0"))


# ---- ports


def test_first_free_port_of_a_range_is_taken() -> None:
    """A range that gives up at its first port, or skips one that is free."""
    with taken_ports(3) as taken:
        low, last = port_of(taken[0]), port_of(taken[2])
        taken[2].close()
        with listening(f"tcp://127.0.0.1:{low}-{last}") as opened:
            assert hosts(opened) == [f"tcp://127.0.0.1:{last}"]


def test_range_without_a_free_port_is_refused() -> None:
    """A range that wraps to any port at all."""
    with taken_ports(2) as taken:
        error = refusal(f"tcp://127.0.0.1:{port_of(taken[0])}-{port_of(taken[1])}")
    assert error.what == "mailbox finds no free port in its range"
    assert "in use" in str(error)
    assert "leave the port out" in str(error)


def test_taken_port_is_refused() -> None:
    """Two mailboxes that share a port, so that outboxes meet either."""
    with listening("tcp://127.0.0.1") as opened:
        error = refusal(f"tcp://127.0.0.1:{port_of(opened[1].link)}")
    assert error.what == "mailbox's port is taken"
    assert "leave the port out" in str(error)


def test_chosen_port_is_free_again_at_once() -> None:
    """A mailbox that cannot be restarted on its port while old connections die out."""
    with taken_ports(1) as taken:
        url = f"tcp://127.0.0.1:{port_of(taken[0])}"
    for _ in range(3):
        with listening(url) as opened:
            dialled = connect(hosts(opened)[0], 5.0)
            accepted, _ = opened[1].link.accept()
            accepted.close()  # this end first: it keeps the dead connection
            dialled.close()


def _listen_as_nobody(link: Link) -> str:
    """Ask for a port that only root may have."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    error = refusal("tcp://127.0.0.1:1")
    assert error.what == "mailbox may not listen on this port"
    return str(error)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(
    int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) < 2,
    reason="every port is anybody's here",
)
def test_port_that_is_not_permitted_is_refused() -> None:
    """Port 80 for a plain user: told as if somebody had it."""
    with Children(limit=20) as children:
        text = children.start(_listen_as_nobody).result()
    assert "denied" in str(text).lower()


def test_failure_leaves_nothing_open(tmp_path: Path) -> None:
    """The host's own socket, left behind by a network address that could not be had."""
    before = sorted(os.listdir("/proc/self/fd"))
    with taken_ports(1) as taken:
        places = where_to_listen(
            f"unix://{tmp_path}/m.sock",
            f"tcp://127.0.0.1:{port_of(taken[0])}",
            "auto",
            None,
            False,
        )
        with pytest.raises(ConfigError):
            open_all(places)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


# ---- the secret


@pytest.mark.parametrize("url", ["tcp://*", "tcp://0.0.0.0:4711", "tcp://[::]", "tcp://eth9"])
def test_open_mailbox_without_a_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """A mailbox that lets in whoever finds its port."""
    own = interfaces.reachable((4,))[0]
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth9")])
    monkeypatch.setattr(interfaces, "addresses", lambda: [("eth9", own)])
    if own.is_loopback and url == "tcp://eth9":
        pytest.skip("this machine has loopback only")
    text = str(refusal(url, secret=None))
    assert "secret" in text
    for remedy in ("secret=", "TAPCHANNEL_SECRET", "allow_no_secret=True"):
        assert remedy in text


def test_open_mailbox_without_a_secret_may_be_asked_for() -> None:
    """A flag that has no effect, or that is taken from any value that is not empty."""
    places = where_to_listen(fresh_address(), "tcp://*", "auto", None, True)
    assert len(places.spots) == 1
    for slip in ("yes", 1, None):
        with pytest.raises(ConfigError, match="allow_no_secret"):
            where_to_listen(fresh_address(), "tcp://*", "auto", None, slip)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1", "tcp://localhost", "tcp://lo"])
def test_loopback_takes_no_secret(url: str) -> None:
    """A test on one host that has to invent a secret."""
    assert where_to_listen(fresh_address(), url, "auto", None, False).spots
