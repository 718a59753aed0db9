"""Where a test's outboxes live: in this process, or in another one that does what this one asks.

A test that runs on both says what a producer does in functions of the outbox:

    producer = place.attach(plan, 0, store=store)
    producer.push(0, "layer1", tensor)
    producer.run(push_strided, seed)        # push_strided(outbox, seed), a module-level function
    pushed = producer.begin(push_all, 8)    # meanwhile the test goes on
    pushed()                                # its value, or its error
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from support import processes
from support.children import Child, Children
from support.link import Link
from tapchannel import Outbox, TapPlan
from tapchannel.passes import Pass
from tapchannel.settings import CREDIT_WAIT_S

ASK_LIMIT = 30.0  # seconds for one thing that the other process is asked to do


class Here:
    """This process."""

    name = "here"

    # ``credit_wait``: of the outboxes. Where the consumer is this very thread, what a push from a
    # GPU waits for cannot come while it waits.
    def __init__(self, credit_wait: float = 0.02) -> None:
        self._credit_wait = credit_wait
        self._numbers = itertools.count()
        self._outboxes: dict[int, Outbox] = {}
        self._passes: dict[int, Pass] = {}

    def attach(
        self, plan: TapPlan, rank: int, env: Mapping[str, str | None] | None = None, **options: Any
    ) -> Producer:
        """Attach an outbox, made under these environment variables."""
        return Producer(self, self.make(plan, rank, dict(env or {}), options))

    def make(
        self, plan: TapPlan, rank: int, env: dict[str, str | None], options: dict[str, Any]
    ) -> int:
        """Attach an outbox; return its number here."""
        with processes.environment(env):
            outbox = Outbox(plan, rank, **{"credit_wait": self._credit_wait, **options})
        number = next(self._numbers)
        self._outboxes[number] = outbox
        return number

    def ask(self, number: int, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(outbox, *args)``."""
        return function(self._outboxes[number], *args)

    def begin(self, number: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Start ``function(outbox, *args)``; the callable waits for its value or its error."""
        return in_background(self.ask, number, function, *args)

    def open_pass(self, number: int, step: int, microbatches: int) -> None:
        """Open a pass of an outbox."""
        self._passes[number] = self._outboxes[number].open_pass(step, microbatches)

    def leave_pass(self, number: int, error: BaseException | None) -> None:
        """Leave it, by an error or without."""
        kind = None if error is None else type(error)
        self._passes.pop(number).__exit__(kind, error, None)

    def close(self, number: int) -> None:
        """Close an outbox and forget it."""
        self._passes.pop(number, None)
        self._outboxes.pop(number).close()


class Apart:
    """Another process, which holds the outboxes in a `Here` of its own."""

    name = "apart"

    def __init__(self, children: Children, env: Mapping[str, str | None] | None = None) -> None:
        self._children = children
        self._child: Child = children.start(serve, name="producers", env=env)
        self._numbers = itertools.count()

    def attach(
        self, plan: TapPlan, rank: int, env: Mapping[str, str | None] | None = None, **options: Any
    ) -> Producer:
        """Attach an outbox over there, made under these environment variables."""
        return Producer(self, self._call("make", plan, rank, dict(env or {}), options))

    def ask(self, number: int, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(outbox, *args)``, done over there."""
        return self._call("ask", number, function, *args)

    def begin(self, number: int, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Start ``function(outbox, *args)``; the callable waits for its value or its error."""
        return self._send(True, "ask", number, function, *args)

    def open_pass(self, number: int, step: int, microbatches: int) -> None:
        """Open a pass of an outbox."""
        self._call("open_pass", number, step, microbatches)

    def leave_pass(self, number: int, error: BaseException | None) -> None:
        """Leave it, by an error or without."""
        self._call("leave_pass", number, error)

    def close(self, number: int) -> None:
        """Close an outbox and forget it."""
        self._call("close", number)

    def end(self) -> None:
        """Let the process return."""
        self._children.limit(ASK_LIMIT)
        self._child.send(None)

    def _call(self, method: str, *args: Any) -> Any:
        return self._send(False, method, *args)()

    def _send(self, meanwhile: bool, method: str, *args: Any) -> Callable[[], Any]:
        self._children.limit(ASK_LIMIT)
        number = next(self._numbers)
        self._child.send((number, meanwhile, method, args))

        def answer(limit: float | None = None) -> Any:
            value, error = self._child.wait_for(f"answer {number}", limit)
            if error is not None:
                raise error
            return value

        return answer


class Producer:
    """One outbox, wherever it is."""

    def __init__(self, place: Here | Apart, number: int) -> None:
        self._place = place
        self._number = number
        self._closed = False

    def push(self, microbatch: int, tap: str, tensor: torch.Tensor, **options: Any) -> None:
        """Push a tensor of the host, moved to the outbox's device first."""
        self.run(_push, microbatch, tap, tensor, options)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push has been copied."""
        self.run(Outbox.flush, timeout)

    def abort(self, reason: str) -> None:
        """End the open pass."""
        self.run(Outbox.abort, reason)

    def info(self) -> dict[str, Any]:
        """Return the outbox's facts."""
        return self.run(Outbox.info)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(outbox, *args)``."""
        return self._place.ask(self._number, function, *args)

    def begin(self, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Start ``function(outbox, *args)``; the callable waits for its value or its error."""
        return self._place.begin(self._number, function, *args)

    def open_pass(self, step: int, microbatches: int) -> ProducerPass:
        """Open a pass now; the block it is used for leaves it."""
        self._place.open_pass(self._number, step, microbatches)
        return ProducerPass(self._place, self._number)

    def close(self) -> None:
        """Close the outbox. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._place.close(self._number)


class ProducerPass:
    """An open pass of an outbox, wherever that is."""

    def __init__(self, place: Here | Apart, number: int) -> None:
        self._place = place
        self._number = number

    def __enter__(self) -> ProducerPass:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Any error, but one without frames and fit to be sent.
        plain = None if error is None else RuntimeError(f"{type(error).__name__}: {error}")
        self._place.leave_pass(self._number, plain)

    def close(self) -> None:
        """Close the pass, as leaving the block does."""
        self._place.leave_pass(self._number, None)


def in_background(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Start a call on a thread; the callable waits for its value or raises its error."""
    outcome: list[tuple[Any, BaseException | None]] = []
    thread = threading.Thread(target=lambda: outcome.append(_tried(function, args)), daemon=True)
    thread.start()

    def answer(limit: float = ASK_LIMIT) -> Any:
        thread.join(limit)
        if not outcome:
            raise AssertionError(f"{function.__name__} has not ended after {limit:.1f} s")
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return answer


def serve(link: Link) -> None:
    """Do to the outboxes of this process what the parent asks, until it sends None."""
    here = Here(CREDIT_WAIT_S)
    speaking = threading.Lock()

    def answer(number: int, method: str, args: tuple[Any, ...]) -> None:
        outcome = _tried(getattr(here, method), args)
        with speaking:
            link.reach(f"answer {number}", outcome)

    while (order := link.receive()) is not None:
        number, meanwhile, method, args = order
        if meanwhile:
            threading.Thread(target=answer, args=(number, method, args), daemon=True).start()
        else:
            answer(number, method, args)


def _tried(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return function(*args), None
    except Exception as error:  # noqa: BLE001 - raised again where the call was asked for
        return None, error


def _push(
    outbox: Outbox, microbatch: int, tap: str, tensor: torch.Tensor, options: dict[str, Any]
) -> None:
    device = str(outbox.info()["device"])
    outbox.push(microbatch, tap, tensor.to(device), **options)
