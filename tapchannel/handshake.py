"""The mailbox's side of one attach handshake (drawn in `service`)."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from . import _native
from .assembly import Assembled, Wanted
from .descriptor import (
    NONCE_BYTES,
    PROBE_BYTES,
    PROBE_STRIDE,
    Challenge,
    Hello,
    Offer,
    proof,
    proven,
)
from .errors import TransportUnavailable
from .plan import Lane
from .plan_check import mismatch_rows
from .refusal import Refusal
from .sockets import bear_silence, peer_pid, peer_pidfd
from .transport.base import LaneOffer, Transport
from .wire import CHALLENGE, HELLO, LIVE, OFFER, READY, REFUSAL, Fields, receive_frame, send_frame

# For the words of this life to stand in the control block of an outbox on another host.
_SETTLE_LIMIT_S: Final = 5.0
_FREE, _TAKEN, _NOT_FENCED, _CLOSED, _REVOKED = range(5)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who holds, or last held, a lane."""

    pid: int
    host: str
    transport: str
    ordering: str


@dataclass(frozen=True, slots=True)
class Desk:
    """What all handshakes of a mailbox share."""

    made: Assembled
    wanted: Wanted
    drop_newest: bool
    secret: bytes | None = field(repr=False)
    peers: dict[int, Peer]
    lane_locks: Sequence[threading.Lock]


@dataclass(frozen=True, slots=True)
class _Terms:
    """What one handshake has settled on."""

    transport: Transport
    refused: dict[str, str]
    probe_offset: int
    probe: bytes


