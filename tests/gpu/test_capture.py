"""CUDA graphs: nothing of ours gets into one, and no capture is broken by the channel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import refusal, wrong_words
from gpu.pair import Pair, Peer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

SIZE = 1024


class Capture:
    """A graph that adds 2 to ones; something else may be done in the middle of its capture."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream(device)
        self._one = torch.ones(SIZE, device=device)
        self._out = torch.zeros(SIZE, device=device)
        self._graph = torch.cuda.CUDAGraph()
        torch.add(self._one, 1, out=self._out)  # loads the kernel
        self._out.zero_()

    def record(self, meanwhile: Callable[[], object]) -> None:
        """Capture the graph; raises if the capture was invalidated."""
        with torch.cuda.graph(self._graph, stream=self.stream):
            torch.add(self._one, 1, out=self._out)
            meanwhile()
            torch.add(self._out, 1, out=self._out)

    def replayed(self) -> bool:
        """Replay the graph; tell whether it did all that was captured, and only once."""
        self._graph.replay()
        torch.cuda.synchronize()
        return bool((self._out == 3).all())


# ---- push and recv on a stream under capture


def _receive_in_capture(peer: Peer, channel: Channel) -> tuple[list[str], bool, int]:
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
        capture = Capture(channel.consumer)
        peer.wait("landed")
        refusals: list[str] = []

        def receive() -> None:
            calls = (
                partial(mailbox.recv, 0),
                partial(mailbox.recv, 0, rows=channel.rows),
                partial(mailbox.recv, 0, wait="host"),
                partial(mailbox.try_recv, 0),
            )
            refusals.extend(refusal(call) for call in calls)

        capture.record(receive)
        replayed = capture.replayed()
        with mailbox.recv(0) as taps:
            return refusals, replayed, wrong_words(taps[TAP], 0)


def _push_in_capture(peer: Peer, channel: Channel) -> tuple[list[str], bool]:
    with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
        capture = Capture(channel.producer)
        source = channel.words(0)
        refusals: list[str] = []
        capture.record(lambda: refusals.append(refusal(lambda: outbox.push(0, TAP, source))))
        replayed = capture.replayed()
        outbox.push(0, TAP, source)
        outbox.flush()
        peer.tell("landed")
        return refusals, replayed


def test_push_and_recv_refuse_a_capture(pair: Pair, tmp_path: Path) -> None:
    """Catches a stamp or a wait that is captured, and replayed for a key long past."""
    received, pushed = pair.run(_receive_in_capture, _push_in_capture, Channel(tmp_path.as_uri()))
    refusals, replayed, wrong = received
    assert refusals == ["UsageError"] * 4
    assert replayed
    assert wrong == 0
    assert pushed == (["UsageError"], True)


# ---- others work while a graph is captured


def _drop_in_capture(peer: Peer, channel: Channel, lease_on: str) -> tuple[bool, int]:
    """Let the last view go in the middle of a capture; then receive into the same slot."""
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 2):
        capture = Capture(channel.consumer)
        legacy = torch.cuda.default_stream()
        held = []
        with torch.cuda.stream(capture.stream if lease_on == "captured stream" else legacy):
            held.append(mailbox.recv(0, wait="host")[TAP])  # the view alone keeps the slot
        torch.cuda.synchronize()
        capture.record(held.clear)
        replayed = capture.replayed()
        with mailbox.recv(1, wait="host") as taps:
            return replayed, wrong_words(taps[TAP], 1)


def _push_two(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, 2):
        for microbatch in range(2):
            outbox.push(microbatch, TAP, channel.words(microbatch))


@pytest.mark.parametrize("lease_on", ["captured stream", "legacy default stream"])
def test_view_dropped_during_a_capture(pair: Pair, tmp_path: Path, lease_on: str) -> None:
    """Catches a deleter that is captured itself, breaks the capture, or loses the slot."""
    drop = partial(_drop_in_capture, lease_on=lease_on)
    (replayed, wrong), _ = pair.run(drop, _push_two, Channel(tmp_path.as_uri(), depth=1))
    assert replayed
    assert wrong == 0


def _push_beside_capture(peer: Peer, channel: Channel) -> bool:
    """Make the lane's very first push from a second thread, while this one captures."""
    with producing(channel, peer) as outbox, ThreadPoolExecutor(1) as second:
        second.submit(torch.cuda.set_device, channel.producer).result()
        capture = Capture(channel.producer)
        source = channel.words(0)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with outbox.open_pass(1, 1):
            push = partial(outbox.push, 0, TAP, source, stream=side)
            capture.record(lambda: second.submit(push).result())
        return capture.replayed()


def _receive_one(peer: Peer, channel: Channel) -> int:
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
        with mailbox.recv(0) as taps:
            return wrong_words(taps[TAP], 0)


def test_push_beside_a_capture(pair: Pair, tmp_path: Path) -> None:
    """Catches driver calls that end a capture in any thread when they are made."""
    wrong, replayed = pair.run(_receive_one, _push_beside_capture, Channel(tmp_path.as_uri()))
    assert replayed
    assert wrong == 0
