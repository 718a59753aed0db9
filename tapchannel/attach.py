"""The outbox's side of the attach handshake (drawn in `service`)."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from .descriptor import (
    NONCE_BYTES,
    Challenge,
    Hello,
    Offer,
    checked_plan,
    proof,
    proven,
)
from .dialing import Again, dial, unusable
from .error_text import printable
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
from .sockets import Descriptor, bear_silence
from .speed import Speed, SpeedCheck, checked
from .stores import Rendezvous
from .targets import targets_of
from .transport import ucx_context
from .transport.base import Adopted, Adoption, Transport, own_device
from .transport.select import TRANSPORTS, Asked, faster
from .transport.ucx import Ucx
from .wire import CHALLENGE, HELLO, LIVE, OFFER, READY, REFUSAL, Fields, receive_frame, send_frame

log = logging.getLogger("tapchannel.attach")
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
    peer_timeout: float
    secret: bytes | None = field(repr=False)
    speed: SpeedCheck | None = None


@dataclass(frozen=True, slots=True)
class Attachment:
    """A live attach: local handles, and what the mailbox said of itself."""

    offer: Offer
    cells: tuple[Cell, ...]
    adopted: Adopted
    transport: Transport
    refused: dict[str, str]
    device: Device
    link: socket.socket
    speed: Speed | None


def attach(place: Rendezvous, request: Request, limit: float) -> Attachment:
    """Find the mailbox and attach to it.

    Blocks:     until attached, refused, or ``limit`` seconds have passed.
    On failure: nothing stays mapped or open, on either side.

    Raises:
        AttachTimeout: no mailbox was there in time, or it never let this lane in.
        PlanMismatchError, AttachError, TransportUnavailable, UsageError: it refused, and said why.
    """
    checked_plan(request.plan)
    asked = Asked(request.transport)
    began = time.monotonic()
    last = "no mailbox has published its address yet"
    while True:
        try:
            addresses = place.lookup()
            if addresses is not None:
                return _attempt(addresses, request, asked, began + limit)
        except Again as reason:
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


def _attempt(
    addresses: Sequence[str], request: Request, asked: Asked, deadline: float
) -> Attachment:
    """Attach over the first address that somebody answers at: a Unix socket's comes first."""
    last = deadline
    deadline = min(last, time.monotonic() + _ATTEMPT_S)
    unanswered: list[Again] = []
    for number, address in enumerate(addresses):
        deadline = min(last, deadline + asked.look(address.startswith("unix://")))
        share = (deadline - time.monotonic()) / (len(addresses) - number)
        try:
            link = dial(address, max(0.0, share))
        except Again as reason:
            unanswered.append(reason)
            continue
        with ExitStack() as held:
            held.enter_context(link)
            try:
                attached = _handshake(link, request, asked, deadline)
            except TimeoutError as error:
                raise Again(f"{address}: {error}", ours=True) from error
            except (ConnectionError, BlockingIOError) as error:
                raise Again(f"{address}: {error}") from error
            except OSError as error:
                raise unusable(address, error) from error
            held.pop_all()
            return attached
    told = "; ".join(map(str, unanswered))
    raise Again(told, ours=any(reason.ours for reason in unanswered))


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
    names = asked.names(link.family == socket.AF_UNIX)
    send_frame(link, HELLO, _hello(request, names, challenge, nonce).body())
    fields, fds = receive_frame(link, deadline, (OFFER, REFUSAL))
    with ExitStack() as received:
        handles = [received.enter_context(Descriptor(fd)) for fd in fds]
        _raise_refusal(fields, request)
        offer = Offer.parse(fields)
        if request.secret is not None and not proven(
            proof(request.secret, "mailbox", challenge, nonce, request.rank), offer.proof
        ):
            raise AttachError("mailbox does not know the job secret", channel=request.name)
        if offer.transport not in names:
            raise ProtocolError(
                "mailbox offers a transport that was not asked for",
                seen=repr(offer.transport),
                expected=", ".join(names),
            )
        refused = faster({**offer.refused, **asked.refused}, offer.transport)
        attached = _map(link, request, deadline, challenge, offer, handles, refused)
    if attached.adopted.slow or asked.failed:
        _warn(request, attached)
    return attached


def _hello(request: Request, names: tuple[str, ...], challenge: Challenge, nonce: bytes) -> Hello:
    secret = request.secret
    return Hello(
        request.name,
        request.rank,
        os.getpid(),
        socket.gethostname()[:255],
        nonce,
        request.plan.to_json(),
        request.claimed,
        names,
        ucx_context.label() if Ucx.name in names else "",
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
    """Take what was offered, write the self-test, wait for "live"."""
    cells = _checked_cells(request, offer)
    transport = TRANSPORTS[offer.transport]
    device = own_device(offer, request.device)
    fds = [handle.take() for handle in handles]
    limits = len(cells), request.peer_timeout
    try:
        adopted = transport.adopt(Adoption(offer, fds, device, challenge.mailbox_id, *limits))
        try:
            # Before the self-test, whose bytes ucx writes over.
            measure = partial(adopted.measure, offer.probe_offset)
            lane = request.name, request.rank, transport.name
            speed = checked(request.speed, *lane, measure, adopted.limit)
            adopted.probe(offer.probe_offset, offer.probe)
            send_frame(link, READY, adopted.ready)
            _expect(link, deadline, request, (LIVE, REFUSAL))
        except BaseException:
            adopted.end()
            raise
    except TransportUnavailable as error:
        _say_why(link, error)
        raise
    link.settimeout(None)
    bear_silence(link, request.peer_timeout)
    return Attachment(offer, cells, adopted, transport, refused, device, link, speed)


def _warn(request: Request, attached: Attachment) -> None:
    """Say that the lane is not by the fastest wire, and why: nobody is to be slow unknowingly."""
    offer, adopted = attached.offer, attached.adopted
    how = offer.transport
    if adopted.slow:
        how = f"{adopted.slow}, measured at {adopted.measure(offer.probe_offset):.2f} GB/s"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in attached.refused.items())
    log.warning(
        "channel %r: rank %d pushes to host %s by %s, since nothing faster serves this pair (%s)",
        *(request.name, request.rank, printable(offer.host), how),
        printable(reasons) or f"transport={request.transport!r} was asked for",
    )


def _say_why(link: socket.socket, error: TransportUnavailable) -> None:
    what = "outbox cannot use what the mailbox offers"
    refusal = Refusal("TransportUnavailable", what, str(error), "", False)
    try:
        send_frame(link, REFUSAL, refusal.body())
    except OSError:  # the mailbox refused first, and has gone
        return


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
        raise Again(f"refused: {refusal.what}: {refusal.reason}")
    raise refusal.as_error(request.name, request.rank)
