"""What the guest offers: two RDMA devices on one wire, and a UCX that goes through them by rc."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rdma import wire

pytestmark = pytest.mark.rdma

LIMIT = 60.0  # seconds: an emulated processor takes its time
SIZE, COUNT = 65536, 100


def test_both_devices_are_active() -> None:
    """Catches a guest without one of its devices, which UCX would make up for by the other."""
    assert sorted(os.listdir("/sys/class/infiniband")) == list(wire.DEVICES)
    assert [wire.state(device) for device in wire.DEVICES] == ["ACTIVE", "ACTIVE"]


def test_memory_can_be_pinned() -> None:
    """Catches a limit on locked memory, where registering a mailbox's arena would fail."""
    limits = Path("/proc/self/limits").read_text()
    assert re.search(r"^Max locked memory +unlimited +unlimited", limits, re.MULTILINE)


def test_ucx_finds_rc_on_both_devices() -> None:
    """Catches a UCX without verbs, such as the one that PyPI's wheels hold."""
    found = subprocess.run(
        ["ucx_info", "-d"], capture_output=True, text=True, check=True, timeout=LIMIT
    ).stdout
    offered = re.findall(r"Transport: (\S+)\n# +Device: (\S+):1\n", found)
    assert {("rc_verbs", device) for device in wire.DEVICES} <= set(offered)


def test_puts_cross_the_wire_by_rc() -> None:
    """Catches a put that a slower transport carries, or the loopback device."""
    before = [wire.sent_bytes(end) for end in wire.ENDS]
    said = put_from(1, to=0)
    sent = [wire.sent_bytes(end) - start for end, start in zip(wire.ENDS, before, strict=True)]
    assert f"rma(rc_verbs/{wire.DEVICES[1]}:1)" in said
    assert sent[1] > SIZE * COUNT
    assert sent[0] < SIZE * COUNT / 10


def test_link_goes_down_and_comes_back() -> None:
    """Catches a link that a test cannot take down, or that carries nothing afterwards."""
    with wire.link_down():
        assert [wire.state(device) for device in wire.DEVICES] == ["DOWN", "DOWN"]
    assert [wire.state(device) for device in wire.DEVICES] == ["ACTIVE", "ACTIVE"]
    assert "rc_verbs" in put_from(0, to=1)


def put_from(source: int, to: int) -> str:
    """Put through UCX from one device to the other; give what the putting side says."""
    with perftest(to, []) as target:
        assert target.stdout is not None
        while "Waiting for connection" not in target.stdout.readline():
            assert target.poll() is None
        with perftest(source, [wire.ADDRESSES[to]], UCX_LOG_LEVEL="info") as putting:
            said, _ = putting.communicate(timeout=LIMIT)
            assert putting.returncode == 0, said
    return said


@contextmanager
def perftest(device: int, peer: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run one side of UCX's own benchmark on a device."""
    test = ["-t", "ucp_put_bw", "-s", str(SIZE), "-n", str(COUNT), "-w", "1"]
    process = subprocess.Popen(
        ["stdbuf", "-oL", "ucx_perftest", *test, *peer],
        env={**os.environ, "UCX_NET_DEVICES": f"{wire.DEVICES[device]}:1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
