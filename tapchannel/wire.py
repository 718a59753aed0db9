"""Frames of the attach handshake: fixed header, bounded JSON body, every field checked.

A peer's bytes are untrusted until the handshake has ended, and only ever data afterwards.
"""

from __future__ import annotations

import array
import json
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final, cast

from .errors import ProtocolError

MAGIC: Final = b"TAPC"
VERSION: Final = 1
MAX_BODY: Final = 1 << 20
MAX_FDS: Final = 3
_HEADER: Final = struct.Struct(">4sHHI")

CHALLENGE, HELLO, OFFER, READY, LIVE, REFUSAL = range(1, 7)


class Fields:
    """A decoded body whose fields are taken out one by one, each with its type and bounds."""

    def __init__(self, kind: int, values: Mapping[str, object]) -> None:
        self.kind = kind
        self._values = values

    def integer(self, name: str, lowest: int, highest: int) -> int:
        """Take an integer within its bounds."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise self._bad(name, f"an integer from {lowest} to {highest}")
        return value

    def flag(self, name: str) -> bool:
        """Take a boolean."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def text(self, name: str, longest: int) -> str:
        """Take a text of at most ``longest`` characters."""
        value = self._values.get(name)
        if not isinstance(value, str) or len(value) > longest or not _encodes(value):
            raise self._bad(name, f"a text of at most {longest} characters")
        return value

    def raw(self, name: str, size: int) -> bytes:
        """Take exactly ``size`` bytes, written as hexadecimal digits."""
        value = self._values.get(name)
        if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", value):
            raise self._bad(name, f"{size} bytes as hexadecimal digits")
        return bytes.fromhex(value)

    def bounded_raw(self, name: str, most: int) -> bytes:
        """Take at most ``most`` bytes, written as hexadecimal digits."""
        value = self._values.get(name)
        if not isinstance(value, str) or not re.fullmatch(rf"([0-9a-f]{{2}}){{0,{most}}}", value):
            raise self._bad(name, f"at most {most} bytes as hexadecimal digits")
        return bytes.fromhex(value)

    def optional_raw(self, name: str, size: int) -> bytes | None:
        """Take exactly ``size`` bytes, or None where the field is empty."""
        return None if self._values.get(name) == "" else self.raw(name, size)

    def items(self, name: str, most: int) -> Sequence[object]:
        """Take a list of at most ``most`` items, whose types the caller checks."""
        value = self._values.get(name)
        if not isinstance(value, list) or len(cast("list[object]", value)) > most:
            raise self._bad(name, f"a list of at most {most} items")
        return cast("list[object]", value)

    def _bad(self, name: str, expected: str) -> ProtocolError:
        return ProtocolError(
            f"field {name!r} of a handshake frame is not what it must be",
            seen=f"a {type(self._values.get(name)).__name__}",
            expected=expected,
            cause="the peer is no tapchannel, or another version of it",
        )


def _encodes(text: str) -> bool:
    """Tell whether a text is free of lone surrogates, which JSON can carry and nothing else."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def send_frame(
    link: socket.socket, kind: int, body: Mapping[str, object], fds: Sequence[int] = ()
) -> None:
    """Send one frame; the descriptors travel with its first byte."""
    payload = json.dumps(body, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    if len(payload) > MAX_BODY:
        raise ProtocolError("handshake frame is too long", seen=len(payload), expected=MAX_BODY)
    frame = _HEADER.pack(MAGIC, VERSION, kind, len(payload)) + payload
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = link.sendmsg([frame], ancillary)
    if sent < len(frame):
        link.sendall(frame[sent:])


def receive_frame(
    link: socket.socket, deadline: float, kinds: Sequence[int]
) -> tuple[Fields, list[int]]:
    """Receive one frame of the given kinds, and the descriptors that came with it.

    Blocks:     until ``deadline`` (time.monotonic), however slowly the peer sends.
    Ownership:  the descriptors are the caller's to close.

    Raises:
        ProtocolError: the bytes are no frame that is due here.
        TimeoutError: the deadline passed.
        ConnectionError: the peer ended the connection.
    """
    fds: list[int] = []
    try:
        header = _receive_exactly(link, _HEADER.size, deadline, fds)
        magic, version, kind, length = _HEADER.unpack(header)
        if magic != MAGIC or version != VERSION or kind not in kinds or length > MAX_BODY:
            raise ProtocolError(
                "peer sent bytes that are no handshake frame due here",
                seen=f"version {version}, kind {kind}, {length} B"
                if magic == MAGIC
                else "no frame",
                expected=f"version {VERSION}, kind in {tuple(kinds)}, at most {MAX_BODY} B",
                cause="the peer is no tapchannel, or another version of it",
            )
        body = _receive_exactly(link, length, deadline, fds)
        values: object = json.loads(body.decode("ascii"))
        if not isinstance(values, dict):
            raise ProtocolError("handshake frame holds no object")
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        _close_all(fds)
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError("handshake frame is not JSON") from error
    except BaseException:
        _close_all(fds)
        raise
    return Fields(kind, cast("dict[str, object]", values)), fds


def _receive_exactly(link: socket.socket, size: int, deadline: float, fds: list[int]) -> bytes:
    received = bytearray()
    while len(received) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("handshake deadline passed")
        link.settimeout(left)
        room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        chunk, ancillary, flags, _ = link.recvmsg(
            min(size - len(received), 65536), room, socket.MSG_CMSG_CLOEXEC
        )
        fds += _descriptors(ancillary)
        if flags & socket.MSG_CTRUNC or len(fds) > MAX_FDS:
            raise ProtocolError("peer sent more descriptors than a frame may carry")
        if not chunk:
            raise ConnectionError("peer ended the connection in the middle of the handshake")
        received += chunk
    return bytes(received)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _close_all(fds: Sequence[int]) -> None:
    import os

    for fd in fds:
        os.close(fd)
