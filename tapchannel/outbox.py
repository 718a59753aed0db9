"""Outbox: a producer's side. Attached to one mailbox, it pushes the taps of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from . import _native, lifetime
from .attach import Request, attach
from .errors import ConfigError, UsageError
from .keys import checked_int
from .lanes import MAX_RANK
from .memory import Device
from .passes import Pass
from .plan import Lane, TapPlan
from .reports import RawEvent, outbox_facts
from .role import Role
from .settings import (
    CREDIT_WAIT_S,
    PEER_TIMEOUT_S,
    cell_geometry,
    checked_choice,
    checked_claims,
    checked_peer_timeout,
    checked_seconds,
    secret_bytes,
)
from .speed import SpeedCheck
from .stores import rendezvous
from .targets import (
    bad_argument,
    current_stream,
    first_rows,
    named,
    not_mine,
    odd,
    targets_of,
    without_memory,
    wrong_kind,
)
from .tensors import adopt, checksum, rows_of
from .transport.select import TRANSPORT_CHOICES
from .verdicts import outbox_scene


class Outbox(Role[_native.Outbox]):
    """Push the taps of one producer rank to a mailbox.

    Constructing it attaches: it waits for the mailbox at most ``attach_timeout`` seconds.

    Parameters
    ----------
    plan, rank
        The tap plan, as the mailbox has it; this producer's rank in the mailbox's ``sources``.
    store, name
        Where the mailbox is found; the same as on the other side. Without a store,
        ``tapchannel.stores.DirectAddress("tcp://host:port")`` names the mailbox's own address.
    device
        This producer's GPU, where the mailbox is on one; the current device by default.
    taps
        What this rank believes it pushes; checked against ``sources`` at attach.
    timeout, attach_timeout
        Seconds: how long the oldest queued push may wait for credit, also the limit of `flush`;
        and how long to wait for the mailbox (``timeout`` by default).
    queue_limit
        Pushes that may wait for credit; each keeps its tensor alive.
    credit_wait
        Seconds that a push from a GPU may wait for credit itself, before it is queued; see `push`.
    peer_timeout
        Between hosts: seconds without any answer after which the mailbox counts as lost.
    secret
        Job secret; the mailbox must prove that it knows it, too.
    speed
        A `tapchannel.speed.SpeedCheck`: measure the lane, and warn or refuse where it is slow.

    Raises:
        AttachTimeout, AttachError: there is no such mailbox, or it refused; the text says why.
        PlanMismatchError: the two sides' plans differ; the text prints what each says.
        TransportUnavailable: the mailbox's memory cannot be mapped from here.
        UsageError: the rank has an outbox already.
    """

    def __init__(
        self,
        plan: TapPlan,
        rank: int,
        *,
        store: object,
        name: str = "default",
        device: object = None,
        taps: Sequence[str] | None = None,
        timeout: float = 120.0,
        attach_timeout: float | None = None,
        queue_limit: int = 256,
        credit_wait: float = CREDIT_WAIT_S,
        transport: str = "auto",
        peer_timeout: float = PEER_TIMEOUT_S,
        secret: str | bytes | None = None,
        speed: SpeedCheck | None = None,
    ) -> None:
        checked_int("rank", rank, 0, MAX_RANK)
        checked_int("queue_limit", queue_limit, 1, 1 << 20)
        checked_choice("transport", transport, TRANSPORT_CHOICES)
        self._timeout = checked_seconds("timeout", timeout)
        limit = (
            timeout if attach_timeout is None else checked_seconds("attach_timeout", attach_timeout)
        )
        super().__init__(name)
        self._rank = rank
        here = None if device is None else Device.parse(device)
        known = secret_bytes(secret)
        lost_after = checked_peer_timeout(peer_timeout)
        request = Request(
            name, plan, rank, checked_claims(taps), here, transport, lost_after, known, speed
        )
        self._attachment = attach(rendezvous(store, name), request, limit)
        self._start(plan, queue_limit, checked_seconds("credit_wait", credit_wait))
        self._closed = False
        lifetime.close_at_exit(self)

    def _start(self, plan: TapPlan, queue_limit: int, credit_wait: float) -> None:
        attached = self._attachment
        lane = Lane(attached.offer.lane, self._rank, attached.cells)
        self._core = _native.Outbox(
            self._wire(),
            attached.adopted.block,
            cell_geometry(lane, plan.max_rows),
            attached.offer.slot_bytes,
            attached.offer.drop_newest,
            queue_limit,
            self._timeout,
            credit_wait,
            attached.link.detach(),
        )
        self._scene = outbox_scene(self._name, self._rank, attached)
        self._ordinal = attached.device.ordinal
        self._torch_device = torch.device(str(attached.device))
        self._targets = targets_of(attached.cells)

    def _wire(self) -> _native.Wire:
        return self._attachment.adopted.wire

    # ---- passes

    def open_pass(self, step: int, microbatches: int) -> Pass:
        """Open the pass that all sides call ``step``; the mailbox need not have opened it yet.

        Raises:
            UsageError: a pass is open, or ``step`` is not larger than the last one.
            TapChannelError: the lane failed earlier, or its peer is gone.
        """
        return self._open(step, microbatches)

    def _close_pass(self) -> None:
        self._raise(self._core.close_pass(), f"closing pass {self._step}")

    # ---- pushing

    def push(
        self,
        microbatch: int,
        tap: str,
        tensor: object,
        *,
        stream: torch.cuda.Stream | None = None,
        rows: int | None = None,
        row_begin: int | None = None,
    ) -> None:
        """Push one tap of one microbatch (steps 2 to 6).

        ``tensor`` is ``[..., width]``: a torch tensor, or an object with DLPack or
        ``__cuda_array_interface__``. ``rows`` pushes only its first rows. ``row_begin`` says where
        the rows of a row share begin; by default share i begins at i × rows.

        Blocks:     in host memory never for credit; the copy is made in this call if credit is
                    there. From a GPU, ``credit_wait`` seconds at most: the copy is to be enqueued
                    before the trainer's next call to the driver, which may keep the driver's lock
                    until the GPU got further, and that may take this tap (I6). Past that, or where
                    UCX carries it, the push is queued.
        Ordering:   the consumer gets what the tensor holds on ``stream`` (the current one by
                    default) at this point of it, whatever is queued there afterwards.
        Ownership:  the tensor is kept alive until its copy is done. It must not be modified in
                    place before then; if it was, this outbox raises and the pass is aborted.
        On failure: nothing was announced, copied or queued; the push may be made again.

        Raises:
            UsageError, ConfigError: wrong tap, dtype, width, device, too many rows, pushed twice,
                outside the pass, a stream under capture, after fork, or an earlier source was
                modified.
            CreditTimeout: no credit in time, or ``queue_limit`` pushes wait for it already.
            PeerLostError, PassAborted, EpochMismatchError, ProtocolError: the pass
                cannot go on.
        """
        try:
            if stream is None:
                verdict = self._push(microbatch, tap, tensor, rows, row_begin)
            else:
                with torch.cuda.stream(stream):
                    verdict = self._push(microbatch, tap, tensor, rows, row_begin)
        except (UsageError, ConfigError) as error:
            raise named(error, self._name, self._rank, tap) from None
        except TypeError as error:  # an argument is not of its type: say which
            found = bad_argument(microbatch, tap, rows, row_begin, self._targets)
            found = found or UsageError("push", detail=str(error))
            raise named(found, self._name, self._rank, tap) from error
        if verdict is not None:
            raise self._error(verdict, f"push({microbatch}, {tap!r})")

    def _push(
        self,
        microbatch: int,
        tap: str,
        tensor: object,
        rows: int | None,
        row_begin: int | None,
    ) -> _native.Verdict | None:
        target = self._targets.get(tap)
        if target is None:
            raise not_mine(tap, self._targets)
        if microbatch.__class__ is bool or row_begin.__class__ is bool:
            raise TypeError("a flag is no number")
        index, dtype, width, row_bytes, share = target
        source = tensor if isinstance(tensor, torch.Tensor) else adopt(tensor, self._torch_device)
        here = source.is_cpu if self._ordinal is None else source.get_device() == self._ordinal
        if source.dtype is not dtype or not here or odd(source):
            raise wrong_kind(tap, dtype, self._torch_device, source)
        if rows is not None:
            source = first_rows(source, rows)
        owner, address, count, pitch, version = rows_of(source, width, row_bytes)
        if not address and count:
            raise without_memory(tap, source)
        return self._core.push(
            microbatch,
            index,
            address,
            count,
            pitch,
            share * count if row_begin is None else row_begin,
            current_stream(self._ordinal),
            source.shape,
            owner,
            version,
            checksum(source) if self._check else None,
        )

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push has been copied; its sources may then be modified.

        Blocks:     until then, at most ``timeout`` seconds.

        Raises:
            CreditTimeout: pushes still wait for credit, or for their copy, at the deadline.
            TapChannelError: the lane failed.
        """
        limit = self._timeout if timeout is None else checked_seconds("timeout", timeout)
        self._raise(self._core.flush(limit), "flush")
        self._raise(self._core.check(), "flush")

    def info(self) -> dict[str, object]:
        """Give the lane's facts: transport, refusals, ordering rule, bytes, GB/s, waits, drops."""
        counters = self._core.counters()
        facts = outbox_facts(self._name, self._rank, self._attachment, counters, self._began)
        return facts | {"last_error": self._last_error}

    def events(self) -> list[RawEvent]:
        """Give the flight recorder: (lane, written by the producer, raw event); see `telemetry`."""
        lane = self._attachment.offer.lane
        return [(lane, side, event) for side in (False, True) for event in self._core.events(side)]

    def close(self) -> None:
        """End the lane. Pushes that still wait for credit are dropped: `flush` first to keep them.

        Blocks:     until the copies in flight are done. Twice is fine.
        """
        if not self._may_close():
            return
        self._core.close()
        self._attachment.adopted.end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._closed:
                self.flush()
        finally:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"by {self._attachment.transport.name}"
        return f"<Outbox {getattr(self, '_name', '?')!r}: {state}>"
