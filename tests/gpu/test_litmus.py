"""No stamp overtakes its payload: thousands of messages, each read as early as can be."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import numbers
from gpu.pair import Pair, Peer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LIMIT = 60.0
FLUSH_EVERY = 64  # less than the outbox's queue_limit
DEPTH = 32
WIDE = ("left", TAP, "right")  # the strided copy lands between two others


def _push_messages(peer: Peer, channel: Channel, messages: int) -> None:
    base = channel.words(0)
    with producing(channel, peer, timeout=LIMIT) as outbox, outbox.open_pass(1, messages):
        for microbatch in range(messages):
            words = base + microbatch
            for tap in channel.taps:
                outbox.push(microbatch, tap, words)
            if microbatch % FLUSH_EVERY == 0:
                outbox.flush()


def _count_wrong(peer: Peer, channel: Channel, messages: int, wait: str) -> int:
    """Compare each message by a kernel that stands right behind its wait; count the wrong words."""
    base = numbers(0, channel.rows, channel.width, channel.consumer)
    base = base.repeat(1, len(channel.taps))
    wrong = torch.zeros((), dtype=torch.int64, device=channel.consumer)
    rows = channel.rows if wait == "stream" else None
    [group] = channel.groups
    with consuming(channel, peer, timeout=LIMIT) as mailbox:
        with mailbox.open_pass(1, messages):
            for microbatch in range(messages):
                expected = base + microbatch
                with mailbox.recv(microbatch, wait=wait, rows=rows) as taps:
                    different = taps[group] != expected
                wrong += different.sum()
                if microbatch % FLUSH_EVERY == 0:
                    torch.cuda.synchronize()  # the host would run ahead by thousands
        return int(wrong)


def _run(pair: Pair, channel: Channel, messages: int, wait: str) -> None:
    wrong, _ = pair.run(
        partial(_count_wrong, messages=messages, wait=wait),
        partial(_push_messages, messages=messages),
        channel,
        limit=LIMIT,
    )
    assert wrong == 0


@pytest.mark.parametrize("wait", ["stream", "host"])
def test_no_stamp_overtakes_its_payload(
    pair: Pair, tmp_path: Path, producer: str, wait: str
) -> None:
    """Catches a stamp that is seen before the payload: over NVLink and PCIe, no order is given."""
    _run(pair, Channel(tmp_path.as_uri(), depth=DEPTH, producer=producer), 20_000, wait)


@pytest.mark.parametrize("wait", ["stream", "host"])
def test_no_stamp_overtakes_a_strided_payload(
    pair: Pair, tmp_path: Path, producer: str, wait: str
) -> None:
    """Catches the same for 2-D copies, which the driver may hand to another engine."""
    groups = {"features": WIDE}
    channel = Channel(tmp_path.as_uri(), groups, depth=DEPTH, producer=producer)
    _run(pair, channel, 3_000, wait)


@pytest.mark.parametrize("environment", ["one connection"])
@pytest.mark.parametrize("wait", ["stream", "host"])
def test_no_stamp_overtakes_by_one_connection(pair: Pair, tmp_path: Path, wait: str) -> None:
    """Catches the same where all streams of a process share one connection to the GPU."""
    _run(pair, Channel(tmp_path.as_uri(), depth=DEPTH), 3_000, wait)
