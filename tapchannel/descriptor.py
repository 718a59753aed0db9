"""What the two sides tell each other at attach: versioned, bounded, every field checked.

A descriptor travels and describes; a handle (a mapping, a file descriptor) is local and is closed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from .errors import ConfigError, ProtocolError
from .lanes import MAX_CELLS, MAX_LANES, MAX_RANK, Shard
from .layout import MAX_BYTES, MAX_NAME
from .plan import TapPlan
from .refusal import MAX_TRANSPORTS, MAX_WORD, refusal_pairs, refusal_reasons, short_text
from .wire import Fields

NONCE_BYTES: Final = 32
ID_BYTES: Final = 16
UUID_BYTES: Final = 16
IPC_HANDLE_BYTES: Final = 64
PROBE_BYTES: Final = 64
PROBE_STRIDE: Final = 1 << 16  # also what a lane's speed is measured with
MAX_PLAN_TEXT: Final = 1 << 19
MAX_HOST: Final = 255
MAX_DEPTH: Final = 4096
MAX_WORKER: Final = 1 << 14
MAX_KEY: Final = 1 << 12
MAX_ADDRESS: Final = (1 << 64) - 1
MEMORIES: Final = ("host", "vmm", "ipc", "local", "staged")


@dataclass(frozen=True, slots=True)
class Challenge:
    """Mailbox to outbox: who I am, prove who you are."""

    mailbox_id: bytes
    nonce: bytes
    name: str
    secret: bool

    def body(self) -> dict[str, object]:
        """Give the frame's body."""
        return {
            "mailbox_id": self.mailbox_id.hex(),
            "nonce": self.nonce.hex(),
            "name": self.name,
            "secret": self.secret,
        }

    @classmethod
    def parse(cls, fields: Fields) -> Challenge:
        """Check a peer's frame."""
        return cls(
            fields.raw("mailbox_id", ID_BYTES),
            fields.raw("nonce", NONCE_BYTES),
            fields.text("name", MAX_NAME),
            fields.flag("secret"),
        )


@dataclass(frozen=True, slots=True)
class Hello:
    """Outbox to mailbox: my rank, my plan, where I run; the proof where there is a secret."""

    name: str
    rank: int
    pid: int
    host: str
    nonce: bytes
    plan: str
    claimed: tuple[str, ...] | None
    transports: tuple[str, ...]
    ucx: str  # version of its UCX, and whether it knows CUDA; empty where it asks for none
    proof: bytes | None

    def body(self) -> dict[str, object]:
        """Give the frame's body."""
        return {
            "name": self.name,
            "rank": self.rank,
            "pid": self.pid,
            "host": self.host,
            "nonce": self.nonce.hex(),
            "plan": self.plan,
            "claims": self.claimed is not None,
            "claimed": list(self.claimed or ()),
            "transports": list(self.transports),
            "ucx": self.ucx,
            "proof": (self.proof or b"").hex(),
        }

    @classmethod
    def parse(cls, fields: Fields) -> Hello:
        """Check a peer's frame."""
        claimed = [short_text(item, MAX_NAME) for item in fields.items("claimed", MAX_CELLS)]
        return cls(
            fields.text("name", MAX_NAME),
            fields.integer("rank", 0, MAX_RANK),
            fields.integer("pid", 0, MAX_RANK),
            fields.text("host", MAX_HOST),
            fields.raw("nonce", NONCE_BYTES),
            fields.text("plan", MAX_PLAN_TEXT),
            tuple(claimed) if fields.flag("claims") else None,
            tuple(
                short_text(item, MAX_WORD) for item in fields.items("transports", MAX_TRANSPORTS)
            ),
            fields.text("ucx", MAX_WORD),
            fields.optional_raw("proof", NONCE_BYTES),
        )


@dataclass(frozen=True, slots=True)
class Remote:
    """How a peer of another host puts into this side's memory: its worker, regions and their keys.

    What a side has not, the outbox its arena and a mailbox without a gate its arrival words, has
    an empty key.
    """

    worker: bytes
    block_address: int
    block_key: bytes
    arena_address: int = 0
    arena_key: bytes = b""
    words_address: int = 0
    words_key: bytes = b""
    ucx: str = ""

    def body(self) -> dict[str, object]:
        """Give its fields of a frame's body."""
        return {
            "worker": self.worker.hex(),
            "block_address": self.block_address,
            "block_key": self.block_key.hex(),
            "arena_address": self.arena_address,
            "arena_key": self.arena_key.hex(),
            "words_address": self.words_address,
            "words_key": self.words_key.hex(),
            "ucx": self.ucx,
        }

    @classmethod
    def parse(cls, fields: Fields) -> Remote:
        """Check a peer's fields. What UCX itself wrote is UCX's to read: only its size is known."""
        return cls(
            fields.bounded_raw("worker", MAX_WORKER),
            fields.integer("block_address", 0, MAX_ADDRESS),
            fields.bounded_raw("block_key", MAX_KEY),
            fields.integer("arena_address", 0, MAX_ADDRESS),
            fields.bounded_raw("arena_key", MAX_KEY),
            fields.integer("words_address", 0, MAX_ADDRESS),
            fields.bounded_raw("words_key", MAX_KEY),
            fields.text("ucx", MAX_WORD),
        )


