"""The sum of what the stages reported, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..telemetry import Event
from .messages import LaneReport, Message, PassDone, StageDone
from .policy import sources
from .settings import Settings


@dataclass
class Outcome:
    """A run so far; it can be judged once every stage is done."""

    settings: Settings
    passes: list[PassDone] = field(default_factory=list[PassDone])
    lanes: list[LaneReport] = field(default_factory=list[LaneReport])
    events: set[Event] = field(default_factory=set[Event])
    seconds: float = 0.0

    def add(self, message: Message) -> None:
        """Take one report in."""
        if isinstance(message, PassDone):
            self.passes.append(message)
            self.events.update(message.events)
        elif isinstance(message, StageDone):
            self.lanes.append(message.lane)
            self.lanes.sort(key=lambda lane: lane.lane)

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
    def pass_seconds(self) -> float:
        """Add up the time that passes were open."""
        return sum(done.seconds for done in self.passes)

    @property
    def tap_wait_seconds(self) -> float:
        """Add up the time that the draft stage's host waited for taps."""
        return sum(done.tap_wait_seconds for done in self.passes)

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
