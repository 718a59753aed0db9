"""What this machine has for RDMA: its devices, the memory it may pin, the ways into GPU memory."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SYSTEM: Final = Path("/sys")
_NODES: Final = Path("/dev/infiniband")
_DMABUF_KERNEL: Final = (5, 12)


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One port of an RDMA device; ``refusal`` is empty where this process can use it.

    ``state`` and ``link_layer`` are the kernel's words: ``ACTIVE``, ``InfiniBand``, ``Ethernet``.
    """

    name: str
    port: int
    state: str
    link_layer: str
    driver: str
    refusal: str


@dataclass(frozen=True, slots=True)
class GpuDirect:
    """What lets an RDMA device reach GPU memory: either one will do.

    ``nvidia_peermem`` is a loaded kernel module; dma-buf needs a kernel from 5.12 on, and a driver
    with open kernel modules, which only an attempt can show.
    """

    nvidia_peermem: bool
    kernel: str
    kernel_has_dmabuf: bool


def rdma_devices(system: Path = _SYSTEM, nodes: Path = _NODES) -> list[RdmaDevice]:
    """List the ports of this machine's RDMA devices, usable or not."""
    folder = system / "class" / "infiniband"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    return [port for device in devices for port in _ports(device, system, nodes)]


def _ports(device: Path, system: Path, nodes: Path) -> Iterator[RdmaDevice]:
    driver = device / "device" / "driver"
    folder = device / "ports"
    numbers = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    for port in sorted(numbers, key=lambda path: int(path.name)):
        # "4: ACTIVE"
        state = _word(port / "state").rpartition(" ")[2]
        closed = _closed(device.name, system, nodes)
        yield RdmaDevice(
            name=device.name,
            port=int(port.name),
            state=state,
            link_layer=_word(port / "link_layer"),
            driver=driver.resolve().name if driver.exists() else "",
            refusal=closed if state == "ACTIVE" else f"its port is {state or 'in no known state'}",
        )


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a device may go at any time
        return ""


def _closed(device: str, system: Path, nodes: Path) -> str:
    """Say why a device cannot be opened, as in a container that was not given it."""
    for verbs in sorted((system / "class" / "infiniband_verbs").glob("uverbs*")):
        if _word(verbs / "ibdev") != device:
            continue
        node = nodes / verbs.name
        if not node.exists():
            return f"there is no {node}: hand it to the container"
        return "" if os.access(node, os.R_OK | os.W_OK) else f"{node} may not be opened"
    return "the kernel gives it no verbs: load ib_uverbs"


def memlock_limit() -> int | None:
    """Give how many bytes this process may pin for RDMA, None for as many as it likes."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def gpu_direct(system: Path = _SYSTEM, kernel: str | None = None) -> GpuDirect:
    """Say which of the prerequisites of GPUDirect RDMA are here."""
    release = platform.release() if kernel is None else kernel
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return GpuDirect(
        nvidia_peermem=(system / "module" / "nvidia_peermem").is_dir(),
        kernel=release,
        kernel_has_dmabuf=numbers is not None
        and (int(numbers[1]), int(numbers[2])) >= _DMABUF_KERNEL,
    )
