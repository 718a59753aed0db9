"""Waits: poison ends them, landed keys need none, producers never make a stream wait for credit."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import Gate, numbers, refusal, wrong_words
from gpu.pair import Pair, Peer
from tapchannel import Lease, Mailbox, _native
from tapchannel.errors import PassAborted
from tapchannel.keys import Key

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
ENVIRONMENTS = ["plain", "one connection"]


# ---- poison

TYPES = {"single": "float32", "half": "bfloat16", "whole": "int32"}
POISONED_INT32 = -0x7F7F7F80  # 0x80 in each byte
DEADLINE = 1.0


def _starving_channel(folder: Path) -> Channel:
    groups = {name: (name,) for name in TYPES}
    return Channel(folder.as_uri(), groups, width=64, dtype=TYPES, rows=128, depth=1)


def _push_all(outbox: Any, channel: Channel, microbatch: int) -> None:
    for tap, dtype in TYPES.items():
        shape = (channel.rows, channel.width)
        outbox.push(microbatch, tap, torch.ones(shape, dtype=getattr(torch, dtype), device="cuda"))


def _starve(peer: Peer, channel: Channel) -> bool:
    """Push in the first and the third pass, not in the second; tell whether that was aborted."""
    aborted = False
    with producing(channel, peer) as outbox:
        with outbox.open_pass(1, 1):
            _push_all(outbox, channel, 0)
        try:
            with outbox.open_pass(2, 2):
                peer.wait("aborted")
        except PassAborted:
            aborted = True
        with outbox.open_pass(3, 1):
            _push_all(outbox, channel, 0)
    return aborted


def _read_by_copy(view: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(view)


def _read_by_new_kernel(view: torch.Tensor, out: torch.Tensor) -> None:
    """Use a kernel that is not loaded yet: the load may have to wait for the stream."""
    new = torch.bitwise_or if view.dtype is torch.int32 else torch.hypot
    new(view, view, out=out)


def _later_calls(mailbox: Mailbox, lease: Lease) -> dict[str, Callable[[], object]]:
    return {
        "recv": lambda: mailbox.recv(1),
        "try_recv": lambda: mailbox.try_recv(1),
        "open_pass": lambda: mailbox.open_pass(3, 1),
        "view": lambda: lease["single"],
        "info": lambda: lease.info,
        "release": lease.release,
        "enter": lease.__enter__,
    }


def _outlast_deadline(
    peer: Peer, channel: Channel, read: Callable[[torch.Tensor, torch.Tensor], None]
) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with consuming(channel, peer) as mailbox:
        out = {name: torch.zeros_like(ones) for name, ones in _receive_ones(mailbox, 1).items()}
        opened = mailbox.open_pass(2, 2)
        began = time.monotonic()
        lease = mailbox.recv(0, rows=channel.rows, timeout=DEADLINE)
        # All views first: a kernel's first launch may hold the host up until the wait has failed,
        # and a failed lease gives no view.
        views = {name: lease[name] for name in out}
        for name, into in out.items():
            read(views[name], into)
        torch.cuda.synchronize()
        del views
        seen["freed after"] = time.monotonic() - began
        seen["out"] = {name: _values(into) for name, into in out.items()}
        calls = _later_calls(mailbox, lease) | {"leaving the pass": opened.close}
        seen["refusals"] = {name: refusal(call) for name, call in calls.items()}
        del lease, calls
        peer.tell("aborted")
        seen["after"] = {name: _values(ones) for name, ones in _receive_ones(mailbox, 3).items()}
    return seen


def _values(tensor: torch.Tensor) -> list[object]:
    """List the values in a tensor, each once."""
    nan = tensor != tensor
    values: list[object] = tensor[~nan].unique().tolist()
    return [*values, "nan"] if nan.any() else values


def _receive_ones(mailbox: Mailbox, step: int) -> dict[str, torch.Tensor]:
    with mailbox.open_pass(step, 1):
        return mailbox.recv(0).clone()


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("read", [_read_by_copy, _read_by_new_kernel])
def test_poison_frees_the_stream(
    pair: Pair, tmp_path: Path, read: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Catches an endless stream wait (I3), and the slot's former contents read (I4)."""
    channel = _starving_channel(tmp_path)
    seen, aborted = pair.run(partial(_outlast_deadline, read=read), _starve, channel)
    assert DEADLINE * 0.9 < seen["freed after"] < DEADLINE + 5
    expected: dict[str, list[object]]
    expected = {"single": ["nan"], "half": ["nan"], "whole": [POISONED_INT32]}
    if read is _read_by_new_kernel:
        # The launch that loads it may hold the driver, and the pattern with it, until the wait has
        # ended: what was there before is then read once, under a lease that raises (README).
        stuck = {name for name, values in seen["out"].items() if values == [1]}
        expected |= dict.fromkeys(stuck, [1])
    assert seen["out"] == expected
    assert set(seen["refusals"].values()) == {"StampTimeout"}, seen["refusals"]
    assert aborted
    assert seen["after"] == {name: [1] for name in TYPES}


