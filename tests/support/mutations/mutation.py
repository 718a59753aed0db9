"""One way to break an invariant: what to change, and which tests must then fail."""

from __future__ import annotations

from dataclasses import dataclass

from support import machine

COMPILING = ("tests/bells/", "tests/streams/")  # their tests compile what they need of native/


@dataclass(frozen=True)
class Edit:
    """One text of one file, and what replaces it."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """One way to break an invariant."""

    name: str
    invariant: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]
    needs: tuple[str, ...] = ()  # markers, as in support.machine

    @property
    def native(self) -> bool:
        """Tell whether the native module must be built for it."""
        compiled = all(test.startswith(COMPILING) for test in self.tests)
        return not compiled and any(edit.file.startswith("native/") for edit in self.edits)

    @property
    def in_header(self) -> bool:
        """Tell whether nearly all of the native module must be built for it."""
        return any(edit.file.endswith(".hpp") for edit in self.edits)

    def lacks(self) -> str | None:
        """Say why it cannot be judged on this machine, or None if it can."""
        return next(filter(None, map(machine.lacks, self.needs)), None)


def mutation(
    name: str,
    invariant: str,
    tests: str | tuple[str, ...],
    file: str,
    old: str,
    new: str,
    needs: tuple[str, ...] = (),
) -> Mutation:
    """Make a mutation of one edit."""
    tests = (tests,) if isinstance(tests, str) else tests
    return Mutation(name, invariant, tests, (Edit(file, old, new),), needs)
