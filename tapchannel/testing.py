"""A wire with faults on order, to see how a trainer takes them.

>>> from tapchannel.testing import FaultyOutbox
>>> def lose_one(outbox: FaultyOutbox) -> None:
...     outbox.faults.drop()                 # befalls the next message of this lane
...     outbox.push(0, "layer1", hidden)     # the consumer's recv ends in a StampTimeout

A message is one push's payload and its stamp; a push without rows has none. Faults on order are
used up one a message, in the order in which the messages leave. The lane keeps its order: what is
pushed behind a held message is held as well.
"""

from __future__ import annotations

from typing import Any

from . import _native
from .outbox import Outbox
from .settings import checked_seconds


class Faults:
    """What befalls the next messages of one lane. All calls may come from any thread."""

    def __init__(self) -> None:
        self._core = _native.Faults()

    def pass_by(self) -> None:
        """Let one message go unharmed."""
        self._core.next("none")

    def delay(self, seconds: float) -> None:
        """Begin a message so many seconds late."""
        self._core.next("delay", checked_seconds("delay", seconds))

    def hold(self) -> None:
        """Put the first half of a message's rows; the rest and the stamp wait for `let_go`.

        An outbox that closes meanwhile gives them up. Its lane then counts as lost, and nobody is
        let in on it before the process has ended: the rest might still have arrived.
        """
        self._core.next("hold")

    def drop(self) -> None:
        """Lose a message, payload and stamp, while the producer takes it for copied."""
        self._core.next("drop")

    def duplicate(self) -> None:
        """Put and stamp a message twice."""
        self._core.next("duplicate")

    def tear(self) -> None:
        """Put the first half of a message's rows, then fail."""
        self._core.next("tear")

    def overtake(self) -> None:
        """Stamp a message of which only the first half of the rows arrives.

        No transport may do this. `TAPCHANNEL_CHECK=1` finds it.
        """
        self._core.next("overtake")

    def let_go(self) -> None:
        """Put and stamp what is held, in order.

        Blocks:     as the wire's own puts do.
        """
        self._core.let_go()

    @property
    def held(self) -> int:
        """How many puts and stamps wait for `let_go`."""
        return self._core.held()

    def wrap(self, wire: _native.Wire) -> _native.Wire:
        """Give a wire that these faults befall; takes the given one over."""
        return self._core.wrap(wire)


class FaultyOutbox(Outbox):
    """An `Outbox`, by whatever transport, whose messages meet the faults that are ordered.

    Takes what `Outbox` takes. Its pushes all leave by the lane's own thread.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.faults = Faults()
        super().__init__(*args, **options)

    def _wire(self) -> _native.Wire:
        return self.faults.wrap(super()._wire())
