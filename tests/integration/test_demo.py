"""The demo: what it checks, what it says, and how it ends when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from support.processes import command_of
from tapchannel import Outbox
from tapchannel.demo import command, main, plot, text
from tapchannel.demo.check import UnpipelinedPolicy, problem_of
from tapchannel.demo.consumer import DraftStage
from tapchannel.demo.messages import PassDone
from tapchannel.demo.outcome import Outcome
from tapchannel.demo.policy import ROWS, SEQUENCES, TOKENS, WIDTH, tap_plan, taps_of
from tapchannel.demo.settings import Placement, Settings
from tapchannel.demo.stage import typed_cause
from tapchannel.errors import StampTimeout
from tapchannel.keys import Key
from tapchannel.telemetry import Event

SMALL = ["--device", "cpu", "--stages", "2", "--microbatches", "3", "--passes", "2"]
CPU = torch.device("cpu")


def settings(**changes: int) -> Settings:
    """Give the settings of a small run."""
    counts = {"stages": 2, "microbatches": 2, "passes": 2, "depth": 2} | changes
    return Settings(**counts, device="cpu", json=False, plot=None)


@contextmanager
def running_demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo in a process group of its own; give it back once its first pass is over."""
    line = [sys.executable, "-u", "-m", "tapchannel.cli", "demo", *SMALL, "--passes", "10000"]
    with subprocess.Popen(
        [*line, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            assert demo.stdout is not None
            assert any(line.startswith("pass 1 ") for line in demo.stdout)
            yield demo
        finally:
            demo.kill()


def stages_of(demo: subprocess.Popen[str]) -> list[int]:
    """Find the stages' processes, in their order."""
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    return sorted(pid for pid in map(int, children) if "spawn_main" in command_of(pid))


@pytest.mark.timeout(180)
def test_every_tap_is_checked_and_the_draft_learns() -> None:
    """Catches: taps that are lost, unchecked or different, and a lane left out of --json."""
    run = subprocess.run(
        [sys.executable, "-m", "tapchannel.cli", "demo", "--json", *SMALL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)  # nothing but one object is printed
    assert result["ok"]
    assert result["differences"] == []
    assert result["taps_checked"] == result["taps_due"] == 3 * 3 * 2
    assert result["draft_loss"][-1] < result["draft_loss"][0]
    tap_bytes = ROWS * WIDTH * 4
    assert [lane["bytes"] for lane in result["lanes"]] == [2 * 3 * 2 * tap_bytes, 3 * 2 * tap_bytes]
    assert {lane["transport"] for lane in result["lanes"]} == {"shm"}


@pytest.mark.timeout(180)
def test_one_slot_is_enough_and_the_timeline_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a deadlock when pushes must wait for credit, and a plot that is not written."""
    file = tmp_path / "timeline.png"
    assert main([*SMALL, "--depth", "1", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    printed = capsys.readouterr().out
    assert "18 of 18 equal" in printed
    assert "embedding, layer2" in printed  # the table of lanes
    assert str(file) in printed


@pytest.mark.timeout(180)
def test_a_killed_stage_is_named() -> None:
    """Catches: a demo that hangs, or blames a stage that only suffered, when one dies."""
    with running_demo() as demo:
        victim = stages_of(demo)[0]
        os.kill(victim, signal.SIGKILL)
        _, complaint = demo.communicate(timeout=60)
    assert demo.returncode == command.FAILED
    assert f"stage 0 (pid {victim}) failed: ProcessDied" in complaint
    assert "SIGKILL" in complaint


@pytest.mark.timeout(180)
def test_ctrl_c_ends_every_stage() -> None:
    """Catches: stages that outlive Ctrl-C (the leak check of conftest), or die with a traceback."""
    with running_demo() as demo:
        os.killpg(demo.pid, signal.SIGINT)
        _, complaint = demo.communicate(timeout=60)
    assert demo.returncode == command.INTERRUPTED
    assert complaint == "tapchannel demo: interrupted; every stage was ended\n"


@pytest.mark.timeout(120)
def test_a_stage_s_error_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: an error of a child that is swallowed, or reported without its type and its text."""
    nowhere = Placement(["cpu", "nowhere"], "gloo")
    monkeypatch.setattr(command, "place", lambda _settings: nowhere)
    assert main([*SMALL, "--json"]) == command.FAILED
    printed = capsys.readouterr()
    failure = json.loads(printed.out)["failure"]
    assert failure["stage"] == 1
    assert failure["kind"] == "RuntimeError"
    assert "nowhere" in failure["text"]
    assert "stage 1 (pid" in printed.err


def test_our_error_is_found_inside_torch_s() -> None:
    """Catches: a typed error that is reported as the RuntimeError that torch wraps around it."""
    ours = StampTimeout("stamp did not land")
    wrapped = RuntimeError("[Stage 1] failed to run forward")
    wrapped.__cause__ = ours
    assert typed_cause(wrapped) is ours
    other = ValueError("not ours")
    assert typed_cause(other) is other


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--stages", "1"], "--stages"),
        (["--microbatches", "3"], "--microbatches"),
        (["--passes", "1"], "--passes"),
        (["--depth", "0"], "--depth"),
        (["--plot", "/no/such/folder/timeline.png"], "--plot"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: an option that only fails, or hangs, once the stages run."""
    assert main(arguments) == command.BAD_OPTIONS
    assert named in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: --device cuda that quietly runs on the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["--device", "cuda"]) == command.BAD_OPTIONS
    assert "--device cuda" in capsys.readouterr().err


@pytest.mark.parametrize("tampered", [None, "embedding", "layer2", "layer4"])
def test_the_check_finds_a_wrong_tap(tampered: str | None) -> None:
    """Catches: a check that compares a tap with itself, with a copy, or not at all.

    The negative control of the whole demo: the taps go through a real mailbox, and one bit of one
    value of one of them is wrong.
    """
    run = settings()
    store = HashStore()
    draft = DraftStage(run, CPU, store)
    outboxes = [Outbox(tap_plan(2), rank, store=store, name="demo") for rank in range(2)]
    policy = UnpipelinedPolicy(2, CPU)
    batch = text.draw(text.load(), 1, run.microbatches * SEQUENCES, TOKENS)
    draft.prepare(1, batch)
    with draft.open_pass(), outboxes[0].open_pass(1, 2), outboxes[1].open_pass(1, 2):
        for microbatch in range(run.microbatches):
            taps = policy.taps(batch.microbatch(microbatch, SEQUENCES).inputs)
            if microbatch == 1 and tampered is not None:
                taps[tampered].view(torch.int32)[7, 11] ^= 1
            for rank, outbox in enumerate(outboxes):
                for tap in taps_of(rank):
                    outbox.push(microbatch, tap, taps[tap])
            draft.consume(microbatch)
    report = draft.report()
    for end in (*outboxes, draft.mailbox):
        end.close()
    assert report.taps_checked == 6
    if tampered is None:
        assert report.differences == []
    else:
        (difference,) = report.differences
        assert f"pass 1, microbatch 1, tap '{tampered}'" in difference
        assert "1 of 65536 values differ, first at row 7, column 11" in difference


def test_bits_are_compared_not_values() -> None:
    """Catches: a comparison by value, blind to the sign of zero and mistaken about NaN."""
    expected = torch.tensor([[0.0, float("nan"), 1.0]])
    assert problem_of(expected.clone(), expected) is None
    negative_zero = torch.tensor([[-0.0, float("nan"), 1.0]])
    assert "column 0" in str(problem_of(negative_zero, expected))
    assert "float64" in str(problem_of(expected.double(), expected))
    assert "[1, 2]" in str(problem_of(expected[:, :2], expected))


@pytest.mark.parametrize(
    ("losses", "checked", "differences", "fault"),
    [
        ([3.0, 2.0], 6, [], None),
        ([3.0, 3.0], 6, [], "did not fall"),
        ([3.0, float("nan")], 6, [], "did not fall"),
        ([3.0, 2.0], 5, [], "only 10 of 12"),
        ([3.0, 2.0], 6, ["pass 1, microbatch 0, tap 'layer2': wrong"], "2 taps differ"),
    ],
)
def test_the_verdict(
    losses: list[float], checked: int, differences: list[str], fault: str | None
) -> None:
    """Catches: exit code 0 for a run whose taps or losses were not as they should be."""
    outcome = Outcome(settings())
    for step, loss in enumerate(losses, start=1):
        outcome.add(PassDone(step, loss, checked, differences, 1.0, 0.0, []))
    if fault is None:
        assert outcome.faults() == []
    else:
        (only,) = outcome.faults()
        assert fault in only


def test_the_timeline_joins_both_sides() -> None:
    """Catches: a bar that starts when the push was sent, not when it began to wait for credit."""
    key, incomplete = Key(1, 1, 0), Key(1, 1, 1)
    steps = [  # time, side, step, key, cell
        (1, "producer", "put", key, 0),
        (2, "producer", "stamp", key, 0),
        (3, "producer", "claim", key, 1),
        (5, "producer", "announce", key, 1),
        (6, "producer", "stamp", key, 1),
        (7, "producer", "announce", incomplete, 0),
        (8, "producer", "stamp", incomplete, 0),
        (9, "consumer", "release", key, 0),
        (9, "consumer", "open_pass", None, 0),
    ]
    events = [
        Event(seconds * 10**9, side, step, 0, of, cell, 64)
        for seconds, side, step, of, cell in reversed(steps)
    ]
    assert plot.stays(events) == [plot.Stay(0, key, pushed=2.0, sent=5.0, released=8.0)]


def test_all_processes_draw_the_same_text() -> None:
    """Catches: inputs of the first stage that are not those of the last stage's check."""
    words = text.load()
    batch, again = (text.draw(words, 3, sequences=4, tokens=16) for _ in range(2))
    assert torch.equal(batch.inputs, again.inputs)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert not torch.equal(batch.inputs, text.draw(words, 4, sequences=4, tokens=16).inputs)
