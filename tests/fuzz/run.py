"""Gives everything that reads a peer's bytes any bytes: ``make fuzz``.

    make fuzz                                  # 10^6 inputs, minutes
    make fuzz ARGS='--runs 20000000 --seed 7'

The native parsers run under AddressSanitizer and UBSan. With clang (``apt install clang`` and its
``libclang-rt``) libFuzzer guides them by coverage, and with atheris (``pip install atheris``) the
Python ones; without, inputs from the corpus are changed at random. What breaks something is left in
build/fuzz.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
WORK = ROOT / "build" / "fuzz"
CORPUS = FOLDER / "corpus"
PARSERS = ("mailbox*.cpp", "outbox*.cpp", "gate.cpp")
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread", "-Wall", "-Wextra"),
    *("-fno-sanitize-recover=all", f"-I{ROOT / 'native'}"),
)
CLANGS = ("clang++", *(f"clang++-{version}" for version in range(21, 12, -1)))
NATIVE_SHARE = 0.6  # of the inputs; the rest is Python's
MEMORY_MIB = 1024
ONE_ALLOCATION_MIB = 64


def sources(guided: bool) -> list[str]:
    """List what a target is built of; libFuzzer brings its own driver."""
    own = [path for path in FOLDER.glob("*.cpp") if not (guided and path.name == "driver.cpp")]
    native = [path for pattern in PARSERS for path in (ROOT / "native").glob(pattern)]
    return sorted(str(path) for path in [*own, *native])


def build(folder: Path, guided: str | None) -> Path:
    """Build the native target, with libFuzzer if a clang is given."""
    program = folder / "target"
    sanitizers = "fuzzer,address,undefined" if guided else "address,undefined"
    command = [guided or "g++", *FLAGS, f"-fsanitize={sanitizers}", "-o", str(program)]
    subprocess.run([*command, *sources(guided is not None)], check=True)
    return program


def clang_with_fuzzer(folder: Path) -> str | None:
    """Give a clang that has libFuzzer and the sanitizers, if there is one."""
    probe = folder / "probe.cpp"
    probe.write_text(
        'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    )
    for name in filter(shutil.which, CLANGS):
        command = [name, "-fsanitize=fuzzer,address,undefined", "-o", str(folder / "probe")]
        if subprocess.run([*command, str(probe)], capture_output=True).returncode == 0:
            return name
    return None


def native_command(program: Path, guided: bool, runs: int, seed: int) -> list[str]:
    """Give the command that tries ``runs`` inputs on the native target."""
    command = [str(program), f"-runs={runs}", f"-seed={seed}"]
    if not guided:
        return [*command, str(CORPUS)]
    grown = program.parent / "corpus"
    grown.mkdir(exist_ok=True)
    limits = ["-max_len=512", "-timeout=20", f"-rss_limit_mb={MEMORY_MIB}"]
    limits += [f"-malloc_limit_mb={ONE_ALLOCATION_MIB}", "-print_final_stats=1"]
    return [*command, *limits, str(grown), str(CORPUS)]


def python_command(folder: Path, guided: bool, runs: int, seed: int) -> list[str]:
    """Give the command that tries ``runs`` inputs on what Python reads."""
    command = [sys.executable, str(FOLDER / "peers.py")]
    if not guided:
        return [*command, "--runs", str(runs), "--seed", str(seed)]
    limits = ["-max_len=4096", "-timeout=20", f"-rss_limit_mb={MEMORY_MIB}"]
    return [
        *[*command, "--atheris", str(folder / "peers"), f"-runs={runs}", f"-seed={seed}"],
        *[*limits, f"-malloc_limit_mb={ONE_ALLOCATION_MIB}", "-print_final_stats=1"],
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 if nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs, native and Python")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=WORK, help="builds, and inputs that broke")
    parser.add_argument("--plain", action="store_true", help="no clang, no atheris")
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    clang = None if chosen.plain else clang_with_fuzzer(chosen.folder)
    atheris = not chosen.plain and importlib.util.find_spec("atheris") is not None
    print(f"native: {clang + ' with libFuzzer' if clang else 'g++, changes at random'}")
    print(f"python: {'atheris' if atheris else 'changes at random'}", flush=True)
    native_runs = int(chosen.runs * NATIVE_SHARE)
    program = build(chosen.folder, clang)
    commands = [
        native_command(program, clang is not None, native_runs, chosen.seed),
        python_command(chosen.folder, atheris, chosen.runs - native_runs, chosen.seed),
    ]
    codes = [subprocess.run(command, cwd=chosen.folder).returncode for command in commands]
    print(f"fuzz: {chosen.runs} inputs, {'nothing broke' if not any(codes) else 'BROKEN'}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
