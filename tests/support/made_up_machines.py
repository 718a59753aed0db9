"""Machines that are nowhere: their GPUs, and what they have for the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tapchannel.doctor_network import GpuRule, Network
from tapchannel.machine import Machine
from tapchannel.rdma import GpuDirect, RdmaDevice
from tapchannel.ucx_candidates import Origin, UcxCandidate
from tapchannel.ucx_library import UcxChoice


def gpu(ordinal: int, **changes: Any) -> dict[str, Any]:
    """Describe a GPU that can do everything."""
    return {
        "ordinal": ordinal,
        "name": "made-up",
        "uuid": f"GPU-{ordinal}",
        "pci_bus_id": f"0000:0{ordinal}:00.0",
        "total_bytes": 141 << 30,
        "stream_mem_ops_64": True,
        "vmm": True,
        "posix_fd_handles": True,
        "gpu_direct_rdma_writes_ordering": 100,
        **changes,
    }


def machine(*gpus: dict[str, Any], cuda_refusal: str = "", peers: bool = True) -> Machine:
    """Describe a machine with these GPUs, all of them peers or none."""
    return Machine(
        versions={"tapchannel": "0"},
        driver={"available": not cuda_refusal, "refusal": cuda_refusal, "driver_version": 13000},
        gpus=list(gpus),
        peer_access=[[peers and here is not there for there in gpus] for here in gpus],
        cuda_refusal=cuda_refusal,
    )


def ucx(origin: Origin = "system", verbs: bool = True, cuda: bool = False) -> UcxCandidate:
    """Describe a UCX library."""
    has = {"tcp"} | ({"ib"} if verbs else set[str]()) | ({"cuda_cpy"} if cuda else set[str]())
    return UcxCandidate(origin, Path("/ucx/libucp.so.0"), "1.19.0", frozenset(has))


def rdma_device(refusal: str = "", name: str = "mlx5_0") -> RdmaDevice:
    """Describe an RDMA device."""
    return RdmaDevice(name, 1, "ACTIVE", "InfiniBand", "mlx5_core", refusal)


def network(
    chosen: UcxCandidate | None = None,
    *devices: RdmaDevice,
    refusal: str = "",
    memlock: int | None = None,
    rules: tuple[GpuRule, ...] = (),
    passed_over: dict[str, str] | None = None,
    remark: str = "",
) -> Network:
    """Describe what a machine has for the network; with a refusal, no UCX does."""
    choice = None if refusal else UcxChoice(chosen or ucx(), passed_over or {}, remark)
    direct = GpuDirect(False, "6.1.0", True)
    return Network(choice, refusal, list(devices), memlock, direct, list(rules))