class Refused(Exception):
    """The handshake ended without an attach; both sides know why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.what}: {refusal.reason}" if refusal.reason else refusal.what)


class Handshake:
    """One peer, from its first byte to "live" or a refusal.

    Blocks:     until ``deadline`` (time.monotonic) at most.
    On failure: the lane is as it was.
    """

    def __init__(self, desk: Desk, link: socket.socket, deadline: float) -> None:
        self._desk = desk
        self._core: _native.Mailbox = desk.made.core
        self._link = link
        self._deadline = deadline

    def run(self) -> None:
        """Attach the peer to its lane.

        Raises:
            Refused: it was told why not, or it told us.
            ProtocolError, OSError: it does not speak the protocol, or went away.
        """
        desk = self._desk
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = Challenge(
            desk.made.mailbox_id, nonce, desk.wanted.name, desk.secret is not None
        )
        send_frame(self._link, CHALLENGE, challenge.body())
        hello = Hello.parse(self._receive(HELLO))
        lane = self._judge(challenge, hello)
        with desk.lane_locks[lane.index]:
            self._admit(challenge, hello, lane)

    def _judge(self, challenge: Challenge, hello: Hello) -> Lane:
        """Check proof, name, plan and rank; nothing of ours has been shown yet."""
        wanted, secret = self._desk.wanted, self._desk.secret
        if secret is not None and not proven(
            proof(secret, "outbox", challenge, hello.nonce, hello.rank), hello.proof
        ):
            raise self._refused(
                "AttachError",
                "job secret is missing or wrong",
                "the mailbox was given a secret",
                "give both sides the same secret=",
            )
        if hello.name != wanted.name:
            raise self._refused(
                "AttachError",
                f"channel {hello.name!r} is not served here",
                f"this is channel {wanted.name!r}",
                "use the mailbox's name=",
            )
        rows = mismatch_rows(wanted.plan, wanted.lanes, hello)
        if rows:
            raise self._refused(
                "PlanMismatchError",
                "ranks disagree on the tap plan",
                "",
                "build the plan from one configuration on all ranks",
                rows=rows,
            )
        return next(lane for lane in wanted.lanes if lane.rank == hello.rank)

    def _admit(self, challenge: Challenge, hello: Hello, lane: Lane) -> None:
        """Offer the lane, check the self-test, go live."""
        self._check_admission(lane, self._core.may_attach(lane.index))
        transport, refused = self._pick(hello)
        wanted = self._desk.wanted
        probe_offset = wanted.plan.arena_bytes(wanted.depth) + lane.index * PROBE_STRIDE
        probe = secrets.token_bytes(PROBE_BYTES)
        terms = _Terms(transport, refused, probe_offset, probe)
        offered = self._offered(transport, lane, hello)
        try:
            self._send_offer(challenge, hello, lane, terms, offered)
            self._check_ready(terms, offered)
            self._go_live(hello, lane, transport, offered)
        except BaseException:
            offered.end()
            raise

    def _offered(self, transport: Transport, lane: Lane, hello: Hello) -> LaneOffer:
        try:
            return self._desk.made.offer(transport, lane.index, hello)
        except TransportUnavailable as error:
            raise self._refused(
                "TransportUnavailable", error.what, "", "", refused=error.refused
            ) from error

    def _check_ready(self, terms: _Terms, offered: LaneOffer) -> None:
        fields = self._receive(READY, REFUSAL)
        if fields.kind == REFUSAL:
            raise Refused(Refusal.parse(fields))
        try:
            offered.meet(fields)
        except TransportUnavailable as error:
            raise self._refused(
                "TransportUnavailable", error.what, "", "", refused=error.refused
            ) from error
        # A copy that was reported as done may still not have arrived: trust what is read back.
        if offered.arena.read_probe(terms.probe_offset, PROBE_BYTES) != terms.probe:
            raise self._refused(
                "TransportUnavailable",
                "self-test of the mapped memory failed",
                "",
                "copies between the two sides are broken: run tapchannel doctor",
                refused={terms.transport.name: "the bytes that the outbox wrote did not arrive"},
            )

    def _pick(self, hello: Hello) -> tuple[Transport, dict[str, str]]:
        one_host = self._link.family == socket.AF_UNIX
        transport, refused = self._desk.made.served.pick(hello.transports, one_host)
        if transport is not None:
            return transport, refused
        raise self._refused(
            "TransportUnavailable",
            f"no transport serves rank {hello.rank} and this mailbox",
            "",
            "give both sides the same transport=, or leave it away",
            refused=refused,
        )

    def _go_live(self, hello: Hello, lane: Lane, transport: Transport, offered: LaneOffer) -> None:
        bear_silence(self._link, self._desk.wanted.peer_timeout)
        held, pidfd = os.dup(self._link.fileno()), peer_pidfd(self._link)
        # The kernel's word for the pid: the peer's own may be of another PID namespace.
        here = peer_pid(self._link) == os.getpid()
        admission = self._core.attach(lane.index, held, pidfd, here, offered.staged, offered.link)
        if admission != _FREE:
            for fd in (held, pidfd):
                if fd >= 0:
                    os.close(fd)
        self._check_admission(lane, admission)
        self._desk.peers[lane.index] = Peer(
            hello.pid, hello.host, transport.name, offered.ordering or transport.ordering
        )
        try:
            if offered.link is not None and not offered.link.settle(_SETTLE_LIMIT_S):
                raise ConnectionError(f"the outbox does not take words: {offered.link.failure}")
            send_frame(self._link, LIVE, {})
        except OSError:
            self._core.undo_attach(lane.index)
            raise

    def _send_offer(
        self, challenge: Challenge, hello: Hello, lane: Lane, terms: _Terms, offered: LaneOffer
    ) -> None:
        desk, secret = self._desk, self._desk.secret
        offer = Offer(
            transport=terms.transport.name,
            refused=terms.refused,
            lane=lane.index,
            shards=tuple(cell.shard for cell in lane.cells),
            depth=desk.wanted.depth,
            slot_bytes=desk.wanted.plan.slot_bytes,
            arena_bytes=desk.made.reservation.bytes,
            memory=offered.memory,
            device_uuid=offered.device_uuid,
            handle=offered.handle,
            drop_newest=desk.drop_newest,
            pid=os.getpid(),
            host=socket.gethostname()[:255],
            probe_offset=terms.probe_offset,
            probe=terms.probe,
            proof=proof(secret, "mailbox", challenge, hello.nonce, hello.rank) if secret else None,
            remote=offered.remote,
        )
        try:
            send_frame(self._link, OFFER, offer.body(), offered.fds)
        finally:
            for fd in offered.fds:
                os.close(fd)

    def _check_admission(self, lane: Lane, admission: int) -> None:
        peer = self._desk.peers.get(lane.index)
        holder = f"pid {peer.pid} on host {peer.host}" if peer else "a peer"
        if admission == _TAKEN:
            raise self._refused(
                "UsageError",
                f"lane of rank {lane.rank} has an outbox already",
                f"it is held by {holder}",
                "close that outbox first",
            )
        if admission == _NOT_FENCED:
            raise self._refused(
                "AttachError",
                f"lane of rank {lane.rank} is not fenced yet",
                f"copies of {holder} may still be in flight",
                "try again",
                again=True,
            )
        if admission == _REVOKED:
            raise self._refused(
                "AttachError",
                f"lane of rank {lane.rank} was revoked",
                "the mailbox lets nobody in on it",
                "attach again after Mailbox.reset()",
            )
        if admission == _CLOSED:
            raise self._refused("ChannelClosed", "mailbox is closed", "", "attach to its next life")

    def _receive(self, *kinds: int) -> Fields:
        fields, fds = receive_frame(self._link, self._deadline, kinds)
        for fd in fds:
            os.close(fd)
        return fields

    def _refused(
        self,
        error: str,
        what: str,
        reason: str,
        next_step: str,
        *,
        again: bool = False,
        rows: tuple[dict[str, object], ...] = (),
        refused: Mapping[str, str] | None = None,
    ) -> Refused:
        refusal = Refusal(error, what, reason, next_step, again, rows, refused or {})
        send_frame(self._link, REFUSAL, refusal.body())
        return Refused(refusal)
