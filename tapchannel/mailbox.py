"""Mailbox: the consumer's side. Slots in its own memory, credit, waits, leases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from . import _native, lifetime
from .arrivals import Shares
from .assembly import Wanted, assemble
from .descriptor import MAX_DEPTH
from .errors import UsageError
from .keys import MAX_EPOCH, MAX_MICROBATCHES, Key, checked_int
from .lanes import lane_of
from .lease import Granted, Lease
from .listening import where_to_listen
from .memory import MEMORY_CHOICES, Device, forget_local
from .passes import Pass, in_print
from .plan import Lane, Sources, TapPlan
from .readiness import wait_ready
from .reports import RawEvent, all_lane_facts, mailbox_events, mailbox_facts
from .role import Role
from .service import MailboxService
from .settings import (
    PEER_TIMEOUT_S,
    checked_choice,
    checked_peer_timeout,
    checked_seconds,
    reading_stream,
    secret_bytes,
)
from .stores import Rendezvous, own_address, own_listen, rendezvous
from .verdicts import Scene, finder, wire_finder

_TRY, _HOST, _STREAM = range(3)
_MODES: Final = {"host": _HOST, "stream": _STREAM}
_WHEN_FULL: Final = ("wait", "drop_newest")


class Mailbox(Role[_native.Mailbox]):
    """Receive the taps of a plan from its producers.

    Constructing it reserves the slots, listens, and publishes the address; it never waits for
    producers (`wait_ready` does). Close it, or use it as a context manager.

    Parameters
    ----------
    plan, sources
        The tap plan, and which producer rank pushes which taps (or `Shard` of taps).
    depth
        Slots. One microbatch each; a slot that autograd still reads counts as taken.
    device
        ``"cpu"`` or ``"cuda:N"``: where the slots lie and the draft trains.
    store, name
        Where outboxes find it: a ``torch.distributed.Store``, ``"file:///folder"``,
        ``"unix:///path.sock"``, ``"tcp://host:port"`` of a TCPStore, or, without any store, a
        `tapchannel.stores.DirectAddress`; and the channel's name.
    when_full
        What becomes of a push without credit. ``"wait"``: it is queued. ``"drop_newest"``: it is
        dropped and counted, and `Lease.missing` names its tap.
    timeout
        Seconds; the deadline of every wait that is not given its own.
    secret
        Job secret; outboxes must prove that they know it.
    listen, allow_no_secret
        Where outboxes of other hosts attach: ``"tcp://HOST"``, ``:PORT`` or ``:LOW-HIGH`` after it
        if the kernel shall not pick; HOST an address, name, interface or ``*``, all of them. None:
        this host only, but ``*`` with transport ``"ucx"``. It takes a secret, unless
        ``allow_no_secret=True`` lets in anybody who reaches the port.
    memory
        GPU memory: ``"auto"``, ``"vmm"`` or ``"ipc"`` (see `info`).
    peer_timeout
        Between hosts: seconds without any answer after which a producer counts as lost.

    Raises:
        ConfigError: a setting is impossible, or the slots do not fit (with the arithmetic).
        PlanMismatchError: ``sources`` does not cover the plan exactly once.
        TransportUnavailable: no transport serves the device; the text says why.
    """

    def __init__(
        self,
        plan: TapPlan,
        sources: Sources,
        *,
        depth: int = 4,
        device: object = "cpu",
        store: object,
        name: str = "default",
        when_full: str = "wait",
        timeout: float = 120.0,
        transport: str = "auto",
        secret: str | bytes | None = None,
        memory: str = "auto",
        peer_timeout: float = PEER_TIMEOUT_S,
        listen: str | None = None,
        allow_no_secret: bool = False,
    ) -> None:
        drop_newest = checked_choice("when_full", when_full, _WHEN_FULL) == "drop_newest"
        checked_choice("memory", memory, MEMORY_CHOICES)
        checked_int("depth", depth, 1, MAX_DEPTH)
        self._timeout = checked_seconds("timeout", timeout)
        super().__init__(name)
        self._plan, self._lanes = plan, plan.lanes(sources)
        place = rendezvous(store, name)
        known = secret_bytes(secret)
        where = Device.parse(device)
        at = own_listen(store, listen)
        places = where_to_listen(own_address(store), at, transport, known, allow_no_secret)
        limits = self._check, checked_peer_timeout(peer_timeout), bool(places.spots)
        wanted = Wanted(name, plan, self._lanes, depth, where, transport, memory, *limits)
        self._made = assemble(wanted)
        self._core = self._made.core
        self._service = MailboxService(self._made, wanted, drop_newest, known, places)
        self._shares = Shares(plan, self._lanes, wire_finder(self._service.peers))
        self._scene = Scene(name, depth, finder(self._lanes, self._service.peers), "producer")
        self._go_public(place)

    def _go_public(self, place: Rendezvous) -> None:
        """Publish the addresses, last of all; where that fails nothing stays open."""
        self._closed = False
        lifetime.close_at_exit(self)
        try:
            place.publish(self._service.addresses)
        except BaseException:
            self.close()
            raise

    # ---- passes

    def open_pass(self, step: int, microbatches: int) -> Pass:
        """Open the pass that all sides call ``step``, and grant its first microbatches (step 1).

        Blocks:     never. Slots still read from the pass before are granted as they come back.

        Raises:
            UsageError: a pass is open, or ``step`` is not larger than the last one.
            PeerLostError: a producer died and has not attached again.
            TapChannelError: an earlier pass failed and was neither left nor aborted.
        """
        return self._open(step, microbatches)

    def _close_pass(self) -> None:
        self._raise(self._core.close_pass(self._timeout), f"closing pass {self._step}")

    def reset(self) -> None:
        """Begin a new epoch: end the pass, count passes anew, let nothing of the old one match.

        Blocks:     never. Open leases stay valid; their slots are granted once they are back.
        """
        if self.epoch >= MAX_EPOCH:
            raise UsageError(
                "reset: this mailbox has had all its epochs", next_step="make a new one"
            )
        self._raise(self._core.reset(), "reset")

    # ---- receiving

    def recv(
        self,
        microbatch: int,
        wait: str = "stream",
        rows: int | None = None,
        timeout: float | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> Lease:
        """Give the lease of a microbatch (steps 7 and 8).

        Blocks:     ``wait="stream"``: the host until every producer has announced its rows or, with
                    ``rows`` given, not at all (by host_staged: until the payload is in host
                    memory); the stream until the payload is there.
                    ``wait="host"``, and in host memory: the host until the payload is there.
                    At most ``timeout`` seconds.
        Ordering:   what is queued on the stream after this call sees the pushed bytes.
        On failure: no slot is taken. A wait that failed fails the pass: it, and all calls after
                    it, raise until the pass is left, `abort` or `reset`.

        Raises:
            StampTimeout, CreditTimeout, AttachTimeout: the deadline passed.
            PeerLostError, PassAborted, ProtocolError: the microbatch will not come.
            UsageError: it was received already, lies outside the pass, needs a slot that is held,
                or the stream is being captured.
        """
        checked_choice("wait", wait, tuple(_MODES))
        if rows is not None:
            checked_int("rows", rows, 0, self._plan.max_rows)
        limit = self._timeout if timeout is None else checked_seconds("timeout", timeout)
        return self._lease(microbatch, _MODES[wait], rows, limit, stream)

    def try_recv(self, microbatch: int) -> Lease:
        """Give the lease of a microbatch that has landed.

        Blocks:     never. Raises WouldBlock where not all of it has landed; nothing has changed.
        """
        return self._lease(microbatch, _TRY, None, 0.0, None)

    def _lease(
        self,
        microbatch: int,
        mode: int,
        rows: int | None,
        limit: float,
        stream: torch.cuda.Stream | None,
    ) -> Lease:
        checked_int("microbatch", microbatch, 0, MAX_MICROBATCHES - 1)
        self._unless_forked(f"recv({microbatch})")
        stream, handle = reading_stream(stream, self._made.reservation.device.ordinal)
        mode = _HOST if self._check and mode == _STREAM else mode
        verdict, number, capsule = self._core.recv(
            microbatch, mode, handle, limit, -1 if rows is None else rows
        )
        self._raise(verdict, f"recv({microbatch})")
        key = Key(self._core.epoch, self._step, microbatch)
        checks = self._error, self._timeout, stream, self._name
        lease = Lease(Granted(self._core, number, capsule, key, rows, *checks), self._shares)
        if self._check:
            lease.verify()
        return lease

    # ---- peers

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every producer has attached.

        Blocks:     until then, at most ``timeout`` seconds.

        Raises:
            AttachTimeout, ChannelClosed: some did not, and they are listed; or it was closed.
        """
        limit = self._timeout if timeout is None else checked_seconds("timeout", timeout)
        wait_ready(self._name, self._lanes, self._is_attached, self._service.refusals, limit)

    def revoke(self, rank: int, reason: object = "revoked by the mailbox") -> None:
        """Take a producer's access away: its lane ends, and nobody is let in on it before `reset`.

        Blocks:     for milliseconds; between hosts for some seconds if the producer is silent.
        Ordering:   recv takes nothing of the lane's from now on. On this host the memory stays
                    mapped in the producer's process as long as that lives; end it, too.

        Raises:
            ConfigError: no lane belongs to the rank.
        """
        self._core.revoke(lane_of(self._lanes, rank).index, in_print(reason))

    def info(self) -> dict[str, object]:
        """Give the channel's facts, per lane: transport, refusals, rule, bytes, waits, drops."""
        lanes = all_lane_facts(self._lanes, self._service.peers, self._status, self._began)
        facts = mailbox_facts(self._name, self._scene.depth, self._made, self.addresses, lanes)
        return facts | {"last_error": self._last_error}

    def events(self) -> list[RawEvent]:
        """Give the flight recorder: (lane, written by the producer, raw event); see `telemetry`."""
        return mailbox_events(self._core, self._lanes)

    @property
    def address(self) -> str:
        """The service's address on this host, such as ``unix:///tmp/…/mailbox.sock``."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of the service: this host's, then those for other hosts, ``tcp://…``."""
        return self._service.addresses

    @property
    def epoch(self) -> int:
        """The life that the mailbox is in; `reset` raises it."""
        return self._core.epoch

    def close(self) -> None:
        """End the channel: abort an open pass, tell producers, stop listening. Twice is fine.

        Blocks:     for milliseconds; for some seconds a lane whose peer on another host is silent.
        Ownership:  views that are alive keep the memory until they are gone.
        """
        if not self._may_close():
            return
        self._service.close()
        self._core.close()
        forget_local(self._made.mailbox_id)
        self._made.servers.clear()
        self._made.drop()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._lanes)} lanes"
        return f"<Mailbox {getattr(self, '_name', '?')!r}: {state}>"

    def _is_attached(self, lane: Lane) -> bool:
        verdict = self._core.check()
        if verdict is not None and verdict.fault in ("closed", "forked"):
            raise self._error(verdict, "wait_ready")
        return bool(self._status(lane)["attached"])

    def _status(self, lane: Lane) -> Mapping[str, object]:
        return self._core.lane_status(lane.index)
