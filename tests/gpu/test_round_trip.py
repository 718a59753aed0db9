"""What arrives is what was pushed: every dtype, every layout, offsets beyond 32 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import numbers
from gpu.pair import Pair, Peer
from tapchannel.dtypes import DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

WIDE = ("left", "middle", "right")


# ---- every dtype


def _octets(index: int, channel: Channel, itemsize: int, device: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(index)
    shape = (channel.rows, channel.width * itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random).to(device)


def _push_every_dtype(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
        for index, dtype in enumerate(DTYPES.values()):
            octets = _octets(index, channel, dtype.itemsize, channel.producer)
            outbox.push(0, dtype.name, octets.view(getattr(torch, dtype.name)))


def _receive_every_dtype(peer: Peer, channel: Channel) -> tuple[list[str], object]:
    wrong = []
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
        with mailbox.recv(0) as taps:
            for index, dtype in enumerate(DTYPES.values()):
                expected = _octets(index, channel, dtype.itemsize, channel.consumer)
                if not torch.equal(taps[dtype.name].view(torch.uint8), expected):
                    wrong.append(dtype.name)
        return wrong, mailbox.info()["memory"]


@pytest.mark.parametrize("memory", ["vmm", "ipc"])
def test_every_dtype_arrives_bit_for_bit(
    pair: Pair, tmp_path: Path, producer: str, memory: str
) -> None:
    """Catches a wrong item size, NaNs that a conversion rewrites, and an ignored memory=."""
    channel = Channel(
        tmp_path.as_uri(),
        groups={name: (name,) for name in DTYPES},
        width=24,
        dtype={name: name for name in DTYPES},
        rows=33,
        memory=memory,
        producer=producer,
    )
    (wrong, used), _ = pair.run(_receive_every_dtype, _push_every_dtype, channel)
    assert wrong == []
    assert used == memory


# ---- every layout, into the middle of a wider group


def _as_pushed(layout: str, dense: torch.Tensor) -> torch.Tensor:
    """Give the same rows in another layout."""
    rows, width = dense.shape
    if layout == "columns of a wider tensor":
        wider = torch.full((rows, 3 * width), -1, dtype=dense.dtype, device=dense.device)
        wider[:, width : 2 * width] = dense
        return wider[:, width : 2 * width]
    if layout == "every other row":
        taller = torch.full((2 * rows, width), -1, dtype=dense.dtype, device=dense.device)
        taller[::2] = dense
        return taller[::2]
    if layout == "sequence and batch":
        return dense.view(4, rows // 4, width)
    if layout == "batch and sequence, transposed":
        return dense.view(4, rows // 4, width).transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "column-major":
        return dense.t().contiguous().t()
    return dense


LAYOUTS = (
    "dense",
    "columns of a wider tensor",
    "every other row",
    "sequence and batch",
    "batch and sequence, transposed",
    "column-major",
)


def _push_layouts(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, len(LAYOUTS) + 3):
        for microbatch, layout in enumerate(LAYOUTS):
            for index, tap in enumerate(WIDE):
                dense = channel.words(10 * microbatch + index)
                outbox.push(microbatch, tap, _as_pushed(layout, dense))
        for microbatch, rows in enumerate((0, 1, 5), len(LAYOUTS)):
            for index, tap in enumerate(WIDE):
                outbox.push(microbatch, tap, channel.words(10 * microbatch + index), rows=rows)


def _receive_layouts(peer: Peer, channel: Channel) -> list[Any]:
    seen = []
    microbatches = len(LAYOUTS) + 3
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, microbatches):
        for microbatch in range(microbatches):
            with mailbox.recv(microbatch) as taps:
                side_by_side = taps["features"]
                seeds = [10 * microbatch + index for index in range(len(WIDE))]
                full = [numbers(s, channel.rows, channel.width, channel.consumer) for s in seeds]
                expected = torch.cat([words[: len(side_by_side)] for words in full], dim=1)
                seen.append((len(side_by_side), torch.equal(side_by_side, expected)))
    return seen


def test_every_layout_lands_between_its_neighbours(
    pair: Pair, tmp_path: Path, producer: str
) -> None:
    """Catches a mixed-up pitch, a copy that writes a neighbour's columns, and lost empty taps."""
    channel = Channel(
        tmp_path.as_uri(), {"features": WIDE}, width=48, rows=64, depth=4, producer=producer
    )
    seen, _ = pair.run(_receive_layouts, _push_layouts, channel)
    full = [(channel.rows, True)] * len(LAYOUTS)
    assert seen == [*full, (0, True), (1, True), (5, True)]


