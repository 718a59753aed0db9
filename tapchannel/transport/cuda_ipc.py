"""cuda_ipc: GPU to GPU of one host. The copy engine writes straight into the mailbox's slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from .. import _native
from ..descriptor import Hello, Offer
from ..errors import DeviceError, ProtocolError, TransportUnavailable
from ..memory import Device, local_arena
from ..speed import device_limit, reading
from .base import Adopted, Adoption, LaneOffer, LaneServer, Serving, adopt_block


@dataclass(frozen=True, slots=True)
class _Server:
    serving: Serving

    def offer(self, lane: int, hello: Hello) -> LaneOffer:
        """Give a descriptor (vmm) or a handle (ipc), and the GPU by its UUID, never its ordinal."""
        reservation, block_fd = self.serving.reservation, self.serving.core.block_fd(lane)
        arena, memory = reservation.arena, reservation.memory
        uuid = device_uuid(reservation.device)
        if memory == "vmm":
            return LaneOffer(memory, arena, fds=(block_fd, arena.export_fd()), device_uuid=uuid)
        handle = arena.export_handle()
        return LaneOffer(memory, arena, handle=handle, fds=(block_fd,), device_uuid=uuid)


class CudaIpc:
    """Copy, then cuStreamWriteValue64 on the same stream; its default fence orders the two."""

    name = "cuda_ipc"
    ordering = "copy, then cuStreamWriteValue64 on the same stream (default system-scope fence)"
    one_host = True

    def refusal(self, device: Device) -> str | None:
        """Refuse host memory, a machine without a driver, and GPUs without what the wire needs."""
        return gpu_refusal(device) if device.on_gpu else "the mailbox is in host memory"

    def absence(self) -> str | None:
        """Refuse a process without a driver."""
        status = _native.cuda_status()
        return None if status["available"] else str(status["refusal"])

    def serve(self, serving: Serving) -> LaneServer:
        """Begin to serve lanes."""
        return _Server(serving)

    def adopt(self, adoption: Adoption) -> Adopted:
        """Map the peer's allocation for this process's own GPU."""
        offer, fds, device = adoption.offer, adoption.fds, adoption.device
        if not fds:
            raise ProtocolError("offer came without the control block's descriptor")
        try:
            block = adopt_block(fds[0], adoption)
        except BaseException:
            for fd in fds[1:]:
                os.close(fd)
            raise
        problem = _unreachable(offer, device)
        if problem is not None:
            for fd in fds[1:]:
                os.close(fd)
            raise TransportUnavailable("offer cannot be mapped", refused={self.name: problem})
        local = local_arena(adoption.mailbox_id) if offer.memory == "ipc" else None
        arena = local or _import(offer, fds[1:], device)
        return Adopted(
            _native.Wire(arena),
            block,
            arena.write_probe,
            arena.drop,
            measure=lambda _: reading(arena),
            limit=lambda: device_limit(arena, device.ordinal or 0, _ordinal_here(offer)),
        )


def gpu_refusal(device: Device) -> str | None:
    """Say why a GPU cannot hold slots; None if it can."""
    status = _native.cuda_status()
    if not status["available"]:
        return str(status["refusal"])
    count = _native.device_count()
    if device.ordinal is None or device.ordinal >= count:
        return f"{device} is not visible here: {count} GPUs are"
    if not _native.device_info(device.ordinal)["stream_mem_ops_64"]:
        return f"{device} has no 64-bit stream memory operations"
    return None


def device_uuid(device: Device) -> bytes | None:
    """Give a GPU's UUID, by which other processes know it; None for host memory."""
    if device.ordinal is None:
        return None
    return cast("bytes", _native.device_info(device.ordinal)["uuid"])


def _ordinal_here(offer: Offer) -> int | None:
    """Give this process's number of the mailbox's GPU; None where it is not visible."""
    for ordinal in range(_native.device_count()):
        if _native.device_info(ordinal)["uuid"] == offer.device_uuid:
            return ordinal
    return None


def _unreachable(offer: Offer, device: Device) -> str | None:
    """Say why this process's device cannot write the mailbox's GPU, as far as it can be known."""
    if device.ordinal is None:
        return "the taps are in host memory"
    for ordinal in range(_native.device_count()):
        if ordinal == device.ordinal or _native.device_info(ordinal)["uuid"] != offer.device_uuid:
            continue
        if not _native.can_access_peer(device.ordinal, ordinal):
            return f"no peer access from {device} to the mailbox's GPU (cuda:{ordinal} here)"
    return None


def _import(offer: Offer, fds: Sequence[int], device: Device) -> _native.Arena:
    ordinal = device.ordinal or 0
    try:
        if offer.memory == "vmm" and len(fds) == 1:
            return _native.Arena.import_vmm(ordinal, fds[0], offer.arena_bytes)
        if offer.memory == "ipc" and offer.handle is not None and not fds:
            return _native.Arena.import_ipc(ordinal, offer.handle, offer.arena_bytes)
    except DeviceError as error:
        raise TransportUnavailable(
            f"memory of the mailbox cannot be mapped for {device}",
            refused={"cuda_ipc": _reason(error, offer)},
        ) from error
    finally:
        for fd in fds:
            os.close(fd)
    raise TransportUnavailable(
        "offer cannot be mapped",
        refused={"cuda_ipc": f"{offer.memory} memory came with {len(fds)} descriptors"},
    )


def _reason(error: DeviceError, offer: Offer) -> str:
    if offer.memory == "ipc":
        return f"{error} (classic IPC needs a shared PID namespace; Mailbox(memory='vmm') does not)"
    return f"{error} (no peer access between the two GPUs?)"
