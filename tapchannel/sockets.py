"""Sockets: files that are not left behind, links that end, what the kernel says of a peer."""

from __future__ import annotations

import math
import os
import secrets
import socket
import stat
import struct
import threading
import time
from pathlib import Path
from typing import Any, Final, TypeAlias

from .endpoints import literal, tcp_parts
from .errors import ConfigError, ProtocolError

# A link's end is the first sign of a peer's death, but a cut wire sends no end: the kernel has to
# ask. Idle 2 s, then three questions 2 s apart: silent for 8 s, the link ends. The user timeout
# gives bytes on their way the same 8 s, which would be retransmitted for a quarter of an hour.
KEEPALIVE_IDLE_S: Final = 2
KEEPALIVE_INTERVAL_S: Final = 2
KEEPALIVE_PROBES: Final = 3
USER_TIMEOUT_MS: Final = 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S)
_LEAST_S: Final = 0.01  # a limit of zero would make the socket non-blocking
_SO_PEERPIDFD: Final = 77
_CREDENTIALS: Final = struct.Struct("3i")

_Target: TypeAlias = "tuple[int, Any]"  # family, and what connect takes


class Descriptor:
    """A received file descriptor: closed at the end of its block unless somebody took it over."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def take(self) -> int:
        """Give the descriptor away; its new owner closes it."""
        if self._fd is None:
            raise ProtocolError("descriptor was taken already")
        fd, self._fd = self._fd, None
        return fd

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def fresh_address() -> str:
    """Give an abstract address: it is gone with its last socket, SIGKILL included."""
    return f"unix://@tapchannel-{secrets.token_hex(12)}"


def native_address(address: str) -> str:
    """Give what bind and connect take for a ``unix://`` address."""
    path = address.removeprefix("unix://")
    return "\0" + path[1:] if path.startswith("@") else path


def tune(link: socket.socket) -> None:
    """Have a TCP link send at once, and end by itself some 8 s after its wire was cut."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def bear_silence(link: socket.socket, seconds: float) -> None:
    """Let a live lane's link be silent as long as its peer may be, where that is longer.

    It ended sooner otherwise, and the lane with it, whatever ``peer_timeout`` says.
    """
    if link.family == socket.AF_UNIX or 1000 * seconds <= USER_TIMEOUT_MS:
        return
    interval = math.ceil(seconds / (KEEPALIVE_PROBES + 1))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * seconds))


def listen_local(address: str) -> socket.socket:
    """Listen on a ``unix://`` address, on this host only.

    Raises:
        ConfigError: the path is too long, is in use, or cannot be bound.
    """
    path = native_address(address)
    if len(os.fsencode(path)) > 107:
        raise ConfigError(
            "socket path is too long",
            seen=address,
            expected="at most 107 bytes",
            next_step="choose a shorter path",
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if (
            not path.startswith("\0")
            and Path(path).exists()
            and stat.S_ISSOCK(os.stat(path).st_mode)
        ):
            _remove_if_dead(path)
        listener.bind(path)
        if not path.startswith("\0"):
            os.chmod(path, 0o600)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            "mailbox cannot listen",
            seen=address,
            detail=str(error),
            next_step="close the mailbox that serves this path, or choose another path",
        ) from error
    return listener


def connect(address: str, timeout: float) -> socket.socket:
    """Connect to a ``unix://`` address, or to ``tcp://host:port``.

    Blocks:     until connected; at most ``timeout`` seconds, shared out over all the addresses
                that a name stands for. What is left is the link's own time-out.
    On failure: nothing stays open.

    Raises:
        TimeoutError: nobody answered in time.
        OSError: nobody listens there, or the address is impossible; ConnectionError and its kind
            where trying again may help.
    """
    deadline = time.monotonic() + timeout
    if address.startswith("unix://"):
        targets: list[_Target] = [(socket.AF_UNIX, native_address(address))]
    else:
        targets = _resolve(address, timeout)
    failures: list[OSError] = []
    for number, target in enumerate(targets):
        share = (deadline - time.monotonic()) / (len(targets) - number)
        try:
            link = _connected(target, max(_LEAST_S, share))
        except OSError as error:
            failures.append(error)
            continue
        link.settimeout(max(_LEAST_S, deadline - time.monotonic()))
        return link
    raise _joint(failures, targets)


def _connected(target: _Target, limit: float) -> socket.socket:
    family, to = target
    link = socket.socket(family, socket.SOCK_STREAM)
    try:
        link.settimeout(limit)
        link.connect(to)
        if family != socket.AF_UNIX:
            _refuse_itself(link)
            tune(link)
    except BaseException:
        link.close()
        raise
    return link


def _refuse_itself(link: socket.socket) -> None:
    """Refuse a link that has met itself.

    TCP lets a socket connect to its own port: it happens to whoever tries a port of this host again
    and again, in the kernel's range, while nobody listens there yet.
    """
    if link.getsockname() == link.getpeername():
        raise ConnectionRefusedError("nobody listens there: the link had met itself")


def _joint(failures: list[OSError], targets: list[_Target]) -> OSError:
    """Make one error of those of a name's addresses."""
    if targets[0][0] == socket.AF_UNIX:
        return failures[0]
    told = "; ".join(f"{to[0]}: {error}" for (_, to), error in zip(targets, failures, strict=True))
    late = all(isinstance(error, TimeoutError) for error in failures)
    # A host that is down or not routed to yet may come up: time may mend it, like a refusal.
    return TimeoutError(told) if late else ConnectionError(told)


def _resolve(address: str, timeout: float) -> list[_Target]:
    parts = tcp_parts(address)
    if parts is None:
        raise OSError("this is neither unix:///path nor tcp://host:port")
    host, port = parts
    ip = literal(host)
    if ip is not None:
        return [(socket.AF_INET6 if ip.version == 6 else socket.AF_INET, (str(ip), port))]
    answers: list[list[_Target] | Exception] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.append([(family, to) for family, _, _, _, to in found])
        except (OSError, UnicodeError) as error:
            answers.append(error)

    # The resolver has no deadline of ours: what it says after it is not waited for.
    asking = threading.Thread(target=ask, name="tapchannel-resolver", daemon=True)
    asking.start()
    asking.join(max(_LEAST_S, timeout))
    if not answers:
        raise TimeoutError(f"name {host!r} was not resolved within {timeout:.3g} s")
    if isinstance(answers[0], Exception):
        raise ConnectionError(f"name {host!r} is not known: {answers[0]}") from answers[0]
    return answers[0]


def other_user(link: socket.socket) -> str | None:
    """Say whose the peer is if it is another user's; None for this user's, and for root's.

    Of a peer over the network the kernel knows no user: there the job secret alone decides.
    """
    if link.family != socket.AF_UNIX:
        return None
    size = _CREDENTIALS.size
    uid = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    own = os.geteuid()
    return None if uid in (own, 0) else f"the peer is uid {uid}, this process uid {own}"


def file_id(address: str) -> tuple[int, int] | None:
    """Tell a socket's file from its successor's; None where there is no file."""
    path = native_address(address)
    if path.startswith("\0"):
        return None
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def peer_pid(link: socket.socket) -> int:
    """Give the peer's process id in this process's PID namespace; 0 where it is in another."""
    size = _CREDENTIALS.size
    return _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]


def peer_pidfd(link: socket.socket) -> int:
    """Give a pidfd of the peer: it turns readable once the process's files are closed. -1: none."""
    try:
        return link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # a kernel before 6.5
        pid = peer_pid(link)
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1


def _remove_if_dead(path: str) -> None:
    """Remove the socket that a killed mailbox left behind; one that answers stays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
