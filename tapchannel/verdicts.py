"""From a native verdict (facts) to the typed error that the caller sees."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import TapChannelError
from .faults import COUNTS, RULES, STAMPS, WAITS
from .keys import Key, describe

if TYPE_CHECKING:
    from . import _native
    from .attach import Attachment
    from .handshake import Peer
    from .plan import Lane


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
    peer_at: str = ""  # where the peer runs, if the lane's facts are this side's own
    own_lane: int | None = None  # an outbox has one lane, whatever the verdict says


def finder(lanes: Sequence[Lane], peers: Mapping[int, Peer]) -> Callable[[int], LaneFacts | None]:
    """Give the function that finds a lane's facts among a mailbox's peers."""

    def find(index: int) -> LaneFacts | None:
        if index < 0:
            return None
        lane, peer = lanes[index], peers.get(index)
        taps = [cell.tap.name for cell in lane.cells]
        return LaneFacts(lane.rank, taps, peer.pid if peer else None, peer.host if peer else None)

    return find


def wire_finder(peers: Mapping[int, Peer]) -> Callable[[int], str]:
    """Give the function that names the transport of a lane; empty until a producer has attached."""
    return lambda index: peers[index].transport if index in peers else ""


def outbox_scene(name: str, rank: int, attached: Attachment) -> Scene:
    """Give the scene of an outbox: its lane's facts are its own, the peer is the consumer."""
    offer = attached.offer
    taps = [cell.tap.name for cell in attached.cells]
    facts = LaneFacts(rank, taps, os.getpid(), socket.gethostname())
    peer_at = f" (pid {offer.pid} on host {offer.host})"
    return Scene(name, offer.depth, lambda _: facts, "consumer", peer_at, offer.lane)


def error_from(verdict: _native.Verdict, scene: Scene, doing: str) -> TapChannelError:
    """Build the error for a verdict; ``doing`` names the call and its subject."""
    kind, what, cause, next_step = RULES[verdict.fault]
    fields: dict[str, Any] = {"channel": scene.channel, "cause": cause, "next_step": next_step}
    fields["key"] = _key(verdict.key)
    facts = scene.lane(verdict.lane) if verdict.lane >= 0 else scene.lane(-1)
    if facts is not None:
        index = verdict.lane if scene.own_lane is None else scene.own_lane
        fields.update(lane=index, rank=facts.rank, pid=facts.pid, host=facts.host)
        if 0 <= verdict.cell < len(facts.taps):
            fields["tap"] = facts.taps[verdict.cell]
    fields.update(_compared(verdict))
    if verdict.fault in WAITS:
        fields.update(waited=verdict.waited, limit=verdict.limit)
    if verdict.silent >= 0:
        fields["last_progress"] = (
            f"{scene.peer}{scene.peer_at}'s last heartbeat {verdict.silent:.2f} s ago"
        )
    fields.update(_by_case(verdict, scene))
    text = verdict.reason.decode("utf-8", "replace")
    if kind is errors.PassAborted:
        fields["who"] = "this side" if verdict.fault == "aborted_here" else f"the {scene.peer}"
        fields["reason"] = _printable(text) or None
    elif text:
        fields["detail"] = _printable(text)
        if verdict.fault == "peer_lost":  # its link knows better than the rule
            fields.pop("cause")
    return kind(
        f"{doing}: {what}", **{name: value for name, value in fields.items() if value is not None}
    )


def _compared(verdict: _native.Verdict) -> dict[str, object]:
    if verdict.fault in STAMPS:
        return {"seen": describe(verdict.seen), "expected": describe(verdict.expected)}
    if verdict.fault == "credit_timeout" and verdict.expected:
        return {
            "seen": f"credit up to {describe(verdict.seen)}",
            "expected": describe(verdict.expected),
        }
    if verdict.fault == "pass_mismatch":
        return {"seen": _pass(verdict.seen), "expected": _pass(verdict.expected)}
    if verdict.fault in COUNTS:
        return {"seen": verdict.seen, "expected": verdict.expected}
    if verdict.fault == "queue_full":
        plural = "" if verdict.seen == 1 else "es"
        return {"seen": f"{verdict.seen} push{plural} queued"}
    return {}


def _by_case(verdict: _native.Verdict, scene: Scene) -> dict[str, object]:
    """Give the fields whose text depends on the facts."""
    if verdict.fault == "bad_microbatch":
        return {
            "key": None,
            "seen": verdict.seen,
            "expected": f"0 to {_count(verdict.key) - 1}",
        }
    if verdict.fault == "bad_rows":
        return {"seen": f"{verdict.seen} rows", "expected": f"at most {verdict.expected} rows"}
    if verdict.fault == "pass_open":
        return {"seen": f"pass {(verdict.key >> 18) & ((1 << 28) - 1)} is open"}
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
    count = _count(word)
    plural = "" if count == 1 else "es"
    return f"pass {(word >> 18) & ((1 << 28) - 1)} with {count} microbatch{plural}"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
