"""Network addresses as text: what is meant is understood, and nothing else is."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapchannel.endpoints import literal, parse_listen, tcp_address, tcp_parts
from tapchannel.errors import ConfigError

ANY = range(1)  # port 0: the kernel picks
PORTS = st.integers(1, 65535)
IPS = st.ip_addresses(v=4) | st.ip_addresses(v=6)


@pytest.mark.parametrize(
    ("url", "host", "ports"),
    [
        ("tcp://*", "*", ANY),
        ("tcp://*:4711", "*", range(4711, 4712)),
        ("tcp://10.0.0.1", "10.0.0.1", ANY),
        ("tcp://10.0.0.1:1-65535", "10.0.0.1", range(1, 65536)),
        ("tcp://[::1]", "::1", ANY),
        ("tcp://[fd00::2]:47000-47010", "fd00::2", range(47000, 47011)),
        ("tcp://eth0", "eth0", ANY),
        ("tcp://bond0.4000:5-5", "bond0.4000", range(5, 6)),
        ("tcp://Node-7.cluster_a.example:80", "Node-7.cluster_a.example", range(80, 81)),
    ],
)
def test_listen_url_is_taken_apart(url: str, host: str, ports: range) -> None:
    """A host that is made lower case or cut short, or a range without its last port."""
    at = parse_listen(url)
    assert (at.url, at.host, at.ports) == (url, host, ports)


BAD_URLS: list[object] = [
    7,
    b"tcp://*",
    True,
    "",
    "*",
    "eth0",
    "10.0.0.1:80",
    "tcp:",
    "tcp://",
    "tcp:///",
    "tcp://:80",
    "TCP://*",
    "udp://*",
    "unix:///tmp/a.sock",
    "tcp://*:",
    "tcp://*:80-",
    "tcp://*:-80",
    "tcp://*:80-90-100",
    "tcp://*:+80",
    "tcp://*:８０",
    "tcp://*:x",
    "tcp://* ",
    " tcp://*",
    "tcp://*\n",
    "tcp://*/",
    "tcp://a/b",
    "tcp://a?b",
    "tcp://user@host",
    "tcp://-host",
    "tcp://::1",
    "tcp://[::1",
    "tcp://[::1]80",
    "tcp://[]",
    "tcp://[:]",
    "tcp://[10.0.0.1]",
    "tcp://[1:2:3]",
    "tcp://[fe80::1%eth0]",
    "tcp://höst",
    "tcp://" + "x" * 254,
    "tcp://a,tcp://b",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_listen_url_of_another_shape_is_refused(url: object) -> None:
    """A slip that listens somewhere else; each refusal lists the forms there are."""
    with pytest.raises(ConfigError, match="listen URL") as raised:
        parse_listen(url)
    assert raised.value.seen == repr(url)
    assert "tcp://HOST:LOW-HIGH" in str(raised.value)


@pytest.mark.parametrize("ports", ["0", "65536", "99999", "0-5", "80-65536", "90-80"])
def test_impossible_port_is_refused(ports: str) -> None:
    """A port that wraps, or a range without a port in it."""
    with pytest.raises(ConfigError, match="impossible port") as raised:
        parse_listen(f"tcp://*:{ports}")
    assert "65535" in str(raised.value)
    assert "leave the port out" in str(raised.value)


@given(IPS, PORTS)
def test_address_is_read_as_it_was_written(ip: IPv4Address | IPv6Address, port: int) -> None:
    """An address that comes out of a store as another one."""
    parts = tcp_parts(tcp_address(ip, port))
    if isinstance(ip, IPv6Address) and ip.scope_id:
        assert parts is None
        return
    assert parts is not None
    assert ip_address(parts[0]) == ip
    assert parts[1] == port


@pytest.mark.parametrize(
    "address",
    [
        *(url for url in BAD_URLS if isinstance(url, str)),
        "tcp://*",
        "tcp://*:80",
        "tcp://host",
        "tcp://10.0.0.1",
        "tcp://[::1]",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:80-80",
        "tcp://host:80-90",
    ],
)
def test_what_is_no_single_address_is_none(address: str) -> None:
    """An address to connect to that has no port, or many."""
    assert tcp_parts(address) is None


@given(st.text() | st.from_regex(r"tcp://[\[\]0-9a-f:.%*-]*", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    """A hostile entry that raises where None or an address was due (I8)."""
    parts = tcp_parts(text)
    if parts is not None:
        host, port = parts
        assert 1 <= port <= 65535
        assert host.isascii()
        assert host.isprintable()
        assert len(host) <= 253


def test_ipv4_address_in_ipv6_clothes_is_itself() -> None:
    """``::ffff:127.0.0.1`` that is taken for no loopback address, or for another host."""
    assert literal("::ffff:10.0.0.1") == IPv4Address("10.0.0.1")
    assert literal("::1") == IPv6Address("::1")
    assert literal("eth0") is None
