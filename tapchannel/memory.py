"""Arenas: the memory that holds a mailbox's slots, reserved once, owned by the mailbox.

Never memory of torch's caching allocator: an IPC handle names a whole allocation, neighbours
included, and expandable segments cannot be exported at all.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from . import _native
from .descriptor import PROBE_STRIDE
from .errors import ChannelClosed, ConfigError, DeviceError, TransportUnavailable
from .plan import TapPlan

MEMORY_CHOICES: Final = ("auto", "vmm", "ipc")
# A classic IPC handle cannot be opened in the process that exported it: an outbox there finds the
# arena here.
_local_arenas: dict[bytes, _native.Arena] = {}


@dataclass(frozen=True, slots=True)
class Device:
    """Where an arena lies: host memory, or the GPU of an ordinal of this process."""

    ordinal: int | None

    @property
    def on_gpu(self) -> bool:
        """Tell whether this is a GPU."""
        return self.ordinal is not None

    def __str__(self) -> str:
        return "cpu" if self.ordinal is None else f"cuda:{self.ordinal}"

    @classmethod
    def parse(cls, device: object) -> Device:
        """Read ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a ``torch.device``.

        Raises:
            ConfigError: it is none of these.
        """
        text = str(device)
        if text == "cpu":
            return cls(None)
        kind, colon, index = text.partition(":")
        if kind == "cuda" and (index.isdecimal() or not colon):
            return cls(int(index) if index else _current_ordinal())
        raise ConfigError(
            "device is not understood", seen=repr(device), expected="'cpu', 'cuda' or 'cuda:N'"
        )


@dataclass(frozen=True, slots=True)
class Reservation:
    """An arena with what was chosen for it and what was refused on the way."""

    arena: _native.Arena
    memory: str
    device: Device
    bytes: int
    refused: dict[str, str] = field(default_factory=dict[str, str])


def arena_bytes(plan: TapPlan, depth: int, lanes: int) -> int:
    """Give the bytes of an arena: the slots, then one page a lane for the attach self-test."""
    return plan.arena_bytes(depth) + lanes * PROBE_STRIDE


def reserve(device: Device, label: str, size: int, memory: str, arithmetic: str) -> Reservation:
    """Reserve an arena on ``device``; see `reserve_host` and `reserve_device`."""
    if device.on_gpu:
        return reserve_device(device, size, memory, arithmetic)
    return reserve_host(label, size, arithmetic)


def reserve_host(label: str, size: int, arithmetic: str) -> Reservation:
    """Reserve and commit host memory in a sealed memfd.

    Raises:
        ConfigError: the machine has not that much memory left; the text gives the arithmetic.
    """
    _check_fits(size, _available_host_bytes(), "host memory", arithmetic)
    try:
        arena = _native.Arena.create_host(label, size)
    except OSError as error:
        raise ConfigError(
            "host memory for the mailbox was refused",
            seen=arithmetic,
            detail=str(error),
            next_step="lower depth or max_rows, or raise the process's memory limit",
        ) from error
    return Reservation(arena, "host", Device(None), size)


def reserve_device(device: Device, size: int, memory: str, arithmetic: str) -> Reservation:
    """Reserve GPU memory that other processes can map.

    ``"vmm"`` is exported as a file descriptor, crosses PID namespaces, and lives until the last
    process unmaps it, so a mailbox may die under a copy in flight. ``"ipc"`` is a classic CUDA IPC
    handle. ``"auto"`` takes the safer one that works: vmm, then ipc.

    Raises:
        ConfigError: it does not fit; the text gives the arithmetic.
        TransportUnavailable: no kind works; the text gives each refusal.
    """
    ordinal = device.ordinal if device.ordinal is not None else 0
    facts = _native.device_info(ordinal)
    _check_fits(size, cast("int", facts["total_bytes"]), f"memory of {device}", arithmetic)
    refused: dict[str, str] = {}
    for kind in ("vmm", "ipc") if memory == "auto" else (memory,):
        create = _native.Arena.create_vmm if kind == "vmm" else _native.Arena.create_ipc
        try:
            return Reservation(create(ordinal, size), kind, device, size, refused)
        except DeviceError as error:
            if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
                raise ConfigError(
                    f"mailbox does not fit in the free memory of {device}",
                    seen=arithmetic,
                    next_step="lower depth or max_rows, or free memory before the mailbox is made",
                ) from error
            refused[kind] = str(error)
    raise TransportUnavailable(f"no exportable memory on {device}", refused=refused)


class Staging:
    """Host memory on the way to the slots and laid out like them, for lanes that need it.

    Reserved by the first of them; until then it costs nothing.
    """

    def __init__(self, label: str, size: int, arithmetic: str) -> None:
        self._wanted = label, size, arithmetic
        self._lock = threading.Lock()
        self._arena: _native.Arena | None = None
        self._dropped = False

    def arena(self) -> _native.Arena:
        """Give the memory.

        Raises:
            ConfigError: the machine has not that much left; the text gives the arithmetic.
            ChannelClosed: the mailbox is closed.
        """
        with self._lock:
            if self._dropped:
                raise ChannelClosed("mailbox is closed")
            if self._arena is None:
                self._arena = reserve_host(*self._wanted).arena
            return self._arena

    def drop(self) -> None:
        """Let go of the memory; the gate and open outboxes keep theirs."""
        with self._lock:
            self._dropped = True
            if self._arena is not None:
                self._arena.drop()


def keep_local(mailbox_id: bytes, arena: _native.Arena) -> None:
    """Let outboxes of this process find the arena by the mailbox's id."""
    _local_arenas[mailbox_id] = arena


def forget_local(mailbox_id: bytes) -> None:
    """End what `keep_local` began."""
    _local_arenas.pop(mailbox_id, None)


def local_arena(mailbox_id: bytes) -> _native.Arena | None:
    """Give the arena of a mailbox of this very process, None for any other."""
    arena = _local_arenas.get(mailbox_id)
    return None if arena is None else arena.share()


def _check_fits(size: int, available: int | None, where: str, arithmetic: str) -> None:
    if available is not None and size > available:
        raise ConfigError(
            f"mailbox is too large for the {where}",
            seen=arithmetic,
            expected=f"at most {available} B ({available / 2**30:.1f} GiB)",
            next_step="lower depth or max_rows",
        )


def _available_host_bytes() -> int | None:
    """Give what the machine, and the cgroup where it says so, can still commit."""
    limits: list[int] = []
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        if limit != "max":
            limits.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no cgroup v2 here, or none that may be read
        limits.append(
            limits[0] if limits else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        )
    return min(limits) if limits else None


def _current_ordinal() -> int:
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0
