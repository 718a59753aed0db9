"""The sum of what the stages reported, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..telemetry import Event
from .messages import Message, PassDone, StageDone
from .policy import sources
from .settings import Settings


@dataclass
class Outcome:
    """A run so far; it can be judged once every stage is done."""

    settings: Settings
    passes: list[PassDone] = field(default_factory=list[PassDone])
    lanes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    events: list[Event] = field(default_factory=list[Event])
    seconds: float = 0.0

    def add(self, message: Message) -> None:
        """Take one report in."""
        if isinstance(message, PassDone):
            self.passes.append(message)
        elif isinstance(message, StageDone):
            self.lanes += message.lanes
            self.events += message.events

    @property
    def taps_due(self) -> int:
        """Count the taps that the run should have checked."""
        taps = sum(len(names) for names in sources(self.settings.stages).values())
        return taps * self.settings.microbatches * self.settings.passes

    @property
    def taps_checked(self) -> int:
        """Count the taps that were compared with the unpipelined forward."""
        return sum(done.taps_checked for done in self.passes)

    @property
    def differences(self) -> list[str]:
        """List every tap that differed from the unpipelined forward."""
        return [difference for done in self.passes for difference in done.differences]

    def faults(self) -> list[str]:
        """Say in words what is wrong with the run; empty when nothing is."""
        faults: list[str] = []
        if self.taps_checked != self.taps_due:
            faults.append(f"only {self.taps_checked} of {self.taps_due} taps were checked")
        if self.differences:
            faults.append(f"{len(self.differences)} taps differ from the unpipelined forward")
        if not self.passes[-1].loss < self.passes[0].loss:  # neither has a NaN fallen
            faults.append("the draft's loss did not fall")
        return faults
