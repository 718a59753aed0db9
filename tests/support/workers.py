"""Processes that run one call after another, so that a test need not pay for a start of its own.

    worker = Worker(children)
    worker.call(attach, store, 1)        # attach(desk, store, 1) there; its value, or its error
    worker.begin(push_pass, 3, 8)        # the same, but meanwhile the test goes on
    worker.finish()

The desk is a namespace that lives as long as the worker: what a call leaves on it, the next finds.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from support.child_errors import ChildTraceback
from support.children import Child, Children
from support.hosts import Host
from support.link import Link


class Answer(NamedTuple):
    """What came of one call: its value, or its error and where it was raised."""

    value: Any
    error: BaseException | None = None
    where: str = ""


class Worker:
    """The test's hold on one such process."""

    def __init__(
        self,
        children: Children,
        name: str | None = None,
        host: Host | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.child: Child = children.start(run_calls, name=name, host=host, env=env)
        self.busy = False

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self.child.pid

    def begin(self, function: Callable[..., object], *args: object) -> None:
        """Start ``function(desk, *args)`` there."""
        self.child.send((function, args))
        self.busy = True

    def finish(self, limit: float | None = None) -> Any:
        """Wait for the call that was begun; return its value or raise its error."""
        answer: Answer = self.child.wait_for("answer", limit)
        self.busy = False
        if answer.error is not None:
            raise answer.error from ChildTraceback(answer.where)
        return answer.value

    def call(self, function: Callable[..., object], *args: object) -> Any:
        """Run ``function(desk, *args)`` there; return its value or raise its error."""
        self.begin(function, *args)
        return self.finish()

    def wait_for(self, point: str) -> Any:
        """Wait until the running call has said ``desk.link.reach(point, value)``."""
        return self.child.wait_for(point)

    def send(self, value: object = None) -> None:
        """Hand a value to the running call's ``desk.link.receive()``."""
        self.child.send(value)

    def dismiss(self) -> None:
        """Let the process return, and end as any program ends."""
        self.child.send(None)


def run_calls(link: Link) -> None:
    """Run what the parent sends, until it sends None."""
    desk = SimpleNamespace(link=link)
    while (order := link.receive()) is not None:
        function, args = order
        link.reach("answer", _answer(function, desk, args))


def _answer(
    function: Callable[..., object], desk: SimpleNamespace, args: tuple[object, ...]
) -> Answer:
    try:
        return Answer(function(desk, *args))
    except Exception as error:  # noqa: BLE001 - raised again where the call was begun
        return Answer(None, error, traceback.format_exc())
