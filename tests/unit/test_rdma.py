"""What a made-up machine has for RDMA."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from tapchannel.rdma import GpuDirect, gpu_direct, memlock_limit, rdma_devices


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Make a /sys with two devices and a /dev/infiniband with the node of the first."""
    for number, (name, state, link) in enumerate(
        [("mlx5_0", "4: ACTIVE", "InfiniBand"), ("rxe0", "1: DOWN", "Ethernet")]
    ):
        device = tmp_path / "sys" / "class" / "infiniband" / name
        port = device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link}\n")
        verbs = tmp_path / "sys" / "class" / "infiniband_verbs" / f"uverbs{number}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"{name}\n")
    driver = tmp_path / "sys" / "bus" / "mlx5_core"
    driver.mkdir(parents=True)
    device = tmp_path / "sys" / "class" / "infiniband" / "mlx5_0" / "device"
    device.mkdir()
    (device / "driver").symlink_to(driver)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    return tmp_path


def test_devices_are_described(system: Path) -> None:
    """Catches a port that is down, or a driver, reported wrongly."""
    first, second = rdma_devices(system / "sys", system / "dev")
    assert (first.name, first.port, first.state) == ("mlx5_0", 1, "ACTIVE")
    assert (first.link_layer, first.driver, first.refusal) == ("InfiniBand", "mlx5_core", "")
    assert (second.name, second.link_layer, second.driver) == ("rxe0", "Ethernet", "")
    assert second.refusal == "its port is DOWN"


def test_device_that_a_container_was_not_given(system: Path) -> None:
    """Catches a device that /sys shows but nobody can open, taken for a usable one."""
    (system / "dev" / "uverbs0").unlink()
    assert "hand it to the container" in rdma_devices(system / "sys", system / "dev")[0].refusal


def test_device_without_verbs(system: Path) -> None:
    """Catches a device whose kernel module for user space is missing."""
    (system / "sys" / "class" / "infiniband_verbs" / "uverbs0" / "ibdev").write_text("other\n")
    assert "ib_uverbs" in rdma_devices(system / "sys", system / "dev")[0].refusal


def test_device_that_may_not_be_opened(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a node without the rights to it, which root never meets."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not be opened" in rdma_devices(system / "sys", system / "dev")[0].refusal


def test_device_that_goes_away(system: Path) -> None:
    """Catches a crash on a device that is unplugged while it is described."""
    (system / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "state").unlink()
    assert (
        rdma_devices(system / "sys", system / "dev")[0].refusal == "its port is in no known state"
    )


def test_machine_without_rdma(tmp_path: Path) -> None:
    """Catches a crash where there is no RDMA at all."""
    assert rdma_devices(tmp_path, tmp_path) == []


def test_memlock_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches "unlimited" read as a number."""
    for soft, limit in ((65536, 65536), (resource.RLIM_INFINITY, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, soft=soft: (soft, soft))
        assert memlock_limit() == limit


@pytest.mark.parametrize(
    ("kernel", "dmabuf"),
    [
        ("5.11.0-27-generic", False),
        ("5.12.0", True),
        ("6.1.0", True),
        ("4.18.0", False),
        ("?", False),
    ],
)
def test_gpu_direct_by_kernel(tmp_path: Path, kernel: str, dmabuf: bool) -> None:
    """Catches versions compared as text."""
    assert gpu_direct(tmp_path, kernel) == GpuDirect(False, kernel, dmabuf)


def test_gpu_direct_by_module(tmp_path: Path) -> None:
    """Catches a loaded nvidia_peermem that is overlooked."""
    (tmp_path / "module" / "nvidia_peermem").mkdir(parents=True)
    assert gpu_direct(tmp_path).nvidia_peermem
