"""TAPCHANNEL_CHECK=1: checksums of every cell, and slots that are filled once they are released."""

from __future__ import annotations

import pytest
import torch

from support.channels import Channel, Maker, arena_of, granted, landed, until
from support.payloads import numbers, payload, same_bits
from tapchannel import ChecksumError, Key, Outbox, Shard, TapPlan

CHECKED = {"TAPCHANNEL_CHECK": "1"}
PLAN = TapPlan({"pair": ["left", "right"]}, 4, "bfloat16", 4)
SOURCES = {1: ["left"], 2: ["right"]}


def push(channel: Channel, microbatch: int) -> None:
    """Push both taps, and wait until they have landed."""
    for rank, [tap] in SOURCES.items():
        tensor = payload((microbatch, tap), 4, 4, "bfloat16")
        channel.producers[rank].push(microbatch, tap, tensor)
    until(lambda: landed(channel.mailbox, microbatch))


def test_sound_cells_pass_the_check(channel_of: Maker) -> None:
    """Bug: a checksum of other bytes than those that travel: shares, strides, empty taps."""
    plan = TapPlan({"group": ["shared", "strided"]}, 4, "float32", 4)
    sources = {
        0: [Shard("shared", rows=(0, 2)), Shard("strided", columns=(1, 2))],
        1: [Shard("shared", rows=(1, 2)), Shard("strided", columns=(0, 2))],
    }
    channel = channel_of(plan, sources, depth=1, env=CHECKED)
    with channel.open_pass(1, 3):
        for microbatch, rows in enumerate((4, 0, 2)):
            shared, strided = numbers(microbatch, rows, 4), numbers((microbatch, 1), rows, 4)
            half = rows // 2
            channel.producers[0].push(microbatch, "shared", shared[:half])
            channel.producers[1].push(microbatch, "shared", shared[half:])
            channel.producers[0].push(microbatch, "strided", strided[:, 2:])
            channel.producers[1].push(microbatch, "strided", strided[:, :2])
            with channel.mailbox.recv(microbatch) as taps:
                assert same_bits(taps["group"], torch.cat([shared, strided], 1))


def test_lazily_conjugated_sources_pass_the_check(channel_of: Maker) -> None:
    """Bug: a checksum of the bytes before the conjugation that travels with them."""
    channel = channel_of(TapPlan({"tap": ["tap"]}, 4, "complex64", 4), env=CHECKED)
    with channel.open_pass(1, 1):
        channel.producer.run(push_conjugated)
        with channel.mailbox.recv(0) as taps:
            value = numbers("complex", 4, 4, dtype=torch.complex64)
            assert torch.equal(taps["tap"].cpu(), value.conj().resolve_conj())


def push_conjugated(outbox: Outbox) -> None:
    """Push a tensor with the conjugate bit."""
    value = numbers("complex", 4, 4, dtype=torch.complex64)
    outbox.push(0, "tap", value.to(str(outbox.info()["device"])).conj())


@pytest.mark.parametrize("column", [0, 4, 7])
def test_a_flipped_byte_is_found_and_its_producer_named(channel_of: Maker, column: int) -> None:
    """Bug: bytes that changed on the way, or were never written, read as the tap."""
    channel = channel_of(PLAN, SOURCES, depth=2, env=CHECKED)
    arena = arena_of(channel.mailbox)
    with pytest.raises(ChecksumError) as found:
        with channel.open_pass(3, 2):
            push(channel, 0)
            with channel.mailbox.recv(0):
                pass
            push(channel, 1)
            offset = PLAN.slot_bytes + 3 * 16 + column * 2  # slot 1, row 3
            [octet] = arena.read_probe(offset, 1)
            arena.write_probe(offset, bytes([octet ^ 0x10]))
            channel.mailbox.recv(1)
    rank = 1 if column < 4 else 2
    assert (found.value.rank, found.value.tap) == (rank, SOURCES[rank][0])
    assert found.value.key == Key(1, 3, 1)
    del found
    with channel.open_pass(4, 1):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            assert same_bits(taps["left"], payload((0, "left"), 4, 4, "bfloat16"))


def test_a_flipped_byte_goes_unseen_without_the_check(channel_of: Maker) -> None:
    """Bug: the check always on, at the price of a copy to the host for every microbatch."""
    channel = channel_of(PLAN, SOURCES, depth=1, env={"TAPCHANNEL_CHECK": None})
    with channel.open_pass(1, 1):
        push(channel, 0)
        arena_of(channel.mailbox).write_probe(0, b"\0\0")
        with channel.mailbox.recv(0) as taps:
            assert taps["left"][0, 0] == 0


def test_released_slots_are_filled(channel_of: Maker) -> None:
    """Bug: a view that is used after its slot went back, and shows plausible numbers."""
    channel = channel_of(PLAN, SOURCES, depth=1, env=CHECKED)
    arena = arena_of(channel.mailbox)
    with channel.open_pass(1, 2):
        push(channel, 0)
        with channel.mailbox.recv(0):
            assert arena.read_probe(0, PLAN.slot_bytes) != b"\xff" * PLAN.slot_bytes
        until(lambda: granted(channel.mailbox, 1) == 2)
        assert arena.read_probe(0, PLAN.slot_bytes) == b"\xff" * PLAN.slot_bytes
        push(channel, 1)
        with channel.mailbox.recv(1) as taps:
            assert same_bits(taps["right"], payload((1, "right"), 4, 4, "bfloat16"))
