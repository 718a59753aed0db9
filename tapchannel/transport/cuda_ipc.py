"""cuda_ipc: GPU to GPU of one host. The copy engine writes straight into the mailbox's slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from .. import _native
from ..descriptor import Offer
from ..errors import DeviceError, TransportUnavailable
from ..memory import Device, Reservation, local_arena
from .base import Adopted, LaneOffer


class CudaIpc:
    """Copy, then cuStreamWriteValue64 on the same stream; its default fence orders the two."""

    name = "cuda_ipc"
    ordering = "copy, then cuStreamWriteValue64 on the same stream (default system-scope fence)"

    def refusal(self, device: Device) -> str | None:
        """Refuse host memory, a machine without a driver, and GPUs without what the wire needs."""
        if not device.on_gpu:
            return "the mailbox is in host memory"
        status = _native.cuda_status()
        if not status["available"]:
            return str(status["refusal"])
        count = _native.device_count()
        if device.ordinal is None or device.ordinal >= count:
            return f"{device} is not visible here: {count} GPUs are"
        if not _native.device_info(device.ordinal)["stream_mem_ops_64"]:
            return f"{device} has no 64-bit stream memory operations"
        return None

    def absence(self) -> str | None:
        """Refuse a process without a driver."""
        status = _native.cuda_status()
        return None if status["available"] else str(status["refusal"])

    def offer(self, reservation: Reservation) -> LaneOffer:
        """Give a descriptor (vmm) or a handle (ipc), and the GPU by its UUID, never its ordinal."""
        arena, memory = reservation.arena, reservation.memory
        ordinal = reservation.device.ordinal or 0
        uuid = cast("bytes", _native.device_info(ordinal)["uuid"])
        if memory == "vmm":
            return LaneOffer(memory, arena, fds=(arena.export_fd(),), device_uuid=uuid)
        return LaneOffer(memory, arena, handle=arena.export_handle(), device_uuid=uuid)

    def adopt(self, offer: Offer, fds: Sequence[int], device: Device, mailbox_id: bytes) -> Adopted:
        """Map the peer's allocation for this process's own GPU."""
        local = local_arena(mailbox_id) if offer.memory == "ipc" else None
        arena = local or _import(offer, fds, device)
        return Adopted(arena, _native.Wire(arena))


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
