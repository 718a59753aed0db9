"""What the parent tells a stage's process once, and what the stages report to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class StageDone:
    """A stage has closed everything; its process ends."""

    stage: int
    lanes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    events: list[Event] = field(default_factory=list[Event])


@dataclass(frozen=True)
class StageFailed:
    """A stage ended by an error."""

    stage: int
    pid: int
    kind: str
    text: str
    at_ns: int = 0


Message = StageReady | MicrobatchDone | PassDone | StageDone | StageFailed
