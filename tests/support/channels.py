"""A mailbox of this process with its producers, on one transport."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import processes
from support.blocks import LaneWords
from support.places import Apart, Here, Producer
from tapchannel import Key, Mailbox, Outbox, Shard, TapPlan
from tapchannel.telemetry import read_events

LIMIT = 20.0  # seconds; no wait of a passing test comes near it
BRIEFLY = 0.1  # seconds; for waits that must end without success

_names = itertools.count()


@dataclass(frozen=True)
class Wire:
    """A transport, and the device and the kind of memory that it is tried on."""

    transport: str
    device: str
    memory: str = "auto"
    listen: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Tell whether the slots lie on a GPU."""
        return self.device != "cpu"


SHM = Wire("shm", "cpu")
UCX = Wire("ucx", "cpu", listen="tcp://127.0.0.1")
# Classic memory: UCX cannot export what is mapped page by page, unless by fabric handles.
UCX_GPU = Wire("ucx", "cuda:0", "ipc", listen="tcp://127.0.0.1")
CUDA_VMM = Wire("cuda_ipc", "cuda:0", "vmm")
CUDA_IPC = Wire("cuda_ipc", "cuda:0", "ipc")
STAGED_CPU = Wire("host_staged", "cpu")
STAGED = Wire("host_staged", "cuda:0")


class Channel:
    """A mailbox and, by rank, its producers."""

    def __init__(self, mailbox: Mailbox, plan: TapPlan, producing: Mapping[str, Any]) -> None:
        self.mailbox = mailbox
        self.plan = plan
        self.producing = producing
        self.producers: dict[int, Producer] = {}

    @property
    def producer(self) -> Producer:
        """Return the only producer."""
        [producer] = self.producers.values()
        return producer

    @contextlib.contextmanager
    def open_pass(self, step: int, microbatches: int) -> Iterator[None]:
        """Open a pass on all sides, the mailbox first."""
        with contextlib.ExitStack() as sides:
            sides.enter_context(self.mailbox.open_pass(step, microbatches))
            for producer in self.producers.values():
                sides.enter_context(producer.open_pass(step, microbatches))
            self.heard()
            yield

    def heard(self) -> None:
        """Wait until each side knows what the other has said: at once, but on a network."""
        assert self.mailbox._core.carried(LIMIT)
        for producer in self.producers.values():
            assert producer.run(carried)

    def close(self) -> None:
        """Close every side."""
        for producer in self.producers.values():
            producer.close()
        self.mailbox.close()


def carried(outbox: Outbox) -> bool:
    """Wait until the mailbox knows what an outbox has said."""
    return outbox._core.carried(LIMIT)


class Maker:
    """Makes channels on one wire, with their producers in one place, and closes them all."""

    def __init__(self, wire: Wire, place: Here | Apart, folder: Path) -> None:
        self.wire = wire
        self.place = place
        self.store = f"file://{folder}"
        self._made: list[Channel] = []

    def __call__(
        self,
        plan: TapPlan,
        sources: Mapping[int, Sequence[str | Shard]] | None = None,
        *,
        attach: Sequence[int] | None = None,
        env: Mapping[str, str | None] | None = None,
        outbox: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Channel:
        """Make a mailbox, by default for one producer of all taps, and attach its producers."""
        sources = sources or {0: [tap.name for tap in plan.taps]}
        options = {"timeout": LIMIT, "name": f"channel {next(_names)}", **options}
        with processes.environment(env or {}):
            mailbox = Mailbox(
                plan,
                sources,
                device=self.wire.device,
                memory=self.wire.memory,
                transport=self.wire.transport,
                listen=self.wire.listen,
                store=self.store,
                **options,
            )
        producing = {
            "timeout": LIMIT,
            "attach_timeout": LIMIT,
            "name": options["name"],
            "device": self.wire.device if self.wire.on_gpu else None,
            "transport": self.wire.transport,
            "env": env,
            **(outbox or {}),
        }
        channel = Channel(mailbox, plan, producing)
        self._made.append(channel)
        for rank in sources if attach is None else attach:
            self.attach(channel, rank)
        return channel

    def attach(self, channel: Channel, rank: int) -> None:
        """Attach the producer of a rank."""
        options = {"store": self.store, **channel.producing}
        channel.producers[rank] = self.place.attach(channel.plan, rank, **options)

    def __enter__(self) -> Maker:
        return self

    def __exit__(self, *error: object) -> None:
        for channel in self._made:
            channel.close()


def until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """Look again and again until a condition holds.

    Raises:
        AssertionError: it did not hold in time.
    """
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"condition did not hold within {limit:.1f} s")
        time.sleep(0.001)


def landed(mailbox: Mailbox, microbatch: int) -> bool:
    """Tell whether every cell of a microbatch of the open pass is stamped."""
    key = Key(mailbox.epoch, mailbox._step, microbatch)
    depth = mailbox._scene.depth
    stamps: list[int] = []
    for lane in mailbox._lanes:
        words = LaneWords(mailbox, lane.index, depth, len(lane.cells))
        stamps += [words.stamp(microbatch % depth, cell.index) for cell in lane.cells]
        words.close()
    return all(stamp == key.stamp() for stamp in stamps)


def granted(mailbox: Mailbox, step: int) -> int:
    """Count the microbatches of a pass that the mailbox has given credit for."""
    return max(
        (
            event.key.microbatch + 1
            for event in read_events(mailbox)
            if event.step_name == "grant" and event.key is not None and event.key.step == step
        ),
        default=0,
    )


def arena_of(mailbox: Mailbox) -> Any:
    """Return the memory that holds a mailbox's slots, to be read and written past the protocol."""
    return mailbox._made.reservation.arena
