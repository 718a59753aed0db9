"""A consumer is killed or ends: its producers hear of it, and keep nothing for it."""

from __future__ import annotations

import gc
import socket
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from multiprocess import roles
from multiprocess.conftest import Crew
from multiprocess.roles import LIMIT, TAPS
from support.workers import Worker
from tapchannel import Outbox
from tapchannel.errors import PassAborted, PeerLostError, TapChannelError
from tapchannel.telemetry import read_events

MICROBATCHES = 4


@pytest.fixture
def consumer(crew: Crew, store: str) -> Worker:
    """Give a consumer that may be killed, with one slot and an open pass."""
    victim = crew.victim()
    victim.call(roles.serve, store, 1, roles.ONE)
    victim.call(roles.open_for_receiving, 0, MICROBATCHES)
    return victim


@pytest.fixture
def outbox(consumer: Worker, store: str) -> Iterator[Outbox]:
    """Give this process's outbox, attached to it."""
    with Outbox(roles.PLAN, 0, store=store, name=roles.NAME, timeout=LIMIT) as made:
        yield made
        made.close()


def push_pass(outbox: Outbox) -> list[weakref.ref[torch.Tensor]]:
    """Push a whole pass; give weak references to all that was pushed."""
    outbox.open_pass(0, MICROBATCHES)
    pushed: list[weakref.ref[torch.Tensor]] = []
    for microbatch in range(MICROBATCHES):
        for tap in TAPS:
            tensor = roles.payload(0, microbatch, tap)
            outbox.push(microbatch, tap, tensor)
            pushed.append(weakref.ref(tensor))
    return pushed


def assert_lost_for_good(outbox: Outbox, pid: int) -> None:
    """See that each later call says who was lost."""
    calls = {
        "push": lambda: outbox.push(0, TAPS[0], roles.payload(0, 0, TAPS[0])),
        "flush": lambda: outbox.flush(LIMIT),
        "open_pass": lambda: outbox.open_pass(9, 1),
    }
    for name, call in calls.items():
        with pytest.raises(PeerLostError) as lost:
            call()
        assert f"consumer (pid {pid} on host {socket.gethostname()})" in str(lost.value), name
    outbox.abort("this does not bring it back")
    with pytest.raises(PeerLostError):
        outbox.open_pass(9, 1)


def test_killed_consumer_ends_the_queue_and_frees_its_sources(
    crew: Crew, consumer: Worker, outbox: Outbox, store: str
) -> None:
    """Catches pushes that go on into a dead mailbox, and tensors kept for nobody."""
    pushed = push_pass(outbox)
    queued = len(TAPS) * (MICROBATCHES - 1)
    assert outbox.info()["queued"] == queued
    assert all(reference() is not None for reference in pushed[-queued:])
    consumer.child.kill()
    began = time.monotonic()
    with pytest.raises(PeerLostError):
        outbox.flush(LIMIT)
    assert time.monotonic() - began < LIMIT / 2
    assert_lost_for_good(outbox, consumer.pid)
    assert outbox.info()["queued"] == 0
    gc.collect()
    assert not any(reference() for reference in pushed)
    recorded = {(event.side, event.step_name) for event in read_events(outbox)}
    assert {("consumer", "grant"), ("producer", "stamp"), ("producer", "lost")} <= recorded
    outbox.close()
    replaced = crew.worker()
    replaced.call(roles.serve, store, 2, roles.ONE)
    with Outbox(roles.PLAN, 0, store=store, name=roles.NAME, attach_timeout=LIMIT) as again:
        replaced.begin(roles.receive_all, 0, MICROBATCHES)
        push_pass(again)
        replaced.finish()


def test_consumer_that_ends_its_process_says_so(consumer: Worker, outbox: Outbox) -> None:
    """Catches a clean exit that leaves its producers waiting, or that looks like a crash."""
    push_pass(outbox)
    consumer.dismiss()
    consumer.child.join()
    assert consumer.child.exitcode == 0
    # Until the outbox has seen that the mailbox is closed, it knows only that the pass was aborted.
    with pytest.raises((PeerLostError, PassAborted)):
        outbox.flush(LIMIT)
    with pytest.raises(PeerLostError, match="closed") as lost:
        _until_lost(outbox)
    assert f"consumer (pid {consumer.pid} " in str(lost.value)
    assert outbox.info()["queued"] == 0


def test_consumer_that_closes_its_mailbox_says_so(consumer: Worker, outbox: Outbox) -> None:
    """Catches a close that only the end of the process makes known."""
    push_pass(outbox)
    consumer.call(roles.close_mailbox)
    with pytest.raises((PeerLostError, PassAborted)):
        outbox.flush(LIMIT)
    with pytest.raises(PeerLostError, match="closed"):
        _until_lost(outbox)


def _until_lost(outbox: Outbox) -> None:
    """Ask until the outbox raises that its mailbox is gone."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            outbox.flush(0.01)
        except PeerLostError:
            raise
        except TapChannelError:
            continue
