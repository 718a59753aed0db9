"""The fuzzers' short form, and inputs that once broke something."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from fuzz import peers, run
from support.effort import repeated
from tapchannel import telemetry

pytestmark = [pytest.mark.timeout(900)]
# What has been fuzzed out of the readers so far.
FINDS = {
    "a recorder's step 0, which had no name": bytes([5]) + bytes(24) + bytes(16),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native target, with sanitizers and without libFuzzer."""
    return run.build(tmp_path_factory.mktemp("fuzz"), None)


@pytest.mark.slow
def test_native_parsers_take_any_bytes(target: Path) -> None:
    """Bug: a word of a peer used as a size, an offset or an index (I8)."""
    command = run.native_command(target, False, repeated(10_000), seed=1)
    done = subprocess.run(command, cwd=target.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    count = int(done.stdout.split()[-2])
    assert count >= repeated(10_000) + len(list(run.CORPUS.iterdir()))


def test_the_harness_sees_what_it_is_there_for(target: Path, tmp_path: Path) -> None:
    """The test of the tests: a sanitizer that is not built in lets everything pass."""
    symbols = subprocess.run(
        ["nm", "-C", target], capture_output=True, text=True, check=True
    ).stdout
    for wanted in ("__asan_init", "__ubsan_handle", "MailboxCore::recv", "OutboxCore::push"):
        assert wanted in symbols
    assert len(list(run.CORPUS.iterdir())) > 10


def test_python_parsers_take_any_bytes(tmp_path: Path) -> None:
    """Bug: bytes of a peer or a stranger that raise what nobody catches (I8)."""
    runs = repeated(5_000)
    assert peers.run(runs, seed=1, folder=tmp_path) > runs
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("find", FINDS)
def test_what_once_broke_holds(find: str) -> None:
    """Bug: one that was there before."""
    peers.one(FINDS[find])
    assert telemetry._event(0, True, (1, 2, 3, 4, 0, 5)).step_name == "step 0"


def test_seeds_are_right() -> None:
    """Bug: seeds that are refused at once, and fuzzing that never gets past the first check."""
    refused = []
    for seed in peers.seeds():
        try:
            peers.TARGETS[seed[0]](seed[1:])
        except peers.ALLOWED as error:
            refused.append((seed, str(error)))
    assert refused == []


def test_changes_differ_and_are_the_same_for_a_seed() -> None:
    """Bug: a find that cannot be found again, or a thousand times the same input."""
    inputs = peers.seeds()
    first, second = (
        [peers.changed(inputs[0], inputs, chance) for _ in range(200)]
        for chance in (random.Random(3), random.Random(3))
    )
    assert first == second
    assert len(set(first)) > 150
