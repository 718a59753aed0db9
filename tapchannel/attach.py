"""The outbox's side of the attach handshake (drawn in `service`)."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from . import _native, errors
from .descriptor import (
    NONCE_BYTES,
    Challenge,
    Hello,
    Offer,
    checked_plan,
    proof,
    proven,
)
from .errors import (
    AttachError,
    AttachTimeout,
    ConfigError,
    ProtocolError,
    TapChannelError,
    TransportUnavailable,
)
from .memory import Device
from .plan import Cell, TapPlan
from .refusal import Refusal
from .sockets import Descriptor, connect, other_user
from .stores import Rendezvous
from .targets import targets_of
from .transport.base import Transport
from .transport.select import TRANSPORTS, Asked, faster
from .wire import CHALLENGE, HELLO, LIVE, OFFER, READY, REFUSAL, Fields, receive_frame, send_frame

_RETRY_S: Final = 0.05
_ATTEMPT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """What an outbox asks for."""

    name: str
    plan: TapPlan
    rank: int
    claimed: tuple[str, ...] | None
    device: Device | None
    transport: str
    secret: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A live attach: local handles, and what the mailbox said of itself."""

    offer: Offer
    cells: tuple[Cell, ...]
    arena: _native.Arena
    wire: _native.Wire
    block: _native.ControlBlock
    transport: Transport
    refused: dict[str, str]
    device: Device
    link: socket.socket


class _Again(Exception):
    """This attempt failed for a reason that time may mend; ``ours``: by our own deadline."""

    def __init__(self, reason: str, *, ours: bool = False) -> None:
        super().__init__(reason)
        self.ours = ours


def attach(place: Rendezvous, request: Request, limit: float) -> Attachment:
    """Find the mailbox and attach to it.

    Blocks:     until attached, refused, or ``limit`` seconds have passed.
    On failure: nothing stays mapped or open, on either side.

    Raises:
        AttachTimeout: no mailbox was there in time, or it never let this lane in.
        PlanMismatchError, AttachError, TransportUnavailable, UsageError: it refused, and said why.
    """
    checked_plan(request.plan)
    asked = Asked.of(request.transport)
    began = time.monotonic()
    last = "no mailbox has published its address yet"
    while True:
        try:
            addresses = place.lookup()
            if addresses is not None:
                return _attempt(addresses[0], request, asked, began + limit)
        except _Again as reason:
            # Our own deadline ends the last attempt: what an earlier one was told says more.
            if not (reason.ours and limit <= time.monotonic() - began and "refused" in last):
                last = str(reason)
        except TapChannelError as error:
            if isinstance(error, TransportUnavailable) and asked.without(error.refused):
                continue
            error.channel, error.rank = error.channel or request.name, request.rank
            raise
        waited = time.monotonic() - began
        if waited >= limit:
            raise AttachTimeout(
                "outbox did not attach",
                channel=request.name,
                rank=request.rank,
                waited=waited,
                limit=limit,
                last_progress=last,
                seen=place.describe(),
                next_step="is the rank with the Mailbox running, with the same store and name?",
            )
        time.sleep(min(_RETRY_S, limit))


def _attempt(address: str, request: Request, asked: Asked, deadline: float) -> Attachment:
    deadline = min(deadline, time.monotonic() + _ATTEMPT_S)
    with ExitStack() as held:
        try:
            link = held.enter_context(connect(address, deadline - time.monotonic()))
            problem = other_user(link)
            if problem is not None:
                raise AttachError(
                    "mailbox belongs to another user",
                    reason=problem,
                    next_step="run both sides as one user, or use a store that others cannot write",
                )
            attached = _handshake(link, request, asked, deadline)
        except errors.TapChannelError:
            raise
        except (ConnectionError, FileNotFoundError, BlockingIOError) as error:
            raise _Again(f"{address}: {error}") from error
        except TimeoutError as error:
            raise _Again(f"{address}: {error}", ours=True) from error
        except OSError as error:
            raise AttachError(
                "mailbox's address cannot be used",
                seen=address,
                reason=str(error),
                next_step="name a socket path that both sides may open",
            ) from error
        held.pop_all()
        return attached


