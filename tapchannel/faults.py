"""Every fault that the native core knows, and what to tell the caller of it."""

from __future__ import annotations

from typing import Final

from . import errors
from .errors import TapChannelError

Rule = tuple[type[TapChannelError], str, str | None, str | None]

# fault -> (class, what, likely cause, next step)
RULES: Final[dict[str, Rule]] = {
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
    "bad_microbatch": (
        errors.UsageError,
        "microbatch is outside the pass",
        None,
        "count microbatches from 0, and give open_pass their number",
    ),
    "pushed_twice": (
        errors.UsageError,
        "tap was pushed twice for one key",
        "a recomputed forward ran the hook again",
        "push only in the microbatch's real forward",
    ),
    "received_twice": (
        errors.UsageError,
        "microbatch was received already",
        None,
        "keep the first lease, or its clone()",
    ),
    "bad_cell": (
        errors.UsageError,
        "tap is not this lane's",
        None,
        "name it in the mailbox's sources for this rank",
    ),
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
        errors.CreditTimeout,
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
    "revoked": (
        errors.PeerLostError,
        "the mailbox revoked the lane",
        None,
        "its rank may attach again after Mailbox.reset()",
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
    "device_error": (
        errors.DeviceError,
        "the wire failed to move a tap",
        "an earlier kernel or copy of this process failed",
        "look for the first CUDA error of this rank, then restart it",
    ),
    "overrun": (
        errors.OverrunError,
        "a newer stamp stands in the cell: it was written without credit",
        "a peer that does not follow the protocol",
        "report it as a bug",
    ),
    "stale_stamp": (
        errors.StaleStampError,
        "an older stamp stands in the cell of an open lease: something was written late",
        "a transport that does not keep the order of its puts, or a peer that does not follow "
        "the protocol",
        "do not use what was read; report it as a bug, with what info() says of the lane",
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
    "incomplete": (
        errors.UsageError,
        "the pass is not complete: it was aborted",
        None,
        "push or receive every microbatch of it, or abort() it first",
    ),
}
# Faults whose seen and expected are stamps, said in words.
STAMPS: Final = frozenset(
    {
        "stamp_timeout",
        "announce_timeout",
        "overrun",
        "stale_stamp",
        "epoch_mismatch",
        "pass_over",
        "never_attached",
    }
)
COUNTS: Final = frozenset({"step_not_growing", "bad_announce", "incomplete", "rows_differ"})
WAITS: Final = frozenset(
    {"stamp_timeout", "announce_timeout", "never_attached", "credit_timeout", "queue_full"}
)
