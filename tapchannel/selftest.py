"""One channel between two spawned processes: random words pushed, read back, wrong ones counted.

The processes are fresh, so a crash in a driver ends only them and reads as a failure here. Every
message holds other words at every place: a late, stale or mixed one cannot pass for the right one.
"""

from __future__ import annotations

import logging
import multiprocessing
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import Signals
from typing import Literal, cast

import torch

from .error_text import seconds
from .errors import TapChannelError
from .mailbox import Mailbox
from .outbox import Outbox
from .plan import TapPlan

CHANNEL, TAP = "doctor", "pattern"
ROWS, WIDTH = 16, 512
MESSAGE_BYTES = ROWS * WIDTH * 8
DEPTH = 4
PASS_MICROBATCHES = 128  # fewer than an outbox queues, so that a push never finds its queue full
GRACE = 5.0  # seconds that the other side gets to say what it saw
# Seconds that only a hang takes: two processes import torch and UCX and make a CUDA context, on a
# busy machine from a slow file system. Once both are there, no message takes as long as a stall.
TO_START = 300.0
STALL = 60.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """What to run: one producer, one consumer, one tap of 64 KiB, ``messages`` times."""

    transport: str
    memory: Literal["auto", "vmm", "ipc"]
    producer_device: str
    consumer_device: str
    wait: Literal["stream", "host"]
    messages: int
    limit: float = TO_START  # seconds


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of an exchange. ``failure`` is empty where every message was received.

    ``lanes`` are UCX's lanes, such as ``rc_mlx5/mlx5_0:1``, where UCX carried it.
    """

    wrong_words: int = 0
    seconds: float = 0.0
    failure: str = ""
    lanes: tuple[str, ...] = ()


def run(exchange: Exchange) -> Finding:
    """Run the exchange in two processes of its own.

    Blocks:     until both have ended, for the exchange's limit and a few seconds at most.
    On failure: both processes are gone, and the finding says what each of them saw.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tapchannel-") as folder:
        store, seed = (Path(folder) / "store").as_uri(), secrets.randbits(63)
        links: dict[str, Connection] = {}
        processes: dict[str, BaseProcess] = {}
        try:
            for role in (_consume, _produce):
                ours, theirs = spawn.Pipe(duplex=False)
                name = role.__name__.lstrip("_")
                links[name] = ours
                processes[name] = spawn.Process(
                    target=_play, args=(role, exchange, store, seed, theirs), daemon=True
                )
                processes[name].start()
                theirs.close()  # so that the process's death reads as end of file here
            return _judge(_listen(links, processes, exchange.limit))
        finally:
            for process in processes.values():
                _end(process)
            for link in links.values():
                link.close()


def _end(process: BaseProcess) -> None:
    process.join(GRACE)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _listen(
    links: dict[str, Connection], processes: dict[str, BaseProcess], limit: float
) -> dict[str, Finding]:
    """Collect one finding a process; after a first failure the other has little time left."""
    findings: dict[str, Finding] = {}
    deadline = time.monotonic() + limit
    while len(findings) < len(links):
        pending = {link: name for name, link in links.items() if name not in findings}
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        for link in (link for link in pending if link in ready):
            finding = _read(link, processes[pending[link]])
            findings[pending[link]] = finding
            if finding.failure:
                deadline = min(deadline, time.monotonic() + GRACE)
        if not ready:
            hung = Finding(failure=f"said nothing in {seconds(limit)}")
            findings |= dict.fromkeys(pending.values(), hung)
    return findings


def _read(link: Connection, process: BaseProcess) -> Finding:
    try:
        return link.recv()
    except EOFError:
        process.join(GRACE)
        code = process.exitcode or 0
        how = f"signal {Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Finding(failure=f"the process ended with {how} and said nothing")


