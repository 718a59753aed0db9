"""``tapchannel doctor litmus``: does a stamp ever overtake its payload between two hosts?

Random words are pushed, a message's own at every place, and compared where they land. The producer
says in its first message which words they are. What the consumer has to tell the producer, the
counts above all, goes back as the reason of a pass that it aborts: a channel carries taps one way.
"""

from __future__ import annotations

import itertools
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from .errors import PassAborted, ProtocolError
from .mailbox import Mailbox
from .outbox import Outbox
from .plan import TapPlan
from .selftest import DEPTH, PASS_MICROBATCHES, STALL, TAP, WIDTH, lanes_of, passes, pattern
from .stores import DirectAddress
from .wire import Fields

ROW_BYTES: Final = WIDTH * 8
ROWS: Final = (1, 16, 256)  # of a message: 4 KiB, 64 KiB, 1 MiB
MOST_MESSAGES: Final = 10_000_000
_MOST_LANES: Final = 64
_LONGEST: Final = 256  # characters of a name or a rule that the other side gives
_ORDERING: Final = "ordering: "
_POLL_S: Final = 0.01
_GOODBYE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What one side was told: ``messages`` of each size, ``limit`` s to wait for the other side."""

    address: str
    messages: int
    limit: float
    device: str | None
    secret: str | bytes | None


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of the messages of one size: those with wrong words, and these words."""

    rows: int
    violations: int
    wrong_words: int
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What both sides know in the end; ``host`` is the other side's."""

    host: str
    device: str
    messages: int
    tallies: tuple[Tally, ...]
    lanes: tuple[str, ...]
    ordering: str

    @property
    def violations(self) -> int:
        """All messages in which a word was wrong though the stamp stood."""
        return sum(tally.violations for tally in self.tallies)


def consume(settings: Settings, ready: Callable[[tuple[str, ...]], None]) -> Result:
    """Listen, take the messages of one producer, count what is wrong.

    ``ready`` is called with the addresses that the producer may name.

    Blocks:     for ``limit`` seconds at most until the producer is there, then as long as messages
                arrive; none may be late by more than STALL seconds.

    Raises:
        TapChannelError: it cannot listen, nobody came, or the exchange broke off.
    """
    with Mailbox(
        _plan(),
        {0: [TAP]},
        depth=DEPTH,
        device=settings.device or "cpu",
        store=DirectAddress(settings.address),
        name=_name(settings.messages),
        timeout=STALL,
        transport="ucx",
        secret=settings.secret,
    ) as mailbox:
        ready(mailbox.addresses[1:])
        mailbox.wait_ready(settings.limit)
        steps = itertools.count()
        seed, host, lanes = _heard_first(_next_row(mailbox, next(steps)))
        device = str(mailbox.info()["device"])
        words = pattern(seed, device, ROWS[-1])
        tallies = tuple(
            _taken(mailbox, steps, words[:rows], first, settings.messages)
            for rows, first in _sizes(settings.messages)
        )
        ordering = str(_lane(mailbox)["ordering"])
        _tell(mailbox, steps, _as_text(tallies))
        _tell(mailbox, steps, _ORDERING + ordering)
        _see_off(mailbox)
        return Result(host, device, settings.messages, tallies, lanes, ordering)


def produce(settings: Settings) -> Result:
    """Attach, push the messages, hear what the consumer has counted.

    Blocks:     for ``limit`` seconds at most until attached, then as `consume`.

    Raises:
        TapChannelError: nobody listens there, it refuses, or the exchange broke off.
    """
    with Outbox(
        _plan(),
        0,
        store=DirectAddress(settings.address),
        name=_name(settings.messages),
        device=settings.device,
        timeout=STALL,
        attach_timeout=settings.limit,
        transport="ucx",
        secret=settings.secret,
    ) as outbox:
        facts = outbox.info()
        steps, seed, lanes = itertools.count(), secrets.randbits(63), lanes_of(outbox)
        device = str(facts["device"])
        first = {"seed": seed, "host": socket.gethostname()[:_LONGEST], "lanes": lanes}
        _push(outbox, next(steps), [_row(json.dumps(first), device)])
        words = pattern(seed, device, ROWS[-1])
        for rows, number in _sizes(settings.messages):
            _give(outbox, steps, words[:rows], number, settings.messages)
        tallies = _from_text(*_hear(outbox, steps, device))
        ordering, aborted = _hear(outbox, steps, device)
        if not ordering.startswith(_ORDERING):
            raise aborted
        host = cast("dict[str, str]", facts["peer"])["host"]
        rule = ordering.removeprefix(_ORDERING)
        return Result(host, device, settings.messages, tallies, lanes, rule)


def _plan() -> TapPlan:
    return TapPlan(groups={TAP: [TAP]}, width=WIDTH, dtype="int64", max_rows=ROWS[-1])


def _name(messages: int) -> str:
    # A side that was told another number is refused when it attaches, and sees both.
    return f"litmus --messages {messages}"


def _sizes(messages: int) -> Iterator[tuple[int, int]]:
    """Give the rows of each size, and its first message's number: no two have the same."""
    for index, rows in enumerate(ROWS):
        yield rows, index * (messages + PASS_MICROBATCHES)


def _lane(mailbox: Mailbox) -> dict[str, Any]:
    return cast("list[dict[str, Any]]", mailbox.info()["lanes"])[0]


