"""What ``--extra-peers`` loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from tapchannel.benchmark.payload import Sources
from tapchannel.benchmark.peer import Meeting, Receiver, Sender
from tapchannel.benchmark.peers.staging import Staging, StagingReceiver, StagingSender
from tapchannel.benchmark.traffic import Place, Traffic

LATE = 3  # messages that go well before it goes wrong


class FlippingReceiver(StagingReceiver):
    """Delivers each message with one bit of it flipped."""

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Flip it."""
        landed = super().receive(message)
        for tap in landed.values():
            tap.view(torch.int16)[-1, -1] ^= 1
        return landed


class StaleSender(StagingSender):
    """Sends, but for the first, the message before the one that is asked for."""

    before: Any = None

    def send(self, message: int, prepared: Any) -> None:
        """Send the one before."""
        super().send(message, prepared if self.before is None else self.before)
        self.before = prepared


class RaisingSender(StagingSender):
    """Raises in mid-round."""

    def send(self, message: int, prepared: Any) -> None:
        """Send the first ones."""
        if message == LATE:
            raise OSError("the wire is cut")
        super().send(message, prepared)


class DyingSender(StagingSender):
    """Ends its process in mid-round."""

    def send(self, message: int, prepared: Any) -> None:
        """Send the first ones."""
        if message == LATE:
            os._exit(7)
        super().send(message, prepared)


class Odd(Staging):
    """Staging with one of its sides exchanged."""

    def __init__(
        self,
        name: str,
        receiver: type[StagingReceiver] = StagingReceiver,
        sender: type[StagingSender] = StagingSender,
    ) -> None:
        super().__init__(name, "goes wrong", 2)
        self._receiver, self._sender = receiver, sender

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Make the consumer's side."""
        return self._receiver(traffic, meeting, 2)

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Make a producer's side."""
        return self._sender(traffic, rank, meeting, 2)


class NotHere(Odd):
    """Cannot be had."""

    def absence(self, place: Place, producers: int) -> str | None:
        """Say why."""
        return "it was never made"


PEERS = (
    Odd("flips a bit", receiver=FlippingReceiver),
    Odd("sends the one before", sender=StaleSender),
    Odd("raises", sender=RaisingSender),
    Odd("dies", sender=DyingSender),
    NotHere("is not here"),
)
