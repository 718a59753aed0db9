"""What Python reads of a peer or a stranger, given any bytes: only our own errors may come of it.

    python tests/fuzz/peers.py --runs 100000 [--seed 1]        # any Python
    python tests/fuzz/peers.py --atheris FOLDER -runs=100000   # guided by coverage, with atheris

The first byte says what reads the rest. What must hold is asserted here; what is refused raises one
of ALLOWED.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tapchannel import (
    descriptor,
    endpoints,
    keys,
    plan,
    plan_check,
    plan_json,
    refusal,
    stores,
    targets,
    telemetry,
    wire,
)
from tapchannel import lanes as lane_rules
from tapchannel.errors import TapChannelError
from tapchannel.plan import TapPlan
from tapchannel.refusal import Refusal

READERS = (
    descriptor, endpoints, keys, lane_rules, plan, plan_check, plan_json, refusal, stores, targets,
    telemetry, wire,
)  # fmt: skip
ALLOWED = (TapChannelError, ConnectionError)
PLAN = TapPlan({"g": ["high", "low"]}, 4, "float32", 8)
LANES = PLAN.lanes({1: ["high"], 2: ["low"]})
KINDS = (wire.CHALLENGE, wire.HELLO, wire.OFFER, wire.READY, wire.LIVE, wire.REFUSAL)
MEMORY = 1 << 30  # more than the process has at first
LONGEST = 4096


def frame(data: bytes) -> None:
    """Read a frame off a socket, and what it says."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here:
        with there:
            there.sendall(data)
        fields, fds = wire.receive_frame(here, time.monotonic() + 5, KINDS)
    assert fds == []
    said(fields)


def body(data: bytes) -> None:
    """Read a frame's body, its header left out."""
    if not data:
        return
    try:
        values = json.loads(data[1:].decode("latin-1"))
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict):
        said(wire.Fields(KINDS[data[0] % len(KINDS)], values))


def said(fields: wire.Fields) -> None:
    """Parse a frame of any kind, and use what it says as its receiver would."""
    if fields.kind == wire.CHALLENGE:
        challenge = descriptor.Challenge.parse(fields)
        assert len(descriptor.proof(b"s", "outbox", challenge, bytes(32), 1)) == 32
    elif fields.kind == wire.HELLO:
        hello = descriptor.Hello.parse(fields)
        rows = plan_check.mismatch_rows(PLAN, LANES, hello)
        refusal = Refusal("PlanMismatchError", "differ", "", "", False, rows)
        assert len(json.dumps(refusal.body())) <= wire.MAX_BODY
    elif fields.kind == wire.OFFER:
        offer = descriptor.Offer.parse(fields)
        assert offer.probe_offset + len(offer.probe) <= offer.arena_bytes
        assert offer.depth * offer.slot_bytes <= offer.arena_bytes
        targets.targets_of(PLAN.cells(offer.shards))
    elif fields.kind == wire.READY:
        remote = descriptor.Remote.parse(fields)
        assert len(remote.worker) <= descriptor.MAX_WORKER
    elif fields.kind == wire.REFUSAL:
        assert str(Refusal.parse(fields).as_error("c", 1))


def entry(data: bytes) -> None:
    """Read what stands in a store."""
    addresses = stores._decode(data, "somewhere")
    assert 1 <= len(addresses) <= 1 + stores.MAX_HOSTS
    assert all(endpoints.tcp_parts(host) for host in addresses[1:])


def tap_plan(data: bytes) -> None:
    """Read a tap plan."""
    read = TapPlan.from_json(data.decode("latin-1"))
    assert TapPlan.from_json(read.to_json()).fingerprint == read.fingerprint


def address(data: bytes) -> None:
    """Read an address."""
    text = data.decode("utf-8", "replace")
    parts = endpoints.tcp_parts(text)
    assert parts is None or 1 <= parts[1] <= 65535
    assert 1 <= len(endpoints.parse_listen(text).ports) <= 65535


def words(data: bytes) -> None:
    """Read the words of a control block's recorder."""
    numbers = [int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, 40, 8)]
    event = telemetry._event(0, bool(numbers[0] & 1), (1, *numbers[:3], numbers[3] & 0xFFFF, 7))
    assert event.step_name
    assert keys.describe(numbers[4])


TARGETS: Sequence[Callable[[bytes], None]] = (frame, body, entry, tap_plan, address, words)


def one(data: bytes) -> None:
    """Try one input."""
    if not data:
        return
    try:
        TARGETS[data[0] % len(TARGETS)](data[1:])
    except ALLOWED as error:
        text = str(error)
        assert text