# ---- the messages


def _taken(
    mailbox: Mailbox, steps: Iterator[int], words: torch.Tensor, first: int, messages: int
) -> Tally:
    """Compare each message, then time as many as fit a pass without looking at them."""
    rows = words.shape[0]
    wrong = torch.zeros(messages, dtype=torch.int64, device=words.device)
    number = 0
    for _, microbatches in passes(messages):
        with mailbox.open_pass(next(steps), microbatches):
            for microbatch in range(microbatches):
                # On a GPU: every other wait is the stream's, enqueued before anything has landed.
                wait = "stream" if number % 2 else "host"
                with mailbox.recv(microbatch, wait=wait, rows=rows) as taps:
                    wrong[number] = (taps[TAP] != words + (first + number)).sum()
                number += 1
    speed = _timed(mailbox, next(steps), rows)
    return Tally(rows, int((wrong > 0).sum().item()), int(wrong.sum().item()), speed)


def _timed(mailbox: Mailbox, step: int, rows: int) -> float:
    began = 0.0
    with mailbox.open_pass(step, PASS_MICROBATCHES):
        for microbatch in range(PASS_MICROBATCHES):
            with mailbox.recv(microbatch, wait="host", rows=rows):
                began = began or time.monotonic()
        seconds = max(1e-9, time.monotonic() - began)
    return (PASS_MICROBATCHES - 1) * rows * ROW_BYTES / seconds / 1e9


def _give(
    outbox: Outbox, steps: Iterator[int], words: torch.Tensor, first: int, messages: int
) -> None:
    for _, microbatches in passes(messages):
        _push(outbox, next(steps), [words + (first + at) for at in range(microbatches)])
        first += microbatches
    _push(outbox, next(steps), [words] * PASS_MICROBATCHES)


def _push(outbox: Outbox, step: int, messages: list[torch.Tensor]) -> None:
    with outbox.open_pass(step, len(messages)):
        for microbatch, message in enumerate(messages):
            outbox.push(microbatch, TAP, message)
        outbox.flush()


# ---- what the sides tell each other


def _row(text: str, device: str) -> torch.Tensor:
    padded = bytearray(text.encode("ascii").ljust(ROW_BYTES, b" "))
    return torch.frombuffer(padded, dtype=torch.int64).view(1, WIDTH).to(device)


def _next_row(mailbox: Mailbox, step: int) -> bytes:
    with mailbox.open_pass(step, 1), mailbox.recv(0, wait="host", rows=1) as taps:
        words = taps[TAP].contiguous().view(torch.uint8).flatten()
        return bytes(cast("list[int]", words.tolist()))


def _heard_first(row: bytes) -> tuple[int, str, tuple[str, ...]]:
    """Read the producer's first message as untrusted bytes (I8)."""
    fields = _fields(row.decode("ascii", "replace"))
    lanes = [str(lane)[:_LONGEST] for lane in fields.items("lanes", _MOST_LANES)]
    return fields.integer("seed", 0, (1 << 63) - 1), fields.text("host", _LONGEST), tuple(lanes)


def _tell(mailbox: Mailbox, steps: Iterator[int], text: str) -> None:
    """Tell the producer a text, and wait until it has heard it."""
    mailbox.open_pass(next(steps), DEPTH + 1)
    mailbox.abort(text)
    _next_row(mailbox, next(steps))


def _hear(outbox: Outbox, steps: Iterator[int], device: str) -> tuple[str, PassAborted]:
    """Wait for what the consumer tells; also give the error that it came with."""
    empty = _row("", device)
    try:
        _push(outbox, next(steps), [empty] * (DEPTH + 1))  # the last one never gets credit
    except PassAborted as error:
        _push(outbox, next(steps), [empty])
        return error.reason or "", error
    raise ProtocolError("consumer took a message that it was to abort")


def _see_off(mailbox: Mailbox) -> None:
    """Let the producer close first: it would take the mailbox's end for a failure."""
    deadline = time.monotonic() + _GOODBYE_S
    while _lane(mailbox)["state"] == "attached" and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _as_text(tallies: tuple[Tally, ...]) -> str:
    return json.dumps(
        {
            "violations": [tally.violations for tally in tallies],
            "words": [tally.wrong_words for tally in tallies],
            "MB_per_s": [round(tally.gb_per_s * 1e3) for tally in tallies],
        }
    )


def _from_text(text: str, aborted: PassAborted) -> tuple[Tally, ...]:
    """Read the counts; what is no counts is why the consumer has given up."""
    if not text.startswith("{"):
        raise aborted
    fields = _fields(text)
    columns = [_counts(fields, name) for name in ("violations", "words", "MB_per_s")]
    rows = zip(ROWS, *columns, strict=True)
    return tuple(Tally(size, bad, words, speed / 1e3) for size, bad, words, speed in rows)


def _counts(fields: Fields, name: str) -> list[int]:
    given = Fields(0, {str(at): value for at, value in enumerate(fields.items(name, len(ROWS)))})
    return [given.integer(str(at), 0, (1 << 63) - 1) for at in range(len(ROWS))]


def _fields(text: str) -> Fields:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ProtocolError("the other side of the litmus does not say what it should")
    return Fields(0, cast("dict[str, object]", values))
