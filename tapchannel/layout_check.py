"""One layout, two languages: the native control block against what Python believes, at import."""

from __future__ import annotations

from typing import Final

from . import _native
from .errors import ProtocolError
from .keys import POISON_BIT, Key

EXPECTED: Final[dict[str, int]] = {
    "magic": 0x314B4C4250415431,
    "version": 2,
    "header_bytes": 64,
    "announce_bytes": 128,
    "event_bytes": 32,
    "ring_entries": 1024,
    "max_dims": 8,
    "max_depth": 4096,
    "max_cells": 4096,
    "poison_bit": POISON_BIT,
    "stamp_1_2_3": Key(1, 2, 2).stamp(),
}


def check_layout(native: dict[str, int] | None = None) -> None:
    """Refuse to run a native module that was built from another source than this Python.

    Raises:
        ProtocolError: they differ; rebuild the package.
    """
    facts = _native.layout() if native is None else native
    for name, expected in EXPECTED.items():
        if facts.get(name) != expected:
            raise ProtocolError(
                f"native module does not fit this package: {name} differs",
                seen=facts.get(name),
                expected=expected,
                next_step="reinstall tapchannel",
            )
