"""What a channel has to do, in pure Python: one mailbox, its lanes, and what each call must answer.

Nothing here looks at the real channel. A call's verdict is the set of what may come of it: error
classes, or None for success. The nine steps happen at once: `settle` sends what credit covers, so
the real channel reaches the model's state a moment later.
"""

from __future__ import annotations

from collections.abc import Sequence

from support.channel_terms import (
    RIGHT,
    CellKey,
    LaneModel,
    LeaseModel,
    Opened,
    PassKey,
    Verdict,
    only,
)
from tapchannel.errors import (
    AttachTimeout,
    CreditTimeout,
    EpochMismatchError,
    PassAborted,
    PeerLostError,
    ProtocolError,
    StampTimeout,
    TapChannelError,
    UsageError,
    WouldBlock,
)


class ChannelModel:
    """The mailbox, and through it everything."""

    def __init__(self, depth: int, lanes: Sequence[Sequence[str]]) -> None:
        self.depth = depth
        self.lanes = [LaneModel(taps) for taps in lanes]
        self.epoch = 1
        self.open: Opened | None = None
        self.last_step = -1
        self.granted = 0
        self.received: set[int] = set()
        self.leases: dict[int, LeaseModel] = {}
        self.failure: type[TapChannelError] | None = None
        self._newest = PassKey(1, 0)  # the last pass that was opened; what abort and reset end

    # ---- consumer

    def judge_open(self, step: int) -> Verdict:
        """Judge the mailbox's open_pass."""
        if self.failure is not None:
            return only(self.failure)
        if self.open is not None or step <= self.last_step:
            return only(UsageError)
        return RIGHT

    def open_pass(self, step: int, microbatches: int) -> None:
        """Open a pass."""
        self._newest = PassKey(self.epoch, step)
        self.open = Opened(self._newest, microbatches)
        self.last_step = step
        self.granted = 0
        self.received = set()
        for lane in self.lanes:
            lane.shown = self.open
            if lane.attached:
                lane.took_part = self._newest
        self.settle()

    def judge_close(self) -> Verdict:
        """Judge the end of the pass's with block."""
        if self.failure is not None:
            return only(self.failure)
        if self.open is None or len(self.received) < self.open.microbatches:
            return only(UsageError)
        return RIGHT

    def close_pass(self) -> None:
        """Close the pass."""
        self.open = None
        self.settle()

    def abort(self) -> None:
        """End the pass on both sides, or clear a failure."""
        if self.open is not None or self.failure is not None:
            self._end_pass()
        self.failure = None
        self.settle()

    def reset(self) -> None:
        """Begin a new epoch."""
        self._end_pass()
        self.failure = None
        self.epoch += 1
        self.last_step = -1
        for lane in self.lanes:
            lane.shown = None
        self.settle()

    def _end_pass(self) -> None:
        for lane in self.lanes:
            lane.ended = PassKey(self.epoch, self._newest.step)
        self.open = None
        self.received = set()

    def judge_receive(self, microbatch: int, mode: str) -> Verdict:
        """Judge recv with a short deadline, mode ``host`` or ``stream``, or try_recv, ``try``."""
        if self.failure is not None:
            return only(self.failure)
        if self.open is None or microbatch >= self.open.microbatches or microbatch in self.received:
            return only(UsageError)
        if any(self.open.key in lane.gave_up for lane in self.lanes):
            return only(PassAborted)  # also of what has landed: it may have been taken back
        lacking = [lane for lane in self.lanes if self._lacks(lane, microbatch)]
        faults = {fault for lane in lacking for fault in self._faults(lane)}
        if any(self._counts_differ(lane) for lane in self.lanes):
            faults.add(ProtocolError)
        if microbatch >= self.granted:  # a lane's fault may be told here as well
            late = {"try": WouldBlock, "host": CreditTimeout, "stream": UsageError}[mode]
            return frozenset(faults | {late})
        if faults:
            return frozenset(faults)
        if not lacking:
            return RIGHT
        if mode == "try":
            return only(WouldBlock)
        return frozenset(StampTimeout if lane.ever else AttachTimeout for lane in lacking)

    def is_ready(self, microbatch: int) -> bool:
        """Tell whether all of a microbatch of the open pass has landed, and may be used."""
        return not any(
            self._lacks(lane, microbatch) or self._counts_differ(lane) for lane in self.lanes
        )

    def _lacks(self, lane: LaneModel, microbatch: int) -> bool:
        assert self.open is not None
        key = self.open.key
        return any(CellKey(key, microbatch, tap) not in lane.landed for tap in lane.taps)

    def _faults(self, lane: LaneModel) -> set[type[TapChannelError]]:
        """Say why a lane will never bring what it lacks."""
        assert self.open is not None
        gone = lane.ever and not lane.attached
        return {PeerLostError} if gone or lane.barred == self.open.key else set()

    def _counts_differ(self, lane: LaneModel) -> bool:
        """Tell whether a lane has opened this pass with another number of microbatches."""
        assert self.open is not None
        said = lane.announced if lane.attached else None
        return said is not None and said.key == self.open.key and said != self.open

    def fail(self, kind: type[TapChannelError]) -> None:
        """Take the error that a receive raised for what it does to the pass."""
        if kind not in (WouldBlock, UsageError):
            self.failure = kind

    def receive(self, lease: int, microbatch: int) -> None:
        """Give out a lease."""
        assert self.open is not None
        self.received.add(microbatch)
        self.leases[lease] = LeaseModel(self.open.key, microbatch, microbatch % self.depth)

    def give_back(self, lease: int) -> None:
        """The last view of a lease is gone (step 9)."""
        del self.leases[lease]
        self.settle()

    # ---- producers

    def attach(self, lane: LaneModel) -> None:
        """A producer's life begins."""
        lane.announced, lane.gave_up, lane.last, lane.open = None, set(), None, None
        if self.open is not None:
            if lane.ever and lane.took_part == self.open.key:
                lane.barred = lane.ended = self.open.key
            lane.took_part = self.open.key
        lane.shown = self.open
        lane.attached = lane.ever = True
        self.settle()

    def detach(self, lane: LaneModel) -> None:
        """A producer's outbox is closed."""
        lane.attached = False
        lane.open = None
        lane.queue.clear()

    def judge_open_at(self, lane: LaneModel, step: int) -> Verdict:
        """Judge an outbox's open_pass."""
        known = lane.last is not None and lane.last.epoch == self.epoch
        if lane.open is not None or (known and lane.last is not None and step <= lane.last.step):
            return only(UsageError)
        return RIGHT

    def open_at(self, lane: LaneModel, step: int, microbatches: int) -> None:
        """Open a pass at a producer."""
        lane.last = PassKey(self.epoch, step)
        lane.open = lane.announced = Opened(lane.last, microbatches)
        lane.pushed = set()

    def judge_push(self, lane: LaneModel, microbatch: int, tap: str) -> Verdict:
        """Judge a push."""
        if lane.open is None or microbatch >= lane.open.microbatches:
            return only(UsageError)
        if (microbatch, tap) in lane.pushed:
            return only(UsageError)
        key = lane.open.key
        if lane.ended >= key:
            return only(PassAborted)
        if key.epoch != self.epoch:
            return only(EpochMismatchError)
        if lane.shown is not None and lane.shown != lane.open and lane.shown.key >= key:
            return only(ProtocolError)
        return RIGHT

    def push(self, lane: LaneModel, microbatch: int, tap: str) -> CellKey:
        """Push."""
        assert lane.open is not None
        lane.pushed.add((microbatch, tap))
        lane.queue.append(CellKey(lane.open.key, microbatch, tap))
        self.settle()
        return CellKey(lane.open.key, microbatch, tap)

    def judge_close_at(self, lane: LaneModel) -> Verdict:
        """Judge the end of a producer's with block.

        A pass that was pushed and sent whole is a success, whatever became of later passes.
        """
        assert lane.open is not None
        key = lane.open.key
        if lane.ended == key:
            return only(PassAborted)
        if len(lane.pushed) < lane.open.microbatches * len(lane.taps):
            over = (
                [PassAborted, EpochMismatchError, ProtocolError] if self._is_over(lane, key) else []
            )
            return only(UsageError, *over)
        unsent = lane.pushed - {
            (cell.microbatch, cell.tap) for cell in lane.landed if cell.of == key
        }
        if not unsent or not self._is_over(lane, key):
            return RIGHT
        return only(None, PassAborted, EpochMismatchError, ProtocolError)

    def close_at(self, lane: LaneModel) -> None:
        """Close a producer's pass; what is queued stays queued."""
        lane.open = None

    def abort_at(self, lane: LaneModel) -> None:
        """A producer gives its open pass up; outside of one, all that still waits for credit."""
        over = {lane.open.key} if lane.open is not None else {cell.of for cell in lane.queue}
        lane.gave_up |= over
        lane.queue = [cell for cell in lane.queue if cell.of not in over]
        lane.open = None

    # ---- credit

    def settle(self) -> None:
        """Grant in key order (step 1), and send what credit covers (steps 2 to 6)."""
        while self._may_grant():
            self.granted += 1
        for lane in self.lanes:
            lane.queue = [cell for cell in lane.queue if not self._is_over(lane, cell.of)]
            sent = [cell for cell in lane.queue if self._is_covered(lane, cell)]
            lane.queue = [cell for cell in lane.queue if cell not in sent]
            lane.landed.update(sent)

    def _may_grant(self) -> bool:
        if self.open is None or self.failure is not None or self.granted >= self.open.microbatches:
            return False
        before = self.granted - self.depth
        if before >= 0 and before not in self.received:
            return False
        slot = self.granted % self.depth
        return not any(lease.slot == slot for lease in self.leases.values())

    def _is_over(self, lane: LaneModel, key: PassKey) -> bool:
        return lane.ended >= key or key.epoch != self.epoch or key < self._newest

    def _is_covered(self, lane: LaneModel, cell: CellKey) -> bool:
        if self.open is None or cell.of != self.open.key or lane.barred == cell.of:
            return False
        return cell.microbatch < self.granted
