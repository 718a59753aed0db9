"""The smallest channel: a mailbox and its only outbox, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from support.small_channel import LIMIT, NAME
from tapchannel import Mailbox, Outbox, TapPlan
from tapchannel.stores import rendezvous


def channel_of(folder: Path, plan: TapPlan, **options: Any) -> tuple[Mailbox, Outbox]:
    """Give a mailbox and its outbox."""
    place: dict[str, Any] = {"store": f"file://{folder}", "timeout": LIMIT}
    taps = [tap.name for tap in plan.taps]
    mailbox = Mailbox(plan, {0: taps}, **place, **options)
    return mailbox, Outbox(plan, 0, **place)


def telling(address: str) -> HashStore:
    """Give a store that tells this address of a mailbox."""
    store = HashStore()
    rendezvous(store, NAME).publish([address])
    return store
