"""A million small messages over shm from three producers: none stale, mixed, lost or doubled.

A message is one cell of one slot. Each of its words carries the message's own key: pass,
microbatch, lane and tap. Allowed in a word of a lease: the lease's key. Forbidden: any other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stress.footprint import Footprint, assert_flat, footprint
from support.children import Children
from support.link import Link
from tapchannel import Mailbox, Outbox, TapPlan

LIMIT = 60.0
MESSAGES = 1_000_000
PASSES = 5
MICROBATCHES = 20_000
TAPS_OF_RANK = {0: 3, 1: 3, 2: 4}
ROWS, WIDTH = 2, 4
BYTES = ROWS * WIDTH * 8
DEPTH = 64
FLUSHED_EVERY = 2_000  # microbatches; bounds the queue

SOURCES = {rank: [f"tap{rank}.{i}" for i in range(n)] for rank, n in TAPS_OF_RANK.items()}
PLAN = TapPlan(
    groups={"all": [tap for taps in SOURCES.values() for tap in taps]},
    width=WIDTH,
    dtype="int64",
    max_rows=ROWS,
)


def word(step: int, microbatch: int, rank: int, tap: int) -> int:
    """Give the word that fills a message."""
    return (step << 18 | microbatch) << 16 | rank << 8 | tap


MICROBATCH_STRIDE = word(0, 1, 0, 0)


def messages(step: int, rank: int, first: int, count: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Give a producer's messages, microbatch by microbatch: a tuple of one tensor a tap."""
    taps = TAPS_OF_RANK[rank]
    heads = torch.tensor([word(step, first, rank, tap) for tap in range(taps)])
    strides = torch.arange(count) * MICROBATCH_STRIDE
    words = (strides.view(-1, 1) + heads).view(count, taps, 1, 1)
    for of_microbatch in words.expand(count, taps, ROWS, WIDTH).contiguous().unbind():
        yield of_microbatch.unbind()


def produce(link: Link, store: str, rank: int) -> tuple[Footprint, Footprint, object]:
    """Push this rank's share of the million; return what it held, and how much it sent."""
    taps = SOURCES[rank]
    queue_limit = FLUSHED_EVERY * len(taps)
    with Outbox(PLAN, rank, store=store, queue_limit=queue_limit, timeout=LIMIT) as outbox:
        warm = footprint()
        for step in range(PASSES):
            with outbox.open_pass(step, MICROBATCHES):
                for first in range(0, MICROBATCHES, FLUSHED_EVERY):
                    batch = messages(step, rank, first, FLUSHED_EVERY)
                    for microbatch, tensors in enumerate(batch, first):
                        for tap, tensor in zip(taps, tensors, strict=True):
                            outbox.push(microbatch, tap, tensor)
                    outbox.flush()
            warm = footprint() if step == 0 else warm
        facts = outbox.info()
        return warm, footprint(), (facts["pushes"], facts["bytes"])


def expected(step: int) -> torch.Tensor:
    """Give microbatch 0 of a pass as the group shows it."""
    words = [word(step, 0, rank, tap) for rank, taps in TAPS_OF_RANK.items() for tap in range(taps)]
    return torch.tensor(words).repeat_interleave(WIDTH).expand(ROWS, -1).contiguous()


def consume(mailbox: Mailbox) -> Footprint:
    """Receive the million and check every word; return what the process held once it was warm."""
    warm = footprint()
    for step in range(PASSES):
        wanted = expected(step)
        with mailbox.open_pass(step, MICROBATCHES):
            for microbatch in range(MICROBATCHES):
                with mailbox.recv(microbatch, rows=ROWS) as taps:
                    if not torch.equal(taps["all"], wanted):
                        pytest.fail(f"pass {step}, microbatch {microbatch}: {taps['all'] - wanted}")
                wanted += MICROBATCH_STRIDE
        warm = footprint() if step == 0 else warm
    return warm


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_million_messages_of_three_producers(tmp_path: Path) -> None:
    """Catches a lost, doubled, stale or torn message that shows once in a hundred thousand, and
    a message, lease or queued push that leaves something behind.
    """
    store = f"file://{tmp_path}"
    assert PASSES * MICROBATCHES * sum(TAPS_OF_RANK.values()) == MESSAGES
    with Children(limit=170) as children:
        with Mailbox(PLAN, SOURCES, depth=DEPTH, store=store, timeout=LIMIT) as mailbox:
            producers = [children.start(produce, store, rank) for rank in SOURCES]
            mailbox.wait_ready()
            began = time.monotonic()
            warm = consume(mailbox)
            end = footprint()
            took = time.monotonic() - began
            lanes = mailbox.info()["lanes"]
            assert isinstance(lanes, list)
            share = [PASSES * MICROBATCHES * taps for taps in TAPS_OF_RANK.values()]
            assert [lane["messages"] for lane in lanes] == share
            assert [lane["bytes"] for lane in lanes] == [count * BYTES for count in share]
            assert_flat("consumer", warm, end)
            for rank, producer in enumerate(producers):
                warm, end, sent = producer.result()
                assert sent == (share[rank], share[rank] * BYTES)
                assert_flat(f"producer {rank}", warm, end)
    print(f"{MESSAGES} messages in {took:.1f} s")
