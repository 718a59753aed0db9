"""What both roles of a GPU test agree on, and how each of them begins and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.device import numbers, warm_up
from gpu.pair import Peer
from tapchannel import Mailbox, Outbox, TapPlan

TAP = "state"
LIMIT = 15.0  # seconds: the deadline of every wait that a test does not shorten
ATTACH_LIMIT = 60.0  # the other process may still be starting


@dataclass(frozen=True)
class Channel:
    """One channel: by default one tap of int32 words, one lane, both sides on cuda:0."""

    store: str
    groups: Mapping[str, Sequence[str]] = field(default_factory=lambda: {TAP: (TAP,)})
    width: int = 256
    dtype: Any = "int32"
    rows: int = 512
    depth: int = 2
    memory: str = "auto"
    consumer: str = "cuda:0"
    producer: str = "cuda:0"

    @property
    def plan(self) -> TapPlan:
        """The plan, the same on both sides."""
        return TapPlan(self.groups, width=self.width, dtype=self.dtype, max_rows=self.rows)

    @property
    def taps(self) -> list[str]:
        """All taps, in the order of the slot."""
        return [tap for taps in self.groups.values() for tap in taps]

    def mailbox(self, **settings: Any) -> Mailbox:
        """Make the consumer's end."""
        chosen = {"depth": self.depth, "memory": self.memory, "timeout": LIMIT} | settings
        sources = {0: self.taps}
        return Mailbox(self.plan, sources, device=self.consumer, store=self.store, **chosen)

    def outbox(self, **settings: Any) -> Outbox:
        """Attach the producer's end."""
        chosen = {"timeout": LIMIT, "attach_timeout": ATTACH_LIMIT} | settings
        return Outbox(self.plan, 0, device=self.producer, store=self.store, **chosen)

    def words(self, seed: int) -> torch.Tensor:
        """Make a tap of the full size on the producer's device."""
        return numbers(seed, self.rows, self.width, self.producer)


@contextlib.contextmanager
def consuming(channel: Channel, peer: Peer, **settings: Any) -> Iterator[Mailbox]:
    """Hold the mailbox open until the producer is through with its outbox."""
    torch.cuda.set_device(channel.consumer)
    warm_up(channel.consumer)
    with channel.mailbox(**settings) as mailbox:
        mailbox.wait_ready(ATTACH_LIMIT)
        yield mailbox
        peer.wait("outbox closed")


@contextlib.contextmanager
def producing(channel: Channel, peer: Peer, **settings: Any) -> Iterator[Outbox]:
    """Hold the outbox open; what was pushed has been copied when the block is left."""
    torch.cuda.set_device(channel.producer)
    warm_up(channel.producer)
    with channel.outbox(**settings) as outbox:
        yield outbox
    peer.tell("outbox closed")
