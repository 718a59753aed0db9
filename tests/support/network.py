"""What tests of the network need: free ports, taken ports, a wire that is cut."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06


def has_ipv6() -> bool:
    """Tell whether this machine's loopback speaks IPv6."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine's loopback has no ::1")


@contextmanager
def taken_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Listen on ``count`` ports in a row, below those that the kernel picks."""
    for _ in range(200):
        low = random.randrange(20_000, 30_000)
        with ExitStack() as held, contextlib.suppress(OSError):
            listeners: list[socket.socket] = []
            for port in range(low, low + count):
                listener = held.enter_context(socket.socket())
                listener.bind((host, port))
                listener.listen()
                listeners.append(listener)
            yield listeners
            return
    raise AssertionError(f"no {count} free ports in a row")


def port_of(link: socket.socket) -> int:
    """Give a socket's own port."""
    return int(link.getsockname()[1])


def cut_wire(link: socket.socket) -> None:
    """Let nothing more that the peer sends reach this end: not even a question is answered.

    A filter of the kernel's does it, which accepts no byte of any packet.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    option = struct.pack("HL", 1, ctypes.addressof(program))
    link.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
