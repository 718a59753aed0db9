"""What the parent tells a stage's process once, and what the stages report to it."""

from __future__ import annotations

from dataclasses import dataclass

from ..telemetry import Event
from .settings import Placement, Settings


@dataclass(frozen=True)
class Assignment:
    """What a process needs to know to become a stage."""

    stage: int
    settings: Settings
    placement: Placement
    store_port: int


@dataclass(frozen=True)
class StageReady:
    """A stage is attached and about to open its first pass."""

    stage: int


@dataclass(frozen=True)
class MicrobatchDone:
    """The draft has trained on one microbatch."""

    step: int
    microbatch: int
    loss: float


@dataclass(frozen=True)
class PassDone:
    """The last stage has closed a pass."""

    step: int
    loss: float
    taps_checked: int
    differences: list[str]
    seconds: float
    tap_wait_seconds: float  # the host's time inside `recv`
    events: list[Event]  # of every lane, if the user wants the timeline


@dataclass(frozen=True)
class LaneReport:
    """What a producer says of its lane once all is over."""

    lane: int
    stage: int
    taps: list[str]
    transport: str
    bytes: int
    pushes: int
    push_seconds: float  # the host's time inside one `push`, median
    queued: int  # pushes that found no credit
    credit_wait_seconds: float  # what all pushes together waited for it


@dataclass(frozen=True)
class StageDone:
    """A stage has closed everything; its process ends."""

    stage: int
    lane: LaneReport


@dataclass(frozen=True)
class StageFailed:
    """A stage ended by an error."""

    stage: int
    pid: int
    kind: str
    text: str
    at_ns: int  # CLOCK_MONOTONIC; 0 for a death without a word, which causes errors elsewhere


Message = StageReady | MicrobatchDone | PassDone | StageDone | StageFailed
