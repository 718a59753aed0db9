"""The Megatron example runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_megatron_draft_learns() -> None:
    """Catches: an example that no longer fits Megatron, or taps of the wrong microbatches."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    on_cpu = str(ROOT / "tests" / "support" / "megatron_on_cpu.py")
    example = str(ROOT / "examples" / "megatron_draft.py")
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", on_cpu, example],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"draft loss ([\d.]+) in the first microbatch, ([\d.]+)", run.stdout)
    assert found is not None
    first, last = map(float, found.groups())
    assert last < first / 2