# ---- landed already


class StampWord:
    """The stamp of slot 0, cell 0 of a mailbox's first lane, in a mapping of its own."""

    def __init__(self, mailbox: Mailbox) -> None:
        descriptor = mailbox._core.block_fd(0)
        self._block = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        self._offset: int = _native.layout()["stamps_3_5"]  # the same for every depth

    def load(self) -> int:
        """Read the word."""
        return struct.unpack_from("<Q", self._block, self._offset)[0]

    def store(self, value: int) -> None:
        """Write the word."""
        struct.pack_into("<Q", self._block, self._offset, value)


def _push_and_flush(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
        outbox.push(0, TAP, channel.words(0))
        outbox.flush()
        peer.tell("landed")


def _receive_landed(peer: Peer, channel: Channel) -> tuple[bool, bool]:
    """Take the stamp away behind recv: a wait that it had queued would now never end."""
    torch.cuda.set_device(channel.consumer)
    gate, stream, end = Gate(), torch.cuda.Stream(), torch.cuda.Event()
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
        peer.wait("landed")
        word = StampWord(mailbox)
        landed = word.load()
        gate.hold(stream)
        lease = mailbox.recv(0, rows=channel.rows, stream=stream)
        word.store(0)
        end.record(stream)
        gate.open()
        deadline = time.monotonic() + 5.0
        while not (ended := end.query()) and time.monotonic() < deadline:
            os.sched_yield()
        word.store(landed)
        lease.release()
        return landed == Key(mailbox.epoch, 1, 0).stamp(), ended


def test_nothing_is_queued_for_a_landed_key(pair: Pair, tmp_path: Path) -> None:
    """Catches a recv that makes the stream wait although the stamp is there already."""
    (was_landed, ended), _ = pair.run(_receive_landed, _push_and_flush, Channel(tmp_path.as_uri()))
    assert was_landed
    assert ended


# ---- one connection: an unsatisfied wait stops every stream of its process


def _push_without_credit(peer: Peer, channel: Channel) -> tuple[object, bool]:
    """Push what cannot go yet, then compute: the whole device must still answer."""
    with producing(channel, peer) as outbox, outbox.open_pass(1, 2):
        outbox.push(0, TAP, channel.words(0))
        peer.wait("holding")
        outbox.push(1, TAP, channel.words(1))
        queued = outbox.info()["queued"]
        answer = wrong_words(numbers(5, 64, 64, channel.producer), 5) == 0
        torch.cuda.synchronize()
        peer.tell("computed")
        return queued, answer


def _hold_slot(peer: Peer, channel: Channel) -> list[int]:
    wrong = []
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 2):
        with mailbox.recv(0) as taps:
            wrong.append(wrong_words(taps[TAP], 0))
            peer.tell("holding")
            peer.wait("computed")
        with mailbox.recv(1) as taps:
            wrong.append(wrong_words(taps[TAP], 1))
    return wrong


@pytest.mark.parametrize("environment", ["one connection"])
def test_push_without_credit_stops_no_stream(pair: Pair, tmp_path: Path) -> None:
    """Catches a GPU wait for credit: it would stop all of the producer's work (I6)."""
    channel = Channel(tmp_path.as_uri(), depth=1)
    wrong, (queued, answer) = pair.run(_hold_slot, _push_without_credit, channel)
    assert queued == 1
    assert answer
    assert wrong == [0, 0]


def _receive_before_push(peer: Peer, channel: Channel) -> list[int]:
    """Receive, in the process that pushes, what a second thread pushes only then."""
    torch.cuda.set_device(channel.consumer)
    wrong = []
    with channel.mailbox() as mailbox, channel.outbox() as outbox, ThreadPoolExecutor(1) as second:
        with mailbox.open_pass(1, 20), outbox.open_pass(1, 20):
            for microbatch in range(20):
                source = channel.words(microbatch)
                torch.cuda.synchronize()
                # The thread gets the interpreter once recv lets go of it, that is, once it waits.
                pushed = second.submit(outbox.push, microbatch, TAP, source)
                with mailbox.recv(microbatch, rows=channel.rows) as taps:
                    wrong.append(wrong_words(taps[TAP], microbatch))
                pushed.result()
    return wrong


@pytest.mark.parametrize("environment", ["one connection"])
def test_wait_in_the_pushing_process(pair: Pair, tmp_path: Path) -> None:
    """Catches a stream wait queued before the push that it needs, and would stop (I6)."""
    wrong, _ = pair.run(_receive_before_push, None, Channel(tmp_path.as_uri()))
    assert wrong == [0] * 20
