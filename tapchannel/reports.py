"""The facts that `Mailbox.info` and `Outbox.info` give."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from . import _native
from .plan import Lane
from .transport.base import Transport

_STATES: Final = ("revoked", "attached", "lost")  # else it is away

# Lane, written by the producer, (number, time_ns, key, bytes, step, cell).
RawEvent: TypeAlias = "tuple[int, bool, tuple[int, ...]]"

if TYPE_CHECKING:
    from .assembly import Assembled
    from .attach import Attachment
    from .handshake import Peer


def mailbox_events(core: _native.Mailbox, lanes: Sequence[Lane]) -> list[RawEvent]:
    """Give what both sides of every lane have recorded."""
    return [
        (lane.index, side, event)
        for lane in lanes
        for side in (False, True)
        for event in core.events(lane.index, side)
    ]


def mailbox_facts(
    name: str,
    depth: int,
    made: Assembled,
    addresses: Sequence[str],
    lanes: Sequence[Mapping[str, object]],
) -> dict[str, object]:
    """Give what a mailbox says of itself."""
    return {
        **_channel_facts("mailbox", name, made.served.transports[0], made.refused),
        "device": str(made.reservation.device),
        "memory": made.reservation.memory,
        "depth": depth,
        "reserved_bytes": made.reservation.bytes,
        "epoch": made.core.epoch,
        "address": addresses[0],
        "addresses": list(addresses),
        "lanes": lanes,
    }


def outbox_facts(
    name: str,
    rank: int,
    attached: Attachment,
    counters: Mapping[str, int | float],
    began: float,
) -> dict[str, object]:
    """Give what an outbox says of itself."""
    seconds = max(1e-9, time.monotonic() - began)
    return {
        **_channel_facts("outbox", name, attached.transport, attached.refused),
        "rank": rank,
        "lane": attached.offer.lane,
        "device": str(attached.device),
        "memory": attached.offer.memory,
        "depth": attached.offer.depth,
        "peer": {"pid": attached.offer.pid, "host": attached.offer.host},
        "mean_GB_per_s": counters["bytes"] / seconds / 1e9,
        "speed": attached.speed.facts() if attached.speed else None,
        **attached.adopted.facts(),
        **counters,
    }


def _channel_facts(
    role: str, name: str, transport: Transport, refused: Mapping[str, str]
) -> dict[str, object]:
    """Give what both roles say of their channel."""
    return {
        "role": role,
        "channel": name,
        "transport": transport.name,
        "ordering": transport.ordering,
        "refused": dict(refused),
    }


def all_lane_facts(
    lanes: Sequence[Lane],
    peers: Mapping[int, Peer],
    status_of: Callable[[Lane], Mapping[str, object]],
    began: float,
) -> list[dict[str, object]]:
    """Give what a mailbox says of its lanes."""
    return [_lane_facts(lane, peers.get(lane.index), status_of(lane), began) for lane in lanes]


def _lane_facts(
    lane: Lane, peer: Peer | None, status: Mapping[str, object], began: float
) -> dict[str, object]:
    """Give what a mailbox says of one lane."""
    received = cast("int", status["bytes"])
    seconds = max(1e-9, time.monotonic() - began)
    return {
        "lane": lane.index,
        "rank": lane.rank,
        "taps": [cell.tap.name for cell in lane.cells],
        "transport": peer.transport if peer else None,
        "ordering": peer.ordering if peer else None,
        "state": next((name for name in _STATES if status[name]), "away"),
        "attaches": status["attaches"],
        "last_heartbeat_s": status["silent_s"],
        "messages": status["messages"],
        "bytes": received,
        "mean_GB_per_s": received / seconds / 1e9,
        "dropped": status["dropped"],
        "wait_s": status["wait_s"],
    }
