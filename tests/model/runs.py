"""What the model is run on: configurations that are explored whole, and faults that must be found.

``python tests/model/runs.py`` prints the table of ``docs/model.md``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMPILER = ("g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")
LIMIT_S = 900.0
TWO = "lanes=2 "
ONE = "lanes=1 "

# Two passes each, unless it says otherwise; faults: of any kind, at any moment.
EXPLORED = (
    # shm: depth 3 with a slot used again in its pass; payloads in halves; two faults.
    TWO + "wire=shm depth=3 width=4 faults=1",
    TWO + "wire=shm depth=2 width=3 faults=1 fine=1",
    TWO + "wire=shm depth=2 width=2 faults=2",
    TWO + "wire=shm depth=1 width=2 faults=1 drop=1",
    ONE + "wire=shm depth=2 width=3 faults=2 any_order=1",
    # cuda_ipc: stream waits, poison, releases that are performed later.
    TWO + "wire=cuda_ipc recv=host depth=3 width=3 faults=1 whole=1 limit=1",
    TWO + "wire=cuda_ipc recv=stream depth=3 width=3 faults=0 whole=1 limit=1",
    TWO + "wire=cuda_ipc recv=host depth=2 width=2 faults=1",
    TWO + "wire=cuda_ipc recv=stream depth=1 width=2 faults=1",
    TWO + "wire=cuda_ipc recv=named depth=1 width=2 faults=1 whole=1 limit=1",
    TWO + "wire=cuda_ipc recv=named depth=2 width=2 faults=0",
    ONE + "wire=cuda_ipc recv=stream depth=2 width=3 faults=1",
    ONE + "wire=cuda_ipc recv=stream depth=1 width=2 faults=2",
    ONE + "wire=cuda_ipc recv=named depth=1 width=2 faults=1 fine=1",
    ONE + "wire=cuda_ipc recv=named depth=2 width=2,1 faults=1",
    ONE + "wire=cuda_ipc recv=named depth=2 width=2,1,1 passes=3 faults=0",
    TWO + "wire=cuda_ipc recv=stream depth=1 width=2 faults=0 shared=1",
    ONE + "wire=cuda_ipc recv=named depth=1 width=2 faults=1 shared=1",
    # host_staged: the gate.
    TWO + "wire=staged recv=stream depth=1 width=2 faults=1",
    TWO + "wire=staged recv=host depth=2 width=2 faults=1 whole=1 limit=1",
    ONE + "wire=staged recv=stream depth=2 width=2 faults=1",
    ONE + "wire=staged recv=named depth=1 width=2 faults=1 shared=1",
    ONE + "wire=staged recv=stream depth=1 width=2 faults=2 direct=1",
    # ucx: puts that overtake one another, words that arrive late.
    TWO + "wire=ucx recv=host depth=2 width=2 faults=1 whole=1 limit=1",
    TWO + "wire=ucx recv=stream depth=1 width=1 faults=1",
    ONE + "wire=ucx recv=stream depth=2 width=2 faults=1",
    ONE + "wire=ucx recv=named depth=1 width=2 faults=1",
    ONE + "wire=ucx recv=named depth=1 width=2 faults=0 fine=1",
)


WAITS_FOR_EVER = ("I3: the consumer waits for ever", "I3: a producer waits for ever")


@dataclass(frozen=True)
class Seeded:
    """A rule that is broken on purpose: where, and which invariants may be seen to break first."""

    bug: str
    settings: str
    broken: tuple[str, ...] = ("I1", "I2")


SMALL = "lanes=1 depth=1 "
GPU = SMALL + "wire=cuda_ipc "
SEEDED = (
    Seeded("stamp_early", SMALL + "width=1 faults=0"),
    Seeded("credit_early", GPU + "width=2 faults=0"),
    Seeded("credit_over_passes", SMALL + "width=1 faults=0"),
    Seeded("epoch_ignored", SMALL + "width=1 faults=1", ("I1", *WAITS_FOR_EVER)),
    Seeded("poison_forgotten", GPU + "recv=stream width=1 faults=1"),
    Seeded("poison_once", GPU + "recv=named width=2 faults=1", WAITS_FOR_EVER),
    Seeded("poison_at_once", GPU + "recv=named width=2 faults=1"),
    Seeded("ahead_of_poison", GPU + "recv=named width=2 faults=1"),
    Seeded("poison_kept", GPU + "recv=stream width=1 faults=1"),
    Seeded("pattern_late", GPU + "recv=stream width=1 faults=1"),
    Seeded("no_fence", GPU + "width=1 faults=1"),
    Seeded("no_fence", SMALL + "wire=ucx width=1 faults=1"),
    Seeded("no_gate_fence", SMALL + "wire=staged width=1 faults=1 direct=1"),
    Seeded("restart_hides_loss", GPU + "recv=stream width=1 faults=1", WAITS_FOR_EVER),
    Seeded("restart_joins", SMALL + "width=1 faults=1"),
    Seeded("close_ends_credit", GPU + "recv=named width=1 faults=0", WAITS_FOR_EVER),
    Seeded(
        "next_ends_credit",
        ONE + "depth=2 wire=cuda_ipc recv=named width=2,1,1 passes=3 faults=0",
        WAITS_FOR_EVER,
    ),
    Seeded("attach_ends_credit", GPU + "recv=named width=1 faults=0", WAITS_FOR_EVER),
    Seeded("announce_ahead", GPU + "recv=stream width=1 faults=0 shared=1", WAITS_FOR_EVER),
    Seeded(
        "wait_unpassed",
        SMALL + "wire=staged recv=named width=1 faults=0 shared=1",
        WAITS_FOR_EVER,
    ),
    Seeded("wait_for_held", GPU + "recv=named width=2 faults=0", WAITS_FOR_EVER),
    Seeded("old_memory", GPU + "width=1 faults=1"),
    Seeded("drop_at_once", SMALL + "width=2 faults=0 drop=1"),
    Seeded("drop_unmarked", SMALL + "width=2 faults=0 drop=1"),
    Seeded("queue_in_order", SMALL + "width=2 faults=0 any_order=1", WAITS_FOR_EVER),
    Seeded("credit_carried_first", SMALL + "wire=ucx recv=named width=1 faults=0", WAITS_FOR_EVER),
)


def build(folder: Path) -> Path:
    """Compile the model into ``folder``."""
    program = folder / "model"
    sources = sorted(str(path) for path in FOLDER.glob("*.cpp"))
    subprocess.run([*COMPILER, "-o", str(program), *sources], check=True, timeout=LIMIT_S)
    return program


def run(program: Path, settings: str, *options: str) -> dict[str, Any]:
    """Explore one configuration."""
    command = [str(program), *options, *settings.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return json.loads(done.stdout)


def run_all(program: Path, at_once: int = 2) -> dict[str, dict[str, Any]]:
    """Explore all configurations, a few at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        found = pool.map(lambda settings: run(program, settings), EXPLORED)
        return dict(zip(EXPLORED, found, strict=True))


def table(found: dict[str, dict[str, Any]]) -> str:
    """Write what was explored as a table."""
    rows = ["| configuration | states | steps | ends of runs |", "|---|---:|---:|---:|"]
    for settings, facts in found.items():
        numbers = " | ".join(f"{facts[name]:,}" for name in ("states", "steps", "ends"))
        rows.append(f"| `{settings}` | {numbers} |")
    totals = " | ".join(
        f"{sum(facts[name] for facts in found.values()):,}" for name in ("states", "steps", "ends")
    )
    return "\n".join([*rows, f"| all | {totals} |"])


def main() -> int:
    """Print the table, and what did not hold."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(build(Path(folder)))
    print(table(found))
    broken = {name: facts for name, facts in found.items() if not facts["complete"]}
    for settings, facts in broken.items():
        print(f"\n{settings}: {facts['broken'] or 'not finished'}")
        print("\n".join(f"  {step}" for step in facts["trace"]))
    return len(broken) != 0


if __name__ == "__main__":
    sys.exit(main())
