"""The examples run as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"


def test_quickstart_is_the_readme_s_example() -> None:
    """Catches: a README whose example was edited and no longer is the one that the tests run."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert QUICKSTART.read_text() in blocks
    assert len([line for line in QUICKSTART.read_text().splitlines() if line.strip()]) == 15


@pytest.mark.timeout(120)
def test_quickstart_runs() -> None:
    """Catches: a first example that does not work."""
    run = subprocess.run(
        [sys.executable, str(QUICKSTART)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""  # the producer's process ended well, too
    row = "1., 1., 1., 2., 2., 2."
    assert run.stdout.replace("\n        ", " ") == f"tensor([[{row}], [{row}]])\n"


def losses_in(printed: str) -> tuple[float, float]:
    """Give the first and the last loss of the draft that an example prints."""
    found = re.search(r"draft loss ([\d.]+) in the first microbatch, ([\d.]+)", printed)
    assert found is not None, printed
    return float(found[1]), float(found[2])


def draft_losses(ranks: int, example: str, *args: str) -> tuple[float, float]:
    """Run an example under torchrun; give the losses that it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", str(ranks), str(ROOT / "examples" / example), *args],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return losses_in(run.stdout)


@pytest.mark.timeout(180)
def test_torchrun_pipeline_trains_its_draft() -> None:
    """Catches: an example that no longer fits torch's pipelining, or taps of the wrong passes."""
    first, last = draft_losses(3, "torchrun_pipeline.py")
    assert last < first / 10


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
@pytest.mark.timeout(180)
def test_pipelining_draft_trains(schedule: str) -> None:
    """Catches: an example that does not work, on the last rank or, in a V, on the first."""
    first, last = draft_losses(2, "pipelining_draft.py", schedule)
    assert last < first / 5


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ray_pipeline_trains_its_draft(tmp_path: Path) -> None:
    """Catches: a channel that works under torchrun alone."""
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # Ray's sockets lie in it
        own = {"HOME": str(tmp_path), "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        run = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "ray_pipeline.py")],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | own,
        )
    assert run.returncode == 0, run.stderr
    first, last = losses_in(run.stdout)
    assert last < first / 10
