"""A pass as a context manager: opened by the call, closed or aborted by leaving the block."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final

from .errors import TapChannelError

MAX_REASON: Final = 240


class Pass:
    """One run of the schedule, on one side.

    Leaving the block normally closes the pass, which must be complete. On a GPU a recv with its
    rows named may run ahead of credit; closing then waits until all of the pass is granted. Leaving
    by an exception, or incomplete, aborts the pass on both sides: the next one works (I7).
    """

    def __init__(
        self,
        step: int,
        microbatches: int,
        close: Callable[[], None],
        abort: Callable[[str], None],
    ) -> None:
        self.step = step
        self.microbatches = microbatches
        self._close = close
        self._abort = abort
        self._over = False

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._over:
            self._abort(said(error))

    def close(self) -> None:
        """Close the pass, as leaving the block does.

        Raises:
            UsageError: not every key was pushed or received; the pass was aborted.
        """
        if self._over:
            return
        try:
            self._close()
        except Exception as failure:
            self._abort(said(failure))
            raise
        finally:
            self._over = True

    def end(self) -> None:
        """Let the block be left in peace: the pass was aborted inside it."""
        self._over = True


def end_pass(opened: weakref.ref[Pass] | None) -> None:
    """End a pass that was aborted by its role, if anybody still holds it."""
    held = opened() if opened is not None else None
    if held is not None:
        held.end()


def said(error: BaseException) -> str:
    """Give an error in a few words, for the other side."""
    words = error.what if isinstance(error, TapChannelError) else str(error)
    return in_print(f"{type(error).__name__}: {words}")


def in_print(reason: object) -> str:
    """Give a reason as short text that any encoding can carry."""
    return str(reason)[:MAX_REASON].encode("utf-8", "backslashreplace").decode("utf-8")
