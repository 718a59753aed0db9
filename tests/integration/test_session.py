"""The core of the integrations, over real processes and no framework."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration import session_roles as roles
from integration.session_roles import GROUPS, MICROBATCHES, WIDTH, Job, hidden, rows_of
from support.children import Children
from tapchannel.errors import ConfigError, UsageError
from tapchannel.integrations.depth import Action, slots_needed
from tapchannel.integrations.forwards import Forwards
from tapchannel.integrations.wiring import Settings, TapShape

STEPS = 2


def run_all(job: Job, role: Any, *args: Any) -> list[Any]:
    """Run a role on every rank; ``args`` that are lists hold one value a rank."""
    with Children(limit=50) as children:
        ranks = [
            children.start(
                role, job, rank, *(arg[rank] if isinstance(arg, list) else arg for arg in args)
            )
            for rank in range(job.world)
        ]
        return [child.result() for child in ranks]


def expected() -> list[torch.Tensor]:
    """Give what the draft should see: both layers side by side, microbatch by microbatch."""
    return [
        torch.cat([hidden(step, mb, layer, rows_of(mb)) for layer in (1, 2)], dim=1)
        for step in range(1, STEPS + 1)
        for mb in range(MICROBATCHES)
    ]


def assert_all_equal(seen: list[torch.Tensor], due: list[torch.Tensor]) -> None:
    """Compare bit by bit."""
    assert len(seen) == len(due)
    assert all(torch.equal(*pair) for pair in zip(seen, due, strict=True))


@pytest.mark.timeout(120)
def test_draft_sees_every_tap(tmp_path: Path) -> None:
    """Catches: a push outside a step, a wrong microbatch, a tap that is pushed twice."""
    producer, consumer = run_all(Job(tmp_path), roles.train, STEPS)
    assert_all_equal(consumer["seen"], expected())
    assert producer["pushes"] == consumer["pushes"] == [STEPS * MICROBATCHES]


@pytest.mark.timeout(120)
def test_tensor_parallel_ranks_push_their_share(tmp_path: Path) -> None:
    """Catches: rows that TP ranks push twice or not, and more bytes on a lane than 1/TP."""
    job = Job(tmp_path, tp=2)
    results = run_all(job, roles.train, STEPS)
    for consumer in results[2:]:
        assert_all_equal(consumer["seen"], expected())
    whole = STEPS * WIDTH * 4 * sum(rows_of(mb) for mb in range(MICROBATCHES))
    for lanes in zip(*(result["bytes"] for result in results[:2]), strict=True):
        assert sum(lanes) == whole  # both ranks of the stage together push each row once


@pytest.mark.timeout(120)
def test_draft_rank_may_see_its_share_alone(tmp_path: Path) -> None:
    """Catches: layout="share" that carries whole rows after all."""
    job = Job(tmp_path, tp=2, settings=Settings(GROUPS, max_rows=9, layout="share", timeout=20.0))
    results = run_all(job, roles.train, STEPS)
    halves = [torch.tensor_split(whole, [-(-len(whole) // 2)]) for whole in expected()]
    for t, consumer in enumerate(results[2:]):
        assert_all_equal(consumer["seen"], [half[t] for half in halves])
    assert all(len(result["bytes"]) == 1 for result in results)


@pytest.mark.timeout(120)
def test_exception_on_one_rank_leaves_the_next_step_usable(tmp_path: Path) -> None:
    """Catches: a session that is of no use once one rank has raised in mid-step (I7)."""
    producer, consumer = run_all(Job(tmp_path), roles.fail_once, 0)
    good = [f"{float(hidden(2, mb, 1, 9)[0, 0]):.0f}" for mb in range(MICROBATCHES)]
    assert producer == ["ArithmeticError", "closed"]
    assert consumer[-4:] == [*good, "closed"]
    assert "PassAborted" in consumer[:2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"refusals": ["its graphs run no hooks"]}, "rank 1: its graphs run no hooks"),
        ({"produces": {"layer1": TapShape(WIDTH, "float32")}}, "'layer1' is made by several ranks"),
        ({"produces": {}}, "'layer2' is made by no rank"),
        ({"produces": {"layer2": TapShape(WIDTH, "bfloat16")}}, "have different dtypes"),
        ({"depth": 3}, "depth differs between ranks"),
        ({"settings": Settings(GROUPS, max_rows=8, timeout=20.0)}, "max_rows differs"),
        ({"store": "nowhere://"}, "store URL is not understood"),
    ],
)
@pytest.mark.timeout(120)
def test_every_rank_hears_why(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    """Catches: a rank that waits for another which was refused, or is not told the reason."""
    said = run_all(Job(tmp_path), roles.refused, [{}, options])
    assert all(text in what for what in said), said


def test_forward_is_counted_and_compared() -> None:
    """Catches: a chunk's extra or misnumbered forward that is pushed as another microbatch."""
    forwards = Forwards()
    forwards.enter(0, 0)
    assert forwards.running is None  # no pass is open
    forwards.begin(2)
    forwards.enter(0, 0)
    forwards.leave(1)
    assert forwards.running is not None
    forwards.leave(0)
    with pytest.raises(UsageError, match="out of order — seen microbatch 0, expected"):
        forwards.enter(0, 0)
    forwards.enter(0, None)
    forwards.leave(0)
    with pytest.raises(UsageError, match="more often than the pass has microbatches"):
        forwards.enter(0, None)
    forwards.enter(1, 0)  # each chunk counts for itself


def test_slots_that_a_schedule_needs() -> None:
    """Catches: a bound that is not that of one-forward-one-backward, 2 ahead of the draft here."""
    order = [Action(True, 0, 0), Action(True, 0, 1)]
    for microbatch in range(2, 6):
        order += [Action(False, 0, microbatch - 2), Action(True, 0, microbatch)]
    assert slots_needed(order) == 2
    assert slots_needed(action for action in order if action.forward) == 6
    assert slots_needed([]) == 0


def test_settings_are_checked() -> None:
    """Catches: a session without taps, or of a layout that nobody knows."""
    good = Settings(GROUPS, max_rows=8)
    with pytest.raises(ConfigError, match="a session without taps"):
        replace(good, groups={"features": []})
    with pytest.raises(ConfigError, match="layout"):
        replace(good, layout="half")
