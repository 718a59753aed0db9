"""Which network addresses this host has, and by which of them others reach it."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

from .endpoints import IP

_SIOCGIFCONF: Final = 0x8912
_IFREQ: Final = struct.Struct("16s4x4s16x")  # name, then a sockaddr_in: family, port, address
_MAX_INTERFACES: Final = 256
_IF_INET6: Final = Path("/proc/net/if_inet6")
# Addresses for documentation, which nobody has: asked for the route alone, nothing is sent.
_FAR_AWAY: Final = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))
# Bridges of containers and virtual machines: every host has the same address on them.
_BRIDGES: Final = ("docker", "virbr", "br-", "cni", "podman", "veth", "lxc")


def addresses() -> list[tuple[str, IP]]:
    """Give every address of this host that needs no zone, with its interface."""
    return [*_v4_addresses(), *_v6_addresses()]


def reachable(families: Sequence[int] = (4, 6)) -> tuple[IP, ...]:
    """Give the addresses by which other hosts reach this one, at most one of each family.

    The route decides, not the host's name, which Debian resolves to 127.0.1.1. Where no route leads
    out: an interface's own; loopback only where there is nothing else.
    """
    routed = [ip for family, far in _FAR_AWAY if (ip := _source_towards(family, far)) is not None]
    found = _one_of_each([ip for ip in routed if _leads_out(ip)], families)
    if found:
        return found
    own = sorted(addresses(), key=lambda entry: entry[0].startswith(_BRIDGES))
    found = _one_of_each([ip for _, ip in own if _leads_out(ip)], families)
    loopback: Sequence[IP] = (IPv4Address("127.0.0.1"), IPv6Address("::1"))
    return found or _one_of_each(loopback, families)[:1]


def _one_of_each(ips: Sequence[IP], families: Sequence[int]) -> tuple[IP, ...]:
    """Give the first address of each family."""
    firsts = {ip.version: ip for ip in reversed(ips)}
    return tuple(firsts[family] for family in families if family in firsts)


def _leads_out(ip: IP) -> bool:
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def _source_towards(family: int, far: str) -> IP | None:
    """Give the address that packets on the way there would carry; None without a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _v4_addresses() -> list[tuple[str, IP]]:
    room = array.array("B", bytes(_MAX_INTERFACES * _IFREQ.size))
    asked = struct.pack("iP", len(room), room.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        used = struct.unpack("iP", fcntl.ioctl(any_socket, _SIOCGIFCONF, asked))[0]
    filled = room.tobytes()[: used - used % _IFREQ.size]
    return [(_name(name), IPv4Address(packed)) for name, packed in _IFREQ.iter_unpack(filled)]


def _name(raw: bytes) -> str:
    """Give an interface's name; an alias such as eth0:1 belongs to its interface."""
    return raw.partition(b"\0")[0].decode("ascii", "replace").partition(":")[0]


def _v6_addresses() -> list[tuple[str, IP]]:
    try:
        lines = _IF_INET6.read_text("ascii", "replace").splitlines()
    except OSError:  # a kernel without IPv6
        return []
    found = [(line.split()[5], IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
    return [(name, ip) for name, ip in found if not ip.is_link_local]
