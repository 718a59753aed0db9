"""Waits on a stream that fail, against a stream that moves only when it is told to.

``tests/model`` found most of these; here the code itself is run.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
NATIVE = FOLDER.parents[1] / "native"
CASES = re.findall(r"^void (\w+)\(\) \{$", (FOLDER / "cases.cpp").read_text(), re.MULTILINE)
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", f"-I{NATIVE}")
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases, compiled with the mailbox's native sources."""
    made = tmp_path_factory.mktemp("streams") / "streams"
    sources = [FOLDER / "cases.cpp", *NATIVE.glob("mailbox*.cpp"), NATIVE / "gate.cpp"]
    subprocess.run(["g++", *FLAGS, *SANITIZED, "-o", made, *sources], check=True)
    return made


@pytest.mark.parametrize("case", CASES)
def test_case_holds(program: Path, case: str) -> None:
    """Bug: poison that misses its wait or hits another's read, credit or news that get lost."""
    done = subprocess.run([program, case], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.returncode == 0


def test_every_case_is_run(program: Path) -> None:
    """Bug: a case that was written and is not in the list."""
    listed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(listed) == sorted(CASES)
    assert len(CASES) == 8
