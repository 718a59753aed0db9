"""ucx over RDMA verbs, in the emulated guest: a third of what ``make rdma`` runs.

An emulated processor takes many times as long; of the conformance suite only credit and the layouts
of sources go along with every change.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 900
CHOICE = "not test_conformance or credit or layout"


@pytest.mark.slow
@pytest.mark.ucx
@pytest.mark.timeout(LIMIT + 30)
def test_ucx_passes_over_rdma_verbs() -> None:
    """Catches what only a wire without the target's help shows; fails where there is no guest."""
    ran = subprocess.run(
        ["make", "rdma", f"ARGS=-k '{CHOICE}'"],
        cwd=ROOT,
        env={
            **os.environ,
            "RDMA_GUEST_LIMIT": str(LIMIT - 60),
        },  # it says more than a time-out here
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    tail = ran.stdout[-4000:]
    assert ran.returncode == 0, tail
    passed = re.search(r"(\d+) passed", tail)
    assert passed is not None, tail
    assert int(passed.group(1)) > 0
