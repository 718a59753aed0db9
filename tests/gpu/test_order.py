"""A push carries what the tensor held at that point of its stream, whatever comes after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu.channel import LIMIT, TAP, Channel, consuming, producing
from gpu.device import wrong_words
from gpu.pair import Pair, Peer
from gpu.roles import BURST, WAYS, push_all_ways, push_burst, receive_all_ways, receive_burst
from tapchannel.errors import PassAborted, UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.mark.parametrize("memory", ["vmm", "ipc"])
def test_push_behind_a_long_kernel(pair: Pair, tmp_path: Path, producer: str, memory: str) -> None:
    """Catches a copy that does not wait for the pushing stream (I1), and a push that waits (I5)."""
    channel = Channel(tmp_path.as_uri(), depth=len(WAYS), memory=memory, producer=producer)
    wrong, returned_early = pair.run(receive_all_ways, push_all_ways, channel)
    assert wrong == [0] * 2 * len(WAYS)
    assert returned_early == [True] * 2 * len(WAYS)


# ---- sources that are freed


def _push_and_free(peer: Peer, channel: Channel) -> tuple[object, bool]:
    """Push without credit, drop the source, and write over all memory of its size that is free."""
    with producing(channel, peer) as outbox, outbox.open_pass(1, 2):
        outbox.push(0, TAP, channel.words(0))
        peer.wait("holding")
        source = channel.words(1)
        address = source.data_ptr()
        outbox.push(1, TAP, source)
        queued = outbox.info()["queued"]
        del source
        garbage = torch.full((channel.rows, channel.width), -1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        peer.tell("freed")
        return queued, garbage.data_ptr() == address


def _receive_freed(peer: Peer, channel: Channel) -> list[int]:
    wrong = []
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 2):
        with mailbox.recv(0) as taps:
            wrong.append(wrong_words(taps[TAP], 0))
            peer.tell("holding")
            peer.wait("freed")
        with mailbox.recv(1) as taps:
            wrong.append(wrong_words(taps[TAP], 1))
    return wrong


def test_source_freed_while_it_waits_for_credit(pair: Pair, tmp_path: Path, producer: str) -> None:
    """Catches a queued push that does not keep its tensor: the allocator hands the memory on."""
    channel = Channel(tmp_path.as_uri(), depth=1, producer=producer)
    wrong, (queued, reused) = pair.run(_receive_freed, _push_and_free, channel)
    assert queued == 1
    assert not reused
    assert wrong == [0, 0]


def test_source_freed_while_it_is_copied(pair: Pair, tmp_path: Path, producer: str) -> None:
    """Catches a source let go before its copy was performed: the overwriting overtakes the copy."""
    channel = Channel(tmp_path.as_uri(), width=8192, rows=4096, depth=4, producer=producer)
    wrong, _ = pair.run(receive_burst, push_burst, channel)
    assert wrong == [0] * BURST


# ---- sources that are modified


def _push_and_modify(peer: Peer, channel: Channel) -> str:
    """Modify a queued source in place; name the error that told of it."""
    error = ""
    with producing(channel, peer) as outbox:
        try:
            with outbox.open_pass(1, 2):
                outbox.push(0, TAP, channel.words(0))
                peer.wait("holding")
                source = channel.words(1)
                outbox.push(1, TAP, source)
                source.add_(1)
                torch.cuda.synchronize()
                peer.tell("modified")
                outbox.flush(LIMIT)
        except UsageError as raised:
            error = str(raised)
        with outbox.open_pass(2, 1):
            outbox.push(0, TAP, channel.words(2))
    return error


def _receive_modified(peer: Peer, channel: Channel) -> tuple[str, int]:
    with consuming(channel, peer) as mailbox:
        try:
            with mailbox.open_pass(1, 2):
                with mailbox.recv(0):
                    peer.tell("holding")
                    peer.wait("modified")
                with mailbox.recv(1, wait="host") as taps:
                    outcome = "wrong" if wrong_words(taps[TAP], 1) else "right"
        except PassAborted:
            outcome = "aborted"
        with mailbox.open_pass(2, 1), mailbox.recv(0) as taps:
            return outcome, wrong_words(taps[TAP], 2)


def test_modified_source_is_right_or_loud(pair: Pair, tmp_path: Path) -> None:
    """Catches a push that sends what an in-place layer wrote later, and says nothing."""
    channel = Channel(tmp_path.as_uri(), depth=1)
    (outcome, wrong_afterwards), error = pair.run(_receive_modified, _push_and_modify, channel)
    assert outcome == "right" or "modified in place" in error
    assert wrong_afterwards == 0
