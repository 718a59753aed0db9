"""Arenas: what fits, where it lies, and who finds it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from support.children import Children
from support.link import Link
from support.machine import cuda_devices
from support.small_channel import PLAN, descriptors
from tapchannel import _native, memory
from tapchannel.descriptor import PROBE_STRIDE
from tapchannel.errors import ConfigError
from tapchannel.memory import (
    Device,
    arena_bytes,
    forget_local,
    keep_local,
    local_arena,
    reserve_host,
)

ARITHMETIC = "2 slots × 100 B + 1 lanes × 65536 B = 65736 B (0.000 GiB)"


@pytest.mark.parametrize(
    ("given", "ordinal"),
    [
        ("cpu", None),
        (torch.device("cpu"), None),
        ("cuda:0", 0),
        ("cuda:11", 11),
        (torch.device("cuda", 3), 3),
    ],
    ids=str,
)
def test_device_is_read(given: object, ordinal: int | None) -> None:
    """A device that becomes another one."""
    device = Device.parse(given)
    assert device.ordinal == ordinal
    assert device.on_gpu == (ordinal is not None)
    assert str(device) == str(given)


@pytest.mark.parametrize(
    "given", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "cpu:0x", "meta", None, 0, "CPU"]
)
def test_impossible_device_is_refused(given: object) -> None:
    """A slip that ends on the default device in silence."""
    with pytest.raises(ConfigError) as raised:
        Device.parse(given)
    assert repr(given) in str(raised.value)
    assert "'cuda:N'" in str(raised.value)


def test_current_device_is_the_default_gpu() -> None:
    """A plain ``cuda`` that is always GPU 0."""
    count, reason = cuda_devices()
    if not count:
        assert Device.parse("cuda").ordinal == 0, reason
        return
    torch.cuda.set_device(count - 1)
    assert Device.parse("cuda").ordinal == count - 1


def test_arena_holds_slots_and_a_page_for_each_lane() -> None:
    """A self-test at attach that writes into a slot."""
    assert arena_bytes(PLAN, 3, 5) == 3 * PLAN.slot_bytes + 5 * PROBE_STRIDE


def test_host_memory_is_sealed_and_of_the_size_asked_for() -> None:
    """A peer that shrinks the memory under this process's feet, which ends it by SIGBUS."""
    reservation = reserve_host("tapchannel:test", 12345, ARITHMETIC)
    assert reservation.memory == "host"
    assert reservation.bytes == reservation.arena.bytes == 12345
    fd = reservation.arena.export_fd()
    try:
        for size in (0, 12344, 12346, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_memory_is_committed_before_it_is_promised(tmp_path: Path) -> None:
    """A page that is missing in mid-pass: the first push to it pays, or the process dies."""
    size = 64 << 20
    before = resident()
    reservation = reserve_host("tapchannel:test", size, ARITHMETIC)
    assert resident() - before > size * 0.9
    del reservation


def resident() -> int:
    """Give this process's resident bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize(
    ("available", "fits"), [(4296, True), (4295, False), (None, True), (1 << 40, True)]
)
def test_fit_is_judged_at_the_byte(
    monkeypatch: pytest.MonkeyPatch, available: int | None, fits: bool
) -> None:
    """A mailbox that is refused though it fits, or tried though it does not."""
    monkeypatch.setattr(memory, "_available_host_bytes", lambda: available)
    if fits:
        assert reserve_host("tapchannel:test", 4296, ARITHMETIC).bytes == 4296
        return
    with pytest.raises(ConfigError) as raised:
        reserve_host("tapchannel:test", 4296, ARITHMETIC)
    assert ARITHMETIC in str(raised.value)
    assert f"{available} B" in str(raised.value)
    assert "host memory" in str(raised.value)
    assert "depth" in str(raised.value.next_step)


def test_available_memory_is_what_the_machine_says() -> None:
    """A limit in the wrong unit, which would refuse everything or nothing."""
    available = memory._available_host_bytes()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available is not None
    assert total / 1000 < available <= total


def _reserve_beyond_limit(link: Link) -> str:
    """Reserve more than the address space of this process may hold."""
    room = 256 << 20
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    try:
        reserve_host("tapchannel:test", 2 * room, ARITHMETIC)
    except ConfigError as error:
        return str(error)
    return "it was reserved"


def test_memory_that_the_system_refuses_is_a_typed_error() -> None:
    """A bare OSError in place of the arithmetic: the look beforehand cannot see every limit."""
    with Children(limit=20) as children:
        told = children.start(_reserve_beyond_limit).result()
    assert ARITHMETIC in told
    assert "depth" in told


@pytest.mark.parametrize("size", [12344, 12346, 0, 1 << 40])
def test_received_memory_must_have_the_offered_size(size: int) -> None:
    """A mapping that is longer than the memory: a read behind its end is a SIGBUS (I8)."""
    fd = reserve_host("tapchannel:test", 12345, ARITHMETIC).arena.export_fd()
    before = set(descriptors()) - {fd}
    with pytest.raises(ValueError, match="12345 bytes"):
        _native.Arena.adopt_host(fd, size)
    assert set(descriptors()) <= before  # an earlier test's may be collected meanwhile


def test_received_memory_must_be_sealed() -> None:
    """Memory that its sender can cut off while it is mapped."""
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="sealed"):
        _native.Arena.adopt_host(fd, 4096)


def _probe_outside(link: Link) -> list[tuple[int, int, str]]:
    """Try probes that lie outside an arena, also by wrapping around."""
    arena = reserve_host("tapchannel:test", 4096, ARITHMETIC).arena
    taken: list[tuple[int, int, str]] = []
    for offset, size in ((4033, 64), (4096, 1), (0, 5000), (1 << 63, 1), ((1 << 64) - 8, 16)):
        for name, call in (("write", arena.write_probe), ("read", arena.read_probe)):
            try:
                call(offset, bytes(size) if name == "write" else size)  # type: ignore[operator]
            except ValueError:
                continue
            taken.append((offset, size, name))
    return taken


def test_probe_stays_inside_the_arena() -> None:
    """An offset that wraps around and reaches anywhere (tried in a child: it may crash)."""
    with Children(limit=20) as children:
        assert children.start(_probe_outside).result() == []


def test_probe_reads_back_what_was_written() -> None:
    """A self-test that passes whatever was written."""
    arena = reserve_host("tapchannel:test", 4096, ARITHMETIC).arena
    pattern = os.urandom(64)
    arena.write_probe(4096 - 64, pattern)
    assert arena.read_probe(4096 - 64, 64) == pattern
    assert arena.read_probe(0, 64) == bytes(64)


def test_local_arena_is_found_until_forgotten() -> None:
    """An arena that stays for ever because a mailbox once kept it, or one of another mailbox."""
    arena = reserve_host("tapchannel:test", 4096, ARITHMETIC).arena
    mailbox_id = os.urandom(16)
    assert local_arena(mailbox_id) is None
    keep_local(mailbox_id, arena)
    found = local_arena(mailbox_id)
    assert found is not None
    arena.write_probe(0, b"same")
    assert found.read_probe(0, 4) == b"same"
    assert local_arena(os.urandom(16)) is None
    forget_local(mailbox_id)
    forget_local(mailbox_id)
    assert local_arena(mailbox_id) is None


def test_reservation_gives_everything_back() -> None:
    """A mapping or a descriptor that outlives its reservation."""
    before = descriptors()
    for _ in range(5):
        reservation = reserve_host("tapchannel:test", 1 << 20, ARITHMETIC)
        assert len(descriptors()) == len(before) + 1
        del reservation
    assert descriptors() == before
