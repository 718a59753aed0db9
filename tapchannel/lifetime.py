"""Closing what a program forgot to close, at exit, while the interpreter still works."""

from __future__ import annotations

import atexit
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Self


class Closable(Protocol):
    """Something with a `close` that may be called twice."""

    def close(self) -> None:
        """End it."""
        ...


class ClosesOnExit:
    """A context manager that closes itself when its block is left, or when it is dropped."""

    _closed: bool = True  # until there is something to close

    def close(self) -> None:
        """End it; twice is fine."""
        raise NotImplementedError

    def __del__(self) -> None:
        self.close()  # threads and slots of one that was dropped must not stay

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(thing: Closable) -> None:
    """Close ``thing`` at interpreter exit if it is still alive then.

    Its native thread must be gone before the interpreter is: it asks the interpreter for things.
    """
    _open.add(thing)


@atexit.register
def _close_all() -> None:
    for thing in list(_open):
        thing.close()
