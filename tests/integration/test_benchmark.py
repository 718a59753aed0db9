"""tapchannel bench: every scenario ends, keeps its figures, and trusts no peer's payload."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import odd_peers
from support.processes import running_children
from tapchannel.benchmark import main
from tapchannel.benchmark.scenarios import SCENARIOS

ODD = Path(odd_peers.__file__).parent
GOOD = "tapchannel,bare copy,gloo"


def bench(
    out: Path, *arguments: str, extra: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command on the CPU."""
    more = [] if extra is None else ["--extra-peers", str(extra)]
    line = [sys.executable, "-m", "tapchannel.cli", "bench", *arguments]
    return subprocess.run(
        [*line, "--device", "cpu", "--quick", "--out", str(out), *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )


def rows_in(out: Path) -> list[dict[str, Any]]:
    """Read what a run kept."""
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run all scenarios once; give the folder and what was printed."""
    out = tmp_path_factory.mktemp("bench")
    done = bench(out, "all", "--peers", f"{GOOD},nccl")
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_measures_and_checks(everything: tuple[Path, str], scenario: str) -> None:
    """Catches: a scenario without figures, and rows whose payload nobody has looked at."""
    rows = [row for row in rows_in(everything[0]) if row["scenario"] == scenario]
    good = [row for row in rows if row["status"] == "ok"]
    assert "tapchannel" in {row["peer"] for row in good}
    for row in good:
        assert row["check"].endswith(" equal")
        assert int(row["check"].split()[0]) >= 12  # six before the clock, six after
        assert row["metrics"]
        for metric in row["metrics"].values():
            assert len(metric["samples"]) == 2  # both rounds, not only their median
            assert metric["kind"] in ("bandwidth", "latency", "info")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_line_says_on_what_it_was_measured(everything: tuple[Path, str]) -> None:
    """Catches: figures that nobody can place, and a report that names the machine."""
    out, printed = everything
    for row in rows_in(out):
        facts = row["facts"]
        assert {"commit", "command", "date", "torch", "python", "kernel", "cpu"} <= set(facts)
        assert facts["command"].startswith("tapchannel bench all")
        assert str(out) not in json.dumps(facts)
    assert "every round:" in printed


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_is_missing_is_named_with_its_reason(everything: tuple[Path, str]) -> None:
    """Catches: a peer that is silently left out of the table."""
    out, printed = everything
    assert "stream: nccl missing: " in printed
    lost = [row for row in rows_in(out) if row["peer"] == "nccl"]
    assert {row["scenario"] for row in lost} == set(SCENARIOS)
    assert all(row["status"] == "missing" and row["reason"] for row in lost)
    one_sided = next(
        row for row in rows_in(out) if row["scenario"] == "pipeline" and row["peer"] == "bare copy"
    )
    assert "no consumer" in one_sided["reason"]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("scenario", ["stream", "latency", "fan-in", "pipeline"])
def test_a_picture_is_drawn(everything: tuple[Path, str], scenario: str) -> None:
    """Catches: a plot that is announced and not written."""
    file = everything[0] / f"{scenario}.png"
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    assert str(file) in everything[1]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("peer", ["flips a bit", "sends the one before"])
def test_wrong_payload_is_caught(tmp_path: Path, peer: str) -> None:
    """Catches: a peer that is fast because it delivers something else."""
    done = bench(tmp_path, "stream", "--peers", f"tapchannel,{peer}", "--sizes", "4K", extra=ODD)
    assert done.returncode == 1
    assert f"{peer}: " in done.stderr
    assert "wrong" in done.stderr
    status = {row["peer"]: row["status"] for row in rows_in(tmp_path)}
    assert status == {"tapchannel": "ok", peer: "wrong"}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_peer_that_fails_harms_no_other(tmp_path: Path) -> None:
    """Catches: a run that ends, or hangs, with the first peer that does."""
    peers = "raises,dies,is not here,tapchannel"
    done = bench(tmp_path, "stream", "--peers", peers, "--sizes", "4K,64K", extra=ODD)
    assert done.returncode == 1
    rows = rows_in(tmp_path)
    ours = [row for row in rows if row["peer"] == "tapchannel"]
    assert [row["status"] for row in ours] == ["ok", "ok"]
    reason = {row["peer"]: row["reason"] for row in rows if row["status"] != "ok"}
    assert reason["raises"] == "OSError: the wire is cut"
    assert reason["dies"] == "its process ended with exit code 7 and no error of its own"
    assert reason["is not here"] == "it was never made"
    assert "stream: is not here missing: it was never made" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["stream", "--peers", "tapchannel,carrier pigeon"], "carrier pigeon"),
        (["stream", "--sizes", "5K"], "5K"),
        (["fan-in", "--producers", "0"], "--producers"),
        (["stream", "--rounds", "0"], "--rounds"),
        (["stream", "--extra-peers", "/nowhere"], "/nowhere"),
    ],
)
def test_options_that_cannot_work_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    """Catches: a traceback, or a run that measures something else than was asked for."""
    assert main([*arguments, "--device", "cpu", "--out", str(tmp_path / "none")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a run that takes long; give it once it measures."""
    line = [sys.executable, "-u", "-m", "tapchannel.cli", "bench", "stream", "--device", "cpu"]
    options = ["--peers", "tapchannel", "--sizes", "4K", "--rounds", "100000"]
    with subprocess.Popen(
        [*line, *options, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            assert run.stdout is not None
            assert any(line.startswith("stream: 4 KiB") for line in run.stdout)
            yield run
        finally:
            run.kill()


@pytest.mark.timeout(120)
def test_ctrl_c_ends_every_process(long_run: subprocess.Popen[str]) -> None:
    """Catches: workers that outlive Ctrl-C (the leak check of conftest), and their tracebacks."""
    os.killpg(long_run.pid, signal.SIGINT)
    _, complaint = long_run.communicate(timeout=60)
    assert long_run.returncode == 130
    assert complaint == "tapchannel bench: interrupted; what was measured is kept\n"


@pytest.mark.timeout(120)
def test_workers_end_with_the_run(long_run: subprocess.Popen[str]) -> None:
    """Catches: workers that go on when the run is killed (the leak check of conftest)."""
    before = running_children()
    os.kill(long_run.pid, signal.SIGKILL)
    long_run.communicate(timeout=60)
    assert long_run.returncode == -signal.SIGKILL
    assert long_run.pid in before