def seeds() -> list[bytes]:
    """Give an input of each kind that is right."""
    challenge = descriptor.Challenge(bytes(16), bytes(32), "draft", True)
    hello = descriptor.Hello(
        "draft", 1, 2, "n", bytes(32), PLAN.to_json(), ("high",), ("shm",), "1.19", bytes(32)
    )
    offer = descriptor.Offer(
        "shm", {"ucx": "no"}, 0, (LANES[0].cells[0].shard,), 2, PLAN.slot_bytes, 1 << 16, "host",
        None, None, False, 3, "n", 64, bytes(64), None,
        descriptor.Remote(b"w", 1, b"k", 2, b"a", 3, b"b", "1.19"),
    )  # fmt: skip
    refusal = Refusal("AttachError", "no", "why", "go", True, (), {"shm": "x"})
    bodies: list[dict[str, Any]] = [one.body() for one in (challenge, hello, offer, refusal)]
    bodies.append(descriptor.Remote(b"w", 1, b"k").body())
    kinds = [wire.CHALLENGE, wire.HELLO, wire.OFFER, wire.REFUSAL, wire.READY]
    made = [bytes([3]) + PLAN.to_json().encode(), bytes([5]) + bytes(range(40))]
    for kind, fields in zip(kinds, bodies, strict=True):
        text = json.dumps(fields).encode("ascii")
        made.append(b"\0" + wire._HEADER.pack(wire.MAGIC, wire.VERSION, kind, len(text)) + text)
        made.append(bytes([1, kind - 1]) + text)
    made += [b"\2" + stores._encode(["unix://@x", "tcp://[::1]:5", "tcp://h:6"])]
    return [*made, b"\4tcp://h:1-2", b"\4tcp://[fe80::1]:99", b"\4tcp://*"]


def changed(data: bytes, inputs: Sequence[bytes], chance: random.Random) -> bytes:
    """Change an input: bytes, numbers and texts in it, or parts of another."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(1, len(made)) if len(made) > 1 else 0
        match chance.randrange(6):
            case 0:
                made[at:at] = bytes([chance.randrange(256)])
            case 1:
                del made[at : at + chance.randint(1, 8)]
            case 2:
                other = chance.choice(inputs)
                start = chance.randrange(len(other))
                made[at:at] = other[start : start + chance.randint(1, 40)]
            case 3:
                made[at:at] = chance.choice(ODD)
            case 4:
                made[at : at + 1] = chance.choice(ODD)
            case _:
                if made:
                    made[min(at, len(made) - 1)] ^= 1 << chance.randrange(8)
    return bytes(made[:LONGEST])


ODD = [
    b"null", b"true", b"[]", b"{}", b"-1", b"1e999", b"NaN", b"9" * 40, b'"', b"\\", b"[" * 500,
    b"18446744073709551615", b'"\\ud800"', b"\xff", b"\0", b",", b":", b"0" * 64, b'"a":1,',
]  # fmt: skip


def run(runs: int, seed: int, folder: Path | None = None) -> int:
    """Try the seeds, then changes of them; give the number of inputs."""
    inputs = seeds()
    for data in inputs:
        one(data)
    chance = random.Random(seed)
    for number in range(runs):
        data = changed(chance.choice(inputs), inputs, chance)
        try:
            one(data)
        except BaseException:
            path = (folder or Path.cwd()) / "crash-peers"
            path.write_bytes(data)
            print(f"fuzz: input {number} of seed {seed} is in {path}", file=sys.stderr)
            raise
    return runs + len(inputs)


def bound_memory() -> None:
    """Let whatever reserves without bound fail here."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def functions() -> list[FunctionType]:
    """List the functions and methods that read what a peer wrote."""
    found: list[object] = []
    for module in READERS:
        own = [
            one
            for one in vars(module).values()
            if getattr(one, "__module__", "") == module.__name__
        ]
        for value in own:
            found += vars(value).values() if isinstance(value, type) else [value]
    plain = [getattr(one, "__func__", one) for one in found]
    return [one for one in plain if isinstance(one, FunctionType)]


def with_atheris(arguments: Sequence[str]) -> None:
    """Have atheris change the inputs, by the lines that they reach."""
    import atheris  # pyright: ignore[reportMissingImports]

    for function in functions():
        atheris.instrument_func(function)
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds()):
        (folder / f"seed-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> int:
    """Run from the command line."""
    if sys.argv[1:2] == ["--atheris"]:
        with_atheris(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    bound_memory()
    print(f"fuzz: {run(chosen.runs, chosen.seed)} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
