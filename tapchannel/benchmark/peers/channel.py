"""tapchannel itself."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import torch

from ... import Lease, Mailbox, Outbox
from ...errors import WouldBlock
from ...passes import Pass
from ...targets import current_stream
from ...tensors import rows_of
from ..payload import Sources
from ..peer import Meeting, Receiver, Sender
from ..traffic import Place, Traffic

_LIMIT_S: Final = 60.0
_QUEUE: Final = 4096


class ChannelReceiver(Receiver):
    """A mailbox."""

    def __init__(self, traffic: Traffic, meeting: Meeting, transport: str) -> None:
        far: dict[str, Any] = {"listen": "tcp://127.0.0.1", "allow_no_secret": True}
        self._mailbox = Mailbox(
            traffic.plan(),
            traffic.sources(),
            depth=traffic.depth,
            device=traffic.place.consumer,
            store=meeting.store,
            timeout=_LIMIT_S,
            transport=transport,
            memory="ipc" if transport == "ucx" and traffic.place.on_gpu else "auto",
            **(far if transport == "ucx" else {}),
        )
        self._wait = traffic.wait
        self._rows = traffic.taps[0].rows if self._wait == "stream" else None
        self._pass: Pass | None = None
        self._leases: dict[int, Lease] = {}

    def begin(self, step: int, count: int) -> None:
        """Open a pass."""
        self._pass = self._mailbox.open_pass(step, count)

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Wait for the lease."""
        lease = self._mailbox.recv(message, self._wait, self._rows)
        self._leases[message] = lease
        return lease

    def receive_awake(self, message: int) -> Mapping[str, torch.Tensor]:
        """Ask for the lease until it is there."""
        while True:
            with contextlib.suppress(WouldBlock):
                lease = self._leases[message] = self._mailbox.try_recv(message)
                return lease

    def release(self, message: int) -> None:
        """Give the slot back."""
        self._leases.pop(message).release()

    def end(self) -> None:
        """Close the pass."""
        if self._pass is not None:
            self._pass.close()

    def close(self) -> None:
        """Close the mailbox."""
        self._mailbox.close()


class ChannelSender(Sender):
    """An outbox."""

    def __init__(self, traffic: Traffic, rank: int, meeting: Meeting, transport: str) -> None:
        self.outbox = Outbox(
            traffic.plan(),
            rank,
            store=meeting.store,
            device=traffic.place.producer(rank),
            timeout=_LIMIT_S,
            queue_limit=_QUEUE,
            transport=transport,
        )
        self._pass: Pass | None = None

    def begin(self, step: int, count: int) -> None:
        """Open a pass."""
        self._pass = self.outbox.open_pass(step, count)

    def send(self, message: int, prepared: Any) -> None:
        """Push every tap."""
        push = self.outbox.push
        for name, tensor in prepared.items():
            push(message, name, tensor)

    def drain(self) -> None:
        """Flush."""
        self.outbox.flush()

    def end(self) -> None:
        """Close the pass."""
        if self._pass is not None:
            self._pass.close()

    def close(self) -> None:
        """Close the outbox."""
        self.outbox.close()


class NativeSender(ChannelSender):
    """Calls the native part of a push alone, with its arguments worked out beforehand."""

    def prepare(self, taps: Mapping[str, torch.Tensor]) -> Any:
        """Work out the arguments of every call."""
        targets, ordinal = self.outbox._targets, self.outbox._ordinal  # pyright: ignore[reportPrivateUsage]
        stream = current_stream(ordinal)
        calls: list[tuple[Any, ...]] = []
        for name, tensor in taps.items():
            index, _, width, row_bytes, _ = targets[name]
            owner, address, rows, pitch, version = rows_of(tensor, width, row_bytes)
            calls.append((index, address, rows, pitch, 0, stream, owner.shape, owner, version))
        return calls

    def send(self, message: int, prepared: Any) -> None:
        """Make the calls."""
        push: Any = self.outbox._core.push  # pyright: ignore[reportPrivateUsage]
        for call in prepared:
            push(message, *call, None)


class Channel:
    """A mailbox in one process, an outbox in each of the others."""

    one_sided = unchecked = blocking = False

    def __init__(
        self,
        name: str,
        about: str,
        transport: str = "auto",
        sender: type[ChannelSender] = ChannelSender,
    ) -> None:
        self.name, self.about = name, about
        self._transport, self._sender = transport, sender

    def absence(self, place: Place, producers: int) -> str | None:
        """Say why the transport cannot be had."""
        from ...transport.select import TRANSPORTS

        transport = TRANSPORTS.get(self._transport)
        return transport.absence() if transport is not None else None

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Make the mailbox."""
        return ChannelReceiver(traffic, meeting, self._transport)

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Attach to it."""
        return self._sender(traffic, rank, meeting, self._transport)


PEERS: Final = (
    Channel("tapchannel", "push to recv, by the transport that it picks"),
    Channel("tapchannel native", "the native part of push alone", sender=NativeSender),
    Channel("tapchannel ucx", "push to recv by transport ucx, over loopback", "ucx"),
    Channel("tapchannel host_staged", "push to recv by host_staged", "host_staged"),
)
