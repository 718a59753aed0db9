"""Taps of torch's own pipeline schedules, in real processes over gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from integration import pipelining_roles as roles
from integration.pipelining_roles import Case, Report
from support.children import Children
from support.payloads import same_bits
from support.workers import Worker

TEST_LIMIT = 50.0
START_LIMIT = 100.0  # seconds, for four processes to import torch on two busy cores

pytestmark = pytest.mark.timeout(120)


class Ranks:
    """The ranks of a process group, each a process."""

    def __init__(self, children: Children, workers: list[Worker], count: int) -> None:
        self._children, self._workers, self._count = children, workers, count

    def __call__(self, role: Any, *args: Any) -> list[Any]:
        """Run a role on the first ranks, as many as are asked for; give what each came to."""
        self._children.limit(TEST_LIMIT)
        return self.all(roles.among, self._count, role, *args)[: self._count]

    def all(self, function: Any, *args: Any) -> list[Any]:
        """Run a function on every rank at once; raise what went wrong first."""
        for worker in self._workers:
            worker.begin(function, *args)
        results: list[Any] = []
        errors: list[Exception] = []
        for worker in self._workers:
            try:
                results.append(worker.finish())
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:  # gloo's time-outs follow from what went wrong elsewhere
            raise min(errors, key=lambda error: "Timed out" in str(error))
        return results


@pytest.fixture(scope="module")
def one_group() -> Iterator[tuple[Children, list[Worker]]]:
    """Start four ranks for all tests of this module: to start them takes seconds."""
    with Children(START_LIMIT) as children, tempfile.TemporaryDirectory() as folder:
        workers = [Worker(children, f"rank {rank}") for rank in range(4)]
        every = Ranks(children, workers, 4)
        every.all(roles.join, folder, [worker.pid for worker in workers])
        yield children, workers
        children.limit(TEST_LIMIT)
        every.all(roles.leave)
        for worker in workers:
            worker.dismiss()


@pytest.fixture
def one(one_group: tuple[Children, list[Worker]]) -> Ranks:
    """One rank; the others stand by."""
    return Ranks(*one_group, 1)


@pytest.fixture
def two(one_group: tuple[Children, list[Worker]]) -> Ranks:
    """Two ranks; the others stand by."""
    return Ranks(*one_group, 2)


@pytest.fixture
def four(one_group: tuple[Children, list[Worker]]) -> Ranks:
    """Four ranks."""
    return Ranks(*one_group, 4)


LOOPED = {"stages_each": 2}
BENT = {"v": True}
SCHEDULES = [
    Case("1F1B"),
    Case("GPipe"),
    Case("Interleaved1F1B", **LOOPED),
    Case("InterleavedZeroBubble", **LOOPED, draft="apart"),
    Case("ZBVZeroBubble", **BENT, draft="apart"),
    Case("DualPipeV", **BENT, draft="apart"),
]


def check(case: Case, reports: list[Report], passes: int) -> None:
    """See that every tap was the whole policy's, was pushed once, and trained the draft."""
    for report in reports:
        assert report.wrong == []
        assert report.own_taps > 0
        assert report.pushes == passes * case.microbatches * report.own_taps
    [place] = [place for place, report in enumerate(reports) if report.is_consumer]
    assert place == (0 if case.v else len(reports) - 1)  # a V brings the last stage back
    microbatches = range(case.microbatches)
    assert len(reports[place].keys) == passes * case.microbatches
    assert [key[1] for key in reports[place].keys] == [*microbatches] * passes


