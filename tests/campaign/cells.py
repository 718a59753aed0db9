"""The cells of the campaign: what strikes whom, when, on which wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, and SIGCONT once the other side's wait has ended",
    "exception": "an exception in the user's own code, raised where the process stands",
    "slow": "the user's own code takes 0.3 s, a fifth of the deadline",
    "cut": "every packet to and from its host is dropped, and nobody is told",
    "restart": "SIGKILL, and another process takes its place before the other side looks",
}
VICTIMS = ("producer", "consumer")
# Where the producer and the consumer stand when the fault strikes.
MOMENTS = {
    "attach": ("in the handshake, its self-test due", "before it waits for producers"),
    "open pass": ("has opened the pass", "has opened the pass"),
    "push": ("between two taps of a microbatch", "has opened the pass"),
    "put": ("half of a tap's rows have arrived", "has opened the pass"),
    "wait": ("has pushed nothing", "waits in recv"),
    "read": ("has pushed all; half of it waits for credit", "reads a lease"),
    "release": ("waits in flush, for credit", "holds the last view of a lease that was left"),
    "idle": ("between two passes", "between two passes"),
    "close": ("enters close", "enters close"),
}
WIRES = ("shm", "ucx", "cuda_ipc")
_ONE_HOST = "memory of one host: there is no wire that could be cut without a word"


@dataclass(frozen=True)
class Cell:
    """One case of the campaign."""

    wire: str
    fault: str
    victim: str
    moment: str

    def __str__(self) -> str:
        return f"{self.wire}: {self.fault} of the {self.victim} at {self.moment}"

    @property
    def impossible(self) -> str | None:
        """Say why there is no such case; None if there is."""
        return _ONE_HOST if self.fault == "cut" and self.wire != "ucx" else None


def cells_of(wire: str) -> Iterator[Cell]:
    """Give all cells of a wire, impossible ones included."""
    for fault in FAULTS:
        for victim in VICTIMS:
            for moment in MOMENTS:
                yield Cell(wire, fault, victim, moment)


# What runs with every change: each fault, victim and moment, but not each with each.
SHORT = (
    Cell("shm", "kill", "producer", "put"),
    Cell("shm", "kill", "consumer", "release"),
    Cell("shm", "kill", "consumer", "attach"),
    Cell("shm", "stop", "producer", "wait"),
    Cell("shm", "stop", "consumer", "release"),
    Cell("shm", "exception", "consumer", "wait"),
    Cell("shm", "exception", "producer", "push"),
    Cell("shm", "slow", "consumer", "read"),
    Cell("shm", "slow", "producer", "put"),
    Cell("shm", "restart", "producer", "read"),
    Cell("shm", "restart", "consumer", "idle"),
    Cell("shm", "kill", "producer", "close"),
    Cell("ucx", "kill", "producer", "put"),
    Cell("ucx", "exception", "producer", "open pass"),
    Cell("ucx", "cut", "producer", "read"),
)
