"""What the workers of test_lab do with plain sockets; nothing here needs torch."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace

from support.link import Link

LIMIT = 10.0  # seconds; no wait of a passing test comes near it
CHUNK = 1 << 16

NETWORK_AT_IMPORT = os.stat("/proc/self/ns/net").st_ino


def networks(link: Link) -> tuple[int, int]:
    """Give the network this process was in when this module was imported, and is in now."""
    return NETWORK_AT_IMPORT, os.stat("/proc/self/ns/net").st_ino


def surroundings(desk: SimpleNamespace) -> tuple[str, set[str], int]:
    """Give the host's name, its interfaces as /sys shows them, and its System V namespace."""
    interfaces = set(os.listdir("/sys/class/net"))
    return socket.gethostname(), interfaces, os.stat("/proc/self/ns/ipc").st_ino


def listen(desk: SimpleNamespace, address: str) -> int:
    """Listen on any port of an address; give the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    desk.listener = socket.create_server((address, 0), family=family)
    desk.listener.settimeout(LIMIT)
    return desk.listener.getsockname()[1]


def accept(desk: SimpleNamespace) -> str:
    """Accept a connection; give the address that it comes from."""
    desk.connection, peer = desk.listener.accept()
    return peer[0]


def connect(desk: SimpleNamespace, address: str, port: int, limit: float = LIMIT) -> None:
    """Connect."""
    desk.connection = socket.create_connection((address, port), timeout=limit)


def listen_by_name(desk: SimpleNamespace, name: str) -> None:
    """Listen on an abstract Unix socket."""
    desk.listener = socket.socket(socket.AF_UNIX)
    desk.listener.bind(f"\0{name}")
    desk.listener.listen()


def connect_by_name(desk: SimpleNamespace, name: str) -> None:
    """Connect to an abstract Unix socket."""
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(f"\0{name}")


def send(desk: SimpleNamespace, count: int) -> None:
    """Send so many bytes."""
    desk.connection.settimeout(LIMIT)
    desk.connection.sendall(bytes(count))


def receive(desk: SimpleNamespace, count: int, limit: float = LIMIT) -> tuple[int, float]:
    """Receive so many bytes, or what comes until nothing has come for ``limit`` seconds.

    Gives their number and the seconds from the first to the last of them.
    """
    desk.connection.settimeout(limit)
    got, first = 0, 0.0
    while got < count:
        try:
            part = len(desk.connection.recv(min(CHUNK, count - got)))
        except TimeoutError:
            break
        first = first or time.monotonic()
        got += part
    return got, time.monotonic() - first if got else 0.0
