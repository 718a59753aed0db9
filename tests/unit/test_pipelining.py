"""What the adapter for torch's pipelining reads of stages, schedules and losses; no processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from tapchannel.errors import UsageError
from tapchannel.integrations.pipelining import TapStage
from tapchannel.integrations.pipelining_loss import any_loss, check_trained
from tapchannel.integrations.pipelining_modules import find
from tapchannel.integrations.wiring import TapShape


def stage_of(module: nn.Module, index: int = 0) -> Any:
    """Give as much of a stage as is read."""
    return SimpleNamespace(submod=module, stage_index=index)


def model(**layers: nn.Module | None) -> nn.Module:
    """Give a module with these submodules."""
    made = nn.Module()
    for name, layer in layers.items():
        setattr(made, name, layer)
    return made


def shapes(stages: list[Any], taps: Any, **given: Any) -> tuple[Mapping[str, TapShape], list[str]]:
    """Find taps; give their shapes, and what is wrong."""
    found, wrong = find(stages, taps, given.get("width"), given.get("dtype"))
    return {tap: tapped.shape for tap, tapped in found.items()}, wrong


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (nn.Linear(3, 5), 5),
        (nn.Embedding(7, 6), 6),
        (nn.LayerNorm(4), 4),
        (nn.RMSNorm((2, 8)), 8),
    ],
    ids=lambda value: type(value).__name__,
)
def test_width_is_read_where_a_module_says_it(layer: nn.Module, width: int) -> None:
    """Catches: an input's width taken for an output's, the first axis of a norm for its last."""
    found, wrong = shapes([stage_of(model(layer=layer.bfloat16()))], {"layer": "tap"})
    assert (found, wrong) == ({"tap": TapShape(width, "bfloat16")}, [])


def test_what_is_given_counts_before_what_is_read() -> None:
    """Catches: settings by tap that are taken for all taps, or not at all."""
    stage = stage_of(model(a=nn.Linear(3, 5), b=nn.Linear(3, 5)))
    given = {"width": {"a": 9}, "dtype": {"b": torch.float16}}
    found, wrong = shapes([stage], {"a": "a", "b": "b"}, **given)
    assert found == {"a": TapShape(9, "float32"), "b": TapShape(5, "float16")}
    assert wrong == []


def test_dtype_is_the_stage_s_where_a_module_has_no_weights() -> None:
    """Catches: a tap on a module without weights that is refused, or guessed to be float32."""
    stage = stage_of(model(drop=nn.Dropout(), head=nn.Linear(2, 2).half()))
    assert shapes([stage], {"drop": "tap"}, width=2)[0] == {"tap": TapShape(2, "float16")}
    _, [wrong] = shapes([stage_of(nn.Identity())], {"": "tap"}, width=2)
    assert wrong == (
        "tap 'tap', module '': there are no parameters to read its dtype from: pass dtype="
    )


def test_one_name_in_two_stages() -> None:
    """Catches: the first stage's module taken for the one that was meant."""
    stages = [stage_of(nn.Linear(2, 2), 0), stage_of(nn.Linear(2, 2), 3)]
    found, [wrong] = find(stages, {"": "tap"}, None, None)
    assert found == {}
    assert "of stages 0, 3 at once: say which by (stage index, name)" in wrong
    found, wrong = find(stages, {(3, ""): "late", (0, ""): "early", (5, ""): "away"}, None, None)
    assert {tap: tapped.stage for tap, tapped in found.items()} == {"late": 3, "early": 0}
    assert wrong == []


def test_one_tap_of_two_modules() -> None:
    """Catches: a tap that two modules of a rank would push."""
    stage = stage_of(model(a=nn.Linear(2, 2), b=nn.Linear(2, 2)))
    _, [wrong] = find([stage], {"a": "tap", "b": "tap"}, None, None)
    assert "tap 'tap' would be" in wrong


def test_layers_of_other_stages_are_left_out() -> None:
    """Catches: an error for a layer that is elsewhere, or None here, as TorchTitan leaves it."""
    assert find([stage_of(model(norm=None))], {"norm": "a", "layers.7": "b"}, 4, None) == ({}, [])


def test_names_hold_within_ddp() -> None:
    """Catches: names that get a prefix by wrapping the stage's module."""
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model(layer=nn.Linear(2, 3))
    assert shapes([stage_of(wrapped)], {"layer": "tap"})[0] == {"tap": TapShape(3, "float32")}