def _judge(findings: dict[str, Finding]) -> Finding:
    failures = [f"{name}: {found.failure}" for name, found in findings.items() if found.failure]
    if failures:
        return Finding(failure="; ".join(failures))
    return replace(findings["consume"], lanes=findings["produce"].lanes)


def _play(
    role: Callable[[Exchange, str, int], Finding],
    exchange: Exchange,
    store: str,
    seed: int,
    link: Connection,
) -> None:
    # An exchange is as slow as it was meant to be: no warning of a wire that is not the fastest.
    logging.getLogger("tapchannel.attach").setLevel(logging.ERROR)
    try:
        finding = role(exchange, store, seed)
    except (TapChannelError, RuntimeError, OSError) as error:
        finding = Finding(failure=f"{type(error).__name__}: {error}")
    link.send(finding)


def _plan() -> TapPlan:
    return TapPlan(groups={TAP: [TAP]}, width=WIDTH, dtype="int64", max_rows=ROWS)


def passes(messages: int) -> Iterator[tuple[int, int]]:
    """Give step and microbatches of each pass that so many messages take."""
    for step, first in enumerate(range(0, messages, PASS_MICROBATCHES)):
        yield step, min(PASS_MICROBATCHES, messages - first)


def pattern(seed: int, device: str, rows: int = ROWS) -> torch.Tensor:
    """Give words of which no two are alike; plus a message's number, they are that message's."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (rows, WIDTH), dtype=torch.int64, generator=random)
    return words.to(device)


def _secret(exchange: Exchange, seed: int) -> str | None:
    # Both sides know the seed, and nobody else: over TCP anybody may knock.
    return f"{seed:016x}" if exchange.transport == "ucx" else None


def _consume(exchange: Exchange, store: str, seed: int) -> Finding:
    words = pattern(seed, exchange.consumer_device)
    wrong = torch.zeros((), dtype=torch.int64, device=exchange.consumer_device)
    # With the rows given, a stream wait is enqueued before anything has landed: the harder case.
    rows = ROWS if exchange.wait == "stream" else None
    with Mailbox(
        _plan(),
        {0: [TAP]},
        depth=DEPTH,
        device=exchange.consumer_device,
        store=store,
        name=CHANNEL,
        timeout=STALL,
        transport=exchange.transport,
        memory=exchange.memory,
        secret=_secret(exchange, seed),
        listen="tcp://127.0.0.1" if exchange.transport == "ucx" else None,
    ) as mailbox:
        mailbox.wait_ready(exchange.limit)
        begun = time.monotonic()
        for step, microbatches in passes(exchange.messages):
            with mailbox.open_pass(step, microbatches):
                for microbatch in range(microbatches):
                    expected = words + (step * PASS_MICROBATCHES + microbatch)
                    with mailbox.recv(microbatch, wait=exchange.wait, rows=rows) as taps:
                        wrong += (taps[TAP] != expected).sum()
        return Finding(int(wrong.item()), time.monotonic() - begun)


def _produce(exchange: Exchange, store: str, seed: int) -> Finding:
    words = pattern(seed, exchange.producer_device)
    with Outbox(
        _plan(),
        0,
        store=store,
        name=CHANNEL,
        device=exchange.producer_device,
        timeout=STALL,
        attach_timeout=exchange.limit,
        transport=exchange.transport,
        secret=_secret(exchange, seed),
    ) as outbox:
        for step, microbatches in passes(exchange.messages):
            with outbox.open_pass(step, microbatches):
                for microbatch in range(microbatches):
                    number = step * PASS_MICROBATCHES + microbatch
                    outbox.push(microbatch, TAP, words + number)
                outbox.flush()
        return Finding(lanes=lanes_of(outbox))


def lanes_of(outbox: Outbox) -> tuple[str, ...]:
    """Give UCX's lanes to the mailbox, such as ``rc_mlx5/mlx5_0:1``; none where UCX has no part."""
    return tuple(cast("list[str]", outbox.info().get("ucx_lanes", [])))
