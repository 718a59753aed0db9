"""The one small interface that every way to move bytes stands behind.

A peer makes a receiver in the consumer's process and a sender in each producer's. The frame drives
both a message at a time; they find each other through a store of their own.

A peer that wants more than torch is a file in the folder of ``--extra-peers`` (``bench/peers`` of
the source tree) that defines ``PEERS``, and imports what it wants only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .payload import Sources
from .traffic import Place, Traffic

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Meeting:
    """Where the two sides of a peer meet: a store that nobody else writes."""

    store: Store

    def put(self, key: str, value: bytes) -> None:
        """Tell the other side."""
        self.store.set(key, value)  # pyright: ignore[reportUnknownMemberType, reportArgumentType]

    def get(self, key: str) -> bytes:
        """Hear what the other side tells; at most the store's own time-out."""
        return self.store.get(key)


class Receiver:
    """The consumer's side. Messages are received and released in their order."""

    def begin(self, step: int, count: int) -> None:
        """Get ready for a round of ``count`` messages; not timed."""

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Wait until a message is there, all of it, and give its taps by their names."""
        raise NotImplementedError

    def receive_awake(self, message: int) -> Mapping[str, torch.Tensor]:
        """Do the same, asking again and again where the peer's own wait sleeps in between."""
        return self.receive(message)

    def release(self, message: int) -> None:
        """Let the memory of a message be written again."""

    def end(self) -> None:
        """End the round; not timed."""

    def close(self) -> None:
        """Let go of everything."""


class Sender:
    """A producer's side. The clock of a round runs from its first ``send``."""

    def begin(self, step: int, count: int) -> None:
        """Get ready for a round of ``count`` messages; not timed."""

    def prepare(self, taps: Mapping[str, torch.Tensor]) -> Any:
        """Work out what `send` wants of these taps; not timed."""
        return taps

    def send(self, message: int, prepared: Any) -> None:
        """Send a message; it may still be on its way afterwards."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until all that was sent needs its sources no more."""

    def end(self) -> None:
        """End the round; not timed."""

    def landed(self, message: int) -> Mapping[str, torch.Tensor]:
        """Give what arrived of a message; of a one-sided peer only, and only of the last ones."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything."""


class Tool(Sender):
    """A program that makes its own messages and has its own clock: nobody checks its payload."""

    def seconds(self, count: int) -> float:
        """Give the seconds that ``count`` messages took."""
        raise NotImplementedError

    def latency(self, count: int) -> list[float]:
        """Give one way's microseconds; of a message, or an average."""
        raise NotImplementedError


class Peer(Protocol):
    """One way to move bytes."""

    name: str
    # One sentence for the report.
    about: str
    # No consumer's process: the producer writes memory of its own, and is trusted to say when.
    one_sided: bool
    # A `Tool`.
    unchecked: bool
    # `Sender.send` waits for the receive. Inside a pipeline's schedule that stands still for ever,
    # so its taps are sent, as its users send them, once the step's last backward is over.
    blocking: bool

    def absence(self, place: Place, producers: int) -> str | None:
        """Say why it cannot be measured here; None if it can."""
        ...

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Make the consumer's side. All sides are made at once: it may wait for the others."""
        ...

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Make a producer's side. Its tensors lie in the memory of ``sources``."""
        ...