def check_policy_unmoved(plain: list[Report], tapped: list[Report]) -> None:
    """See that the policy's losses and gradients are the same to the bit."""
    for one, other in zip(plain, tapped, strict=True):
        assert len(one.losses) == len(other.losses)
        assert all(map(same_bits, one.losses, other.losses))
        for before, after in zip(one.gradients, other.gradients, strict=True):
            assert before.keys() == after.keys()
            assert all(same_bits(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "case",
    [
        *SCHEDULES,
        Case("1F1B", replayed=True),
        Case("InterleavedZeroBubble", **LOOPED, draft="inside"),
        Case("ZBVZeroBubble", **BENT, draft="apart", replayed=True),
    ],
    ids=lambda case: f"{case.schedule}-{case.draft}" + "-replayed" * case.replayed,
)
def test_two_ranks(two: Ranks, case: Case) -> None:
    """Catches: a push from the dry run or a replay, a tap of another microbatch, a moved policy."""
    plain = two(roles.run, case, False)
    tapped = two(roles.run, case)
    check(case, tapped, case.steps)
    check_policy_unmoved(plain, tapped)


@pytest.mark.parametrize("case", [SCHEDULES[0], SCHEDULES[2]], ids=lambda case: case.schedule)
def test_four_ranks(four: Ranks, case: Case) -> None:
    """Catches: peers or depth that fit two stages only."""
    plain = four(roles.run, case, False)
    tapped = four(roles.run, case)
    check(case, tapped, case.steps)
    check_policy_unmoved(plain, tapped)
    assert {report.depth for report in tapped} == {4 if case.schedule == "1F1B" else 6}


def test_pipeline_of_one_stage(one: Ranks) -> None:
    """Catches: a draft that finds no microbatch where no stage is before the last."""
    check(Case("1F1B"), one(roles.run, Case("1F1B")), 3)


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: case.schedule)
def test_one_slot_too_few_is_never_wrong(two: Ranks, case: Case) -> None:
    """Catches: a schedule that relies on its depth for order, rather than on credit."""
    short = Case(**{**vars(case), "draft": "apart", "fewer": 1})
    check(short, two(roles.run, short), short.steps)


def test_push_without_a_slot_waits(two: Ranks) -> None:
    """Catches: a slot that is overwritten, or a stage that stands still, for want of credit."""
    reports = two(roles.starve)
    check(Case("1F1B"), reports, 2)
    assert reports[0].deferred > 0


def test_exception_in_mid_step_leaves_the_next_usable(two: Ranks) -> None:
    """Catches: a pass that stays open on a rank that raised, or that another one aborted (I7)."""
    texts, reports = zip(*two(roles.fail), strict=True)
    assert all(texts)
    for report in reports:
        assert report.wrong == []
    assert reports[1].keys[-12:] == [(step, mb) for step in (3, 4) for mb in range(6)]


def test_evaluation_pushes_in_a_step_only(two: Ranks) -> None:
    """Catches: an eval() that pushes, taps that an eval() in a step lacks, hooks left behind."""
    pushed, reports = zip(*two(roles.evaluate), strict=True)
    assert pushed == (0, 0)
    check(Case("1F1B"), list(reports), 3)


@pytest.mark.parametrize("how", ["layers", "in place", "stage"])
def test_compiled_layers(two: Ranks, how: str) -> None:
    """Catches: a hook that is traced, and runs once; or does not run where a layer is compiled."""
    case = Case("1F1B", compiled=how, steps=2)
    check(case, two(roles.run, case), case.steps)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("plain stage", "stage 0 is a PipelineStage, which tells nobody what it runs: make it a "),
        ("another stage", "the stages given are not those that the schedule runs here (0)"),
        ("unknown layer", "tap 'layers.9' is made by no rank"),
        ("no width", "a Layer does not say how wide its output is: pass width="),
        ("twice", "stage 0 is attached already"),
    ],
)
def test_every_rank_hears_of_one_rank_s_mistake(two: Ranks, mistake: str, text: str) -> None:
    """Catches: an error on one rank that leaves the others waiting, or does not name the remedy."""
    for said in two(roles.refuse, mistake):
        assert text in said


def test_draft_that_a_schedule_would_not_train(one: Ranks) -> None:
    """Catches: a zero-bubble schedule that leaves the draft's gradients out, and nobody knows."""
    [said] = one(roles.neglect_draft)
    assert "the draft would not be trained" in said
    assert "call backward() on the draft's loss in the loss function" in said
