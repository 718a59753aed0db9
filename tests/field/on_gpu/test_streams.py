"""Field reports on a GPU: streams and the allocator. Roles that tests/gpu has are its own."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from field.test_peers import WORKERS, Touching
from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import keep_busy, wrong_words
from gpu.pair import Pair, Peer
from gpu.roles import BURST, WAYS, push_all_ways, push_burst, receive_all_ways, receive_burst
from gpu.test_wait import (
    DEADLINE,
    POISONED_INT32,
    _outlast_deadline,
    _read_by_copy,
    _starve,
    _starving_channel,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
ENVIRONMENTS = ["plain", "one connection", "eager"]
SETTLED_BYTES = 1 << 20


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_field_a02_a_push_comes_after_what_its_stream_does(pair: Pair, tmp_path: Path) -> None:
    """A2 (K3): a copy on a side stream that did not wait, or that nobody waited for."""
    channel = Channel(tmp_path.as_uri(), depth=len(WAYS))
    wrong, returned_early = pair.run(receive_all_ways, push_all_ways, channel)
    assert wrong == [0] * 2 * len(WAYS)
    assert returned_early == [True] * 2 * len(WAYS)


def _push_burst_and_settle(peer: Peer, channel: Channel) -> int:
    """Push and free; give the bytes that stay allocated."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    push_burst(peer, channel)
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def test_field_a03_a_source_lives_until_its_copy_is_done(pair: Pair, tmp_path: Path) -> None:
    """A3 (K3): the allocator gave a source's block to the next tensor while it was still read."""
    channel = Channel(tmp_path.as_uri(), width=8192, rows=4096, depth=4)
    wrong, kept = pair.run(receive_burst, _push_burst_and_settle, channel)
    assert wrong == [0] * BURST
    assert kept < SETTLED_BYTES


# ---- A4


def _receive_beside_first_launches(peer: Peer, channel: Channel) -> int:
    """Wait on a stream; meanwhile launch kernels that are not loaded, allocate and free."""
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
        stream = torch.cuda.Stream()
        lease = mailbox.recv(0, rows=channel.rows, stream=stream)
        done = threading.Event()

        def compute() -> None:
            torch.cuda.set_device(channel.consumer)
            with torch.cuda.stream(torch.cuda.Stream()):
                words = torch.linspace(0.5, 1.5, 4096, device="cuda")
                torch.special.i1e(torch.erfinv(words - 0.5))
                torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            done.set()

        computing = threading.Thread(target=compute, daemon=True)
        computing.start()
        done.wait(2.0)  # it may stand behind the wait; what the push needs must not
        peer.tell("computing")
        with torch.cuda.stream(stream):
            wrong = wrong_words(lease[TAP], 4)
        computing.join(10.0)
        assert done.is_set()
        lease.release()
        return wrong


def _push_late(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
        peer.wait("computing")
        outbox.push(0, TAP, channel.words(4))


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_field_a04_a_stream_wait_lets_first_launches_by(pair: Pair, tmp_path: Path) -> None:
    """A4 (K6): a first launch took the lock that the awaited copy needed: a hang for good."""
    channel = Channel(tmp_path.as_uri())
    wrong, _ = pair.run(_receive_beside_first_launches, _push_late, channel)
    assert wrong == 0


def test_field_a05_what_a_timed_out_wait_shows_is_poison(pair: Pair, tmp_path: Path) -> None:
    """A5 (K5): a wait kernel gave up, and the step went on with half of its data."""
    channel = _starving_channel(tmp_path)
    seen, aborted = pair.run(partial(_outlast_deadline, read=_read_by_copy), _starve, channel)
    assert DEADLINE * 0.9 < seen["freed after"] < DEADLINE + 5
    assert seen["out"] == {"single": ["nan"], "half": ["nan"], "whole": [POISONED_INT32]}
    assert set(seen["refusals"].values()) == {"StampTimeout"}
    assert aborted


# ---- A18

LIVES = 50


def _live_briefly(peer: Peer, channel: Channel) -> list[int]:
    """Make mailboxes while the default stream is busy; receive the first message of each."""
    torch.cuda.set_device(channel.consumer)
    wrong = []
    for life in range(LIVES):
        keep_busy(5)
        with channel.mailbox(name=f"life {life}", depth=1) as mailbox:
            peer.tell(f"life {life}")
            with mailbox.open_pass(1, 1), mailbox.recv(0, wait="host") as taps:
                wrong.append(wrong_words(taps[TAP], life))
            peer.wait(f"closed {life}")
    return wrong


def _greet_each(peer: Peer, channel: Channel) -> None:
    torch.cuda.set_device(channel.producer)
    for life in range(LIVES):
        peer.wait(f"life {life}")
        with channel.outbox(name=f"life {life}") as outbox, outbox.open_pass(1, 1):
            outbox.push(0, TAP, channel.words(life))
        peer.tell(f"closed {life}")


def test_field_a18_a_fresh_mailbox_loses_no_first_stamp(pair: Pair, tmp_path: Path) -> None:
    """A18 (K4): a late memset wiped the peer's first signal."""
    wrong, _ = pair.run(_live_briefly, _greet_each, Channel(tmp_path.as_uri(), rows=16), limit=90)
    assert wrong == [0] * LIVES


# ---- A21


def _push_beside_workers(peer: Peer, channel: Channel) -> list[str]:
    """Fork a data loader's workers while pushes go on."""
    with producing(channel, peer) as outbox, outbox.open_pass(1, WORKERS):
        source = channel.words(0)
        data = Touching(lambda: outbox.push(0, TAP, source))
        loader: Any = DataLoader(
            data, num_workers=WORKERS, multiprocessing_context="fork", batch_size=None
        )
        said = []
        for microbatch, answer in enumerate(loader):
            said.append(answer)
            outbox.push(microbatch, TAP, channel.words(microbatch))
    return said


def _receive_each(peer: Peer, channel: Channel) -> list[int]:
    wrong = []
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, WORKERS):
        for microbatch in range(WORKERS):
            with mailbox.recv(microbatch) as taps:
                wrong.append(wrong_words(taps[TAP], microbatch))
    return wrong


def test_field_a21_data_loaders_may_fork(pair: Pair, tmp_path: Path) -> None:
    """A21 (K13): forked workers crashed at the first batch."""
    wrong, said = pair.run(_receive_each, _push_beside_workers, Channel(tmp_path.as_uri()))
    assert wrong == [0] * WORKERS
    assert "not usable after fork" in said[0]
    assert said[1:] == [""] * (WORKERS - 1)
