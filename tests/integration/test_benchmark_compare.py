"""tapchannel bench compare: what it calls slower, and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapchannel.benchmark import compare, main, record
from tapchannel.benchmark.record import Metric, Row

FACTS = {"commit": "abc"}


def row(speed: float = 10.0, micros: float = 20.0, **changes: Any) -> Row:
    """Make a row with one figure of each kind."""
    metrics = {
        "GB/s": Metric("GB/s", "bandwidth", [speed, speed, 3 * speed]),
        "p50": Metric("µs", "latency", [micros, micros, 3 * micros]),
        "of bare copy": Metric("%", "info", [1.0]),
    }
    named = {"scenario": "stream", "label": "1 MiB", "peer": "tapchannel", **changes}
    return Row(**named, metrics=metrics)


def runs(folder: Path, *rows: Row) -> Path:
    """Keep rows as a run does."""
    folder.mkdir()
    record.append(folder / "runs.jsonl", rows, FACTS)
    return folder


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (row(), compare.SAME),
        (row(speed=9.6), compare.SAME),  # 4 % worse
        (row(speed=9.3), compare.SLOWER),  # 7.5 %
        (row(micros=22.0), compare.SAME),  # 10 %
        (row(micros=24.0), compare.SLOWER),  # 20 %
        (row(speed=100.0, micros=2.0), compare.SAME),  # better is never worse
    ],
)
def test_each_kind_has_a_tolerance_of_its_own(tmp_path: Path, after: Row, code: int) -> None:
    """Catches: a latency judged as a bandwidth, and a change for the better called worse."""
    before = runs(tmp_path / "a", row())
    assert main(["compare", str(before), str(runs(tmp_path / "b", after))]) == code


def test_tolerances_are_settings(tmp_path: Path) -> None:
    """Catches: an option that is read and not used."""
    paths = [str(runs(tmp_path / "a", row())), str(runs(tmp_path / "b", row(9.3, 24.0)))]
    assert main(["compare", *paths]) == compare.SLOWER
    assert main(["compare", *paths, "--bandwidth", "10"]) == compare.SLOWER
    assert main(["compare", *paths, "--latency", "30"]) == compare.SLOWER
    assert main(["compare", *paths, "--bandwidth", "10", "--latency", "30"]) == compare.SAME


def test_the_newest_run_of_a_file_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: an old figure that is compared though the file has a newer one."""
    before = runs(tmp_path / "a", row(1.0), row(10.0))
    after = runs(tmp_path / "b", row(10.0), row(1.0))
    assert main(["compare", str(before), str(after)]) == compare.SLOWER
    assert "+900.0 %" in capsys.readouterr().out


@pytest.mark.parametrize("status", ["failed", "wrong", "missing"])
def test_a_row_that_is_no_longer_good_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: record.Status
) -> None:
    """Catches: a peer that fails now, of which nothing is said since it has no figures."""
    good = row(peer="gloo")
    before = runs(tmp_path / "a", row(), good)
    bad = Row("stream", "1 MiB", "gloo", status=status, reason="because")
    after = runs(tmp_path / "b", row(), bad)
    assert main(["compare", str(before), str(after)]) == compare.SLOWER
    assert f"gloo: {status}: because" in capsys.readouterr().out
    assert main(["compare", str(before), str(after), "--peers", "tapchannel"]) == compare.SAME


def test_nothing_in_common(tmp_path: Path) -> None:
    """Catches: two unrelated runs that are called the same."""
    before = runs(tmp_path / "a", row())
    after = runs(tmp_path / "b", row(label="4 KiB"))
    assert main(["compare", str(before), str(after)]) == compare.NOTHING


@pytest.mark.parametrize(
    "text", [None, "no JSON\n", '{"schema": 99}\n', '{"schema": 1}\n', "[1]\n", "\xff"]
)
def test_what_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    """Catches: a traceback, or a file that is taken for an empty run."""
    before = runs(tmp_path / "a", row())
    bad = tmp_path / "bad.jsonl"
    if text is not None:
        bad.write_bytes(text.encode("latin-1"))
    assert main(["compare", str(before), str(bad)]) == compare.NOTHING
    assert "bad.jsonl" in capsys.readouterr().out


def test_a_row_survives_its_file(tmp_path: Path) -> None:
    """Catches: a field that is written and not read, or the other way round."""
    kept = row(case={"size": 1 << 20}, check="16 equal", curve=[1.0, 2.0])
    folder = runs(tmp_path / "a", kept)
    [(back, facts)] = record.read(folder / "runs.jsonl")
    assert back == kept
    assert facts == FACTS


def test_plot_draws_what_a_run_left(tmp_path: Path) -> None:
    """Catches: results of another machine that cannot be drawn here."""
    folder = runs(tmp_path / "a", row(case={"size": 1 << 20}))
    assert main(["plot", str(folder)]) == 0
    assert (folder / "stream.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert main(["plot", str(tmp_path / "nowhere")]) == 2
