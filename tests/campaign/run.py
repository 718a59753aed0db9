"""One cell of the campaign: two sides at their stations, the fault, what comes of it, and after."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign import sides
from campaign.cells import Cell
from support.child_errors import ChildHung
from support.children import Children
from support.hosts import Host, hosts
from support.workers import Worker
from tapchannel.errors import TapChannelError, UsageError

DEADLINE = 1.5  # seconds: of every wait of both sides
CUT_DEADLINE = 6.0  # longer than a peer may be silent: the cut is to be seen, not the deadline
PEER_TIMEOUT = 2.0
SLOW = 0.3
GRACE = 6.0  # seconds beyond a deadline after which a side hangs
STATION_LIMIT = 10.0
CELL_LIMIT = 60.0


@dataclass
class Result:
    """What came of a cell: each side's end, and what is wrong with it."""

    cell: Cell
    ends: dict[str, str] = field(default_factory=dict[str, str])
    wrong: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


class Lab:
    """Where the cells of one wire run: its hosts, its device."""

    def __init__(self, wire: str, folder: Path, pair: tuple[Host, Host] | None) -> None:
        self.wire, self._folder = wire, folder
        self.pair = dict(zip(("consumer", "producer"), pair, strict=True)) if pair else None

    def settings(self, side: str, cell: Cell) -> dict[str, Any]:
        """Give what a side's objects are made with."""
        host = self.pair[side] if self.pair else None
        return {
            "wire": self.wire,
            "device": "cuda:0" if self.wire == "cuda_ipc" else "cpu",
            "listen": f"tcp://{host.address}" if host else None,
            "store": f"file://{tempfile.mkdtemp(dir=self._folder)}",
            "warm": str(self._folder / "warm"),
            "deadline": CUT_DEADLINE if cell.fault == "cut" else DEADLINE,
            "peer_timeout": PEER_TIMEOUT,
        }

    def host_name(self, side: str) -> str | None:
        """Name the network namespace that a side lives in."""
        return self.pair[side].name if self.pair else None


