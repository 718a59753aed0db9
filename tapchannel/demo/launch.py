"""The stages' processes: started, listened to, and ended whatever happens."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType

from . import rendezvous
from .messages import Assignment, Message, StageDone, StageFailed
from .settings import Placement, Settings

GRACE = 10.0  # seconds that a process gets to end by itself
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class DemoFailed(Exception):
    """A stage's process failed; ``failure`` says which and why."""

    def __init__(self, failure: StageFailed) -> None:
        super().__init__(
            f"stage {failure.stage} (pid {failure.pid}) failed: {failure.kind}: {failure.text}"
        )
        self.failure = failure


class Stages:
    """One spawned process a stage. Leaving the ``with`` block ends those that still run."""

    def __init__(self, settings: Settings, placement: Placement) -> None:
        self._settings = settings
        self._placement = placement
        self._store, self._port = rendezvous.host()
        self._processes: list[BaseProcess] = []
        self._links: list[Connection] = []

    def __enter__(self) -> Stages:
        try:
            with _ctrl_c_held():
                for stage in range(self._settings.stages):
                    self._start(stage)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self, stage: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe(duplex=False)
        assignment = Assignment(stage, self._settings, self._placement, self._port)
        process = spawn.Process(
            target=_become, args=(assignment, theirs), name=f"stage {stage}", daemon=True
        )
        process.start()
        theirs.close()  # so that the stage's death reads as end of file here
        self._processes.append(process)
        self._links.append(ours)

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()

    def messages(self) -> Iterator[Message]:
        """Yield what the stages report, until all are done and their processes have ended.

        Raises:
            DemoFailed: a stage reported an error, or its process died.
        """
        listening = dict(enumerate(self._links))
        while listening:
            ready = wait(list(listening.values()))
            news = [self._read(stage) for stage, link in listening.items() if link in ready]
            failures = [message for message in news if isinstance(message, StageFailed)]
            if failures:
                # One failure makes others, and the earliest is the cause.
                raise DemoFailed(min(failures, key=lambda failure: failure.at_ns))
            for message in news:
                if isinstance(message, StageDone):
                    del listening[message.stage]
                yield message
        for stage, process in enumerate(self._processes):
            process.join(GRACE)
            if process.exitcode != 0:
                raise DemoFailed(self._death(stage))

    def _read(self, stage: int) -> Message:
        try:
            return self._links[stage].recv()
        except EOFError:
            self._processes[stage].join(GRACE)
            return self._death(stage)

    def _death(self, stage: int) -> StageFailed:
        process = self._processes[stage]
        return StageFailed(stage, process.pid or 0, "ProcessDied", _ending(process.exitcode), 0)


@contextmanager
def _ctrl_c_held() -> Generator[None, None, None]:
    """Hold Ctrl-C back; processes started meanwhile never see it: their parent handles it."""
    resource_tracker.ensure_running()  # now, since starting it unblocks the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "it closed its pipe but still runs"
    if exit_code < 0:
        return f"it was ended by signal {signal.Signals(-exit_code).name}, with no error of its own"
    return f"it ended with exit code {exit_code} and no error of its own"


def _become(assignment: Assignment, link: Connection) -> None:
    """Turn a spawned process into a stage."""
    # The kernel ends this process with its parent, even while gloo holds the main thread.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        raise SystemExit(1)  # it ended before the kernel was told
    from .stage import run_stage  # here, since only the stages need torch's pipelining

    run_stage(assignment, link)
