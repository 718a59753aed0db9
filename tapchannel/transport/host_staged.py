"""host_staged: through pinned memory of the host, where two GPUs of one host have no peer path.

The producer's copy engine writes staging memory, and an arrival word says so. The consumer's gate
copies from there into the slot and stamps it. Payload k + 1 is on its first way while k is on its
second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from .. import _native
from ..descriptor import Hello
from ..errors import ChannelClosed, ConfigError, DeviceError, ProtocolError, TransportUnavailable
from ..memory import Device
from .base import Adopted, Adoption, LaneOffer, LaneServer, Serving, adopt_block
from .cuda_ipc import device_uuid, gpu_refusal


@dataclass(frozen=True, slots=True)
class _Server:
    serving: Serving

    def offer(self, lane: int, hello: Hello) -> LaneOffer:
        """Give descriptors of the control block, the staging memory and the arrival words."""
        core = self.serving.core
        try:
            staging = self.serving.staging.arena()
            core.open_gate(staging)
            arrivals = core.arrivals_fd(lane, f"tapchannel:arrivals{lane}")
            if arrivals < 0:
                raise ChannelClosed("mailbox is closed")
        except (ChannelClosed, ConfigError, DeviceError) as error:
            raise _unavailable(str(error)) from error
        fds = core.block_fd(lane), staging.export_fd(), arrivals
        uuid = device_uuid(self.serving.reservation.device)
        return LaneOffer("staged", staging, fds=fds, device_uuid=uuid, staged=True)


class HostStaged:
    """Copy and arrival word on one stream; then, by the gate, copy and stamp on one stream."""

    name = "host_staged"
    one_host = True
    ordering = (
        "copy to host memory, then the arrival word on the same stream; "
        "the consumer's gate: copy to the slot, then the stamp on the same stream"
    )

    def refusal(self, device: Device) -> str | None:
        """Refuse GPUs that cannot hold slots."""
        return gpu_refusal(device) if device.on_gpu else None

    def absence(self) -> str | None:
        """Refuse nothing: every process has host memory."""
        return None

    def serve(self, serving: Serving) -> LaneServer:
        """Begin to serve lanes."""
        return _Server(serving)

    def adopt(self, adoption: Adoption) -> Adopted:
        """Map both memories after their sizes and seals were checked; a GPU registers them."""
        offer, fds = adoption.offer, list(adoption.fds)
        sizes = offer.arena_bytes, _native.arrival_bytes(offer.depth, adoption.cells)
        try:
            if len(fds) != 3 or offer.memory != "staged":
                raise ProtocolError(
                    "offer is not host_staged's",
                    seen=f"{offer.memory} memory with {len(fds)} descriptors",
                    expected="staged memory with 3",
                )
            block = adopt_block(fds.pop(0), adoption)
            staging, arrivals = (_native.Arena.adopt_host(fds.pop(0), size) for size in sizes)
            wire = _native.Wire.staged(staging, arrivals, adoption.device.ordinal)
        except (DeviceError, OSError, ValueError) as error:
            raise _unavailable(str(error)) from error
        finally:
            _close(fds)
        return Adopted(wire, block, staging.write_probe, staging.drop)


def _unavailable(reason: str) -> TransportUnavailable:
    return TransportUnavailable("staging memory cannot be had", refused={HostStaged.name: reason})


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