def test_dry_run_s_loss_reaches_every_output() -> None:
    """Catches: an output whose gradient has no shape in the dry run."""
    hidden = torch.ones(2, 3, requires_grad=True)
    for output in (hidden * 2, (hidden * 2, torch.ones(2, dtype=torch.int64), hidden.bfloat16())):
        [gradient] = torch.autograd.grad(any_loss(output, None, tokens=3), [hidden])
        assert gradient.shape == hidden.shape
        assert gradient.is_contiguous()


def test_draft_outside_of_the_stage_is_found() -> None:
    """Catches: a draft that is not trained and not told of, or a policy that is called one."""
    policy, draft = nn.Linear(2, 2), nn.Linear(2, 2)
    hidden = torch.ones(1, 2, requires_grad=True)
    loss = policy(hidden).sum()
    check_trained(loss, [*policy.parameters(), hidden])
    with pytest.raises(UsageError, match=r"2 weights from outside of the last stage \(\(2, 2\)"):
        check_trained(loss + draft(torch.ones(1, 2)).sum(), [*policy.parameters(), hidden])


class Listener:
    """A session that notes what is pushed."""

    def __init__(self) -> None:
        self.pushed: list[torch.Tensor] = []

    def tap(self, name: str, hidden: torch.Tensor) -> None:
        """Note it."""
        self.pushed.append(hidden)


@pytest.fixture
def listener() -> Listener:
    """Give a session to listen with."""
    return Listener()


@pytest.fixture
def stage(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> TapStage:
    """Give a stage whose forward pushes what it is given, as a tapped module does."""

    def forward(self: TapStage, chunk: int, act: Any) -> None:
        act()

    monkeypatch.setattr(PipelineStage, "forward_one_chunk", forward)
    made = TapStage.__new__(TapStage)
    made.stage_index, made.num_stages = 2, 4
    listener.enter = listener.leave = lambda *_: None
    made.tell(listener)
    return made


def test_another_thread_s_replay_is_not_pushed(stage: TapStage, listener: Listener) -> None:
    """Catches: a replay on a thread that runs a backward beside this stage's forward."""
    forward, replay = torch.ones(1), torch.zeros(1)

    def act() -> None:
        thread = threading.Thread(target=stage.push_tap, args=("tap", replay))
        thread.start()
        thread.join()
        stage.push_tap("tap", (forward, "context"))

    stage.forward_one_chunk(0, act)
    stage.push_tap("tap", replay)  # and not once the forward is over
    assert listener.pushed == [forward]


def distributed(hidden: torch.Tensor, *placements: Placement) -> Any:
    """Give what a DTensor on several ranks shows of itself."""
    hidden.placements, hidden.to_local = placements, lambda: hidden
    return hidden


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        ({"hidden": torch.ones(1)}, "dict"),
        ((), ""),
        (distributed(torch.ones(1), Replicate(), Shard(1)), "Tensor"),
    ],
    ids=["no tensor", "nothing", "sharded"],
)
def test_output_that_is_not_the_hidden_states(stage: TapStage, output: Any, seen: str) -> None:
    """Catches: a tap that is silently missing, or a part of it, since a module puts out else."""
    with pytest.raises(UsageError, match="puts out something else") as caught:
        stage.forward_one_chunk(0, lambda: stage.push_tap("tap", output))
    assert (caught.value.tap, caught.value.stage, caught.value.seen) == ("tap", 2, seen)


def test_replicated_hidden_states_are_pushed(stage: TapStage, listener: Listener) -> None:
    """Catches: a wrapper without memory of its own that is handed on."""
    hidden = torch.ones(1)
    output = distributed(torch.zeros(1), Replicate())
    output.to_local = lambda: hidden
    stage.forward_one_chunk(0, lambda: stage.push_tap("tap", output))
    assert listener.pushed == [hidden]


def test_error_of_a_push_is_not_wrapped(stage: TapStage) -> None:
    """Catches: torch's RuntimeError, with all inputs printed, in place of what went wrong."""
    wrong = UsageError("pushed twice")

    def act() -> None:
        raise RuntimeError("failed to run forward: args: …") from wrong

    with pytest.raises(UsageError, match="pushed twice"):
        stage.forward_one_chunk(0, act)
