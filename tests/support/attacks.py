"""What strangers may send to a mailbox's socket."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from support.handmade_peers import hello
from support.small_channel import PLAN
from tapchannel.wire import CHALLENGE, HELLO, MAX_BODY, READY, VERSION


def frame(kind: int, body: bytes, version: int = VERSION, length: int | None = None) -> bytes:
    """Give the bytes of a frame that may lie about itself."""
    size = len(body) if length is None else length
    return struct.pack(">4sHHI", b"TAPC", version, kind, size) + body


class Marker:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def body(**changes: object) -> bytes:
    """Give a hello's body with some changes."""
    return json.dumps(hello(**changes)).encode()


ATTACKS = {
    "random bytes": os.urandom(4096),
    "another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "zeroes": bytes(1024),
    "two gigabytes announced": frame(HELLO, b"{}", length=1 << 31),
    "one byte too many announced": frame(HELLO, b"{}", length=MAX_BODY + 1),
    "another version": frame(HELLO, body(), version=VERSION + 1),
    "a frame that is not due": frame(READY, b"{}"),
    "a frame that only the mailbox sends": frame(CHALLENGE, body()),
    "no body": frame(HELLO, b""),
    "no JSON": frame(HELLO, b"not JSON at all"),
    "not ASCII": frame(HELLO, "{'name': 'ü'}".encode()),
    "a list": frame(HELLO, b"[1, 2, 3]"),
    "an empty object": frame(HELLO, b"{}"),
    "brackets without end": frame(HELLO, b"[" * MAX_BODY),
    "a number without end": frame(HELLO, b'{"rank": ' + b"9" * 100_000 + b"}"),
    "a million keys": frame(HELLO, b"{" + b",".join(b'"%d":1' % n for n in range(70_000)) + b"}"),
    "not a number": frame(HELLO, body(rank=float("nan"))),
    "a plan that is none": frame(HELLO, body(plan="[" * 100_000)),
    "a plan too long": frame(HELLO, body(plan="x" * (1 << 19) + "x")),
    "a plan of another shape": frame(HELLO, body(plan='{"version": 1}')),
    "a vast plan": frame(
        HELLO, body(plan=PLAN.to_json().replace('"width":8', f'"width":{(1 << 63) - 1}'))
    ),
}
