"""How a process moves into one of the hosts that `hosts` makes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NAMESPACES = Path("/run/netns")  # where ip netns keeps them

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWNET = 0x40000000
MS_REC = 0x4000
MS_SLAVE = 1 << 19
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Entry:
    """Moves the process that unpickles it into a host.

    Children.start pickles it ahead of the function, so that the process has moved before the
    function's module, and with it torch and tapchannel, is imported and may start threads.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return enter, (self.name,)


def enter(name: str) -> None:
    """Move this process into a host: its network, and a host name and System V memory of its own.

    Shared memory would otherwise connect two hosts: UCX takes two processes that share a System V
    namespace for neighbours. /sys is mounted anew because that is where UCX looks for the network's
    interfaces, and a mount shows those of the namespace that it was made in.
    """
    descriptor = os.open(NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check("setns", _libc.setns(descriptor, CLONE_NEWNET))
    finally:
        os.close(descriptor)
    _check("unshare", _libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC))
    host_name = name.encode()
    _check("sethostname", _libc.sethostname(host_name, len(host_name)))
    _check("mount /", _mount(b"none", b"/", None, MS_REC | MS_SLAVE))
    _check("umount /sys", _libc.umount2(b"/sys", MNT_DETACH))
    _check("mount /sys", _mount(b"sysfs", b"/sys", b"sysfs", 0))


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> int:
    return _libc.mount(source, target, kind, ctypes.c_ulong(flags), None)


def _check(call: str, answer: int) -> None:
    if answer != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