# ---- offsets beyond 32 bits

CHUNK = 2048  # rows compared at once


def _push_huge(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, channel.depth):
        for microbatch in range(channel.depth):
            for index, tap in enumerate(channel.taps):
                outbox.push(microbatch, tap, channel.words(2 * microbatch + index))


def _wrong_chunks(tap: torch.Tensor, seed: int) -> int:
    expected = numbers(seed, *tap.shape, tap.device)
    pairs = zip(tap.split(CHUNK), expected.split(CHUNK), strict=True)
    return sum(not torch.equal(seen, wanted) for seen, wanted in pairs)


def _receive_huge(peer: Peer, channel: Channel) -> tuple[list[int], Any, int]:
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, channel.depth):
        leases = [mailbox.recv(microbatch) for microbatch in range(channel.depth)]
        # All slots have landed before the first is looked at: a wrapped offset shows in either.
        torch.cuda.synchronize()
        wrong = [
            _wrong_chunks(lease[tap], 2 * microbatch + index)
            for microbatch, lease in enumerate(leases)
            for index, tap in enumerate(channel.taps)
        ]
        last = leases[-1][channel.taps[-1]]
        span = last[-1, -1].data_ptr() - leases[0][channel.taps[0]].data_ptr()
        return wrong, mailbox.info()["reserved_bytes"], span


def test_offsets_beyond_four_gib(pair: Pair, tmp_path: Path, producer: str) -> None:
    """Catches any size or offset kept in 32 bits: in the arena, in the slot, in the 2-D copy."""
    channel = Channel(
        tmp_path.as_uri(),
        {"features": ("first", "second")},
        width=32768,
        rows=20480,
        depth=2,
        producer=producer,
    )
    (wrong, reserved, span), _ = pair.run(_receive_huge, _push_huge, channel)
    assert wrong == [0, 0, 0, 0]
    assert reserved > 2 * 5 * 2**30
    assert span > 9 * 2**30, "the last word that was checked lies too near"


# ---- both ends in one process


def _loop_back(peer: Peer, channel: Channel) -> tuple[list[bool], object]:
    torch.cuda.set_device(channel.consumer)
    right = []
    with channel.mailbox() as mailbox, channel.outbox() as outbox:
        for step, by_rows in enumerate((None, channel.rows), 1):
            with mailbox.open_pass(step, 6), outbox.open_pass(step, 6):
                for microbatch in range(6):
                    outbox.push(microbatch, TAP, channel.words(10 * step + microbatch))
                    expected = channel.words(10 * step + microbatch)
                    with mailbox.recv(microbatch, rows=by_rows) as taps:
                        right.append(torch.equal(taps[TAP], expected))
        return right, outbox.info()["memory"]


@pytest.mark.parametrize("memory", ["vmm", "ipc"])
def test_both_ends_in_one_process(pair: Pair, tmp_path: Path, memory: str) -> None:
    """Catches opening a classic IPC handle in the process that exported it, which CUDA refuses."""
    channel = Channel(tmp_path.as_uri(), memory=memory)
    (right, used), _ = pair.run(_loop_back, None, channel)
    assert right == [True] * 12
    assert used == memory
