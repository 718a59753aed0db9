"""A process that ends under copies in flight takes nobody else with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.channel import ATTACH_LIMIT, TAP, Channel, producing
from gpu.device import keep_busy, refusal, wrong_words
from gpu.environments import PLAIN
from gpu.pair import Pair, Peer
from support.children import Children
from support.link import Link
from tapchannel import Outbox

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

CHILDREN_LIMIT = 90.0
COPIES = 8  # of 2 GiB each: at least 7 ms of copies on one GPU, 40 ms between two
LAST = COPIES  # one more, behind a kernel that outlives whoever is killed
KERNEL_MS = 1500
FIRST_LIFE, SECOND_LIFE = 3, 4  # seeds
POISONED_INT32 = -0x7F7F7F80  # 0x80 in each byte


def _large(folder: Path, producer: str) -> Channel:
    return Channel(
        folder.as_uri(), width=8192, rows=65536, depth=COPIES + 1, memory="vmm", producer=producer
    )


def _push_many(outbox: Outbox, channel: Channel, source: torch.Tensor) -> None:
    """Queue 16 GiB of copies at once, and one that cannot begin for long."""
    for microbatch in range(COPIES):
        outbox.push(microbatch, TAP, source)
    keep_busy(KERNEL_MS)
    outbox.push(LAST, TAP, source)


def _lost_but_alive(outbox: Outbox, channel: Channel) -> tuple[str, bool]:
    """Let the copies end; tell what a call on the lane raises and whether the device computes."""
    torch.cuda.synchronize()
    lost = refusal(outbox.flush)
    outbox.close()
    return lost, bool((torch.ones(1024, device=channel.producer) * 2 == 2).all())


# ---- killed


def _produce(link: Link, channel: Channel) -> tuple[str, bool]:
    torch.cuda.set_device(channel.producer)
    source = channel.words(FIRST_LIFE)
    torch.cuda.synchronize()
    with channel.outbox() as outbox:
        outbox.open_pass(1, COPIES + 1)
        link.reach("attached")
        link.receive()
        _push_many(outbox, channel, source)
        link.reach("pushed")
        link.receive()
        return _lost_but_alive(outbox, channel)


def _produce_again(link: Link, channel: Channel) -> None:
    torch.cuda.set_device(channel.producer)
    source = channel.words(SECOND_LIFE)
    link.reach("started")
    link.receive()
    with channel.outbox() as outbox, outbox.open_pass(2, COPIES + 1):
        for microbatch in range(COPIES + 1):
            outbox.push(microbatch, TAP, source)


def _outlive_producer(link: Link, channel: Channel) -> dict[str, Any]:
    torch.cuda.set_device(channel.consumer)
    out = torch.zeros(64, channel.width, dtype=torch.int32, device=channel.consumer)
    seen: dict[str, Any] = {}
    with channel.mailbox() as mailbox:
        mailbox.wait_ready(ATTACH_LIMIT)
        mailbox.open_pass(1, COPIES + 1)
        lease = mailbox.recv(LAST, rows=channel.rows, timeout=CHILDREN_LIMIT)
        out.copy_(lease[TAP][:64])
        link.reach("waiting")
        link.receive()
        torch.cuda.synchronize()
        seen["out"] = out.unique().tolist()
        seen["refusal"] = refusal(partial(lease.__getitem__, TAP))
        del lease
        mailbox.abort("its producer was killed")
        link.reach("ready for another")
        mailbox.wait_ready(ATTACH_LIMIT)
        with mailbox.open_pass(2, COPIES + 1):
            leases = [mailbox.recv(microbatch, wait="host") for microbatch in range(COPIES + 1)]
            # Looked at twice: what the dead process had queued would come late.
            seen["wrong"] = [wrong_words(lease[TAP], SECOND_LIFE) for lease in (*leases, *leases)]
    return seen


def test_producer_killed_in_mid_copy(tmp_path: Path, producer: str) -> None:
    """Catches a stream stuck for ever (I3), old data shown for new (I4), and late copies."""
    channel = _large(tmp_path, producer)
    with Children(CHILDREN_LIMIT) as children:
        consumer = children.start(_outlive_producer, channel, env=PLAIN)
        victim = children.start(_produce, channel, env=PLAIN)
        successor = children.start(_produce_again, channel, env=PLAIN)
        successor.wait_for("started")
        victim.wait_for("attached")
        consumer.wait_for("waiting")
        victim.send()
        victim.wait_for("pushed")
        victim.kill()
        consumer.send()
        consumer.wait_for("ready for another")
        successor.send()
        seen = consumer.result()
    assert seen["refusal"] == "PeerLostError"
    assert seen["out"] == [POISONED_INT32]
    assert seen["wrong"] == [0] * 2 * (COPIES + 1)


def _consume_nothing(link: Link, channel: Channel) -> None:
    torch.cuda.set_device(channel.consumer)
    with channel.mailbox() as mailbox:
        mailbox.wait_ready(ATTACH_LIMIT)
        mailbox.open_pass(1, COPIES + 1)
        link.reach("waiting")
        link.receive()


def test_consumer_killed_in_mid_copy(tmp_path: Path, producer: str) -> None:
    """Catches memory that goes with its exporter: the copy in flight would fault the producer."""
    channel = _large(tmp_path, producer)
    with Children(CHILDREN_LIMIT) as children:
        victim = children.start(_consume_nothing, channel, env=PLAIN)
        survivor = children.start(_produce, channel, env=PLAIN)
        survivor.wait_for("attached")
        victim.wait_for("waiting")
        survivor.send()
        survivor.wait_for("pushed")
        victim.kill()
        survivor.send()
        assert survivor.result() == ("PeerLostError", True)


# ---- closed


def _close_early(peer: Peer, channel: Channel) -> bool:
    torch.cuda.set_device(channel.consumer)
    with channel.mailbox() as mailbox:
        mailbox.wait_ready(ATTACH_LIMIT)
        mailbox.open_pass(1, COPIES + 1)
        peer.tell("open")
        peer.wait("pushed")
    del mailbox
    peer.wait("outbox closed")
    return bool((torch.ones(1024, device=channel.consumer) * 2 == 2).all())


def _push_into_closing(peer: Peer, channel: Channel) -> tuple[str, bool]:
    with producing(channel, peer) as outbox:
        outbox.open_pass(1, COPIES + 1)
        peer.wait("open")
        _push_many(outbox, channel, channel.words(FIRST_LIFE))
        peer.tell("pushed")
        return _lost_but_alive(outbox, channel)


def test_mailbox_closed_in_mid_copy(pair: Pair, tmp_path: Path, producer: str) -> None:
    """Catches a close that frees the slots for everybody, and not only for the mailbox itself."""
    channel = _large(tmp_path, producer)
    computes, survived = pair.run(_close_early, _push_into_closing, channel)
    assert computes
    assert survived == ("PeerLostError", True)
