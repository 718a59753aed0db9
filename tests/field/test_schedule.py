"""Field reports of kinds K6 to K8: who pushes what when, and how it finds its place."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from field.channel import channel_of
from support.channels import BRIEFLY
from support.payloads import numbers, same_bits
from support.small_channel import LIMIT, NAME, attach, refused, small_channel
from tapchannel import Mailbox, Outbox, Shard, TapPlan
from tapchannel.errors import (
    CreditTimeout,
    PlanMismatchError,
    StampTimeout,
    UsageError,
)

ROWS, WIDTH = 6, 8


# ---- A4


def test_field_a04_a_waiting_thread_holds_up_nothing(tmp_path: Path) -> None:
    """A4 (K6): what a wait needed was behind the very lock that the wait held."""
    with small_channel(tmp_path) as channel, ThreadPoolExecutor(1) as first:
        channel.open_next(1)
        waiting = first.submit(channel.mailbox.recv, 0, wait="host", timeout=LIMIT)
        assert channel.mailbox.info()["lanes"]  # each takes the core's lock, some the interpreter
        torch.randn(256, 256) @ torch.randn(256, 256)
        gc.collect()
        attach_refused(tmp_path)
        assert not waiting.done()
        for rank, taps in ((3, ("embedding", "low")), (7, ("high",))):
            for tap in taps:
                channel.outboxes[rank].push(0, tap, torch.ones(5, 8))
        began = time.monotonic()
        waiting.result(LIMIT).release()
        assert time.monotonic() - began < LIMIT / 2
        channel.abort()


def attach_refused(folder: Path) -> None:
    """Have the mailbox's service answer somebody."""
    with refused(UsageError, rank=7):
        attach(folder, 7)


# ---- A7


class Stage(torch.nn.Module):
    """A stage whose hook pushes its output, keyed by the microbatch that the trainer names."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.outbox, self.microbatch = outbox, 0
        self.pushed: list[torch.Tensor] = []
        self.refused: list[str] = []
        self.layer.register_forward_hook(self._push)

    def _push(self, layer: object, inputs: object, output: torch.Tensor) -> None:
        try:
            self.outbox.push(self.microbatch, "tap", output.detach())
        except UsageError as error:
            self.refused.append(error.what)
        else:
            self.pushed.append(output.detach().clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        return torch.tanh(self.layer(hidden))


@pytest.mark.parametrize("reentrant", [True, False])
def test_field_a07_a_recomputed_forward_pushes_nothing(tmp_path: Path, reentrant: bool) -> None:
    """A7 (K8): hooks ran twice under activation checkpointing, and shifted what came after."""
    mailbox, outbox = channel_of(tmp_path, TapPlan({"tap": ["tap"]}, WIDTH, "float32", ROWS))
    with outbox, mailbox:
        stage = Stage(outbox)
        for step in (1, 2):
            stage.pushed.clear()
            stage.refused.clear()
            inputs = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(4)]
            mailbox.open_pass(step, 4)
            outbox.open_pass(step, 4)
            outputs = []
            for stage.microbatch in range(4):
                made = checkpoint(stage, inputs[stage.microbatch], use_reentrant=reentrant)
                outputs.append(made)
            for stage.microbatch in (2, 0, 3, 1):  # backward has an order of its own
                outputs[stage.microbatch].sum().backward()
            assert len(stage.refused) == 4
            assert all("pushed twice" in what for what in stage.refused)
            assert len(stage.pushed) == 4
            for microbatch in range(4):
                with mailbox.recv(microbatch) as taps:
                    assert same_bits(taps["tap"], stage.pushed[microbatch])
            for side in (outbox, mailbox):
                side.abort("the step is over")
            with torch.no_grad():  # evaluation in between: no pass is open, so nothing is pushed
                stage(torch.randn(ROWS, WIDTH))
            assert "no pass is open" in stage.refused[4]


# ---- A8


def test_field_a08_forward_only_runs_push_nothing(tmp_path: Path) -> None:
    """A8 (K8), a and c: steps whose outputs nobody takes met the next step's traffic."""
    with small_channel(tmp_path) as channel:
        for _ in range(3):
            channel.carry(2)  # a training step
            before = channel.outboxes[7].info()
            for _ in range(10):
                with pytest.raises(UsageError, match="no pass is open"):
                    channel.outboxes[7].push(0, "high", torch.full((5, 8), -1.0))
            after = channel.outboxes[7].info()
            assert (after["pushes"], after["queued"]) == (before["pushes"], 0)


def test_field_a08_a_pass_that_the_consumer_never_opens_is_bounded(tmp_path: Path) -> None:
    """A8 (K6), a: pushes that nobody receives block the producer, or grow without bound."""
    with small_channel(tmp_path, ranks=(3,)) as channel:
        outbox = attach(tmp_path, 7, queue_limit=4)
        channel.outboxes[7] = outbox
        outbox.open_pass(1, 10)
        began = time.monotonic()
        for microbatch in range(4):
            outbox.push(microbatch, "high", torch.ones(5, 8))
        with refused(CreditTimeout, rank=7, seen="4 pushes queued"):
            outbox.push(4, "high", torch.ones(5, 8))
        assert time.monotonic() - began < LIMIT / 2  # none of them has waited
        outbox.abort("nobody receives")
        channel.step = 1
        channel.carry()


