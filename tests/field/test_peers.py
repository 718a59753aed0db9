"""Field reports of kinds K5, K11 and K13: peers that fail, slots that run out, processes forked."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from multiprocess import roles
from multiprocess.conftest import Crew, MailboxMaker
from multiprocess.test_idle import SHARE, wait_for_stamp, wait_idly
from support.channels import UCX, until
from support.children import Children
from support.link import Link
from support.small_channel import LIMIT, Footprint, attach, refused, small_channel
from support.workers import Worker
from tapchannel.errors import (
    CreditTimeout,
    PassAborted,
    PeerLostError,
    StampTimeout,
    TapChannelError,
    UsageError,
)
from tapchannel.testing import FaultyOutbox

DEADLINE = 5.0


# ---- A11


def attach_faulty(desk: SimpleNamespace, store: str, rank: int) -> None:
    """Attach an outbox whose wire may be told to fail."""
    settings = {"timeout": LIMIT, "attach_timeout": roles.LIMIT}
    desk.outbox = FaultyOutbox(roles.PLAN, rank, store=store, name=roles.NAME, **settings)


def push_by_halves(desk: SimpleNamespace, tap: str) -> None:
    """Put the first half of a tap's rows."""
    desk.outbox.faults.hold()
    desk.outbox.push(0, tap, roles.payload(desk.step, 0, tap))
    until(lambda: desk.outbox.faults.held == 2)


def tear(desk: SimpleNamespace, tap: str) -> None:
    """Fail in the middle of a tap."""
    desk.outbox.faults.tear()
    desk.outbox.push(0, tap, roles.payload(desk.step, 0, tap))


def failed_put(victim: Worker) -> None:
    """Fail to put one of the taps."""
    victim.call(tear, "ids")


def standstill(victim: Worker) -> None:
    """Stop before anything is pushed."""
    victim.child.stop()


def death_by_halves(victim: Worker) -> None:
    """Die when half of a payload has been put."""
    victim.call(push_by_halves, "ids")
    victim.child.kill()


