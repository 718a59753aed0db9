"""What the two roles share: their pass, their standing error, their end."""

from __future__ import annotations

import os
import time
import weakref
from typing import Generic, Protocol, TypeVar

from . import _native, lifetime
from .errors import TapChannelError
from .keys import MAX_MICROBATCHES, MAX_STEP, checked_int
from .passes import Pass, end_pass, in_print
from .settings import check_mode
from .verdicts import Scene, error_from


class _Core(Protocol):
    def open_pass(self, step: int, microbatches: int) -> _native.Verdict | None: ...

    def abort(self, reason: str) -> None: ...

    def check(self) -> _native.Verdict | None: ...


_CoreT = TypeVar("_CoreT", bound=_Core)


class Role(lifetime.ClosesOnExit, Generic[_CoreT]):
    """A mailbox or an outbox, once its core and its scene are there."""

    _core: _CoreT
    _scene: Scene

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid, self._check = os.getpid(), check_mode()
        self._began, self._step = time.monotonic(), 0
        self._pass: weakref.ref[Pass] | None = None
        self._last_error: str | None = None

    def _close_pass(self) -> None:
        raise NotImplementedError

    def abort(self, reason: object) -> None:
        """End the open pass on both sides, or clear a failure; the next `open_pass` works.

        Without an open pass, an outbox ends those whose pushes still wait for credit.

        Blocks:     never. What waits for the pass goes on: pushes that are queued for it are
                    dropped, streams see the poison pattern.
        """
        self._core.abort(in_print(reason))
        end_pass(self._pass)

    def _open(self, step: int, microbatches: int) -> Pass:
        checked_int("step", step, 0, MAX_STEP)
        checked_int("microbatches", microbatches, 1, MAX_MICROBATCHES)
        self._raise(self._core.open_pass(step, microbatches), f"open_pass({step})")
        self._step = step
        opened = Pass(step, microbatches, self._close_pass, self.abort)
        self._pass = weakref.ref(opened)  # it refers to us: a cycle would keep closed memory
        return opened

    def _may_close(self) -> bool:
        """Tell, once, whether there is something to close, and it is this process's."""
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        return True

    def _unless_forked(self, doing: str) -> None:
        """Say what the core would, before torch says that CUDA is not for forked processes."""
        if os.getpid() != self._pid:
            self._raise(self._core.check(), doing)

    def _error(self, verdict: _native.Verdict, doing: str) -> TapChannelError:
        error = error_from(verdict, self._scene, doing)
        if verdict.fault != "would_block":
            self._last_error = str(error)
        return error

    def _raise(self, verdict: _native.Verdict | None, doing: str) -> None:
        if verdict is not None:
            raise self._error(verdict, doing)
