"""Unix sockets: listening without leaving files behind, and what the kernel says of a peer."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from .errors import ConfigError, ProtocolError

_SO_PEERPIDFD: Final = 77
_CREDENTIALS: Final = struct.Struct("3i")


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


def listen(address: str) -> socket.socket:
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


def other_user(link: socket.socket) -> str | None:
    """Say whose the peer is if it is another user's; None for this user's, and for root's."""
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