FAULTS: dict[str, tuple[Callable[[Worker], None], type[TapChannelError], float]] = {
    "failed put": (failed_put, PassAborted, DEADLINE / 2),
    "standstill": (standstill, StampTimeout, DEADLINE + 2),
    "death by halves": (death_by_halves, PeerLostError, DEADLINE / 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_field_a11_one_of_three_producers_fails(
    crew: Crew, store: str, mailbox_of: MailboxMaker, fault: str
) -> None:
    """A11 (K5): the receiver counted notices, and one could never come: it waited for ever."""
    strike, kind, limit = FAULTS[fault]
    victim, early, late = crew.victim(), crew.worker(), crew.worker()
    mailbox = mailbox_of(roles.THREE)
    victim.call(attach_faulty, store, 2)
    for rank, producer in enumerate((early, late)):
        producer.call(roles.attach, store, rank)
    for producer in (early, late, victim):
        producer.call(roles.open_pass, 4, 1)
    opened = mailbox.open_pass(4, 1)
    early.call(roles.push, 0, ["early"])
    late.call(roles.push, 0, ["late"])
    strike(victim)
    began = time.monotonic()
    with pytest.raises(kind) as told, opened:
        mailbox.recv(0, timeout=DEADLINE)
    assert time.monotonic() - began < limit
    error = told.value
    assert (error.rank, error.pid, error.host) == (2, victim.pid, socket.gethostname())
    assert error.key is not None
    assert (error.key.step, error.key.microbatch) == (4, 0)
    for fact in ("rank 2", f"pid {victim.pid}", socket.gethostname(), "microbatch 0", roles.NAME):
        assert fact in str(error)
    if kind is StampTimeout:
        assert "last heartbeat" in str(error)
    if kind is PassAborted:
        assert "tore in mid-payload" in str(error)
    if victim.child.exitcode is None:
        victim.child.resume()
        victim.child.kill()
    until(lambda: mailbox.info()["lanes"][2]["state"] == "lost")  # type: ignore[index]
    replaced = crew.victim()
    replaced.call(roles.attach, store, 2)
    for producer, tap in ((early, "early"), (late, "late")):
        producer.call(roles.fail_in_pass, "the pass is lost")
        producer.begin(roles.push_pass, 5, 2, [tap])
    replaced.begin(roles.push_pass, 5, 2, ["ids"])
    roles.receive_pass(mailbox, 5, 2)
    for producer in (early, late, replaced):
        producer.finish()


# ---- A12


def test_field_a12_a_consumer_that_stops_releasing_is_named(crew: Crew, store: str) -> None:
    """A12 (K11), a: with the pool used up, sends waited silently for ever."""
    consumer, producer = crew.victim(), crew.worker()
    consumer.call(roles.serve, store, 4, roles.ONE)
    producer.call(roles.attach_with, store, 0, {"timeout": 1.0})
    consumer.call(roles.open_for_receiving, 1, 8)
    producer.call(roles.open_pass, 1, 8)
    for microbatch in range(8):
        producer.call(roles.push, microbatch)  # returns at once, also without a slot
    assert producer.call(roles.facts)["queued"] == 4 * len(roles.TAPS)
    with pytest.raises(CreditTimeout) as slow:
        producer.call(roles.flush, 1.0)
    assert f"consumer (pid {consumer.pid} " in str(slow.value)
    assert "microbatch 4" in str(slow.value)  # all four slots are taken
    consumer.child.kill()
    with pytest.raises(PeerLostError, match=f"pid {consumer.pid}"):
        until(lambda: flushed(producer))


def flushed(producer: Worker) -> bool:
    """Tell whether all is copied, or only too late: the lane may have failed by time-out before."""
    try:
        producer.call(roles.flush, 1.0)
    except CreditTimeout:
        return False
    return True


def test_field_a12_an_exception_gives_its_slot_back(tmp_path: Path) -> None:
    """A12 (K11), b: an exception in the reader left its slot busy, and the writer hung."""
    with small_channel(tmp_path, depth=4) as channel, channel.open_pass(9):
        for microbatch in range(9):
            if microbatch != 2:
                channel.deliver(microbatch)
                continue
            for rank, taps in ((3, ("embedding", "low")), (7, ("high",))):
                for tap in taps:
                    channel.outboxes[rank].push(2, tap, torch.ones(5, 8))
            with pytest.raises(roles.TrainerError), channel.mailbox.recv(2) as lease:
                assert lease["low"].shape[0] == 5
                raise roles.TrainerError("in the body that reads slot 2")


def test_field_a12_one_slow_consumer_leaves_the_other_alone(tmp_path: Path) -> None:
    """A12 (K11), c: one late acknowledgement failed the sends to all."""
    with small_channel(tmp_path / "slow") as slow, small_channel(tmp_path / "quick") as quick:
        slow.outboxes.pop(7).close()
        slow.outboxes[7] = attach(tmp_path / "slow", 7, timeout=0.2)
        slow.open_next(3)
        for microbatch in range(3):  # of two slots, none of which is released
            slow.outboxes[7].push(microbatch, "high", torch.ones(5, 8))
        with refused(CreditTimeout, rank=7):
            slow.outboxes[7].flush()
        for _ in range(3):
            quick.carry(4)
        slow.abort()
        slow.carry()


def test_field_a12_a_long_wait_costs_next_to_nothing(crew: Crew, store: str) -> None:
    """A12 (K5), d: polling so hard that it starved the launches."""
    consumer, producer = crew.worker(), crew.worker()
    consumer.call(roles.serve, store, 2, roles.ONE)
    producer.call(roles.attach, store, 0)
    consumer.call(roles.open_for_receiving, 0, 2)
    producer.call(roles.open_pass, 0, 2)
    producer.call(roles.push, 0)
    consumer.call(roles.receive, 0)
    waited, used = consumer.call(wait_idly, wait_for_stamp)
    assert used < SHARE * waited


# ---- A21

WORKERS = 4
TOUCHED = 64 << 20  # bytes


class Touching(Dataset[str]):
    """Touches ordinary memory in each worker; one of them also tries to push."""

    def __init__(self, push: Callable[[], object]) -> None:
        self._push = push

    def __len__(self) -> int:
        return WORKERS

    def __getitem__(self, index: int) -> str:
        assert int(torch.ones(TOUCHED, dtype=torch.uint8)[-1]) == 1
        if index != 0:
            return ""
        try:
            self._push()
        except UsageError as error:
            return str(error)
        return "a child pushed into its parent's pass"


def load_by_fork(link: Link, folder: Path, transport: str) -> tuple[list[str], int]:
    """Fork the workers of a data loader in mid-pass; go on with the pass."""
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    by = {} if transport == "shm" else {"listen": UCX.listen, "secret": "a job's secret"}
    outboxes = {"transport": transport, **({} if transport == "shm" else {"secret": by["secret"]})}
    with small_channel(folder, ranks=(), transport=transport, **by) as channel:
        for rank in (3, 7):
            channel.outboxes[rank] = attach(folder, rank, **outboxes)
        channel.carry()
        before = Footprint.at_rest()
        with channel.open_pass(4):
            channel.deliver(0)
            data = Touching(lambda: channel.outboxes[7].push(1, "high", torch.ones(5, 8)))
            loader: Any = DataLoader(
                data, num_workers=WORKERS, multiprocessing_context="fork", batch_size=None
            )
            said = []
            for microbatch, answer in enumerate(loader, 1):
                said.append(answer)
                if microbatch < 4:
                    channel.deliver(microbatch)
        channel.carry()
        grown = before.grown()
    return said, 0 if grown is None else 1


@pytest.mark.parametrize("transport", ["shm", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_field_a21_data_loaders_may_fork(tmp_path: Path, transport: str) -> None:
    """A21 (K13): the workers of a data loader crashed at the first batch, or hung."""
    with Children(50.0) as children:
        child = children.start(load_by_fork, tmp_path, transport, env={"OMP_NUM_THREADS": "1"})
        said, grown = child.result()
    assert len(said) == WORKERS
    assert "not usable after fork" in said[0]
    assert said[1:] == [""] * (WORKERS - 1)
    assert grown == 0
