"""Where a mailbox listens: its own host's socket always, network addresses where asked to."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

from . import _native, interfaces
from .endpoints import IP, ListenAt, literal, parse_listen, tcp_address
from .errors import ConfigError
from .sockets import file_id, listen_local, native_address

ALL_INTERFACES: Final = "tcp://*"
_BACKLOG: Final = 128
_PORT_REMEDY: Final = (
    "choose another port, give a range such as tcp://HOST:47000-47100, or leave the port out: the "
    "kernel picks a free one and the store tells it"
)


@dataclass(frozen=True, slots=True)
class Spot:
    """An address to bind, and those by which other hosts reach what listens there."""

    at: ListenAt
    bound: IP
    published: tuple[IP, ...]


@dataclass(frozen=True, slots=True)
class Places:
    """All addresses that one mailbox shall listen on."""

    local: str
    spots: tuple[Spot, ...] = ()


class Listener:
    """A listening socket, and the addresses to publish for it.

    Ownership:  the socket, and the file of a Unix one, are the listener's; `close` ends both.
    """

    def __init__(self, link: socket.socket, addresses: Sequence[str], local: bool) -> None:
        self.link = link
        self.addresses = tuple(addresses)
        self.local = local
        self._file = file_id(self.addresses[0]) if local else None
        _native.close_in_child(link.fileno())

    def stop(self) -> None:
        """Wake whoever accepts here; nobody is let in any more."""
        with contextlib.suppress(OSError):  # it was down already
            self.link.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone would not

    def close(self) -> None:
        """Close the socket, once nobody accepts on it."""
        _native.keep_in_child(self.link.fileno())  # the number may soon be somebody else's
        self.link.close()
        # A successor may have taken the path over already: only our own file is ours to remove.
        if self._file is not None and file_id(self.addresses[0]) == self._file:
            Path(native_address(self.addresses[0])).unlink(missing_ok=True)


def where_to_listen(
    local: str,
    listen: str | None,
    transport: str,
    secret: bytes | None,
    allow_no_secret: object,
) -> Places:
    """Settle where to listen, before anything is reserved or bound.

    Without ``listen``: on this host only; but whoever asks for the network's transport means
    outboxes of other hosts.

    Raises:
        ConfigError: the URL, its name or its interface leads nowhere here, or other hosts could
            reach a mailbox that has no job secret.
    """
    if not isinstance(allow_no_secret, bool):
        raise ConfigError(
            "allow_no_secret is no flag", seen=repr(allow_no_secret), expected="True or False"
        )
    if listen is None and transport != "ucx":
        return Places(local)
    at = parse_listen(ALL_INTERFACES if listen is None else listen)
    spots = tuple(_spots(at))
    if secret is None and not allow_no_secret and not all(s.bound.is_loopback for s in spots):
        raise ConfigError(
            "mailbox without a job secret would be open to other hosts",
            seen=f"listen={at.url!r}",
            next_step="give both sides the same secret= (or TAPCHANNEL_SECRET), or, on a network "
            "where every host may be trusted, say allow_no_secret=True",
        )
    return Places(local, spots)


def open_all(places: Places) -> list[Listener]:
    """Listen on every place, the host's own first.

    On failure: nothing stays open.

    Raises:
        ConfigError: a path or port is taken, not permitted or impossible; the text says which.
    """
    opened = [Listener(listen_local(places.local), (places.local,), local=True)]
    try:
        opened += map(_open_network, places.spots)
    except BaseException:
        for listener in opened:
            listener.close()
        raise
    return opened


def _spots(at: ListenAt) -> list[Spot]:
    ip = literal(at.host)
    if at.host == "*" or (ip is not None and ip.is_unspecified):
        return [_everywhere(at, only_v4=isinstance(ip, IPv4Address))]
    if ip is None:
        ips = _of_interface(at) or _of_name(at)
    elif ip.is_link_local and ip.version == 6:
        raise _no_address(at, "an IPv6 link-local address means nothing to other hosts")
    else:
        ips = [ip]
    here = [ip for ip in ips if _is_here(ip)]
    if not here:
        raise _no_address(at, f"{', '.join(map(str, ips))} belongs to another host, or to none")
    return [Spot(at, ip, (ip,)) for ip in here]


def _everywhere(at: ListenAt, only_v4: bool) -> Spot:
    if only_v4 or not socket.has_dualstack_ipv6():
        return Spot(at, IPv4Address("0.0.0.0"), interfaces.reachable((4,)))
    return Spot(at, IPv6Address("::"), interfaces.reachable())


def _of_interface(at: ListenAt) -> list[IP]:
    if at.host not in _interfaces():
        return []
    found = [ip for name, ip in interfaces.addresses() if name == at.host]
    if not found:
        raise _no_address(at, f"interface {at.host} has no address that other hosts can use")
    return found


def _of_name(at: ListenAt) -> list[IP]:
    try:
        answers = socket.getaddrinfo(at.host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _no_address(at, f"no interface has this name, and {error}") from error
    found: list[IP] = [ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    found = [ip for ip in dict.fromkeys(found) if not (ip.version == 6 and ip.is_link_local)]
    outward = [ip for ip in found if not ip.is_loopback]
    if outward or at.host.lower() == "localhost":
        return outward or found
    if at.host in (socket.gethostname(), socket.getfqdn()):
        return list(interfaces.reachable())  # Debian has a host resolve its own name to 127.0.1.1
    raise _no_address(at, f"this name resolves to loopback only: {', '.join(map(str, found))}")


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _no_address(at: ListenAt, detail: str) -> ConfigError:
    here = ", ".join(f"{ip} ({name})" for name, ip in interfaces.addresses())
    return ConfigError(
        "mailbox has no address to listen on",
        seen=f"listen={at.url!r}",
        expected=f"an address, name or interface of this host, which has {here}",
        detail=detail,
        next_step=f"name one of these, or listen on all of them: listen={ALL_INTERFACES!r}",
    )


def _is_here(ip: IP) -> bool:
    """Tell whether the address is this host's: what else could be bound to it."""
    try:
        with socket.socket(_family(ip), socket.SOCK_STREAM) as probe:
            probe.bind((str(ip), 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            return False
        raise ConfigError("address cannot be bound", seen=str(ip), detail=str(error)) from error
    return True


def _family(ip: IP) -> int:
    return socket.AF_INET6 if ip.version == 6 else socket.AF_INET


def _open_network(spot: Spot) -> Listener:
    """Listen on the first port that is free."""
    failures: list[OSError] = []
    for port in spot.at.ports:
        try:
            link = _bind(spot.bound, port)
        except OSError as error:
            failures.append(error)
            continue
        chosen = link.getsockname()[1]
        return Listener(link, [tcp_address(ip, chosen) for ip in spot.published], local=False)
    raise _no_port(spot, failures)


def _bind(ip: IP, port: int) -> socket.socket:
    link = socket.socket(_family(ip), socket.SOCK_STREAM)
    try:
        if port:  # else the last life's dead connections keep a chosen port for a minute
            link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ip.version == 6:
            link.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not ip.is_unspecified))
        link.bind((str(ip), port))
        link.listen(_BACKLOG)
    except OSError:
        link.close()
        raise
    return link


def _no_port(spot: Spot, failures: Sequence[OSError]) -> ConfigError:
    causes = {error.errno for error in failures}
    what = "mailbox cannot listen"
    if len(spot.at.ports) > 1:
        what = "mailbox finds no free port in its range"
    elif causes == {errno.EADDRINUSE}:
        what = "mailbox's port is taken"
    elif causes <= {errno.EACCES, errno.EPERM}:
        what = "mailbox may not listen on this port"
    reasons = dict.fromkeys(error.strerror or str(error) for error in failures)
    return ConfigError(
        what,
        seen=f"listen={spot.at.url!r} at {spot.bound}",
        detail="; ".join(reasons),
        next_step=_PORT_REMEDY,
    )
