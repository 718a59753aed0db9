"""cuda_ipc: GPU to GPU of one host. The copy engine writes straight into the mailbox's slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from .. import _native
from ..descriptor import Offer
from ..errors import DeviceError, TransportUnavailable
from ..memory import Device, Reservation, reserve_device
from .base import Export


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

    def reserve(
        self, device: Device, label: str, size: int, memory: str, arithmetic: str
    ) -> Reservation:
        """Reserve a dedicated, exportable allocation."""
        return reserve_device(device, size, memory, arithmetic)

    def export(self, reservation: Reservation) -> Export:
        """Give a descriptor (vmm) or a handle (ipc), and the GPU by its UUID, never its ordinal."""
        ordinal = reservation.device.ordinal or 0
        device_uuid = cast("bytes", _native.device_info(ordinal)["uuid"])
        if reservation.memory == "vmm":
            return Export(fds=(reservation.arena.export_fd(),), device_uuid=device_uuid)
        return Export(handle=reservation.arena.export_handle(), device_uuid=device_uuid)

    def adopt(self, offer: Offer, fds: Sequence[int], device: Device) -> _native.Arena:
        """Map the peer's allocation for this process's own GPU."""
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