def _handshake(link: socket.socket, request: Request, asked: Asked, deadline: float) -> Attachment:
    fields = _expect(link, deadline, request, (CHALLENGE, REFUSAL))
    challenge = Challenge.parse(fields)
    nonce = secrets.token_bytes(NONCE_BYTES)
    if request.secret is not None and not challenge.secret:
        raise AttachError(
            "mailbox has no job secret, this outbox has one",
            channel=request.name,
            rank=request.rank,
            next_step="give both sides the same secret=",
        )
    send_frame(link, HELLO, _hello(request, asked, challenge, nonce).body())
    fields, fds = receive_frame(link, deadline, (OFFER, REFUSAL))
    with ExitStack() as received:
        handles = [received.enter_context(Descriptor(fd)) for fd in fds]
        _raise_refusal(fields, request)
        offer = Offer.parse(fields)
        if request.secret is not None and not proven(
            proof(request.secret, "mailbox", challenge, nonce, request.rank), offer.proof
        ):
            raise AttachError("mailbox does not know the job secret", channel=request.name)
        if offer.transport not in asked.names:
            raise ProtocolError(
                "mailbox offers a transport that was not asked for",
                seen=repr(offer.transport),
                expected=", ".join(asked.names),
            )
        refused = faster({**offer.refused, **asked.refused}, offer.transport)
        return _map(link, request, deadline, challenge, offer, handles, refused)


def _hello(request: Request, asked: Asked, challenge: Challenge, nonce: bytes) -> Hello:
    secret = request.secret
    return Hello(
        request.name,
        request.rank,
        os.getpid(),
        socket.gethostname()[:255],
        nonce,
        request.plan.to_json(),
        request.claimed,
        asked.names,
        proof(secret, "outbox", challenge, nonce, request.rank) if secret else None,
    )


def _map(
    link: socket.socket,
    request: Request,
    deadline: float,
    challenge: Challenge,
    offer: Offer,
    handles: Sequence[Descriptor],
    refused: dict[str, str],
) -> Attachment:
    """Map what was offered, write the self-test, wait for "live"."""
    if not handles:
        raise ProtocolError("offer came without the control block's descriptor")
    cells = _checked_cells(request, offer)
    block = _adopt_block(handles[0], offer, len(cells), challenge.mailbox_id)
    transport = TRANSPORTS[offer.transport]
    device = Device(None) if offer.memory == "host" else request.device or Device.parse("cuda")
    try:
        fds = [handle.take() for handle in handles[1:]]
        adopted = transport.adopt(offer, fds, device, challenge.mailbox_id)
        adopted.arena.write_probe(offer.probe_offset, offer.probe)
    except errors.TapChannelError as error:
        reply = Refusal(
            type(error).__name__, "outbox cannot map the mailbox", str(error), "", False
        )
        send_frame(link, REFUSAL, reply.body())
        raise
    send_frame(link, READY, {})
    _expect(link, deadline, request, (LIVE, REFUSAL))
    link.settimeout(None)
    return Attachment(
        offer, cells, adopted.arena, adopted.wire, block, transport, refused, device, link
    )


def _adopt_block(
    handle: Descriptor, offer: Offer, cells: int, mailbox_id: bytes
) -> _native.ControlBlock:
    try:
        return _native.ControlBlock.adopt(handle.take(), offer.lane, offer.depth, cells, mailbox_id)
    except (OSError, ValueError) as error:
        raise ProtocolError(
            "offered control block is not what it must be", detail=str(error)
        ) from error


def _checked_cells(request: Request, offer: Offer) -> tuple[Cell, ...]:
    """Rebuild this lane's cells from this side's own plan; the mailbox's sizes must agree."""
    try:
        cells = request.plan.cells(offer.shards)
    except ConfigError as error:
        raise ProtocolError("mailbox offers cells that the plan does not have") from error
    if offer.slot_bytes != request.plan.slot_bytes:
        raise ProtocolError(
            "mailbox's slot has another size than the plan's",
            channel=request.name,
            seen=f"{offer.slot_bytes} B",
            expected=f"{request.plan.slot_bytes} B",
        )
    targets_of(cells)  # two shares of one tap in a lane are refused here, before anything is mapped
    return cells


def _expect(
    link: socket.socket, deadline: float, request: Request, kinds: tuple[int, ...]
) -> Fields:
    fields, fds = receive_frame(link, deadline, kinds)
    for fd in fds:
        os.close(fd)
    _raise_refusal(fields, request)
    return fields


def _raise_refusal(fields: Fields, request: Request) -> None:
    if fields.kind != REFUSAL:
        return
    refusal = Refusal.parse(fields)
    if refusal.again:
        raise _Again(f"refused: {refusal.what}: {refusal.reason}")
    raise refusal.as_error(request.name, request.rank)
