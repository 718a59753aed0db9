"""Field reports on a GPU: whose memory, whose device. Roles that tests/gpu has are its own."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from gpu.channel import ATTACH_LIMIT, TAP, Channel
from gpu.device import refusal, wrong_words
from gpu.environments import environments
from gpu.pair import Pair, Peer
from gpu.roles import BURST, push_burst, receive_burst
from gpu.test_environment import _check_in_force, _with_facts
from gpu.test_foreign import _push_from_elsewhere, _receive_from_elsewhere

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


# ---- A1

WORDS = {"64 B": 16, "16 KiB": 4 << 10, "512 KiB": 128 << 10, "4 MiB": 1 << 20}
NAMES = ("A", "B")


def _receive_from_both(peer: Peer, channel: Channel) -> tuple[list[int], list[bool]]:
    """Receive by two mailboxes whose memory might be one segment; look at what lies around them."""
    torch.cuda.set_device(channel.consumer)
    dummies = [torch.full((1 << s,), 7, dtype=torch.uint8, device="cuda") for s in (10, 16)]
    wrong = []
    with ExitStack() as open_boxes:
        boxes = [open_boxes.enter_context(channel.mailbox(name=name)) for name in NAMES]
        for mailbox in boxes:
            mailbox.wait_ready(ATTACH_LIMIT)
            mailbox.open_pass(1, 2)
        for microbatch in range(2):
            for number, mailbox in enumerate(boxes):
                with mailbox.recv(microbatch) as taps:
                    wrong.append(wrong_words(taps[TAP], 2 * microbatch + number))
        peer.wait("closed")
    return wrong, [bool((dummy == 7).all()) for dummy in dummies]


def _push_to_both(peer: Peer, channel: Channel) -> None:
    torch.cuda.set_device(channel.producer)
    with ExitStack() as open_boxes:
        boxes = [open_boxes.enter_context(channel.outbox(name=name)) for name in NAMES]
        for outbox in boxes:
            outbox.open_pass(1, 2)
        for microbatch in range(2):
            for number, outbox in enumerate(boxes):
                outbox.push(microbatch, TAP, channel.words(2 * microbatch + number))
    peer.tell("closed")


@pytest.mark.parametrize("memory", ["vmm", "ipc"])
@pytest.mark.parametrize("size", WORDS)
def test_field_a01_neighbours_in_memory_stay_apart(
    pair: Pair, tmp_path: Path, size: str, memory: str
) -> None:
    """A1 (K1): a handle names a whole allocation, and the offset inside it got lost."""
    channel = Channel(tmp_path.as_uri(), width=WORDS[size], rows=1, memory=memory)
    (wrong, untouched), _ = pair.run(_receive_from_both, _push_to_both, channel)
    assert wrong == [0] * 4
    assert untouched == [True, True]


# ---- A13, A14


@pytest.mark.parametrize("environment", ["one connection", "eager"])
def test_field_a13_the_allocators_settings_do_not_matter(
    pair: Pair, tmp_path: Path, environment: str
) -> None:
    """A13 (K1): memory of expandable segments cannot be shared as torch shares it."""
    channel = Channel(tmp_path.as_uri(), width=8192, rows=4096, depth=4)
    (wrong, consumer), (_, producer) = pair.run(
        partial(_with_facts, role=receive_burst), partial(_with_facts, role=push_burst), channel
    )
    assert wrong == [0] * BURST
    _check_in_force(environment, consumer, producer)
    assert any(
        "PYTORCH_CUDA_ALLOC_CONF" in side and side["PYTORCH_CUDA_ALLOC_CONF"] is not None
        for side in environments()[environment]
    )


@pytest.mark.parametrize("environment", ["plain", "eager"])
def test_field_a14_devices_are_known_by_uuid(pair: Pair, tmp_path: Path) -> None:
    """A14 (K1): the peer's ordinal taken for one's own, and the caller's current device changed.

    In the environment "eager" the producer sees one GPU, by its UUID.
    """
    channel = Channel(tmp_path.as_uri(), depth=4)
    changed, (pushed, before, after) = pair.run(
        _receive_from_elsewhere, _push_from_elsewhere, channel
    )
    assert (changed, pushed) == ([], [])
    assert before == after


# ---- A17


def _live_twice(peer: Peer, channel: Channel) -> int:
    """Be a mailbox, and another one of the same name and size."""
    torch.cuda.set_device(channel.consumer)
    with channel.mailbox() as mailbox:
        mailbox.wait_ready(ATTACH_LIMIT)
        mailbox.open_pass(1, 1)
    peer.tell("closed")
    with channel.mailbox() as mailbox:
        peer.tell("again")
        with mailbox.open_pass(1, 1), mailbox.recv(0) as taps:
            wrong = wrong_words(taps[TAP], 2)
        peer.wait("through")
    return wrong


def _outlive_the_first(peer: Peer, channel: Channel) -> str:
    torch.cuda.set_device(channel.producer)
    old = channel.outbox()
    peer.wait("closed")
    peer.wait("again")
    refused = refusal(lambda: old.open_pass(1, 1) and old.push(0, TAP, channel.words(1)))
    old.close()
    with channel.outbox() as outbox, outbox.open_pass(1, 1):
        outbox.push(0, TAP, channel.words(2))
    peer.tell("through")
    return refused


@pytest.mark.parametrize("memory", ["vmm", "ipc"])
def test_field_a17_a_mailbox_made_again_is_another_one(
    pair: Pair, tmp_path: Path, memory: str
) -> None:
    """A17 (K2): an old mapping of the same address that was used for the new memory."""
    wrong, refused = pair.run(
        _live_twice, _outlive_the_first, Channel(tmp_path.as_uri(), memory=memory)
    )
    assert wrong == 0
    assert refused == "PeerLostError"
