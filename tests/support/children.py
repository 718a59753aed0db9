"""Run functions in spawned processes: every wait has a deadline, no process is left behind.

    def push_all(link, address):            # a module-level function; the link comes first
        outbox = attach(address)
        link.reach("attached")
        link.receive()                      # until the parent sends
        return outbox.info()

    with Children(limit=20) as children:
        producer = children.start(push_all, address, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        producer.wait_for("attached")
        producer.send()
    assert producer.result() == ...         # every child has ended by now

``start(..., host=far)`` puts the child into one of the hosts that `support.hosts` makes.

Leaving the block waits until each child that was not killed has ended, and raises what a child
raised unless ``result`` or ``wait_for`` has raised it before. A crash on the way out, after the
result, is an error too. An exception inside the block ends all children at once. Events, barriers
and pipes come from ``children.context`` and may be passed as arguments.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn

from support import link, processes
from support.child_errors import ChildDied, ChildHung, ChildTraceback
from support.host_entry import Entry
from support.hosts import Host
from support.link import Message

STACKS_LIMIT = 2.0  # seconds that a hung child gets to say where it is
STACKS_PAUSE = 0.2  # it has said it when it pauses this long


class Child:
    """The parent's hold on one child; made by Children.start."""

    def __init__(
        self, process: Any, pipe: Connection, stacks: Connection, deadline: Callable[[], float]
    ) -> None:
        self._process = process
        self._pipe = pipe
        self._stacks = stacks
        self._deadline = deadline
        self._points: dict[str, list[Any]] = {}
        self._outcome: Message | None = None
        self.pid: int = process.pid
        self.name: str = process.name
        self.settled = False  # its result or failure has been handed out, or it was killed
        self.killed = False

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, minus the signal's number for a killed child, None if it runs."""
        return self._process.exitcode

    def send(self, value: object = None) -> None:
        """Hand a value to the child's Link.receive."""
        link.send(self._pipe, Message(link.POINT, value))

    def wait_for(self, point: str, limit: float | None = None) -> Any:
        """Wait until the child reaches a point; return the value it gave there.

        Raises:
            ChildHung: it did not get there in time, and has been killed.
            ChildDied: it ended before.
            Exception: what the child raised.
        """
        deadline = self._within(limit)
        while not self._points.get(point):
            if self._outcome is not None:
                self.result()
                self._fail_dead(f"point {point!r}")
            self._take_message(f"point {point!r}", deadline)
        return self._points[point].pop(0)

    def result(self, limit: float | None = None) -> Any:
        """Wait until the child's function returns; return its value or raise its error.

        Raises:
            ChildHung: it did not return in time, and has been killed.
            ChildDied: it ended without a result.
            Exception: what the child raised.
        """
        deadline = self._within(limit)
        while self._outcome is None:
            self._take_message("result", deadline)
        self.settled = True
        if self._outcome.kind == link.ERROR:
            raise self._outcome.value from ChildTraceback(self._outcome.detail)
        return self._outcome.value

    def end(self) -> None:
        """Wait until the child has ended by itself, and cleanly.

        Raises:
            ChildHung: it returned but did not end in time, and has been killed.
            ChildDied: it crashed on the way out.
        """
        if self.join() and self._outcome is not None:
            self._fail_dead("clean end")

    def stop(self) -> None:
        """SIGSTOP the child; return once all its threads stand still."""
        self._signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT the child."""
        self._signal(signal.SIGCONT)

    def join(self) -> int:
        """Wait until the child has ended, without looking at what it sent; return the exit code.

        Raises:
            ChildHung: it did not end in time, and has been killed.
        """
        limit = max(0.0, self._deadline() - time.monotonic())
        if not connection.wait([self._process.sentinel], limit):
            self._fail_hung("end", limit)
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL the child, stopped or not; return once it has ended."""
        self.settled = self.killed = True
        self._signal(signal.SIGKILL)
        self._process.join()

    def close(self) -> Exception | None:
        """End the child and the line to it; return the error that nobody was handed, if any."""
        self._signal(signal.SIGKILL)
        self._process.join()
        with contextlib.suppress(EOFError):
            while self._outcome is None:
                self._keep(self._next_message(0.0))
        self._pipe.close()
        self._stacks.close()
        if self.settled or self._outcome is None or self._outcome.kind != link.ERROR:
            return None
        return self._outcome.value

    def _signal(self, number: int) -> None:
        if self.exitcode is None:  # else the pid may be another's by now
            os.kill(self.pid, number)

    def _within(self, limit: float | None) -> float:
        deadline = self._deadline()
        return deadline if limit is None else min(deadline, time.monotonic() + limit)

    def _next_message(self, limit: float) -> Message | None:
        """Wait for one message: None if none came in time, EOFError if the child has ended."""
        if self._pipe.closed:
            raise EOFError
        if not connection.wait([self._pipe, self._process.sentinel], limit):
            return None
        # A process that the child started may hold the pipe open: its end is not to be waited for.
        if not self._pipe.poll():
            raise EOFError
        try:
            return link.receive(self._pipe)
        except ConnectionResetError:
            raise EOFError from None

    def _keep(self, message: Message | None) -> None:
        if message is None:
            return
        if message.kind == link.POINT:
            self._points.setdefault(message.detail, []).append(message.value)
        else:
            self._outcome = message

    def _take_message(self, awaited: str, deadline: float) -> None:
        limit = max(0.0, deadline - time.monotonic())
        try:
            message = self._next_message(limit)
        except EOFError:
            self._fail_dead(awaited)
        if message is None:
            self._fail_hung(awaited, limit)
        self._keep(message)

    def _fail_dead(self, awaited: str) -> NoReturn:
        self.settled = True
        self._process.join()
        raise ChildDied(self.name, self.pid, awaited, self._process.exitcode) from None

    def _fail_hung(self, awaited: str, limit: float) -> NoReturn:
        stacks = self._where()
        self.kill()
        raise ChildHung(self.name, self.pid, awaited, limit, stacks)

    def _where(self) -> str:
        """Return the Python stacks of all the child's threads, if it can still tell."""
        self._signal(signal.SIGUSR1)
        text, pause = b"", STACKS_LIMIT
        while connection.wait([self._stacks], pause):
            part = os.read(self._stacks.fileno(), 65536)
            if not part:
                break
            text, pause = text + part, STACKS_PAUSE
        return text.decode(errors="replace") or "it does not say where: stopped, or not yet started"


