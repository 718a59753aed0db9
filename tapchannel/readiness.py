"""Waiting until every producer has attached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from .errors import AttachTimeout
from .plan import Lane

_POLL_S: Final = 0.01


def wait_ready(
    name: str,
    lanes: Sequence[Lane],
    is_attached: Callable[[Lane], bool],
    refusals: Sequence[str],
    limit: float,
) -> None:
    """Return once every lane is attached.

    Blocks:     until then, at most ``limit`` seconds.

    Raises:
        AttachTimeout: some are not; the text lists them.
    """
    began = time.monotonic()
    while missing := [lane for lane in lanes if not is_attached(lane)]:
        waited = time.monotonic() - began
        if waited >= limit:
            raise _not_ready(name, missing, refusals, waited, limit)
        time.sleep(min(_POLL_S, limit - waited))


def _not_ready(
    name: str, missing: Sequence[Lane], refusals: Sequence[str], waited: float, limit: float
) -> AttachTimeout:
    """Build the error that lists the producers which have not attached."""
    named = "; ".join(
        f"rank {lane.rank} ({', '.join(cell.tap.name for cell in lane.cells[:4])})"
        for lane in missing[:8]
    )
    return AttachTimeout(
        f"{len(missing)} producer{'s have' if len(missing) > 1 else ' has'} not attached",
        channel=name,
        waited=waited,
        limit=limit,
        seen=f"missing: {named}",
        last_progress=f"refused: {refusals[-1]}" if refusals else None,
        next_step="start their Outbox with the same plan, store and name",
    )