def test_field_a08_a_step_that_was_skipped_ends_by_name(tmp_path: Path) -> None:
    """A8 (K8), b: a receive for a step whose producers were told to skip it."""
    with small_channel(tmp_path) as channel:
        channel.mailbox.open_pass(1, 1)
        with refused(StampTimeout, rank=3, limit=BRIEFLY, cause=...) as told:
            channel.mailbox.recv(0, timeout=BRIEFLY)
        assert "nothing was pushed" in str(told[0])
        channel.mailbox.abort("its producers skipped it")
        channel.step = 1
        channel.carry()


# ---- A9


def layers(*ids: int) -> list[str]:
    """Name the taps of these layers."""
    return [f"layer{number}" for number in ids]


def layer_plan(*ids: int) -> TapPlan:
    """Give the plan of these layers."""
    return TapPlan({"taps": layers(*ids)}, WIDTH, "float32", ROWS)


WANTED = (2, 16, 29)
CLAIMS = {
    "fewer": (layer_plan(2, 16), None, "layer29"),
    "others": (layer_plan(2, 16, 30), None, "layer30"),
    "another order": (layer_plan(16, 2, 29), None, "layer16"),
    "a claim too few": (layer_plan(*WANTED), layers(2, 16), "layer29"),
    "a claim of another's": (layer_plan(*WANTED), layers(2, 16, 30), "layer30"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_field_a09_stages_that_disagree_are_refused_with_a_table(tmp_path: Path, case: str) -> None:
    """A9 (K8): stages fell back to built-in defaults, and disagreed about what to send."""
    plan, claims, named = CLAIMS[case]
    place: dict[str, Any] = {"store": f"file://{tmp_path}", "name": NAME}
    with Mailbox(layer_plan(*WANTED), {0: layers(*WANTED)}, **place):
        with pytest.raises(PlanMismatchError) as told:
            Outbox(plan, 0, taps=claims, attach_timeout=LIMIT, **place)
        assert told.value.rows
        assert named in str(told.value)
        # In any order, what is claimed is what is claimed.
        Outbox(
            layer_plan(*WANTED), 0, taps=layers(29, 2, 16), attach_timeout=LIMIT, **place
        ).close()


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ({0: layers(2, 16)}, "missing"),
        ({0: layers(2, 16, 29), 1: layers(16)}, "pushed twice"),
        ({0: layers(2, 16, 29, 30)}, "not in the plan"),
        ({0: layers(2, 16, 29), 1: []}, "no lane"),
        ({0: layers(2, 16), 1: [Shard("layer29", (0, 2))]}, "missing"),
    ],
)
def test_field_a09_sources_name_each_tap_once(
    tmp_path: Path, sources: dict[int, Any], problem: str
) -> None:
    """A9 (K8): missing, extra and doubled layers found out in the first step, or never."""
    with pytest.raises(PlanMismatchError, match=problem):
        Mailbox(layer_plan(*WANTED), sources, store=f"file://{tmp_path}")


# ---- A10


def test_field_a10_taps_find_their_key_in_any_order(tmp_path: Path) -> None:
    """A10 (K7): two untagged shape messages to one peer were swapped."""
    counts = {3: 257, 1: 64, 2: 1024, 0: 1}
    chunks = ["chunk0", "chunk1"]
    plan = TapPlan({name: [name] for name in chunks}, WIDTH, "float32", 1024)
    mailbox, outbox = channel_of(tmp_path, plan, depth=4)
    with outbox, mailbox, mailbox.open_pass(1, 4), outbox.open_pass(1, 4):
        for microbatch, rows in counts.items():
            for chunk in reversed(chunks):
                outbox.push(microbatch, chunk, numbers((microbatch, chunk), rows, WIDTH))
        for microbatch in range(4):
            with mailbox.recv(microbatch) as taps:
                for chunk in chunks:
                    assert taps.info[chunk].rows == counts[microbatch]
                    wanted = numbers((microbatch, chunk), counts[microbatch], WIDTH)
                    assert same_bits(taps[chunk], wanted)


def test_field_a10_as_many_elements_are_not_the_same_shape(tmp_path: Path) -> None:
    """A10 (K7): sizes matched on the wire, and the crash came later in autograd."""
    mailbox, outbox = channel_of(tmp_path, TapPlan({"tap": ["tap"]}, 64, "float32", 128))
    with outbox, mailbox, mailbox.open_pass(1, 1), outbox.open_pass(1, 1):
        with refused(UsageError, rank=0, tap="tap", seen=..., expected=...) as told:
            outbox.push(0, "tap", torch.zeros(64, 128))
        assert "64" in str(told[0].expected)
        assert "128" in str(told[0].seen)
        outbox.push(0, "tap", torch.ones(128, 64))
        with mailbox.recv(0) as taps:
            assert taps.info["tap"].shape == (128, 64)
