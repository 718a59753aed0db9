"""Breaks each invariant on purpose, in a copy of the tree, and runs the tests that must then fail.

    make mutants                    # all of them; those for hardware that is not here are skipped
    make mutants ARGS='credit'      # those whose name holds a word
    make mutants ARGS=--list

Exits 1 if a mutant survives, if its text is no longer in the code, if it does not build, or if an
invariant is left without a mutant that was killed. Builds are kept in build/mutants.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.mutations import MUTATIONS, Mutation
from support.tree_copy import DoesNotBuild, TreeCopy

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"
COPY = TreeCopy(WORK)
INVARIANTS = tuple(f"I{number}" for number in range(1, 10))
TESTS_LIMIT = 300  # seconds for the tests of one mutant
KILLED, SURVIVED, SKIPPED = "killed", "SURVIVED", "skipped"


class Broken(Exception):
    """A mutant that proves nothing: stale text, no build, no verdict."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    mutation: Mutation
    outcome: str
    detail: str
    seconds: float


def failed_tests(tests: Iterable[str]) -> dict[str, bool]:
    """Run tests in the copy; tell for each whether it, or one of its parameters, failed.

    Raises:
        Broken: the run ended without a verdict on one of them.
    """
    names = list(dict.fromkeys(tests))
    command = [COPY.python, "-m", "pytest", "-v", "--tb=no", "-p", "no:cacheprovider"]
    words = [str(word) for word in [*command, *names]]
    try:
        done = subprocess.run(
            words, cwd=COPY.tree, capture_output=True, text=True, check=False, timeout=TESTS_LIMIT
        )
    except subprocess.TimeoutExpired:
        raise Broken(f"tests did not end within {TESTS_LIMIT} s") from None
    verdicts = re.findall(r"^(tests/\S+?::.+?) (PASSED|FAILED)\b", done.stdout, re.MULTILINE)
    seen: dict[str, bool] = {}
    for test, verdict in verdicts:
        name = test if test in names else test.partition("[")[0]
        seen[name] = seen.get(name, False) or verdict == "FAILED"
    silent = [name for name in names if name not in seen]
    if silent:
        raise Broken(f"no verdict on {silent[0]}:\n{(done.stdout + done.stderr)[-2000:]}")
    return seen


@contextlib.contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Change the copy, and bring it back.

    Raises:
        Broken: the text to change is not there, or not just once.
    """
    before = {edit.file: (COPY.tree / edit.file).read_text() for edit in mutation.edits}
    try:
        for edit in mutation.edits:
            text = (COPY.tree / edit.file).read_text()
            if text.count(edit.old) != 1:
                raise Broken(f"stale: {edit.file} has its text {text.count(edit.old)} times")
            (COPY.tree / edit.file).write_text(text.replace(edit.old, edit.new))
        yield
    finally:
        for file, text in before.items():
            (COPY.tree / file).write_text(text)


def judge(mutation: Mutation, sound: Path) -> Row:
    """Apply one mutation, run its tests, undo it."""
    began = time.monotonic()
    if lacking := mutation.lacks():
        return Row(mutation, SKIPPED, lacking, 0.0)
    try:
        with mutated(mutation):
            if mutation.native:
                COPY.build()
            failed = failed_tests(mutation.tests)
        survived = [name.rpartition("::")[2] for name in mutation.tests if not failed[name]]
        outcome = SURVIVED if survived else KILLED
        detail = f"passed: {', '.join(survived)}" if survived else f"{len(failed)} failed"
    except (Broken, DoesNotBuild) as reason:
        outcome, detail = "BROKEN", str(reason)
    finally:
        shutil.copyfile(sound, COPY.tree / "tapchannel" / sound.name)
    return Row(mutation, outcome, detail, time.monotonic() - began)


def prepare(mutations: Sequence[Mutation]) -> Path:
    """Make the copy, build it, and see the tests pass; return the sound native module."""
    COPY.make()
    [module] = (COPY.tree / "tapchannel").glob("_native*.so")
    sound = WORK / module.name
    shutil.copyfile(module, sound)
    tests = [test for mutation in mutations if not mutation.lacks() for test in mutation.tests]
    failing = [name for name, failed in failed_tests(tests).items() if failed] if tests else []
    if failing:
        raise Broken("these tests fail without any mutation:\n  " + "\n  ".join(failing))
    return sound


def show(row: Row) -> None:
    """Print one line of the table."""
    mutation = row.mutation
    line = f"{mutation.invariant}  {mutation.name:28}  {row.outcome:8}  {row.seconds:5.1f} s"
    print(f"{line}  {row.detail}", flush=True)


def summary(rows: Sequence[Row], complete: bool) -> int:
    """Print the last line; return the exit code."""
    bad = [row for row in rows if row.outcome not in (KILLED, SKIPPED)]
    killed = [row for row in rows if row.outcome == KILLED]
    covered = {row.mutation.invariant for row in killed}
    bare = [name for name in INVARIANTS if complete and name not in covered]
    skipped = len(rows) - len(bad) - len(killed)
    print(f"{len(killed)} of {len(rows) - skipped} mutants killed, {skipped} skipped")
    if bare:
        print(f"no mutant killed for {', '.join(bare)}")
    return 1 if bad or bare else 0


def main() -> int:
    """Run the mutants."""
    parser = argparse.ArgumentParser(description="break each invariant on purpose")
    parser.add_argument("words", nargs="*", help="run the mutants whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="list them, run none")
    arguments = parser.parse_args()
    words: list[str] = arguments.words
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if arguments.list:
        for mutation in chosen:
            needs = f"  (needs {' and '.join(mutation.needs)})" if mutation.needs else ""
            print(f"{mutation.invariant}  {mutation.name}{needs}")
        return 0
    try:
        sound = prepare(chosen)
    except (Broken, DoesNotBuild) as reason:
        print(reason)
        return 1
    rows: list[Row] = []
    for mutation in chosen:
        rows.append(judge(mutation, sound))
        show(rows[-1])
    return summary(rows, complete=not words)


if __name__ == "__main__":
    sys.exit(main())
