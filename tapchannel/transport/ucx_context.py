"""The UCX of this process as a transport needs it: loaded, set up, and what it knows of GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .. import _native
from ..errors import TransportUnavailable
from ..memory import Device
from ..rdma import rdma_devices
from ..ucx_candidates import UcxCandidate, candidates
from ..ucx_library import UcxChoice, choose_ucx, loading, pick

KNOWS_CUDA: Final = " with CUDA"
_SEGMENTS: Final = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")
_SETTINGS: Final = {
    **dict.fromkeys(_SEGMENTS, "256k"),
    "TCP_PUT_ENABLE": "n",
    "TCP_CONN_NB": "y",
}
# Before 1.17, what ucp_config_modify says of a transport is not heard; its environment is.
_CONFIG_REACHES_TCP: Final = (1, 17)
_ORDERED_BY_OWNER: Final = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER


@dataclass(frozen=True, slots=True)
class Ucx:
    """A context of the UCX that this process uses; ``by_host`` is why GPUs are reached by the host.

    Empty where UCX reads and writes the GPU's memory itself.
    """

    context: _native.UcxContext
    choice: UcxChoice
    by_host: str


def choose() -> UcxChoice:
    """Choose the library: one that knows CUDA where this process sees a GPU, else any.

    By what is visible, not by what is asked for: the first choice binds the whole process.

    Raises:
        TransportUnavailable: no library does for the job; the text gives each one's reason.
    """
    return _chosen(choose_ucx)


def foresee() -> UcxChoice:
    """Say what `choose` would choose in a fresh process. This one is not bound to it.

    Raises:
        TransportUnavailable: as `choose`.
    """
    return _chosen(lambda verbs, cuda: pick(candidates(), verbs, cuda))


def _chosen(choose_for: Callable[[bool, bool], UcxChoice]) -> UcxChoice:
    rdma = any(not device.refusal for device in rdma_devices())
    if _native.device_count() == 0:
        return choose_for(rdma, False)
    try:
        return choose_for(rdma, True)
    except TransportUnavailable:
        return choose_for(rdma, False)


def label() -> str:
    """Give the chosen library's version, and whether it knows CUDA, for the peer."""
    chosen = choose().chosen
    return f"{chosen.version}{KNOWS_CUDA if chosen.has_cuda else ''}"


def load(device: Device) -> Ucx:
    """Load UCX, once a process, and make a context for memory on ``device``.

    Raises:
        TransportUnavailable: no library does for the job, or it does not start here.
    """
    choice = choose()
    by_host = _why_by_host(choice, device)
    try:
        with loading(choice) as plan:
            version = _native.ucx_load(list(plan.preload), plan.libucp)
            ordinal = None if by_host else device.ordinal
            return Ucx(_native.UcxContext(_settings(version), ordinal), choice, by_host)
    except RuntimeError as error:
        raise unavailable(str(error)) from error


def unavailable(reason: str) -> TransportUnavailable:
    """Build the error for a lane that UCX cannot carry."""
    return TransportUnavailable("UCX cannot carry this lane", refused={"ucx": reason})


def _why_by_host(choice: UcxChoice, device: Device) -> str:
    if device.ordinal is None:
        return ""
    ordering = _native.device_info(device.ordinal)["gpu_direct_rdma_writes_ordering"]
    return why_by_host(choice.chosen, str(device), ordering)


def why_by_host(ucx: UcxCandidate, gpu: str, ordering: object) -> str:
    """Say why a GPU is reached through host memory; empty where RDMA writes reach it.

    ``ordering`` is the driver's word on the order that the GPU keeps of an RDMA device's writes.
    """
    if not ucx.has_cuda:
        return f"{ucx.name} knows no CUDA"
    if isinstance(ordering, int) and ordering < _ORDERED_BY_OWNER:
        return f"{gpu} does not keep the order of an RDMA device's writes"
    return ""


def _settings(version: str) -> list[tuple[str, str]]:
    """Give the settings of UCX that are ours; those that the user has set stay.

    Puts over TCP go in fragments: larger ones take a quarter of the CPU time. The zero-copy way
    (RNDV_THRESH=inf, from 1.20 on) would be faster for the largest, but it writes on after the
    consumer has closed its endpoint, which is what fences a dead peer. Connections are made without
    blocking: UCX would otherwise stand in connect for minutes where the wire is cut in mid-attach,
    whatever the attach's deadline.
    """
    kept = {name for name in _SETTINGS if f"UCX_{name}" in os.environ}
    if kept & set(_SEGMENTS):  # the two must fit together: UCX refuses RX below TX
        kept |= set(_SEGMENTS)
    wanted = {name: value for name, value in _SETTINGS.items() if name not in kept}
    if tuple(int(part) for part in version.split(".")[:2]) < _CONFIG_REACHES_TCP:
        os.environ.update({f"UCX_{name}": value for name, value in wanted.items()})
    return list(wanted.items())
