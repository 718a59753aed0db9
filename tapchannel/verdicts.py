"""From a native verdict (facts) to the typed error that the caller sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import errors
from .errors import TapChannelError
from .keys import Key, describe

if TYPE_CHECKING:
    from . import _native


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """Where a lane's peer runs, for the error's text."""

    rank: int
    taps: Sequence[str]
    pid: int | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """Who asks: the channel's name, the slots, and how to find a lane's facts."""

    channel: str
    depth: int
    lane: Callable[[int], LaneFacts | None]
    peer: str
    own_lane: int | None = None  # an outbox has one lane, whatever the verdict says


_Rule = tuple[type[TapChannelError], str, str | None, str | None]

# fault -> (class, what, likely cause, next step)
_RULES: Final[dict[str, _Rule]] = {
    "closed": (errors.ChannelClosed, "it was closed already", None, "make a new one"),
    "forked": (
        errors.UsageError,
        "not usable after fork: it belongs to the parent process",
        None,
        "push and receive in the process that made it; start workers by spawn",
    ),
    "no_pass": (errors.UsageError, "no pass is open", None, "call open_pass(step, microbatches)"),
    "pass_open": (errors.UsageError, "a pass is open already", None, "leave its with block first"),
    "step_not_growing": (
        errors.UsageError,
        "step of a pass must be larger than the last one",
        None,
        "name each pass by the trainer's growing step number, the same on all sides",
    ),
    "bad_microbatch": (errors.UsageError, "microbatch is outside the pass", None, None),
    "pushed_twice": (
        errors.UsageError,
        "tap was pushed twice for one key",
        "a recomputed forward ran the hook again",
        "push only in the microbatch's real forward",
    ),
    "received_twice": (errors.UsageError, "microbatch was received already", None, None),
    "bad_cell": (errors.UsageError, "tap is not this lane's", None, None),
    "bad_rows": (
        errors.UsageError,
        "tap has more rows than its cell",
        None,
        "raise the plan's max_rows, or push fewer rows",
    ),
    "capturing": (
        errors.UsageError,
        "a CUDA graph is being captured on the stream",
        None,
        "push and receive outside the capture: a replay would repeat the captured key",
    ),
    "queue_full": (
        errors.OverrunError,
        "queue of pushes that wait for credit is full",
        "the consumer is slower than the producers, or does not receive",
        "raise depth or queue_limit, or use when_full='drop_newest'",
    ),
    "credit_timeout": (
        errors.CreditTimeout,
        "no credit came before the deadline",
        "the consumer does not receive, or still holds views on its slots",
        "look at the consumer; a larger depth helps only if it is slow and not stuck",
    ),
    "stamp_timeout": (
        errors.StampTimeout,
        "stamp did not land: it was announced, its payload is late",
        "the producer's GPU or stream is stuck before the tap",
        "look at the producer's rank; abort or leave the pass to go on",
    ),
    "announce_timeout": (
        errors.StampTimeout,
        "nothing was pushed before the deadline",
        "the producer has not reached this microbatch, or does not push this tap",
        "look at the producer's rank; abort or leave the pass to go on",
    ),
    "never_attached": (
        errors.AttachTimeout,
        "the producer never attached",
        "its rank is not running, or uses another store or name",
        "start its Outbox; Mailbox.wait_ready() lists who is missing",
    ),
    "held": (
        errors.UsageError,
        "the slot that this microbatch needs is still held: waiting would be for ever",
        None,
        None,
    ),
    "peer_lost": (
        errors.PeerLostError,
        "the peer died",
        "its process ended without closing",
        "restart its rank and let it attach again (wait_ready), then open the next pass",
    ),
    "peer_closed": (
        errors.PeerLostError,
        "the peer closed its end",
        None,
        "keep the other side open until the last pass is over on both sides",
    ),
    "aborted_by_peer": (errors.PassAborted, "the pass was aborted", None, "open the next pass"),
    "aborted_here": (errors.PassAborted, "the pass was aborted", None, "open the next pass"),
    "epoch_mismatch": (
        errors.EpochMismatchError,
        "the mailbox began a new epoch (reset) since this pass was opened",
        None,
        "leave this pass and open the next one",
    ),
    "pass_mismatch": (
        errors.ProtocolError,
        "both sides opened this pass with different microbatch counts",
        None,
        "give open_pass the same step and microbatches on all ranks",
    ),
    "pass_over": (
        errors.ProtocolError,
        "the mailbox is at a later pass already",
        "the sides do not name their passes alike",
        "give open_pass the same step on all ranks",
    ),
    "source_modified": (
        errors.UsageError,
        "the pushed tensor was modified in place before its copy was done: the tap may be wrong",
        "a layer after the tap works in place",
        "push a clone of such a tensor, or modify it only after flush()",
    ),
    "device_error": (errors.DeviceError, "the CUDA driver refused to move a tap", None, None),
    "overrun": (
        errors.OverrunError,
        "a newer stamp stands in the cell: it was written without credit",
        "a peer that does not follow the protocol",
        "report it as a bug",
    ),
    "bad_announce": (
        errors.ProtocolError,
        "an announce does not fit the plan",
        "a peer that does not follow the protocol",
        "report it as a bug",
    ),
    "rows_differ": (
        errors.UsageError,
        "tap came with another number of rows than recv(rows=…) named",
        None,
        "leave rows= away, or name what the producers push",
    ),
    "interrupted": (errors.WouldBlock, "the wait was interrupted", None, None),
    "would_block": (errors.WouldBlock, "not everything has landed yet", None, None),
    "incomplete": (errors.UsageError, "the pass is not complete", None, None),
}
# Faults whose seen and expected are stamps, said in words.
_STAMPS: Final = frozenset(
    {
        "stamp_timeout",
        "announce_timeout",
        "overrun",
        "epoch_mismatch",
        "pass_over",
        "never_attached",
    }
)
_COUNTS: Final = frozenset({"step_not_growing", "bad_announce", "incomplete", "rows_differ"})
_WAITS: Final = frozenset({"stamp_timeout", "announce_timeout", "never_attached", "credit_timeout"})


def error_from(verdict: _native.Verdict, scene: Scene, doing: str) -> TapChannelError:
    """Build the error for a verdict; ``doing`` names the call and its subject."""
    kind, what, cause, next_step = _RULES[verdict.fault]
    fields: dict[str, Any] = {"channel": scene.channel, "cause": cause, "next_step": next_step}
    fields["key"] = _key(verdict.key)
    facts = scene.lane(verdict.lane) if verdict.lane >= 0 else scene.lane(-1)
    if facts is not None:
        index = verdict.lane if scene.own_lane is None else scene.own_lane
        fields.update(lane=index, rank=facts.rank, pid=facts.pid, host=facts.host)
        if 0 <= verdict.cell < len(facts.taps):
            fields["tap"] = facts.taps[verdict.cell]
    fields.update(_compared(verdict))
    if verdict.fault in _WAITS:
        fields.update(waited=verdict.waited, limit=verdict.limit)
    if verdict.silent >= 0:
        fields["last_progress"] = f"{scene.peer}'s last heartbeat {verdict.silent:.2f} s ago"
    fields.update(_by_case(verdict, scene))
    text = verdict.reason.decode("utf-8", "replace")
    if kind is errors.PassAborted:
        fields["who"] = "this side" if verdict.fault == "aborted_here" else f"the {scene.peer}"
        fields["reason"] = _printable(text) or None
    elif text:
        fields["detail"] = _printable(text)
    return kind(
        f"{doing}: {what}", **{name: value for name, value in fields.items() if value is not None}
    )


def _compared(verdict: _native.Verdict) -> dict[str, object]:
    if verdict.fault in _STAMPS:
        return {"seen": describe(verdict.seen), "expected": describe(verdict.expected)}
    if verdict.fault == "credit_timeout" and verdict.expected:
        return {
            "seen": f"credit up to {describe(verdict.seen)}",
            "expected": describe(verdict.expected),
        }
    if verdict.fault == "pass_mismatch":
        return {"seen": _pass(verdict.seen), "expected": _pass(verdict.expected)}
    if verdict.fault in _COUNTS:
        return {"seen": verdict.seen, "expected": verdict.expected}
    if verdict.fault == "queue_full":
        return {"seen": f"{verdict.seen} pushes queued"}
    return {}


def _by_case(verdict: _native.Verdict, scene: Scene) -> dict[str, object]:
    """Give the fields whose text depends on the facts."""
    if verdict.fault == "bad_microbatch":
        return {"key": None, "expected": f"0 to {_count(verdict.key) - 1}"}
    if verdict.fault == "step_not_growing":
        return {"expected": f"more than {verdict.expected}"}
    if verdict.fault not in ("held", "credit_timeout") or not verdict.holders:
        return {}
    held = [holder for holder in verdict.holders if holder.leased]
    parts = [
        f"slot {holder.slot} is still held by a live tensor view since "
        f"pass {holder.step}, microbatch {holder.microbatch}"
        if holder.leased
        else f"microbatch {holder.microbatch}, in slot {holder.slot}, has not been received"
        for holder in verdict.holders[:4]
    ]
    deeper = scene.depth + max(1, len(held))
    return {
        "cause": "; ".join(parts),
        "next_step": f"drop the views (del, or clone()), or make the mailbox with depth={deeper}"
        if held
        else "receive the microbatches in order, or make the mailbox deeper",
    }


def _key(word: int) -> Key | None:
    if word == 0:
        return None
    try:
        return Key.from_stamp(word)
    except errors.ConfigError:  # the word of a pass, without a microbatch
        return None


def _count(word: int) -> int:
    return word & ((1 << 18) - 1)


def _pass(word: int) -> str:
    return f"pass {(word >> 18) & ((1 << 28) - 1)} with {_count(word)} microbatches"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
