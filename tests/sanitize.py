"""Builds the native module with sanitizers, in a copy of the tree, and runs real tests with it.

    make sanitize                        # ASan and UBSan, then TSan
    make sanitize ARGS=thread            # one of the two: address or thread
    make sanitize ARGS='thread -- -k abort tests/multiprocess'

Exits 1 if a test fails or a sanitizer reports anything, in the tests' own process or in any that
they start. Builds are kept in build/sanitize. What TSan cannot see: a race of two processes, or of
two mappings, on one word of shared memory; the model and the stress are for that.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.tree_copy import ROOT, DoesNotBuild, TreeCopy

WORK = ROOT / "build" / "sanitize"
SUPPRESSIONS = Path(__file__).parent / "support" / "sanitizers"
LIMIT = 1800  # seconds for the tests of one sanitizer
SHOWN = 5  # reports
HEAD = re.compile(
    r"^(?===\d+==ERROR: |WARNING: ThreadSanitizer: |\S+: runtime error: )", re.MULTILINE
)
# Both sides of every transport that runs here, in one process, in several and on two hosts; both
# ends of the attach; peers that break the protocol; the gate's thread; forks; field reports; any
# order of calls; and all orders of the stress.
# Left out, as they show the native module nothing that these do not: whole trainers (session, demo,
# Megatron, pipelining), other runs between hosts (litmus, 100 restarts), a million messages (the
# stress draws from the same), unit tests. The fuzzers build with sanitizers of their own.
TESTS = (
    "tests/multiprocess",
    "tests/conformance",
    "tests/field",
    "tests/hosts/test_channel.py",
    "tests/hosts/test_faults.py",
    "tests/integration/test_access.py",
    "tests/integration/test_attach.py",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_fork.py",
    "tests/integration/test_gate.py",
    "tests/integration/test_hostile_producer.py",
    "tests/integration/test_mailbox_hostile.py",
    "tests/integration/test_service_hostile.py",
    "tests/integration/test_state_machine.py",
    "tests/stress/test_stress.py",
)


@dataclass(frozen=True)
class Sanitizer:
    """A build, the library that must be loaded first, and how it is told what to do."""

    name: str
    libraries: tuple[str, ...]
    flags: tuple[str, ...]
    options: dict[str, str]
    mistake: str
    cannot: tuple[str, ...] = ()  # tests that no process survives under it


SANITIZERS = (
    Sanitizer(
        "address",
        ("libasan.so", "libubsan.so"),
        ("-fsanitize=address,undefined",),
        {
            # Leaks: the interpreter never frees everything. Signals are faulthandler's. What is
            # freed and kept aside counts as the process's, which the stress allows 16 MiB to grow.
            "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:detect_stack_use_after_return=1"
            ":quarantine_size_mb=8",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        'extern "C" int make_mistake(int at) {\n  int* two = new int[2]();\n  return two[at];\n}\n',
    ),
    Sanitizer(
        "thread",
        ("libtsan.so",),
        ("-fsanitize=thread",),
        {
            "TSAN_OPTIONS": f"second_deadlock_stack=1:suppressions={SUPPRESSIONS / 'thread.txt'}",
            # TSan does not see the order that OpenMP's barriers give torch's threads.
            "OMP_NUM_THREADS": "1",
            # UCX rewrites mmap and its like as it is loaded; TSan did so before, and it crashes.
            "UCX_MEM_EVENTS": "n",
        },
        "#include <thread>\n"
        "static int count;\n"
        'extern "C" int make_mistake(int by) {\n'
        "  std::thread other([by] { count += by; });\n"
        "  count += by;\n"
        "  other.join();\n"
        "  return count;\n"
        "}\n",
        # TSan ends a process that was forked from several threads and starts its own.
        ("tests/field/test_peers.py::test_field_a21_data_loaders_may_fork",),
    ),
)


def library(name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    compiler = os.environ.get("CXX", "g++")
    said = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, check=True)
    path = said.stdout.decode().strip()
    if not os.path.isabs(path):
        sys.exit(f"{compiler} has no {name}: install its sanitizer libraries (libasan8, libtsan2)")
    return path


def environment(sanitizer: Sanitizer, logs: Path) -> dict[str, str]:
    """Give the environment of the tests; the processes that they spawn have it from them."""
    preloaded = [library(name) for name in sanitizer.libraries]
    # Each process writes a file of its own: what a child says on its way out is not lost.
    options = {
        name: f"{value}:log_path={logs / 'report'}" if name.endswith("SAN_OPTIONS") else value
        for name, value in sanitizer.options.items()
    }
    return {**os.environ, **options, "LD_PRELOAD": ":".join(preloaded)}


def run_tests(sanitizer: Sanitizer, copy: TreeCopy, arguments: list[str], logs: Path) -> int:
    """Run the tests; return pytest's exit code."""
    words = [copy.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=300"]
    usual = (*TESTS, *(f"--deselect={test}" for test in sanitizer.cannot))
    command = [str(word) for word in [*words, *(arguments or usual)]]
    shown = environment(sanitizer, logs)
    try:
        done = subprocess.run(command, cwd=copy.tree, env=shown, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        print(f"the tests did not end within {LIMIT} s")
        return 1
    return done.returncode


def reports_in(logs: Path) -> list[str]:
    """Give all that the sanitizers have reported, one text for each report."""
    found: list[str] = []
    for log in sorted(logs.iterdir()):
        found += HEAD.split(log.read_text(errors="replace"))[1:]
    return found


def see_it_report(sanitizer: Sanitizer, folder: Path) -> None:
    """Have a process like those of the tests make the sanitizer's own mistake.

    Raises:
        DoesNotBuild: nothing was reported, so that a clean run would prove nothing.
    """
    logs = fresh(folder / "mistake")
    source, module = folder / "mistake.cpp", folder / "mistake.so"
    source.write_text(sanitizer.mistake)
    compiler = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-g", *sanitizer.flags]
    subprocess.run([*compiler, "-o", module, source], check=True)
    code = f"import ctypes; ctypes.CDLL({str(module)!r}).make_mistake(2)"
    shown = environment(sanitizer, logs)
    subprocess.run([sys.executable, "-c", code], env=shown, check=False, capture_output=True)
    if not reports_in(logs):
        raise DoesNotBuild(f"{sanitizer.name}: a mistake made on purpose was not reported")


def fresh(folder: Path) -> Path:
    """Make a folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def run(sanitizer: Sanitizer, arguments: list[str]) -> bool:
    """Build, run, tell; return whether all is well."""
    began = time.monotonic()
    work = WORK / sanitizer.name
    copy = TreeCopy(work, f"-DTAPCHANNEL_SANITIZE={sanitizer.name}")
    copy.make()
    see_it_report(sanitizer, work)
    logs = fresh(work / "logs")
    code = run_tests(sanitizer, copy, arguments, logs)
    reports = reports_in(logs)
    for report in reports[:SHOWN]:
        print(report)
    verdict = "all passed" if code == 0 else f"TESTS FAILED (pytest ended with {code})"
    took = time.monotonic() - began
    print(f"{sanitizer.name}: {verdict}, {len(reports)} reports, {took:.0f} s", flush=True)
    return code == 0 and not reports


def main() -> int:
    """Run the sanitizers."""
    parser = argparse.ArgumentParser(description="real tests under sanitizers")
    names = [sanitizer.name for sanitizer in SANITIZERS]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; all by default")
    own, _, for_pytest = " ".join(sys.argv[1:]).partition("-- ")
    wanted: list[str] = parser.parse_args(own.split()).names
    for name in set(wanted) - set(names):
        parser.error(f"no sanitizer {name}: {', '.join(names)}")
    try:
        well = [run(s, for_pytest.split()) for s in SANITIZERS if not wanted or s.name in wanted]
    except DoesNotBuild as reason:
        print(reason)
        return 1
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
