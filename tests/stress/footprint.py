"""What a process holds, and that it does not grow."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

SLACK = 16 << 20  # bytes that a process may grow by once it is warm


class Footprint(NamedTuple):
    """What a process holds."""

    resident: int
    descriptors: int
    threads: int


def footprint() -> Footprint:
    """Measure this process, without what it has given back to its own allocator."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Footprint(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def assert_flat(name: str, warm: Footprint, end: Footprint) -> None:
    """See that a process holds at the end what it held when it was warm."""
    assert end.resident - warm.resident < SLACK, f"{name}: {warm} became {end}"
    # Fewer is well: what earlier tests of this process left may be collected meanwhile.
    assert end.descriptors <= warm.descriptors, f"{name}: {warm} became {end}"
    assert end.threads <= warm.threads, f"{name}: {warm} became {end}"
