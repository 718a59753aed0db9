"""What the processes of a team are asked to do, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .traffic import Traffic

Kind = Literal["stream", "ping", "cost", "work", "pipeline"]


@dataclass(frozen=True)
class Open:
    """Make the peer's two sides for these messages; ``key`` names their meeting."""

    traffic: Traffic
    key: str


@dataclass(frozen=True)
class Work:
    """Compute beside the messages.

    ``kernel``: "matmul" or "memory", run once a message and timed; "sleep" waits. ``forward`` and
    ``draft`` are milliseconds of a pipeline's stage; a backward takes twice a forward. ``after``:
    the taps pass once the step is over.
    """

    kernel: str
    taps: bool
    forward: float = 0.0
    draft: float = 0.0
    after: bool = False


@dataclass(frozen=True)
class Round:
    """Move ``count`` messages; ``check`` all of them or, after the clock, the last.

    ``pause``: seconds between the sends of a "cost". ``gate``: hold a GPU's stream until all of it
    is queued, and begin the clock as it is let go.
    """

    kind: Kind
    step: int
    count: int
    check: bool = False
    pause: float = 0.0
    work: Work | None = None
    gate: bool = False


@dataclass
class Answer:
    """One process's round: ns of the host's monotonic clock, and what was found wrong.

    ``values`` are microseconds (ping: until visible; cost) or milliseconds (work: a kernel);
    ``released`` are microseconds until after the release. ``waited``: seconds in receive or send.
    """

    began: int = 0
    ended: int = 0
    at: list[int] = field(default_factory=list[int])
    released: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])
    waited: float = 0.0
    cpu: float = 0.0
    checked: int = 0
    wrong: int = 0


@dataclass(frozen=True)
class Usage:
    """What a process takes: of its own memory and of shared memory, in bytes, and its threads."""

    private: int
    shared: int
    threads: int


class Over:
    """There is no more to do."""


class AskUsage:
    """Say what you take."""


class Close:
    """Let go of the peer's two sides."""
