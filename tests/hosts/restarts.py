"""Short lives of a producer: each is a process of its own, forked from one that has torch."""

from __future__ import annotations

import os
import signal
import traceback
from types import SimpleNamespace

from support import processes
from support import remote_roles as roles


def live_once(desk: SimpleNamespace, store: str, step: int, killed: bool) -> None:
    """Attach, push a pass, end: killed with the outbox open, or having closed it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(desk, store, step, writing, killed)
    os.close(writing)
    with open(reading, "rb") as done:
        said = done.read()  # until that life's end of the pipe is closed
    _, status = os.waitpid(pid, 0)
    expected = -signal.SIGKILL if killed else 0
    assert (os.waitstatus_to_exitcode(status), said) == (expected, b""), said.decode()


def _live(desk: SimpleNamespace, store: str, step: int, failure: int, killed: bool) -> None:
    """Be that process; nothing of the forked one's is to run at its end."""
    processes.end_with_parent(os.getppid())
    code = 1
    try:
        roles.attach(desk, store, {})
        roles.push_pass(desk, step, 1)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        desk.outbox.close()
        code = 0
    except BaseException:  # noqa: BLE001 - told through the pipe
        os.write(failure, traceback.format_exc().encode())
    finally:
        os._exit(code)
