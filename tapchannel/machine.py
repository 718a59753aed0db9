"""What this machine has that a transport needs, and why CUDA cannot be used where it cannot."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from . import _native


@dataclass(frozen=True, slots=True)
class Machine:
    """What is installed, and why CUDA cannot be used where ``cuda_refusal`` is not empty."""

    versions: dict[str, str]
    driver: Mapping[str, Any]
    gpus: list[dict[str, Any]]
    peer_access: list[list[bool]]
    cuda_refusal: str


def examine() -> Machine:
    """Ask the driver and torch what is here. Makes no CUDA context."""
    driver = _native.cuda_status()
    ordinals = range(_native.device_count())
    gpus: list[dict[str, Any]] = [_native.device_info(ordinal) for ordinal in ordinals]
    for gpu in gpus:
        gpu["uuid"] = f"GPU-{uuid.UUID(bytes=gpu['uuid'])}"
    return Machine(
        versions={
            "tapchannel": version("tapchannel"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "system": platform.platform(),
        },
        driver=driver,
        gpus=gpus,
        peer_access=[
            [a != b and _native.can_access_peer(a, b) for b in ordinals] for a in ordinals
        ],
        cuda_refusal=_cuda_refusal(str(driver["refusal"]), gpus),
    )


def _cuda_refusal(driver_refusal: str, gpus: Sequence[Mapping[str, Any]]) -> str:
    if driver_refusal:
        return driver_refusal
    if not gpus:
        return "the CUDA driver finds no GPU"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of it"
    if not torch.cuda.is_available():
        return f"torch, built for CUDA {torch.version.cuda}, cannot use this machine's driver"
    lacking = [str(gpu["ordinal"]) for gpu in gpus[:2] if not gpu["stream_mem_ops_64"]]
    if lacking:
        return f"GPU {' and '.join(lacking)} has no 64-bit stream memory operations"
    return ""