class Children:
    """Processes that share one deadline and end with the with block.

    They are spawned, as a trainer's are. ``method="fork"`` is for where to import torch anew takes
    half a minute; torch and UCX would hang in what is forked once they have made threads.
    """

    def __init__(self, limit: float = 30.0, method: str = "spawn") -> None:
        if method == "fork" and len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("fork children before torch or tapchannel is used in their starter")
        self.context = multiprocessing.get_context(method)
        self._children: list[Child] = []
        self.limit(limit)

    def limit(self, seconds: float) -> None:
        """Set the deadline that all waits for these children share, anew from now on."""
        self._deadline = time.monotonic() + seconds

    def start(
        self,
        function: Callable[..., object],
        *args: Any,
        name: str | None = None,
        env: Mapping[str, str | None] | None = None,
        host: Host | None = None,
        **kwargs: Any,
    ) -> Child:
        """Start ``function(link, *args, **kwargs)`` in a process of its own.

        ``env`` sets variables for the child; None takes one away. ``host`` is where it runs, this
        machine's own network by default. What comes back is pickled: plain values, tensors as
        copies.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start children from the main thread: they end with their starter")
        if host is not None and self.context.get_start_method() != "spawn":
            raise RuntimeError("only a spawned child moves into a host before it imports anything")
        here, there = self.context.Pipe()
        stacks_here, stacks_there = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=link.run,
            args=(
                host and Entry(host.name),
                os.getpid(),
                there,
                stacks_there,
                function,
                args,
                kwargs,
            ),
            name=name or f"{function.__name__} {len(self._children)}",
        )
        with processes.environment(env or {}):
            process.start()
        there.close()
        stacks_there.close()
        child = Child(process, here, stacks_here, lambda: self._deadline)
        self._children.append(child)
        return child

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failures: list[Exception] = []
        try:
            if error is None:
                failures = self._collect()
        finally:
            unseen = [child.close() for child in self._children]
        failures += [failure for failure in unseen if failure is not None]
        # What a child raised explains why others hang or died: it comes first.
        failures.sort(key=lambda failure: isinstance(failure, ChildHung | ChildDied))
        first = failures.pop(0) if failures and error is None else None
        for failure in failures:
            print(f"another child failed: {failure!r}", file=sys.stderr)
        if first is not None:
            raise first

    def _collect(self) -> list[Exception]:
        """Wait for each child whose end nobody has seen; return what went wrong."""
        failures: list[Exception] = []
        for child in self._children:
            try:
                if not child.settled:
                    child.result()
                if not child.killed:
                    child.end()
            except Exception as failure:  # noqa: BLE001 - raised once every child has ended
                failures.append(failure)
        return failures
