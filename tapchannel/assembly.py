"""Putting a mailbox together: transport, arena, control blocks, core."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import _native
from .descriptor import ID_BYTES, PROBE_STRIDE, Hello, checked_plan
from .memory import Device, Reservation, Staging, arena_bytes, keep_local, reserve
from .plan import Lane, TapPlan
from .settings import cell_geometry
from .transport.base import LaneOffer, LaneServer, Serving, Transport
from .transport.select import Served, serve


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a mailbox was asked to be."""

    name: str
    plan: TapPlan
    lanes: Sequence[Lane]
    depth: int
    device: Device
    transport: str
    memory: str
    fill_released: bool
    peer_timeout: float
    listens: bool


@dataclass(frozen=True, slots=True)
class Assembled:
    """The local handles of a mailbox."""

    mailbox_id: bytes
    core: _native.Mailbox
    served: Served
    reservation: Reservation
    serving: Serving
    servers: dict[str, LaneServer] = field(default_factory=dict[str, LaneServer])
    serving_lock: threading.Lock = field(default_factory=threading.Lock)

    def offer(self, transport: Transport, lane: int, hello: Hello) -> LaneOffer:
        """Offer a lane by one of the transports served; see `LaneServer.offer`."""
        with self.serving_lock:
            if transport.name not in self.servers:
                self.servers[transport.name] = transport.serve(self.serving)
            return self.servers[transport.name].offer(lane, hello)

    def drop(self) -> None:
        """Let go of the memory; views that are alive keep the slots."""
        self.reservation.arena.drop()
        self.serving.staging.drop()

    @property
    def refused(self) -> dict[str, str]:
        """Every transport and kind of memory that was passed over, with the reason."""
        return {**self.served.refused, **self.reservation.refused}


def assemble(wanted: Wanted) -> Assembled:
    """Reserve the slots and make the core; the plan's sizes are said before they are reserved.

    Raises:
        ConfigError: the slots do not fit; the text gives the arithmetic.
        TransportUnavailable: no transport serves the device.
    """
    plan, depth, lanes = wanted.plan, wanted.depth, wanted.lanes
    checked_plan(plan)
    served = serve(wanted.device, wanted.transport, wanted.listens)
    size = arena_bytes(plan, depth, len(lanes))
    arithmetic = (
        f"{depth} slots × {plan.slot_bytes} B + {len(lanes)} lanes × {PROBE_STRIDE} B = {size} B "
        f"({size / 2**30:.3f} GiB)"
    )
    # A memfd's name holds 200 bytes: what follows the channel's must not be cut off.
    label = f"tapchannel:{wanted.name.encode()[:150].decode(errors='ignore')}"
    reservation = reserve(wanted.device, f"{label}:slots", size, wanted.memory, arithmetic)
    mailbox_id = secrets.token_bytes(ID_BYTES)
    blocks = [
        _native.ControlBlock.create(
            f"tapchannel:lane{lane.index}:{wanted.name}",
            lane.index,
            depth,
            len(lane.cells),
            mailbox_id,
        )
        for lane in lanes
    ]
    geometry = [cell_geometry(lane, plan.max_rows) for lane in lanes]
    core = _native.Mailbox(
        reservation.arena, blocks, geometry, depth, plan.slot_bytes, wanted.fill_released
    )
    if reservation.memory == "ipc":
        keep_local(mailbox_id, reservation.arena)
    cells = [len(lane.cells) for lane in lanes]
    staging = Staging(f"{label}:staging", size, arithmetic)
    serving = Serving(reservation, staging, core, depth, cells, wanted.peer_timeout)
    return Assembled(mailbox_id, core, served, reservation, serving)
