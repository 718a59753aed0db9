"""Ranks that live on: tests whose imports cost seconds share their processes.

    crew.run(2, train, shape)        # train(rank, shape) in two processes, each in a gloo group

Every run has a process group of its own, so that one may lose or break what it likes. After a
failure the processes are killed, and the next run gets new ones.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from support.child_errors import ChildHung
from support.children import Children
from support.workers import Worker

STARTING_LIMIT = 60.0
ENDING_LIMIT = 40.0  # to tear the interpreter down takes seconds of four on few cores
RUN_LIMIT = 40.0
PEER_LIMIT = datetime.timedelta(seconds=20)  # for a rank whose peer has failed
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class Crew:
    """The test's hold on the ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._children: Children | None = None
        self._workers: list[Worker] = []

    def run(
        self, ranks: int, function: Callable[..., Any], *args: object, limit: float = RUN_LIMIT
    ) -> list[Any]:
        """Run ``function(*args)`` as so many ranks; return what each returned.

        Raises:
            Exception: what a rank raised; the one that failed first, as far as can be told.
        """
        self._start(limit)
        workers = self._workers[:ranks]
        port = workers[0].call(open_store)
        for rank, worker in enumerate(workers):
            worker.begin(as_rank, port, rank, ranks, function, args)
        values: list[Any] = []
        failures: list[Exception] = []
        for worker in workers:
            try:
                values.append(worker.finish())
            except Exception as failure:  # noqa: BLE001 - raised once all have been heard
                failures.append(failure)
        if failures:
            self._kill()
            failures.sort(key=_is_consequence)
            for failure in failures[1:]:
                print(f"another rank failed: {failure!r}")
            raise failures[0]
        return values

    def pids(self) -> set[int]:
        """Name the processes that outlive a test."""
        return {worker.pid for worker in self._workers}

    def close(self) -> None:
        """Let them all end, and cleanly."""
        if self._children is None:
            return
        self._children.limit(ENDING_LIMIT)
        for worker in self._workers:
            worker.dismiss()
        self._children.__exit__(None, None, None)

    def _start(self, limit: float) -> None:
        if self._children is None:
            self._children = Children(STARTING_LIMIT + limit)
            self._workers = [
                Worker(self._children, name=f"rank {rank}", env=ENVIRONMENT)
                for rank in range(self._size)
            ]
        else:
            self._children.limit(limit)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.child.kill()
        self._children, self._workers = None, []


def _is_consequence(failure: Exception) -> bool:
    """Tell a rank that only lost its peers from one that failed by itself."""
    lost = isinstance(failure, RuntimeError) and "gloo" in str(failure).lower()
    return lost or isinstance(failure, ChildHung)


def open_store(desk: SimpleNamespace) -> int:
    """Serve the next run's store; return its port."""
    desk.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return desk.store.port


def as_rank(
    desk: SimpleNamespace,
    port: int,
    rank: int,
    ranks: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Be one rank of a process group while the function runs."""
    torch.set_num_threads(1)
    store = desk.store if rank == 0 else dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PEER_LIMIT)
    try:
        value = function(*args)
        dist.barrier()  # the store goes with rank 0
        return value
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