_NOT_REMOTE: Final = Remote(b"", 0, b"")


@dataclass(frozen=True, slots=True)
class Offer:
    """Mailbox to outbox: the mailbox's memory, this lane's cells, the self-test to pass.

    The control block's descriptor travels with it, and the arena's where its memory has one.
    """

    transport: str
    refused: Mapping[str, str]
    lane: int
    shards: tuple[Shard, ...]
    depth: int
    slot_bytes: int
    arena_bytes: int
    memory: str
    device_uuid: bytes | None
    handle: bytes | None
    drop_newest: bool
    pid: int
    host: str
    probe_offset: int
    probe: bytes
    proof: bytes | None
    remote: Remote | None = None

    def body(self) -> dict[str, object]:
        """Give the frame's body."""
        return {
            **(self.remote or _NOT_REMOTE).body(),
            "transport": self.transport,
            "refused": refusal_pairs(self.refused),
            "lane": self.lane,
            "shards": [[shard.tap, *shard.rows, *shard.columns] for shard in self.shards],
            "depth": self.depth,
            "slot_bytes": self.slot_bytes,
            "arena_bytes": self.arena_bytes,
            "memory": self.memory,
            "device_uuid": (self.device_uuid or b"").hex(),
            "handle": (self.handle or b"").hex(),
            "drop_newest": self.drop_newest,
            "pid": self.pid,
            "host": self.host,
            "probe_offset": self.probe_offset,
            "probe": self.probe.hex(),
            "proof": (self.proof or b"").hex(),
        }

    @classmethod
    def parse(cls, fields: Fields) -> Offer:
        """Check a peer's frame; sizes must agree with one another."""
        depth = fields.integer("depth", 1, MAX_DEPTH)
        slot_bytes = fields.integer("slot_bytes", 1, MAX_BYTES // depth)
        arena_bytes = fields.integer("arena_bytes", depth * slot_bytes, MAX_BYTES)
        memory = fields.text("memory", 8)
        if memory not in MEMORIES:
            raise ProtocolError("mailbox offers memory of an unknown kind", expected=MEMORIES)
        return cls(
            transport=fields.text("transport", MAX_WORD),
            refused=refusal_reasons(fields),
            lane=fields.integer("lane", 0, MAX_LANES - 1),
            shards=tuple(_shard(item) for item in fields.items("shards", MAX_CELLS)),
            depth=depth,
            slot_bytes=slot_bytes,
            arena_bytes=arena_bytes,
            memory=memory,
            device_uuid=fields.optional_raw("device_uuid", UUID_BYTES),
            handle=fields.optional_raw("handle", IPC_HANDLE_BYTES),
            drop_newest=fields.flag("drop_newest"),
            pid=fields.integer("pid", 0, MAX_RANK),
            host=fields.text("host", MAX_HOST),
            probe_offset=fields.integer("probe_offset", 0, arena_bytes - PROBE_BYTES),
            probe=fields.raw("probe", PROBE_BYTES),
            proof=fields.optional_raw("proof", NONCE_BYTES),
            remote=None if (remote := Remote.parse(fields)) == _NOT_REMOTE else remote,
        )


def checked_plan(plan: TapPlan) -> TapPlan:
    """Give back a plan that fits into a handshake frame.

    Raises:
        ConfigError: its text is too long.
    """
    # Inside the frame's own JSON quotes and backslashes count twice.
    size = len(json.dumps(plan.to_json()))
    if size > MAX_PLAN_TEXT:
        raise ConfigError(
            "tap plan is too long to be sent",
            seen=f"{size} B as JSON",
            expected=f"at most {MAX_PLAN_TEXT} B",
            next_step="use shorter names, or fewer taps in one channel",
        )
    return plan


def proof(secret: bytes, role: str, challenge: Challenge, nonce: bytes, rank: int) -> bytes:
    """Give the keyed proof of one side: HMAC-SHA256 over both nonces, so none can be replayed."""
    message = b"|".join(
        [
            b"tapchannel-1",
            role.encode("ascii"),
            challenge.mailbox_id,
            challenge.nonce,
            nonce,
            str(rank).encode("ascii"),
            challenge.name.encode("utf-8"),
        ]
    )
    return hmac.new(secret, message, hashlib.sha256).digest()


def proven(expected: bytes, given: bytes | None) -> bool:
    """Compare a proof in constant time."""
    return given is not None and hmac.compare_digest(expected, given)


def _shard(item: object) -> Shard:
    parts = cast("Sequence[object]", item) if isinstance(item, list) else ()
    if len(parts) != 5 or not all(isinstance(part, int) for part in parts[1:]):
        raise ProtocolError("mailbox offers a cell that is no share of a tap")
    i, n, j, m = cast("Sequence[int]", parts[1:])
    try:
        return Shard(short_text(parts[0], MAX_NAME), (i, n), (j, m))
    except ConfigError as error:
        raise ProtocolError("mailbox offers an impossible cell", detail=str(error)) from error
