"""A slot goes back behind its readers, in stream order, and not before (I2, I9)."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import Gate, RawMemory, keep_busy, wrong_words
from gpu.pair import Pair, Peer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def _push_second_into_held_slot(peer: Peer, channel: Channel) -> object:
    """Push the second microbatch while the only slot waits for its reader; count what is queued."""
    with producing(channel, peer) as outbox, outbox.open_pass(1, 2):
        outbox.push(0, TAP, channel.words(0))
        peer.wait("read is queued")
        outbox.push(1, TAP, channel.words(1))
        queued = outbox.info()["queued"]
        peer.tell("pushed")
        return queued


def _read_late(peer: Peer, channel: Channel, reader: str) -> tuple[int, int]:
    """Leave the with block while the read that was queued in it is held up."""
    torch.cuda.set_device(channel.consumer)
    gate = Gate()
    own, other = torch.cuda.Stream(), torch.cuda.Stream()
    late = own if reader == "lease's stream" else other
    out = torch.empty(channel.rows, channel.width, dtype=torch.int32, device=channel.consumer)
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 2), torch.cuda.stream(own):
        with mailbox.recv(0, wait="host") as taps:
            view = taps[TAP]
            gate.hold(late)
            if late is other:
                taps.record_stream(other)
            with torch.cuda.stream(late):
                out.copy_(view)
            del view
        peer.tell("read is queued")
        peer.wait("pushed")
        gate.open()
        with mailbox.recv(1, wait="host") as taps:
            second = wrong_words(taps[TAP], 1)
        late.synchronize()
        return wrong_words(out, 0), second


@pytest.mark.parametrize("reader", ["lease's stream", "recorded stream"])
def test_slot_is_kept_for_a_queued_read(
    pair: Pair, tmp_path: Path, producer: str, reader: str
) -> None:
    """Catches credit given when the with block ends, though kernels on the slot still wait (I2)."""
    channel = Channel(tmp_path.as_uri(), depth=1, producer=producer)
    late = partial(_read_late, reader=reader)
    (first, second), queued = pair.run(late, _push_second_into_held_slot, channel)
    assert queued == 1, "the slot was granted before it was read"
    assert (first, second) == (0, 0)


# ---- what autograd keeps

MICROBATCHES = 8
HIDDEN = 96


def _push_states(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, MICROBATCHES):
        for microbatch in range(MICROBATCHES):
            for index, tap in enumerate(channel.taps):
                outbox.push(microbatch, tap, _state(channel, microbatch, index, channel.producer))


def _state(channel: Channel, microbatch: int, index: int, device: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * microbatch + index)
    return torch.randn(channel.rows, channel.width, generator=random).to(device)


def _draft(channel: Channel) -> nn.Module:
    torch.manual_seed(7)
    width = channel.width * len(channel.taps)
    layers = nn.Sequential(nn.Linear(width, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1))
    return layers.to(channel.consumer)


def _train_on_slots(peer: Peer, channel: Channel) -> list[bool]:
    """Backward as late as the depth allows, long after the with block; compare with clones."""
    draft = _draft(channel)
    reference = copy.deepcopy(draft)
    pending: list[torch.Tensor] = []
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, MICROBATCHES):
        for microbatch in range(MICROBATCHES):
            with mailbox.recv(microbatch) as taps:
                pending.append(draft(taps["features"]).square().mean())
            keep_busy(5)  # time for an overwriting push to be wrong in
            if len(pending) == channel.depth:
                pending.pop(0).backward()
        while pending:
            pending.pop(0).backward()
    for microbatch in range(MICROBATCHES):
        taps = [_state(channel, microbatch, i, channel.consumer) for i in range(len(channel.taps))]
        reference(torch.cat(taps, dim=1)).square().mean().backward()
    gradients = zip(draft.parameters(), reference.parameters(), strict=True)
    return [torch.equal(ours.grad, theirs.grad) for ours, theirs in gradients]


@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_are_those_of_cloned_taps(pair: Pair, tmp_path: Path, depth: int) -> None:
    """Catches a slot that goes back while autograd saves it for a weight gradient (I9)."""
    channel = Channel(
        tmp_path.as_uri(),
        {"features": ("low", "high")},
        width=128,
        dtype="float32",
        rows=256,
        depth=depth,
    )
    equal, _ = pair.run(_train_on_slots, _push_states, channel)
    assert equal == [True] * 4


# ---- clones, and slots that are checked


def _push_late(peer: Peer, channel: Channel) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
        peer.wait("waiting")
        outbox.push(0, TAP, channel.words(1))


def _clone_on_given_stream(peer: Peer, channel: Channel) -> int:
    """Clone a lease whose wait is queued on a stream that is not the current one."""
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
        stream = torch.cuda.Stream()
        lease = mailbox.recv(0, rows=channel.rows, stream=stream)
        copies = lease.clone()
        peer.tell("waiting")
        torch.cuda.synchronize()
        return wrong_words(copies[TAP], 1)


def test_clone_of_a_lease_on_a_named_stream(pair: Pair, tmp_path: Path) -> None:
    """Catches a clone made on the current stream, where nothing waits for the stamp (I1)."""
    wrong, _ = pair.run(_clone_on_given_stream, _push_late, Channel(tmp_path.as_uri()))
    assert wrong == 0


def _push_checked(peer: Peer, channel: Channel) -> None:
    """Push on a named stream what a kernel there has still to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAPCHANNEL_CHECK", "1")
        with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                source = torch.zeros(channel.rows, channel.width, dtype=torch.int32, device="cuda")
                late = channel.words(1)
                keep_busy(20)
                source.copy_(late)
            outbox.push(0, TAP, source, stream=stream)


def _receive_checked(peer: Peer, channel: Channel) -> tuple[int, int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAPCHANNEL_CHECK", "1")
        with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
            with mailbox.recv(0) as taps:
                address, count = taps[TAP].data_ptr(), taps[TAP].numel()
                wrong = wrong_words(taps[TAP], 1)
            torch.cuda.synchronize()
            slot = torch.as_tensor(RawMemory(address, count), device=channel.consumer)
            return wrong, int(slot.min()), int(slot.max())


def test_checked_slot_is_filled_when_it_goes_back(pair: Pair, tmp_path: Path) -> None:
    """Catches a checksum taken before the tensor was made, and a released slot left readable."""
    seen, _ = pair.run(_receive_checked, _push_checked, Channel(tmp_path.as_uri()))
    assert seen == (0, -1, -1)
