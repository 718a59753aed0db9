"""A peer's processes. A team is on its own: what a peer does to its processes harms no other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from .peer import Peer, Store
from .rounds import Answer, AskUsage, Close, Open, Over, Round, Usage
from .traffic import Place, Traffic
from .worker import CONSUMER, LOOPBACK, Post, TCPStore, become

GRACE_S: Final = 5.0
ANSWER_LIMIT_S: Final = 100.0


class PeerFailed(Exception):
    """A team's process raised, ended or said nothing in time; ``trace`` is its own."""

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


@dataclass(frozen=True)
class Answers:
    """What all processes of a team said; there is no consumer's where the peer is one-sided."""

    consumer: Answer | None
    producers: Sequence[Answer]

    @property
    def seconds(self) -> float:
        """Give the time from the first send to the last receipt."""
        began = min(one.began for one in self.producers)
        if self.consumer is not None:
            return (self.consumer.ended - began) / 1e9
        return (max(one.ended for one in self.producers) - began) / 1e9

    @property
    def all(self) -> list[Answer]:
        """Give all of them."""
        return [*self.producers, *([self.consumer] if self.consumer else [])]


class Meetings:
    """The store through which sides meet; every meeting has a part of its own."""

    def __init__(self) -> None:
        # Port 0: the system picks a free one, so there is nothing to race for.
        self._store: Store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.port: int = self._store.port
        self._held = 0

    def key(self) -> str:
        """Name a new one."""
        self._held += 1
        return f"meeting{self._held}"


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tapchannel.benchmark.worker"])  # torch is imported only once
    return context


class Team:
    """The processes of one peer. Leaving the ``with`` block ends them."""

    def __init__(
        self,
        peer: Peer,
        extra: Path | None,
        place: Place,
        producers: int,
        meetings: Meetings,
        log: Path,
    ) -> None:
        self.peer = peer
        self._meetings = meetings
        self._processes: list[BaseProcess] = []
        self._lines: list[Connection] = []
        self._opened = False
        self._step = 0
        ranks = [*range(producers), *([] if peer.one_sided else [CONSUMER])]
        posts = [Post(peer.name, extra, place, rank, meetings.port, log) for rank in ranks]
        if not peer.one_sided:
            _join(posts)
        for post in posts:
            self._start(post)

    def _start(self, post: Post) -> None:
        context = _context()
        ours, theirs = context.Pipe()
        process = context.Process(target=become, args=(post, theirs), daemon=True)
        process.start()
        for given in (theirs, *post.acks, post.previous, post.next):
            if given is not None:
                given.close()
        self._processes.append(process)
        self._lines.append(ours)

    def __enter__(self) -> Team:
        self._hear_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(in_peace=error is None)

    def end(self, in_peace: bool) -> None:
        """End the processes."""
        for line in self._lines:
            try:
                line.send(Over())
            except OSError:
                in_peace = False
        for process in self._processes:
            process.join(GRACE_S if in_peace else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
        for line in self._lines:
            line.close()
        self._processes, self._lines = [], []

    def open(self, traffic: Traffic) -> None:
        """Make both sides for these messages."""
        self._ask_all(Open(traffic, self._meetings.key()))

    def close(self) -> None:
        """Let go of both sides."""
        self._ask_all(Close())

    def usage(self) -> list[Usage]:
        """Ask all processes what they take; the consumer is the last."""
        return self._ask_all(AskUsage())

    def round(self, asked: Round) -> Answers:
        """Run a round in all processes: they get ready, then are let go, the consumer first."""
        self._ask_all(asked)
        for line in reversed(self._lines):
            line.send(None)
        answers: list[Answer] = self._hear_all()
        if self.peer.one_sided:
            return Answers(None, answers)
        return Answers(answers[-1], answers[:-1])

    def next_step(self) -> int:
        """Give the next pass's number."""
        self._step += 1
        return self._step

    def _ask_all(self, asked: object) -> list[Any]:
        for line in self._lines:
            try:
                line.send(asked)
            except OSError as error:
                raise PeerFailed(self._death(self._lines.index(line))) from error
        return self._hear_all()

    def _hear_all(self) -> list[Any]:
        """Wait for everybody's answer.

        Raises:
            PeerFailed: one failed, ended or said nothing.
        """
        answers: dict[int, Any] = {}
        while len(answers) < len(self._lines):
            open_lines = [line for number, line in enumerate(self._lines) if number not in answers]
            ready = wait(open_lines, ANSWER_LIMIT_S)
            if not ready:
                raise PeerFailed(f"nothing was heard in {ANSWER_LIMIT_S:.0f} s")
            for line in ready:
                number = self._lines.index(line)  # pyright: ignore[reportArgumentType]
                answers[number] = self._read(number)
        return [answers[number] for number in range(len(self._lines))]

    def _read(self, number: int) -> Any:
        try:
            kind, value = self._lines[number].recv()
        except (EOFError, OSError):
            raise PeerFailed(self._death(number)) from None
        if kind == "error":
            raise PeerFailed(*value)
        return value

    def _death(self, number: int) -> str:
        process = self._processes[number]
        process.join(GRACE_S)
        return f"its process ended with exit code {process.exitcode} and no error of its own"


def _join(posts: list[Post]) -> None:
    """Lay the pipes: from the consumer to each producer, and between neighbour stages."""
    consumer = posts[-1]
    for producer in posts[:-1]:
        theirs, ours = multiprocessing.Pipe(duplex=False)
        producer.acks.append(theirs)
        consumer.acks.append(ours)
    for one, other in zip(posts, posts[1:], strict=False):
        one.next, other.previous = multiprocessing.Pipe()
