"""host_staged on GPUs: through pinned memory of the host, by the consumer's gate."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import keep_busy, numbers, wrong_words
from gpu.pair import Pair, Peer
from tapchannel import _native

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
ENVIRONMENTS = ["plain", "one connection"]

WIDE = ("left", "middle", "right")
COUNT = 24
STAGED = {"transport": "host_staged"}


# ---- what arrives


def _push_side_by_side(peer: Peer, channel: Channel) -> object:
    with producing(channel, peer) as outbox, outbox.open_pass(1, COUNT):
        for microbatch in range(COUNT):
            for index, tap in enumerate(WIDE):
                outbox.push(microbatch, tap, channel.words(10 * microbatch + index))
        return outbox.info()["transport"]


def _receive_by(wait: str, peer: Peer, channel: Channel) -> int:
    wrong = 0
    with consuming(channel, peer, **STAGED) as mailbox, mailbox.open_pass(1, COUNT):
        for microbatch in range(COUNT):
            with mailbox.recv(microbatch, wait=wait, rows=channel.rows) as taps:
                for index, tap in enumerate(WIDE):
                    wrong += wrong_words(taps[tap], 10 * microbatch + index)
    return wrong


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("wait", ["stream", "host"])
def test_taps_land_side_by_side(pair: Pair, tmp_path: Path, producer: str, wait: str) -> None:
    """Catches a stamp that overtakes the gate's copy, a mixed-up pitch, a staging cell reused."""
    channel = Channel(
        tmp_path.as_uri(), {"features": WIDE}, width=1024, rows=500, depth=3, producer=producer
    )
    wrong, transport = pair.run(partial(_receive_by, wait), _push_side_by_side, channel)
    assert wrong == 0
    assert transport == "host_staged"


# ---- a wait that must not hold up the gate

BUSY_MS = 300.0


def _push_late(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
        tap = channel.words(0)
        keep_busy(BUSY_MS)
        outbox.push(0, TAP, tap)
        peer.tell("pushed")


def _read_by_a_new_kernel(peer: Peer, channel: Channel) -> tuple[int, float]:
    with consuming(channel, peer, **STAGED) as mailbox, mailbox.open_pass(1, 1):
        peer.wait("pushed")
        expected = numbers(0, channel.rows, channel.width, channel.consumer)
        began = time.monotonic()
        with mailbox.recv(0, rows=channel.rows) as taps:
            # Its first launch loads a module, and the driver waits for what is queued before.
            differing = torch.bitwise_xor(taps[TAP], expected)
        return int(differing.count_nonzero()), time.monotonic() - began


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_no_wait_stands_before_the_copy_that_ends_it(
    pair: Pair, tmp_path: Path, producer: str
) -> None:
    """Catches a stream wait enqueued while the gate has not yet enqueued copy and stamp (I6)."""
    channel = Channel(tmp_path.as_uri(), producer=producer)
    (differing, took), _ = pair.run(_read_by_a_new_kernel, _push_late, channel)
    assert differing == 0
    assert took < 5.0


# ---- when it is taken


def _receive_one(peer: Peer, channel: Channel) -> tuple[int, Any]:
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
        with mailbox.recv(0) as taps:
            wrong = wrong_words(taps[TAP], 5)
        lanes: Any = mailbox.info()["lanes"]
        return wrong, lanes[0]["transport"]


def _push_from_the_host(peer: Peer, channel: Channel) -> dict[str, Any]:
    with channel.outbox() as outbox:
        with outbox.open_pass(1, 1):
            outbox.push(0, TAP, channel.words(5))
        facts = outbox.info()
    peer.tell("outbox closed")
    return facts


def test_taps_in_host_memory_reach_a_gpu(pair: Pair, tmp_path: Path) -> None:
    """Catches cuda_ipc taking a host address for one of its GPU, and a refusal that gets lost."""
    channel = Channel(tmp_path.as_uri(), producer="cpu")
    (wrong, transport), facts = pair.run(_receive_one, _push_from_the_host, channel)
    assert (wrong, transport) == (0, "host_staged")
    assert facts["transport"] == "host_staged"
    assert "host memory" in facts["refused"]["cuda_ipc"]


def _push_without_peer_access(peer: Peer, channel: Channel) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "can_access_peer", lambda ordinal, other: False)
        with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
            outbox.push(0, TAP, channel.words(5))
            return outbox.info()


@pytest.mark.two_gpus
def test_no_peer_access_leaves_the_way_through_the_host(pair: Pair, tmp_path: Path) -> None:
    """Catches an attach that fails where there is a way, and a refusal that is not shown."""
    channel = Channel(tmp_path.as_uri(), producer="cuda:1")
    (wrong, transport), facts = pair.run(_receive_one, _push_without_peer_access, channel)
    assert (wrong, transport) == (0, "host_staged")
    assert "no peer access" in facts["refused"]["cuda_ipc"]
