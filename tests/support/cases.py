"""Cases in C++: compiled to a program that lists them, and runs the one it is given."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", f"-I{NATIVE}", f"-I{HERE}")


def compiled(program: Path, sources: Iterable[Path], flags: Iterable[str] = ()) -> Path:
    """Compile a program of cases; give it back."""
    subprocess.run(["g++", *FLAGS, *flags, "-o", program, *sources], check=True)
    return program


def outcome(program: Path, case: str, limit: float) -> int:
    """Run a case; give its exit code. What it says is an error of the case itself."""
    done = subprocess.run([program, case], capture_output=True, text=True, timeout=limit)
    assert done.stderr == ""
    return done.returncode


def assert_every_case_is_run(program: Path, source: Path, tests: Mapping[str, object]) -> None:
    """See that each case that is written is listed, and has a test of its name."""
    written = re.findall(r"^void (\w+)\(\) \{$", source.read_text(), re.MULTILINE)
    listed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(listed) == sorted(written)
    assert {f"test_{case}" for case in written} <= set(tests)
