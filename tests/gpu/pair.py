"""A consumer and a producer that live on: each test tells the two what to do.

A process that imports torch and makes a CUDA context costs seconds, so the tests of one
environment share two of them. A test hands each a role, a module-level function that is given a
`Peer`, its line to the other role, and the test's arguments:

    received, pushed = pair.run(_receive, _push, channel)

After a failure both are killed, and the next test gets two new ones.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from support.child_errors import ChildDied, ChildHung
from support.children import Child, Children
from support.link import Link
from tapchannel.errors import PassAborted, PeerLostError

STARTING_LIMIT = 90.0  # two cold imports of torch, two contexts, EAGER loading
ENDING_LIMIT = 20.0
ROLE_LIMIT = 30.0
POINT_LIMIT = 20.0
FAILED, DONE = "failed", "done"

Role = Callable[..., Any]
Environment = Mapping[str, str | None]


class PeerFailed(AssertionError):
    """The other role failed; its own error says why."""


class Peer:
    """One role's line to the other."""

    def __init__(self, line: Connection, task: int) -> None:
        self._line = line
        self._task = task
        self._said: dict[str, list[Any]] = {}

    def tell(self, point: str, value: object = None) -> None:
        """Say that a point is reached."""
        self._line.send((self._task, point, value))

    def wait(self, point: str, limit: float = POINT_LIMIT) -> Any:
        """Wait until the other role reaches a point; return the value it gave there.

        Raises:
            PeerFailed: it failed or ended before.
            AssertionError: it did not get there in time.
        """
        deadline = time.monotonic() + limit
        while not self._said.get(point):
            if not self._line.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"the other role did not reach {point!r} in {limit} s")
            try:
                task, reached, value = self._line.recv()
            except (EOFError, ConnectionResetError):
                raise PeerFailed(f"the other role ended before {point!r}") from None
            if task != self._task:
                continue  # an earlier test's, which nobody waited for
            if reached == FAILED:
                raise PeerFailed(f"the other role failed before {point!r}")
            self._said.setdefault(reached, []).append(value)
        return self._said[point].pop(0)


def work(link: Link, line: Connection) -> None:
    """Play one role after the other until there is none."""
    while (task := link.receive()) is not None:
        number, role, args = task
        peer = Peer(line, number)
        try:
            value = role(peer, *args)
            gc.collect()
            torch.cuda.synchronize()  # an error that the role left on the device is the role's
            torch.cuda.empty_cache()
        except BaseException:
            peer.tell(FAILED)
            raise
        link.reach(DONE, value)


class Pair:
    """The parent's hold on the two."""

    def __init__(self, consumer: Environment, producer: Environment) -> None:
        self._children = Children(STARTING_LIMIT)
        ours, theirs = self._children.context.Pipe()
        self.consumer = self._children.start(work, ours, name="consumer", env=consumer)
        self.producer = self._children.start(work, theirs, name="producer", env=producer)
        ours.close()
        theirs.close()
        self._tasks = 0
        self.broken = False

    def run(
        self, consumer: Role | None, producer: Role | None, *args: Any, limit: float = ROLE_LIMIT
    ) -> tuple[Any, Any]:
        """Let them play their roles; return what each returned.

        Raises:
            Exception: what a role raised; the one that failed first, if both did.
        """
        self._children.limit(limit if self._tasks else limit + STARTING_LIMIT)
        self._tasks += 1
        chosen = [(self.consumer, consumer), (self.producer, producer)]
        for child, role in chosen:
            if role is not None:
                child.send((self._tasks, role, args))
        failures: list[Exception] = []
        values = [None if role is None else _value(child, failures) for child, role in chosen]
        if failures:
            self._kill()
            # An own error explains the one of a role that only lost its peer.
            failures.sort(key=_is_consequence)
            for failure in failures[1:]:
                print(f"the other role failed, too: {failure!r}")
            raise failures[0]
        return values[0], values[1]

    def close(self) -> None:
        """Let both end, and cleanly."""
        self._children.limit(ENDING_LIMIT)
        if not self.broken:
            for child in (self.consumer, self.producer):
                child.send(None)
        self._children.__exit__(None, None, None)

    def _kill(self) -> None:
        self.broken = True
        for child in (self.consumer, self.producer):
            child.kill()


def _value(child: Child, failures: list[Exception]) -> Any:
    try:
        return child.wait_for(DONE)
    except Exception as failure:  # noqa: BLE001 - raised once both have been heard
        failures.append(failure)
        return None


def _is_consequence(failure: Exception) -> bool:
    return isinstance(failure, PeerFailed | ChildHung | ChildDied | PeerLostError | PassAborted)


class Pairs:
    """One pair an environment, started when it is first asked for."""

    def __init__(self, environments: Mapping[str, tuple[Environment, Environment]]) -> None:
        self._environments = environments
        self._pairs: dict[str, Pair] = {}
        self._over: list[Pair] = []

    def get(self, name: str) -> Pair:
        """Give the environment's pair; a new one, if the last one broke."""
        pair = self._pairs.get(name)
        if pair is None or pair.broken:
            if pair is not None:
                self._over.append(pair)
            pair = self._pairs[name] = Pair(*self._environments[name])
        return pair

    def pids(self) -> set[int]:
        """Name the processes that outlive a test."""
        return {
            child.pid for pair in self._pairs.values() for child in (pair.consumer, pair.producer)
        }

    def close(self) -> None:
        """End them all."""
        for pair in [*self._over, *self._pairs.values()]:
            pair.close()
