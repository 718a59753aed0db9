"""Workers for the tests of this folder, and the folder in which both sides meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from multiprocess import roles
from support.children import Children
from support.workers import Worker
from tapchannel import Mailbox

STEADY = 3  # workers that outlive a test: to start one takes seconds
TEST_LIMIT = 55.0
CLEARING_LIMIT = 5.0


class Crew:
    """The workers of one test."""

    def __init__(self, steady: list[Worker], children: Children) -> None:
        self._free = [worker for worker in steady if worker.child.exitcode is None]
        self._taken: list[Worker] = []
        self._victims: list[Worker] = []
        self._children = children

    def worker(self) -> Worker:
        """Give a worker that outlives the test."""
        if not self._free:
            return self.victim()
        self._taken.append(self._free.pop(0))
        return self._taken[-1]

    def victim(self) -> Worker:
        """Start a worker that the test may kill, or let end."""
        self._victims.append(Worker(self._children))
        return self._victims[-1]

    def clear(self) -> None:
        """Close what the test left open; end the workers that are not to outlive it."""
        for worker in self._taken:
            worker.child.resume()
            self._end_call(worker)
            if worker.busy:
                worker.child.kill()
            else:
                worker.call(roles.clear)
        for worker in self._victims:
            if worker.child.exitcode is None:
                worker.child.kill()

    @staticmethod
    def _end_call(worker: Worker) -> None:
        """Wait for a call that the test has begun and not finished."""
        if not worker.busy:
            return
        try:
            worker.finish(CLEARING_LIMIT)
        except Exception as error:  # noqa: BLE001 - the test is over; what it left is only told
            print(f"left by the test in {worker.child.name}: {error!r}")


@pytest.fixture(scope="package")
def steady() -> Iterator[tuple[Children, list[Worker]]]:
    """Start the workers that serve all tests of this folder."""
    with Children() as children:
        workers = [Worker(children, f"worker {number}") for number in range(STEADY)]
        yield children, workers
        children.limit(TEST_LIMIT)
        for worker in workers:
            if worker.child.exitcode is None:
                worker.dismiss()


@pytest.fixture
def crew(steady: tuple[Children, list[Worker]]) -> Iterator[Crew]:
    """Give the workers of one test."""
    lasting, workers = steady
    lasting.limit(TEST_LIMIT)
    with Children(TEST_LIMIT) as children:
        made = Crew(workers, children)
        yield made
        made.clear()


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Give the folder in which both sides meet."""
    return f"file://{tmp_path}"


class MailboxMaker:
    """Makes mailboxes of this process."""

    def __init__(self, store: str) -> None:
        self._store = store
        self.made: list[Mailbox] = []

    def __call__(self, sources: Mapping[int, Any] = roles.ONE, **options: Any) -> Mailbox:
        """Make a mailbox for the folder's plan."""
        settings = {"depth": 2, "timeout": roles.LIMIT, "store": self._store, "name": roles.NAME}
        self.made.append(Mailbox(roles.PLAN, sources, **{**settings, **options}))
        return self.made[-1]


@pytest.fixture
def mailbox_of(store: str) -> Iterator[MailboxMaker]:
    """Make mailboxes of this process, closed after the test."""
    maker = MailboxMaker(store)
    yield maker
    for mailbox in maker.made:
        mailbox.close()
