"""I9: a slot is not released while anything may still read it, autograd included.

Each test names the mutation of tests/support/mutations under which it was seen to fail.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from support.channels import BRIEFLY, CUDA_IPC, CUDA_VMM, SHM, Channel, Maker, Wire, granted, until
from support.drafts import FORWARDS, LABELS, TAPS, WIDTH, Draft, Forward, Taps, gradients
from support.payloads import numbers
from support.places import Here
from tapchannel import CreditTimeout, Key, TapPlan, UsageError

ROWS = 16
MICROBATCHES = 5
PLAN = TapPlan({"features": TAPS, "embedding": ["embedding"]}, WIDTH, "float32", ROWS)
WIRES = [
    pytest.param(SHM, id="shm"),
    pytest.param(CUDA_VMM, id="cuda_ipc-vmm", marks=pytest.mark.gpu),
    pytest.param(CUDA_IPC, id="cuda_ipc-ipc", marks=pytest.mark.gpu),
]


@pytest.fixture(params=WIRES)
def channel_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Make channels."""
    wire: Wire = request.param
    with Maker(wire, Here(), tmp_path) as maker:
        yield maker


def tap_of(microbatch: int, name: str) -> torch.Tensor:
    """Return what is pushed for a tap; microbatches differ in rows too."""
    return numbers((microbatch, name), ROWS - microbatch % 3, WIDTH)


def push(channel: Channel, microbatch: int) -> None:
    """Push all taps of a microbatch."""
    for tap in PLAN.taps:
        channel.producer.push(microbatch, tap.name, tap_of(microbatch, tap.name))


def cloned(microbatch: int, device: str) -> Taps:
    """Return copies of the taps, by the names that a lease has."""
    taps = {tap.name: tap_of(microbatch, tap.name).to(device) for tap in PLAN.taps}
    return taps | {"features": torch.cat([taps[name] for name in TAPS], 1)}


def loss_of(draft: Draft, forward: Forward, taps: Taps, microbatch: int) -> torch.Tensor:
    """Return the draft's loss on a microbatch."""
    logits = forward(draft, taps)
    generator = torch.Generator().manual_seed(microbatch)
    labels = torch.randint(0, LABELS, (logits.shape[0],), generator=generator)
    return functional.cross_entropy(logits, labels.to(logits.device)) / MICROBATCHES


def gradients_of_clones(forward: Forward, device: str) -> dict[str, torch.Tensor]:
    """Accumulate the gradients of all microbatches from plain copies of their taps."""
    draft = Draft().to(device)
    for microbatch in range(MICROBATCHES):
        loss_of(draft, forward, cloned(microbatch, device), microbatch).backward()
    return gradients(draft)


def gradients_of_slots(channel: Channel, forward: Forward, ahead: int) -> dict[str, torch.Tensor]:
    """Accumulate them from the slots; each backward runs ``ahead`` microbatches late."""
    depth = int(str(channel.mailbox.info()["depth"]))
    draft = Draft().to(str(channel.mailbox.info()["device"]))
    pending: deque[torch.Tensor] = deque()
    with channel.open_pass(1, MICROBATCHES):
        for microbatch in range(depth):
            push(channel, microbatch)
        for microbatch in range(MICROBATCHES):
            with channel.mailbox.recv(microbatch) as taps:
                pending.append(loss_of(draft, forward, taps, microbatch))
            # The block is left. If the slot went back with it, this would overwrite the views that
            # backward is going to read.
            if microbatch + depth < MICROBATCHES:
                push(channel, microbatch + depth)
            if len(pending) > ahead:
                pending.popleft().backward()
        while pending:
            pending.popleft().backward()
    return gradients(draft)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", FORWARDS)
def test_i9_gradients_are_bit_for_bit_those_of_cloned_taps(
    channel_of: Maker, name: str, depth: int
) -> None:
    """Bug: weight gradients of another microbatch's taps. Mutation: slot-back-with-the-block."""
    forward = FORWARDS[name]
    expected = gradients_of_clones(forward, channel_of.wire.device)
    channel = channel_of(PLAN, depth=depth)
    seen = gradients_of_slots(channel, forward, ahead=depth - 1)
    assert set(seen) == set(expected)
    differing = [name for name in expected if not torch.equal(seen[name], expected[name])]
    assert differing == []
    assert all(bool(gradient.abs().sum() > 0) for gradient in seen.values())


