"""One process of a team: it makes a peer's side, runs rounds, and answers."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from . import consuming, producing
from .payload import Sources
from .peer import Meeting, Peer, Receiver, Sender, Store
from .peers import catalogue
from .rounds import AskUsage, Close, Open, Over, Round, Usage
from .traffic import Place

ANSWER_LIMIT_S: Final = 90.0
CONSUMER: Final = -1
LOOPBACK: Final = "127.0.0.1"
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]


@dataclass
class Post:
    """What a process is told when it is started: its peer, its rank, whom it is joined to.

    ``acks``: to the producers or, at a producer, from the consumer. ``previous`` and ``next`` are
    its neighbours in a pipeline, where the consumer is the last stage.
    """

    peer: str
    extra: Path | None
    place: Place
    rank: int
    port: int
    log: Path
    acks: list[Connection] = field(default_factory=list[Connection])
    previous: Connection | None = None
    next: Connection | None = None


class Worker:
    """Both roles; a consumer has a receiver, a producer a sender and its sources."""

    def __init__(self, post: Post, line: Connection) -> None:
        self._post, self._line = post, line
        self._peer: Peer = catalogue(post.extra)[post.peer]
        self._store: Store = TCPStore(LOOPBACK, post.port, is_master=False)
        self._side: Receiver | Sender | None = None
        self._run: consuming.Consumer | producing.Producer | None = None

    def serve(self) -> None:
        """Do what is asked until there is no more."""
        while not isinstance(asked := self._hear(), Over):
            if isinstance(asked, Open):
                self._open(asked)
                self._say(None)
            elif isinstance(asked, Round) and self._run is not None:
                self._run.begin(asked)
                self._say(None)
                self._hear()  # "go"
                self._say(self._run.go(asked))
            elif isinstance(asked, AskUsage):
                self._say(usage())
            elif isinstance(asked, Close):
                self._close()
                self._say(None)

    def _hear(self) -> Any:
        return self._line.recv()

    def _say(self, value: object) -> None:
        self._line.send(("value", value))

    def _open(self, asked: Open) -> None:
        traffic, post = asked.traffic, self._post
        meeting = Meeting(PrefixStore(asked.key, self._store))
        on_gpu = traffic.place.on_gpu
        if post.rank == CONSUMER:
            if on_gpu:
                torch.cuda.set_device(traffic.place.consumer)
            receiver = self._peer.receiver(traffic, meeting)
            self._side = receiver
            self._run = consuming.Consumer(receiver, traffic, post.acks, post.previous)
            return
        if on_gpu:
            torch.cuda.set_device(traffic.place.producer(post.rank))
        sources = Sources(traffic, post.rank)
        sender = self._peer.sender(traffic, post.rank, meeting, sources)
        self._side = sender
        ends = post.acks, post.previous, post.next
        one_sided = self._peer.one_sided
        self._run = producing.Producer(sender, sources, traffic, post.rank, one_sided, *ends)

    def _close(self) -> None:
        side, self._side, self._run = self._side, None, None
        if side is not None:
            side.close()


def usage() -> Usage:
    """Read what this process takes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)

    def kib(name: str) -> int:
        return int(fields[name].split()[0]) * 1024

    return Usage(kib("RssAnon"), kib("RssShmem"), int(fields["Threads"]))


def become(post: Post, line: Connection) -> None:
    """Turn a process into a worker."""
    _end_with_parent()
    _log_to(post.log)
    torch.set_num_threads(1)  # as many processes as cores, or more, run at the same time
    try:
        worker = Worker(post, line)
        line.send(("value", None))
        worker.serve()
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - told to the parent, which ends the team
        with suppress(OSError):
            line.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc())))
        wait([line], ANSWER_LIMIT_S)  # to be ended: a library's own exit may hang after its error


def _log_to(file: Path) -> None:
    """Keep what libraries say to the terminal out of the report."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _end_with_parent() -> None:
    """End this process when its parent ends, whatever a library holds the main thread with."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
