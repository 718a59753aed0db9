"""The mailbox service: a Unix socket on which outboxes attach.

::

    mailbox                                   outbox
       │ ── challenge: id, nonce ───────────────▶ │   after the peer's uid was checked
       │ ◀── hello: rank, plan, proof ─────────── │
       │ ── offer: cells, memory; descriptors ──▶ │   only to a proven peer whose plan agrees
       │ ◀── ready: self-test written ─────────── │
       │ ── live ───────────────────────────────▶ │   after the self-test was read back

The socket stays open: its end is the first sign of the peer's death, on both sides. Nothing is
unpickled, no length is believed, each handshake has a deadline and their number is bounded.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from . import _native
from .descriptor import (
    NONCE_BYTES,
    PROBE_BYTES,
    PROBE_STRIDE,
    Challenge,
    Hello,
    Offer,
    Refusal,
    proof,
    proven,
)
from .errors import ConfigError, PlanMismatchError, TapChannelError
from .memory import Reservation
from .plan import Lane, TapPlan
from .plan_check import mismatch_rows
from .transport.base import Transport
from .wire import CHALLENGE, HELLO, LIVE, OFFER, READY, REFUSAL, receive_frame, send_frame

HANDSHAKE_LIMIT_S: Final = 10.0
MAX_HANDSHAKES: Final = 64
_FREE, _TAKEN, _NOT_FENCED, _CLOSED = range(4)
_SO_PEERPIDFD: Final = 77
log = logging.getLogger("tapchannel.service")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the service tells outboxes of its mailbox."""

    name: str
    mailbox_id: bytes
    plan: TapPlan
    lanes: tuple[Lane, ...]
    depth: int
    transport: Transport
    reservation: Reservation
    drop_newest: bool
    secret: bytes | None


@dataclass(slots=True)
class Peer:
    """Who holds, or last held, a lane."""

    pid: int
    host: str


@dataclass(slots=True)
class _Refuse(Exception):  # noqa: N818 - control flow of one handshake, never leaves this module
    refusal: Refusal = field(default_factory=lambda: Refusal("AttachError", "", "", "", False))