@contextlib.contextmanager
def lab(wire: str) -> Iterator[Lab]:
    """Make what the cells of a wire need."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as made:
        pair: Any = made.enter_context(hosts(2)) if wire == "ucx" else None
        yield Lab(wire, Path(folder), pair)


def run(cell: Cell, place: Lab) -> Result:
    """Run a cell; whatever happens, its processes have ended afterwards."""
    result, began = Result(cell), time.monotonic()
    shared = set(os.listdir("/dev/shm"))
    try:
        with Children(CELL_LIMIT, method="fork") as children:
            Course(cell, place, children, result).run()
    except Exception as error:  # noqa: BLE001 - it is the cell's result
        result.wrong.append(f"{type(error).__name__}: {error}")
    if left := set(os.listdir("/dev/shm")) - shared:
        result.wrong.append(f"left in /dev/shm: {sorted(left)}")
    result.seconds = time.monotonic() - began
    return result


class Course:
    """The course of one cell."""

    def __init__(self, cell: Cell, place: Lab, children: Children, result: Result) -> None:
        self._cell, self._place, self._children, self._result = cell, place, children, result
        self._store = place.settings("consumer", cell)["store"]
        self._sides: dict[str, Worker] = {}
        self._victim = cell.victim
        self._other = "consumer" if cell.victim == "producer" else "producer"
        self._limit = (CUT_DEADLINE if cell.fault == "cut" else DEADLINE) + GRACE

    def run(self) -> None:
        """Take both sides to their stations, strike, look at the ends, and go on."""
        for side in (self._other, self._victim):
            self._start(side)
        slow = self._cell.fault == "slow"
        for side, life in (("consumer", sides.consume), ("producer", sides.produce)):
            self._sides[side].begin(life, self._cell.moment, slow)
        for worker in self._sides.values():
            try:
                worker.child.wait_for("there", STATION_LIMIT)
            except ChildHung:
                worker.finish(0.0)  # what its life has ended with before
                raise
        getattr(self, f"_{self._cell.fault}")()
        self._judge()
        self._mend()
        self._carry()
        for side in (self._victim, self._other):  # the other is alone again, as it was at first
            worker = self._sides[side]
            leaks = worker.call(sides.end, side == self._other)
            if leaks:
                self._result.wrong.append(f"{side}: {leaks}")
            worker.dismiss()
            worker.child.join()

    # ---- faults

    def _kill(self) -> None:
        self._sides[self._victim].child.kill()
        self._end(self._other)

    def _restart(self) -> None:
        self._sides[self._victim].child.kill()
        self._start(self._victim)
        self._sides[self._victim].call(sides.take_over, self._victim)
        self._end(self._other)

    def _stop(self) -> None:
        self._sides[self._victim].child.stop()
        self._end(self._other)
        self._sides[self._victim].child.resume()
        self._end(self._victim)

    def _exception(self) -> None:
        os.kill(self._sides[self._victim].pid, signal.SIGUSR2)
        self._end(self._victim, go=False)
        self._end(self._other)

    def _slow(self) -> None:
        self._go(self._other)
        time.sleep(SLOW)  # not synchronisation: the fault itself
        self._go(self._victim)
        for side in ("producer", "consumer"):
            self._end(side, go=False)

    def _cut(self) -> None:
        assert self._place.pair is not None
        with self._place.pair[self._victim].silent_cut():
            for side in (self._other, self._victim):
                self._go(side)
            for side in (self._other, self._victim):
                self._end(side, go=False)

    # ---- the two sides

    def _start(self, side: str) -> None:
        worker = Worker(self._children, f"{side} of {self._cell}")
        settings = {**self._place.settings(side, self._cell), "store": self._store}
        worker.call(sides.begin, self._place.host_name(side), settings)
        self._sides[side] = worker

    def _go(self, side: str) -> None:
        """Let a side go on, unless it stands in a call."""
        in_call = {"wait": "consumer", "release": "producer"}.get(self._cell.moment) == side
        if not in_call or self._cell.fault == "slow":
            self._sides[side].send()

    def _end(self, side: str, go: bool = True) -> None:
        """Let a side run to its end, and keep what that was."""
        if go:
            self._go(side)
        began = time.monotonic()
        try:
            end = self._sides[side].finish(self._limit)
        except sides.TrainerError:
            end = "exception"
        except TapChannelError as error:
            end = type(error).__name__
            self._check_text(side, error)
        if time.monotonic() - began > self._limit:
            self._result.wrong.append(f"{side} ended after its deadline")
        self._result.ends[side] = end

    def _check_text(self, side: str, error: TapChannelError) -> None:
        """See that an error is one that names its channel and its peer."""
        named = ("rank 0" in str(error)) or ("pid" in str(error))
        if isinstance(error, UsageError) or error.channel != sides.NAME or not named:
            self._result.wrong.append(f"{side}: {type(error).__name__}: {error}")

    def _judge(self) -> None:
        if self._cell.fault == "slow" and set(self._result.ends.values()) != {"data"}:
            self._result.wrong.append(f"slow is not lost: {self._result.ends}")
        if self._cell.fault == "exception" and self._result.ends[self._victim] != "exception":
            self._result.wrong.append("the user's own error did not come out")

    # ---- afterwards

    def _mend(self) -> None:
        """Bring the victim back, and let the survivor go on with what it has."""
        if self._cell.fault == "kill":
            self._start(self._victim)
        gone = self._cell.fault in ("kill", "restart", "cut")
        consumer, producer = self._sides["consumer"], self._sides["producer"]
        if self._cell.fault == "restart" and self._victim == "consumer":
            new = True
        else:
            new = consumer.call(sides.mend_consumer, gone)
        self._step = 1 if gone and not new else 10
        attached = not new and consumer.call(sides.lane_state) == "attached"
        if not new and self._cell.fault == "restart" and self._victim == "producer":
            return  # it has attached to it already
        producer.call(sides.mend_producer, not attached)

    def _carry(self) -> None:
        """See that a pass goes through."""
        self._sides["producer"].begin(sides.push_pass, self._step)
        self._sides["consumer"].call(sides.receive_pass, self._step)
        self._sides["producer"].finish()