def test_i9_several_backwards_over_one_lease(channel_of: Maker) -> None:
    """Bug: a slot lost to the first of two backwards. Mutation: slot-back-with-the-block."""
    device = channel_of.wire.device
    expected, draft = Draft().to(device), Draft().to(device)
    for _ in range(2):
        loss_of(expected, FORWARDS["plain"], cloned(0, device), 0).backward()
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 2):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            loss = loss_of(draft, FORWARDS["plain"], taps, 0)
        push(channel, 1)
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
        with channel.mailbox.recv(1) as taps:
            assert torch.equal(taps["low"], tap_of(1, "low").to(device))
    for name, gradient in gradients(expected).items():
        assert torch.equal(gradients(draft)[name], gradient), name


def closure_over(view: torch.Tensor) -> object:
    """Return a closure that holds a view."""
    return lambda: view.sum()


def cycle_through(view: torch.Tensor) -> object:
    """Return an object that holds a view and itself."""
    cycle: list[object] = [view]
    cycle.append(cycle)
    return cycle


def graph_over(view: torch.Tensor) -> object:
    """Return a graph that has saved the view for its backward."""
    weight = torch.ones(view.shape[1], 2, device=view.device, requires_grad=True)
    return (view @ weight).sum()


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "the view": lambda view: view,
    "a column slice": lambda view: view[:, 1:3],
    "a detached alias": lambda view: view.detach(),
    "another dtype's view": lambda view: view.view(torch.int32),
    "the storage": lambda view: view.untyped_storage(),
    "a closure": closure_over,
    "a reference cycle": cycle_through,
    "an autograd graph": graph_over,
    "a dlpack capsule": lambda view: view.__dlpack__(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_i9_whatever_holds_the_storage_holds_the_slot(channel_of: Maker, name: str) -> None:
    """Bug: a holder that the release does not see. Mutation: slot-back-with-the-block."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 2):
        push(channel, 0)
        with channel.mailbox.recv(0) as taps:
            holder = HOLDERS[name](taps["features"])
        push(channel, 1)
        with pytest.raises(CreditTimeout):
            channel.producer.flush(BRIEFLY / 2)
        assert granted(channel.mailbox, 1) == 1
        del holder
        gc.collect()
        channel.producer.flush()
        with channel.mailbox.recv(1) as taps:
            assert torch.equal(taps["low"].cpu(), tap_of(1, "low"))


@pytest.mark.parametrize("depth", [1, 2])
def test_i9_a_view_kept_on_purpose_is_named(channel_of: Maker, depth: int) -> None:
    """Bug: a time-out from which nobody can tell what holds the slot. Mutation: holder-unnamed."""
    channel = channel_of(PLAN, depth=depth)
    with channel.open_pass(4, depth + 1):
        for microbatch in range(depth + 1):
            push(channel, microbatch)
        with channel.mailbox.recv(0) as taps:
            kept = taps["features"][1:2]
        for microbatch in range(1, depth):
            with channel.mailbox.recv(microbatch):
                pass
        held = "slot 0 is still held by a live tensor view since pass 4, microbatch 0"
        with pytest.raises(UsageError, match="for ever") as at_once:
            channel.mailbox.recv(depth, wait="stream")
        assert at_once.value.cause == held
        assert f"depth={depth + 1}" in str(at_once.value.next_step)
        assert torch.equal(kept.cpu(), cloned(0, "cpu")["features"][1:2])
        del kept
        with channel.mailbox.recv(depth) as taps:
            assert torch.equal(taps["low"].cpu(), tap_of(depth, "low"))


def test_i9_a_host_wait_for_a_kept_view_names_it_at_its_deadline(channel_of: Maker) -> None:
    """Bug: the time-out blames the producer. Mutation: holder-unnamed."""
    channel = channel_of(PLAN, depth=1)
    with pytest.raises(CreditTimeout) as late:
        with channel.open_pass(4, 2):
            push(channel, 0)
            push(channel, 1)
            kept = channel.mailbox.recv(0)["low"]
            channel.mailbox.recv(1, wait="host", timeout=BRIEFLY)
    assert late.value.key == Key(1, 4, 1)
    assert late.value.limit == BRIEFLY
    held = "slot 0 is still held by a live tensor view since pass 4, microbatch 0"
    assert late.value.cause == held
    assert torch.equal(kept.cpu(), tap_of(0, "low"))


def test_i9_a_lease_dropped_without_its_block_gives_the_slot_back(channel_of: Maker) -> None:
    """Bug: a slot lost for good by an exception between recv and the block."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 3):
        for microbatch in range(3):
            push(channel, microbatch)
            lease = channel.mailbox.recv(microbatch)
            assert torch.equal(lease["low"].cpu(), tap_of(microbatch, "low"))
            del lease
        until(lambda: granted(channel.mailbox, 1) == 3)
