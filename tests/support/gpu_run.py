"""Builds the package beside this machine's own torch, runs the GPU tests, litmus and benches.

Needs no network: the build tools, torch and pytest are those of the Python that runs this file.
Nothing of that Python is changed: the package goes into build/gpu, an environment laid over it.
"""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "build" / "gpu"
PYTHON = OVERLAY / "bin" / "python"
REPORT = OVERLAY / "tests.xml"
PEERS = ROOT / "bench" / "peers"
DEVICES = """
import torch
print("torch", torch.__version__)
for index in range(torch.cuda.device_count()):
    print(f"cuda:{index}", torch.cuda.get_device_name(index))
"""


COUNT = "import torch; print(torch.cuda.device_count())"


class Step(NamedTuple):
    """One line of the table."""

    name: str
    outcome: str
    seconds: float


def run(*command: str | Path, folder: Path = ROOT) -> int:
    """Show a command and run it; return its exit code."""
    print("+", *command, flush=True)
    return subprocess.run([str(word) for word in command], cwd=folder, check=False).returncode


def lay_over() -> None:
    """Make an environment that sees all packages of the Python that runs this file."""
    if run(sys.executable, "-m", "venv", "--without-pip", OVERLAY):
        sys.exit("cannot make an environment: is python3-venv installed?")
    [packages] = OVERLAY.glob("lib/python*/site-packages")
    below = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    # addsitedir, rather than plain paths: it reads the .pth files that lie there too.
    lines = [f"import site; site.addsitedir({path!r})" for path in below]
    (packages / "below.pth").write_text("\n".join([*lines, ""]))


def build() -> int:
    """Build and install the package into the environment; return pip's exit code."""
    lay_over()
    pip = [sys.executable, "-m", "pip", "--python", PYTHON, "--disable-pip-version-check"]
    options = ["--no-index", "--no-build-isolation", "--no-deps", "--force-reinstall"]
    return run(*pip, "install", "-q", *options, f"--config-settings=build-dir={OVERLAY}/cmake", ".")


def test(arguments: list[str]) -> str:
    """Run the GPU tests; return their counts."""
    REPORT.unlink(missing_ok=True)
    # From the overlay, so that ``import tapchannel`` finds the package built there.
    pytest = [PYTHON, "-m", "pytest", ROOT / "tests", "-c", ROOT / "pyproject.toml"]
    choice = ["-m", "gpu or two_gpus", "--require", "gpu", f"--junitxml={REPORT}"]
    code = run(*pytest, *choice, *arguments, folder=OVERLAY)
    if not REPORT.exists():
        return f"failed: pytest ended with {code}"
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(REPORT).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    bad = counts["failures"] + counts["errors"]
    passed = counts["tests"] - bad - counts["skipped"]
    verdict = "ok" if code == 0 else "failed"
    return f"{verdict}: {passed} passed, {bad} failed, {counts['skipped']} skipped"


def bench() -> str:
    """Run every scenario on all GPUs; its results stay in build/gpu/bench."""
    command = [OVERLAY / "bin" / "tapchannel", "bench", "all", "--device", "cuda"]
    code = run(*command, "--extra-peers", PEERS, "--out", OVERLAY / "bench", folder=OVERLAY)
    return "ok" if code == 0 else f"failed with {code}"


def litmus() -> str:
    """Look for a stamp that overtakes its payload, from every GPU to the first."""
    command = [PYTHON, "-m", "gpu.long_litmus", "--out", OVERLAY / "litmus.jsonl"]
    return "ok" if run(*command, folder=ROOT / "tests") == 0 else "failed: a word was wrong"


def megatron() -> str:
    """Time Megatron's step with taps and without, a stage on each of up to four GPUs."""
    if run(PYTHON, "-c", "import megatron.core", folder=OVERLAY):
        return "not run: no megatron-core here"
    stages = min(4, max(2, int(subprocess.check_output([PYTHON, "-c", COUNT]))))
    code = run(PYTHON, ROOT / "bench" / "megatron_step.py", "--stages", str(stages), folder=OVERLAY)
    return "ok" if code == 0 else f"failed with {code}"


def main() -> int:
    """Do all steps, print their table last; return 0 if none has failed."""
    arguments = sys.argv[1:]
    steps: list[Step] = []
    for name, action in (
        ("build", lambda: "failed" if build() else "ok"),
        ("tests", lambda: test(arguments)),
        ("litmus", litmus),
        ("megatron", megatron),
        ("bench", bench),
    ):
        started = time.monotonic()
        outcome = action()
        steps.append(Step(name, outcome, time.monotonic() - started))
        if name == "build" and outcome != "ok":
            break
    print(flush=True)
    if steps[0].outcome == "ok":
        subprocess.run([PYTHON, "-c", DEVICES], check=False, cwd=OVERLAY)
    for step in steps:
        print(f"{step.name:9}{step.seconds:8.1f} s  {step.outcome}")
    return int(any(step.outcome.startswith("failed") for step in steps))


if __name__ == "__main__":
    sys.exit(main())
