"""A consumer whose host runs ahead: rows named, nothing awaited, the next pass open already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import keep_busy
from gpu.pair import Pair, Peer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PASSES, MICROBATCHES = 3, 5


def _push_late(peer: Peer, channel: Channel) -> None:
    """Push each pass behind a busy stream, so that all of it is late."""
    with producing(channel, peer) as outbox:
        for step in range(1, PASSES + 1):
            with outbox.open_pass(step, MICROBATCHES):
                keep_busy(30)
                for microbatch in range(MICROBATCHES):
                    outbox.push(microbatch, TAP, channel.words(step * MICROBATCHES + microbatch))


def _run_ahead(peer: Peer, channel: Channel) -> list[int]:
    """Receive by the stream alone, and open each pass before the one before has landed."""
    wrong: list[torch.Tensor] = []
    with consuming(channel, peer) as mailbox:
        for step in range(1, PASSES + 1):
            with mailbox.open_pass(step, MICROBATCHES):
                for microbatch in range(MICROBATCHES):
                    expected = channel.words(step * MICROBATCHES + microbatch)
                    with mailbox.recv(microbatch, rows=channel.rows) as taps:
                        wrong.append((taps[TAP] != expected).sum())
        return [int(count) for count in wrong]


def test_pushes_keep_their_credit_when_the_next_pass_is_open(pair: Pair, tmp_path: Path) -> None:
    """Catches credit that is the next pass's before the last pushes of this one were sent."""
    seen, _ = pair.run(_run_ahead, _push_late, Channel(tmp_path.as_uri(), depth=2))
    assert seen == [0] * (PASSES * MICROBATCHES)
