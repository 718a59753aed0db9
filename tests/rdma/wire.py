"""The guest's RDMA devices, and the wire between them, as guest_run.sh makes them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

DEVICES = ("rxe0", "rxe1")
ENDS = ("veth0", "veth1")  # of the wire: what each device sends and receives goes through its end
ADDRESSES = ("10.9.0.1", "10.9.0.2")
COMMAND_LIMIT = 20.0


def state(device: str) -> str:
    """Give the state of a device's port: ``ACTIVE``, ``DOWN``."""
    text = Path(f"/sys/class/infiniband/{device}/ports/1/state").read_text()
    return text.split(":")[1].strip()


def sent_bytes(end: str) -> int:
    """Count what has left by one end of the wire so far."""
    return int(Path(f"/sys/class/net/{end}/statistics/tx_bytes").read_text())


@contextlib.contextmanager
def link_down() -> Iterator[None]:
    """Take one end of the wire down, and with it both devices."""
    _run("ip", "link", "set", ENDS[1], "down")
    try:
        yield
    finally:
        _run("ip", "link", "set", ENDS[1], "up")


@contextlib.contextmanager
def silent_cut() -> Iterator[None]:
    """Lose whatever is sent over the wire: neither device is told."""
    with contextlib.ExitStack() as cut:
        for end in ENDS:
            _run("tc", "qdisc", "add", "dev", end, "root", "netem", "loss", "100%")
            cut.callback(_run, "tc", "qdisc", "del", "dev", end, "root")
        yield


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=COMMAND_LIMIT)
