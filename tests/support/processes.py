"""The processes that this one has started, directly or through a child, and their environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of a child's children once that child has ended."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def command_of(pid: int) -> str:
    """Return the command line of a process, or nothing once it has gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()


def state_of(pid: int) -> str:
    """Return a process's state as the kernel writes it: R, S, T and so on, or gone."""
    return _state_and_parent(pid)[0]


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone", 0
    # The name stands in brackets and may hold spaces and brackets itself.
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)


def running_children() -> set[int]:
    """Return the children that have not ended, but for multiprocessing's own resource tracker."""
    own = os.getpid()
    running: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        state, parent = _state_and_parent(int(entry))
        if parent == own and state != "Z" and "resource_tracker" not in command_of(int(entry)):
            running.add(int(entry))
    return running


def wait_until_ended(pids: Iterable[int], limit: float) -> set[int]:
    """Wait for these processes to end by themselves; return those that did not.

    Blocks: until all have ended, ``limit`` seconds at most.
    """
    deadline = time.monotonic() + limit
    left: set[int] = set()
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            left.add(pid)
        os.close(descriptor)
    return left


def end(pids: Iterable[int]) -> list[str]:
    """Kill and collect these children; return a line for each, saying what it was."""
    lines: list[str] = []
    for pid in sorted(pids):
        lines.append(f"pid {pid}: {command_of(pid)}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return lines


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, for the processes started meanwhile; None takes one away."""
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
