"""Network addresses as text: what ``listen=`` may say, and what one address of a mailbox is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, TypeAlias

from .errors import ConfigError

IP: TypeAlias = "IPv4Address | IPv6Address"

LISTEN_FORMS: Final = (
    "'tcp://HOST', 'tcp://HOST:PORT' or 'tcp://HOST:LOW-HIGH', where HOST is an IPv4 address, an "
    "IPv6 address in brackets, a name, an interface such as eth0, or * for all interfaces"
)
_HIGHEST_PORT: Final = 65535
_URL: Final = re.compile(
    r"tcp://(?:\[(?P<six>[0-9A-Fa-f:.]{2,45})\]|(?P<host>\*|[A-Za-z0-9][A-Za-z0-9._-]{0,252}))"
    r"(?::(?P<low>[0-9]{1,5})(?:-(?P<high>[0-9]{1,5}))?)?"
)


@dataclass(frozen=True, slots=True)
class ListenAt:
    """A ``listen=`` taken apart: ``ports`` to try in order; port 0, the kernel picks."""

    url: str
    host: str
    ports: range


def parse_listen(url: object) -> ListenAt:
    """Take a ``listen=`` apart.

    Raises:
        ConfigError: it is no ``tcp://`` URL, or has no possible port.
    """
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    if found is None or not _is_host(found):
        raise ConfigError("listen URL is not understood", seen=repr(url), expected=LISTEN_FORMS)
    host = found["six"] or found["host"]
    if found["low"] is None:
        return ListenAt(found[0], host, range(1))
    low, high = int(found["low"]), int(found["high"] or found["low"])
    if not 1 <= low <= high <= _HIGHEST_PORT:
        raise ConfigError(
            "listen URL has an impossible port",
            seen=repr(url),
            expected=f"a port from 1 to {_HIGHEST_PORT}, or a range from low to high",
            next_step="leave the port out: the kernel picks a free one and the store tells it",
        )
    return ListenAt(found[0], host, range(low, high + 1))


def tcp_parts(address: str) -> tuple[str, int] | None:
    """Take ``tcp://host:port`` apart; None if it is no address of exactly one port (I8)."""
    found = _URL.fullmatch(address)
    if found is None or found["host"] == "*" or not _is_host(found):
        return None
    if found["low"] is None or found["high"] is not None:
        return None
    port = int(found["low"])
    return (found["six"] or found["host"], port) if 1 <= port <= _HIGHEST_PORT else None


def tcp_address(ip: IP, port: int) -> str:
    """Give the text of an address."""
    return f"tcp://[{ip}]:{port}" if ip.version == 6 else f"tcp://{ip}:{port}"


def literal(host: str) -> IP | None:
    """Give the IP address that a host is written as; None for a name."""
    try:
        ip = ip_address(host)
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip


def _is_host(found: re.Match[str]) -> bool:
    six = found["six"]
    return six is None or (":" in six and literal(six) is not None)
