"""A consumer's and a producer's process that only a network connects, and the ends it can come to.

channel = RemoteChannel(consumer, producer, store, near, far)
channel.start()
channel.consumer.begin(roles.lose_producer, 0)
lost = channel.lose_producer(KILLED_LIMIT)       # kills it; the consumer's wait has to end in time
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from support import remote_roles as roles
from support.remote_roles import Lost
from support.workers import Worker

KILLED_LIMIT = 1.0  # seconds until a side knows that the other one's process has ended
CUT_LIMIT = 10.0  # and that the wire between them is cut, by default


class End(NamedTuple):
    """One side's host, as errors name it, and the address that others reach it by."""

    host: str
    address: str


class RemoteChannel:
    """Both processes, and the store that both see; the mailbox is on the near end."""

    def __init__(self, consumer: Worker, producer: Worker, store: str, near: End, far: End) -> None:
        self.consumer, self.producer = consumer, producer
        self.store = store
        self.near_end, self.far_end = near, far

    def serve(self, address: str | None = None, **options: Any) -> None:
        """Make the mailbox."""
        self.consumer.call(roles.serve, self.store, address or self.near_end.address, options)

    def attach(self, **options: Any) -> None:
        """Attach the outbox."""
        self.producer.call(roles.attach, self.store, options)

    def open(self) -> None:
        """Make the mailbox and attach the outbox."""
        self.serve()
        self.attach()

    def start(self) -> None:
        """The same, with a pass open on both sides that neither will end by itself."""
        self.open()
        self.consumer.call(roles.open_for_receiving, 0, roles.ENDLESS)
        self.producer.call(roles.open_for_pushing, 0, roles.ENDLESS)

    def fill(self, taps: Sequence[str] = tuple(roles.WIDTHS)) -> None:
        """Push these taps of one microbatch more than there is credit for."""
        for microbatch in range(roles.DEPTH + 1):
            self.producer.call(roles.push, microbatch, taps)

    def flow(self) -> None:
        """Have one microbatch after the other pushed and received, until the peer is lost."""
        self.open()
        self.producer.begin(roles.lose_consumer_pushing, 0)
        self.consumer.begin(roles.lose_producer_receiving, 0)
        self.producer.wait_for("flowing")
        self.consumer.wait_for("flowing")

    def carry(self, step: int, microbatches: int = 2) -> None:
        """See that a pass goes through whole."""
        self.producer.begin(roles.push_pass, step, microbatches)
        self.consumer.call(roles.receive_pass, step, microbatches)
        self.producer.finish()

    def lose_producer(self) -> None:
        """Kill the producer; see that the consumer's wait ends in time and names it."""
        self._names_producer(_after_kill(self.producer, self.consumer))

    def lose_consumer(self) -> None:
        """Kill the consumer; see that the producer's wait ends in time and names it."""
        self._names_consumer(_after_kill(self.consumer, self.producer))

    def lose_wire(self, fault: AbstractContextManager[None]) -> None:
        """Break the wire; see that the waits of both sides end in time, and name the other side."""
        with fault:
            broken = time.monotonic()
            told: Lost = self.producer.finish()
            heard: Lost = self.consumer.finish()
        assert told.at - broken < CUT_LIMIT
        assert heard.at - broken < CUT_LIMIT
        self._names_consumer(told)
        self._names_producer(heard)

    def replace_producer(self, producer: Worker) -> None:
        """See that the mailbox goes on with another producer; also with the same process's next."""
        if producer is self.producer:
            producer.call(roles.clear)
        self.producer = producer
        self.consumer.call(roles.abort)
        self.attach()
        self.carry(1)

    def replace_consumer(self, consumer: Worker) -> None:
        """See that the producer's process goes on with another mailbox."""
        self.producer.call(roles.clear)
        self.consumer = consumer
        self.open()
        self.carry(0)

    def _names_producer(self, lost: Lost) -> None:
        error, pid, host = lost.error, self.producer.pid, self.far_end.host
        assert (error.rank, error.pid, error.host) == (0, pid, host)
        for fact in ("rank 0", f"pid {pid}", host, roles.NAME):
            assert fact in str(error)

    def _names_consumer(self, lost: Lost) -> None:
        # The fields are the lane's, and so the producer's.
        named = f"consumer (pid {self.consumer.pid} on host {self.near_end.host})"
        assert named in str(lost.error)


def _after_kill(victim: Worker, survivor: Worker) -> Lost:
    killed = time.monotonic()
    victim.child.kill()
    lost: Lost = survivor.finish()
    assert lost.at - killed < KILLED_LIMIT
    return lost
