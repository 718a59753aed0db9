"""The environments that a training job may set for its processes, and that the tests run in."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from gpu.pair import Environment
from support import machine
from tapchannel import _native

PLAIN: Environment = dict.fromkeys(
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_MODULE_LOADING",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TAPCHANNEL_CHECK",
    )
)
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY"}
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _last_gpu() -> str:
    """Name the last GPU as CUDA_VISIBLE_DEVICES does: by what it is, not by where it stands."""
    count, _ = machine.cuda_devices()
    identity = _native.device_info(count - 1)["uuid"]
    assert isinstance(identity, bytes)
    return f"GPU-{uuid.UUID(bytes=identity)}"


def environments() -> Mapping[str, tuple[Environment, Environment]]:
    """Give each environment's variables: the consumer's, the producer's."""
    by_uuid = {"CUDA_VISIBLE_DEVICES": _last_gpu()}
    return {
        "plain": (PLAIN, PLAIN),
        "one connection": (PLAIN | ONE_CONNECTION, PLAIN | ONE_CONNECTION | EXPANDABLE),
        "eager": (PLAIN | EAGER | EXPANDABLE, PLAIN | EAGER | by_uuid),
    }
