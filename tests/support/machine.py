"""What this machine has of the hardware and libraries that some tests need."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
from functools import cache

CUDA_ERROR_NO_DEVICE = 100


@cache
def cuda_devices() -> tuple[int, str]:
    """Count the CUDA devices and, if there is none, say why."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return 0, f"no CUDA driver ({error})"
    code = driver.cuInit(0)
    if code == CUDA_ERROR_NO_DEVICE:
        return 0, "the CUDA driver finds no device"
    if code:
        return 0, f"the CUDA driver does not start (cuInit answered {code})"
    count = ctypes.c_int()
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return 0, f"the CUDA driver does not count its devices (cuDeviceGetCount answered {code})"
    return count.value, "" if count.value else "the CUDA driver finds no device"


def _lacks_devices(wanted: int) -> str | None:
    count, reason = cuda_devices()
    if count >= wanted:
        return None
    return reason or f"needs {wanted} CUDA devices, {count} here"


@cache
def _lacks_ucx() -> str | None:
    # Not loaded here: it would stay, and a test's own copy would be the second one.
    named = os.environ.get("TAPCHANNEL_UCX")
    if named or importlib.util.find_spec("libucx") or ctypes.util.find_library("ucp"):
        return None
    return "no UCX library: no TAPCHANNEL_UCX, no libucx wheel, none of the system"


def _lacks_rdma() -> str | None:
    if os.environ.get("TAPCHANNEL_RDMA_GUEST") == "1":
        return None
    return "no RDMA device: make rdma runs these in a guest that has two"


def _lacks_megatron() -> str | None:
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        return None
    return "Megatron-Core is not installed"


def _lacks_ray() -> str | None:
    return None if importlib.util.find_spec("ray") else "Ray is not installed"


NEEDS = {
    "gpu": lambda: _lacks_devices(1),
    "two_gpus": lambda: _lacks_devices(2),
    "ucx": _lacks_ucx,
    "rdma": _lacks_rdma,
    "megatron": _lacks_megatron,
    "ray": _lacks_ray,
}


def lacks(marker: str) -> str | None:
    """Say why a test with this marker cannot run here, or None if it can."""
    return NEEDS[marker]()