class MailboxService:
    """Accept outboxes for one mailbox, each handshake on a thread of its own."""

    def __init__(self, core: _native.Mailbox, facts: Facts, socket_path: str | None) -> None:
        self._core = core
        self._facts = facts
        self._folder = None if socket_path else tempfile.mkdtemp(prefix="tapchannel-")
        self._path = socket_path or f"{self._folder}/mailbox.sock"
        self._pid = os.getpid()
        self.peers: dict[int, Peer] = {}
        self.refusals: list[str] = []
        self._lane_locks = [threading.Lock() for _ in facts.lanes]
        self._room = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._listener = _listen(self._path)
        _native.close_in_child(self._listener.fileno())
        self._thread = threading.Thread(target=self._accept, name="tapchannel-service", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where outboxes connect."""
        return f"unix://{self._path}"

    def close(self) -> None:
        """Stop listening and remove the socket; attached lanes stay. Twice is fine."""
        if os.getpid() != self._pid or self._listener.fileno() < 0:
            return
        _native.keep_in_child(self._listener.fileno())
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone would not
        except OSError:
            log.debug("listening socket was down already")
        self._thread.join(HANDSHAKE_LIMIT_S)
        self._listener.close()
        Path(self._path).unlink(missing_ok=True)
        if self._folder is not None:
            Path(self._folder).rmdir()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._room.acquire(blocking=False):
                link.close()  # the outbox tries again until its own deadline
                continue
            threading.Thread(
                target=self._serve, args=(link,), name="tapchannel-handshake", daemon=True
            ).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            with link:
                self._handshake(link, time.monotonic() + HANDSHAKE_LIMIT_S)
        except _Refuse as refused:
            self._note(f"{refused.refusal.what}: {refused.refusal.reason}")
        except (TapChannelError, OSError, ValueError) as error:
            self._note(str(error))
        finally:
            self._room.release()

    def _note(self, text: str) -> None:
        log.warning("channel %r refused a peer: %s", self._facts.name, text)
        self.refusals = [*self.refusals[-15:], text]

    def _handshake(self, link: socket.socket, deadline: float) -> None:
        facts = self._facts
        link.settimeout(HANDSHAKE_LIMIT_S)
        uid = _peer_uid(link)
        if uid not in (os.geteuid(), 0):
            raise ConfigError("peer belongs to another user", seen=f"uid {uid}", expected=os.geteuid())
        pidfd = _peer_pidfd(link)
        try:
            nonce = secrets.token_bytes(NONCE_BYTES)
            challenge = Challenge(facts.mailbox_id, nonce, facts.name, facts.secret is not None)
            send_frame(link, CHALLENGE, challenge.body())
            fields, fds = receive_frame(link, deadline, (HELLO,))
            for fd in fds:
                os.close(fd)
            hello = Hello.parse(fields)
            lane = self._judge(link, challenge, hello)
            with self._lane_locks[lane.index]:
                pidfd = self._admit(link, deadline, challenge, hello, lane, pidfd)
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def _judge(self, link: socket.socket, challenge: Challenge, hello: Hello) -> Lane:
        """Check proof, name, plan and rank; nothing of ours has been shown yet."""
        facts = self._facts
        if facts.secret is not None and not proven(
            proof(facts.secret, "outbox", challenge, hello.nonce, hello.rank), hello.proof
        ):
            self._refuse(link, "AttachError", "job secret is missing or wrong",
                         "the mailbox was given a secret", "give both sides the same secret=")  # fmt: skip
        if hello.name != facts.name:
            self._refuse(link, "AttachError", f"channel {hello.name!r} is not served here",
                         f"this is channel {facts.name!r}", "use the mailbox's name=")  # fmt: skip
        rows = mismatch_rows(facts.plan, facts.lanes, hello)
        if rows:
            self._refuse(link, "PlanMismatchError", "ranks disagree on the tap plan", "",
                         "build the plan from one configuration on all ranks", rows=rows)  # fmt: skip
        return next(lane for lane in facts.lanes if lane.rank == hello.rank)

    def _admit(
        self,
        link: socket.socket,
        deadline: float,
        challenge: Challenge,
        hello: Hello,
        lane: Lane,
        pidfd: int,
    ) -> int:
        """Offer the lane, check the self-test, go live. Gives the pidfd that is still ours."""
        admission = self._core.may_attach(lane.index)
        if admission != _FREE:
            self._turn_away(link, lane, admission)
        probe_offset = self._facts.depth * self._facts.plan.slot_bytes + lane.index * PROBE_STRIDE
        probe = secrets.token_bytes(PROBE_BYTES)
        self._offer(link, challenge, hello, lane, probe_offset, probe)
        fields, fds = receive_frame(link, deadline, (READY, REFUSAL))
        for fd in fds:
            os.close(fd)
        if fields.kind == REFUSAL:
            raise _Refuse(Refusal.parse(fields))
        # Bytes that a copy reported as written may still not be there: go live only on what was read back.
        if self._facts.reservation.arena.read_probe(probe_offset, PROBE_BYTES) != probe:
            self._refuse(link, "TransportUnavailable", "self-test of the mapped memory failed",
                         "the bytes that the outbox wrote did not arrive",
                         "peer copies between these two GPUs are broken: tapchannel doctor")  # fmt: skip
        held = os.dup(link.fileno())
        admission = self._core.attach(lane.index, held, pidfd, hello.pid == os.getpid())
        if admission != _FREE:
            os.close(held)
            self._turn_away(link, lane, admission)
        self.peers[lane.index] = Peer(hello.pid, hello.host)
        try:
            send_frame(link, LIVE, {})
        except OSError:
            self._core.revoke(lane.index)
            raise
        return -1

    def _offer(
        self,
        link: socket.socket,
        challenge: Challenge,
        hello: Hello,
        lane: Lane,
        probe_offset: int,
        probe: bytes,
    ) -> None:
        facts = self._facts
        export = facts.transport.export(facts.reservation)
        block_fd = self._core.block_fd(lane.index)
        try:
            own = proof(facts.secret, "mailbox", challenge, hello.nonce, hello.rank) if facts.secret else None
            offer = Offer(
                lane=lane.index,
                shards=tuple(cell.shard for cell in lane.cells),
                depth=facts.depth,
                slot_bytes=facts.plan.slot_bytes,
                arena_bytes=facts.reservation.bytes,
                memory=facts.reservation.memory,
                device_uuid=export.device_uuid,
                handle=export.handle,
                drop_newest=facts.drop_newest,
                pid=os.getpid(),
                host=socket.gethostname(),
                probe_offset=probe_offset,
                probe=probe,
                proof=own,
            )
            send_frame(link, OFFER, offer.body(), (block_fd, *export.fds))
        finally:
            for fd in (block_fd, *export.fds):
                os.close(fd)

    def _turn_away(self, link: socket.socket, lane: Lane, admission: int) -> None:
        peer = self.peers.get(lane.index)
        holder = f"pid {peer.pid} on host {peer.host}" if peer else "a peer"
        if admission == _TAKEN:
            self._refuse(link, "UsageError", f"lane of rank {lane.rank} has an outbox already",
                         f"it is held by {holder}", "close that outbox first", again=False)  # fmt: skip
        if admission == _NOT_FENCED:
            self._refuse(link, "AttachError", f"lane of rank {lane.rank} is not fenced yet",
                         f"copies of {holder} may still be in flight", "try again", again=True)  # fmt: skip
        self._refuse(link, "ChannelClosed", "mailbox is closed", "", "attach to its next life")

    def _refuse(
        self,
        link: socket.socket,
        error: str,
        what: str,
        reason: str,
        next_step: str,
        *,
        again: bool = False,
        rows: tuple[dict[str, object], ...] = (),
    ) -> None:
        refusal = Refusal(error, what, reason, next_step, again, rows)
        send_frame(link, REFUSAL, refusal.body())
        raise _Refuse(refusal)


def _listen(path: str) -> socket.socket:
    if len(os.fsencode(path)) > 107:
        raise ConfigError("socket path is too long", seen=path, expected="at most 107 bytes")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).exists() and stat.S_ISSOCK(os.stat(path).st_mode):
            _remove_if_dead(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError("mailbox cannot listen", seen=path, detail=str(error)) from error
    return listener


def _remove_if_dead(path: str) -> None:
    """Remove the socket that a killed mailbox left behind; one that answers stays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()


def _peer_uid(link: socket.socket) -> int:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def _peer_pidfd(link: socket.socket) -> int:
    """Give a pidfd of the peer: it turns readable once the process's files are closed. -1: none."""
    try:
        return link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # a kernel before 6.5
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = struct.unpack("3i", credentials)[0]
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1


