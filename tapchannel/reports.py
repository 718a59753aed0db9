"""The facts that `Mailbox.info` and `Outbox.info` give."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import cast

from .plan import Lane
from .transport.base import Transport


def channel_facts(name: str, transport: Transport, refused: Mapping[str, str]) -> dict[str, object]:
    """Give what both roles say of their channel."""
    return {
        "channel": name,
        "transport": transport.name,
        "ordering": transport.ordering,
        "refused": dict(refused),
    }


def lane_facts(lane: Lane, status: Mapping[str, object], began: float) -> dict[str, object]:
    """Give what a mailbox says of one lane."""
    received = cast("int", status["bytes"])
    seconds = max(1e-9, time.monotonic() - began)
    return {
        "lane": lane.index,
        "rank": lane.rank,
        "taps": [cell.tap.name for cell in lane.cells],
        "state": "attached" if status["attached"] else "lost" if status["lost"] else "away",
        "attaches": status["attaches"],
        "last_heartbeat_s": status["silent_s"],
        "messages": status["messages"],
        "bytes": received,
        "mean_GB_per_s": received / seconds / 1e9,
        "dropped": status["dropped"],
        "wait_s": status["wait_s"],
    }
