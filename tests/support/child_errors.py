"""How a child process can fail its parent."""

from __future__ import annotations

import signal


class ChildHung(AssertionError):
    """A child did not do in time what its parent waited for."""

    def __init__(self, name: str, pid: int, awaited: str, limit: float, stacks: str) -> None:
        super().__init__(f"{name} (pid {pid}): no {awaited} after {limit:.1f} s\n{stacks}".rstrip())
        self.name, self.pid, self.awaited = name, pid, awaited
        self.limit, self.stacks = limit, stacks


class ChildDied(AssertionError):
    """A child ended without a result or an error."""

    def __init__(self, name: str, pid: int, awaited: str, exitcode: int) -> None:
        how = signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
        super().__init__(f"{name} (pid {pid}) ended by {how} before its {awaited}")
        self.name, self.pid, self.awaited, self.exitcode = name, pid, awaited, exitcode


class ChildError(AssertionError):
    """A child raised something that cannot cross to its parent; the text is its traceback."""


class ChildTraceback(Exception):
    """Where in the child an error was raised: the cause of that error in the parent."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
