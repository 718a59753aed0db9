"""The helpers that the other tests lean on: each guard is seen to fire."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support import machine, processes
from support.child_errors import ChildDied, ChildError, ChildHung
from support.children import Children
from support.hosts import Host
from support.link import Link

TESTS = Path(__file__).parents[1]


class RefusedError(ValueError):
    """An error with fields, which needs its own way through pickle."""

    def __init__(self, *, rank: int) -> None:
        super().__init__(f"rank {rank} refused")
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return _refused, (self.rank,)


def _refused(rank: int) -> RefusedError:
    return RefusedError(rank=rank)


class UnpicklableError(Exception):
    """An error that cannot cross to another process."""

    def __init__(self) -> None:
        super().__init__("cannot cross")
        self.lock = threading.Lock()


def _add(link: Link, left: int, right: int) -> int:
    return left + right


def _refuse(link: Link, rank: int) -> None:
    raise RefusedError(rank=rank)


def _raise_unpicklable(link: Link) -> None:
    raise UnpicklableError


def _hang_here(link: Link) -> None:
    link.reach("hanging", os.getpid())
    link.receive()


def _crash_on_the_way_out(link: Link) -> str:
    atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
    return "result"


def _exit_at_once(link: Link, code: int) -> None:
    os._exit(code)


def _echo(link: Link) -> list[object]:
    link.reach("ready")
    return [link.receive(), link.receive()]


def _variable(link: Link, name: str) -> str | None:
    return os.environ.get(name)


def _start_one_that_stays(link: Link) -> None:
    stays = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    link.reach("started", stays.pid)
    link.receive()


def _is_running(pid: int) -> bool:
    return bool(processes.command_of(pid))


def test_value_comes_back() -> None:
    """Catches arguments or results lost or mixed up on the way to a child and back."""
    with Children() as children:
        first = children.start(_add, 1, right=2)
        second = children.start(_add, 3, right=4)
    assert (first.result(), second.result()) == (3, 7)
    assert (first.exitcode, second.exitcode) == (0, 0)


def test_typed_error_reaches_the_parent_with_its_fields() -> None:
    """Catches a child's error that arrives as text only, or not at all."""
    with Children() as children:
        child = children.start(_refuse, 3)
        with pytest.raises(RefusedError) as caught:
            child.result()
    assert caught.value.rank == 3
    assert "in _refuse" in str(caught.value.__cause__)


def test_error_that_nobody_asked_for_is_raised() -> None:
    """Catches a child that fails while its test passes."""
    with pytest.raises(RefusedError), Children() as children:
        children.start(_add, 1, 2)
        children.start(_refuse, 3)


def test_error_that_cannot_cross_arrives_as_its_traceback() -> None:
    """Catches a child that dies of its error's pickling, which would hide the error."""
    with pytest.raises(ChildError, match="UnpicklableError: cannot cross"), Children() as children:
        children.start(_raise_unpicklable)


def test_hung_child_is_ended_and_reported() -> None:
    """Catches a hang that is waited out, left running, or reported without its place."""
    with pytest.raises(ChildHung) as caught, Children() as children:
        child = children.start(_hang_here, name="hanger")
        pid = child.wait_for("hanging")
        assert _is_running(pid)
        child.result(limit=0.1)
    assert not _is_running(pid)
    assert (caught.value.name, caught.value.pid) == ("hanger", pid)
    assert caught.value.limit == pytest.approx(0.1, abs=0.05)
    assert "in _hang_here" in caught.value.stacks


def test_leaving_the_block_ends_hung_children_at_the_shared_deadline() -> None:
    """Catches a deadline that each child gets anew, or that the last wait does not have."""
    pids: list[int] = []
    with pytest.raises(ChildHung), Children(limit=10) as children:
        pids += [children.start(_hang_here).wait_for("hanging") for _ in range(2)]
        children.limit(0.1)
    assert not any(map(_is_running, pids))


def test_exception_in_the_block_ends_the_children() -> None:
    """Catches a failed assertion that leaves its children running."""
    with pytest.raises(KeyError), Children() as children:
        pid = children.start(_hang_here).wait_for("hanging")
        raise KeyError
    assert not _is_running(pid)


def test_childs_error_is_told_beside_the_parents(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a root cause in a child that is lost behind the assertion it made fail."""
    with pytest.raises(ChildHung), Children() as children:
        children.start(_refuse, 3).join()
        hanger = children.start(_hang_here)
        hanger.wait_for("hanging")
        hanger.result(limit=0.1)
    assert "RefusedError('rank 3 refused')" in capsys.readouterr().err


def test_crash_after_the_result_is_reported() -> None:
    """Catches a destructor that crashes at interpreter exit, once the result is out."""
    with pytest.raises(ChildDied, match="SIGSEGV"), Children() as children:
        assert children.start(_crash_on_the_way_out).result() == "result"


@pytest.mark.parametrize("code", [0, 7])
def test_child_that_exits_without_a_result_is_reported(code: int) -> None:
    """Catches a crash, or an early exit with code 0, that passes as a result."""
    with Children() as children:
        child = children.start(_exit_at_once, code)
        with pytest.raises(ChildDied) as caught:
            child.wait_for("a point it never reaches")
    assert caught.value.exitcode == code


def test_killed_child_is_not_waited_for() -> None:
    """Catches a block that blocks on a child its test has killed, or calls that a failure."""
    with Children() as children:
        child = children.start(_hang_here)
        child.wait_for("hanging")
        child.kill()
    assert child.exitcode == -9
    with pytest.raises(ChildDied, match="SIGKILL"):
        child.result()


def test_stopped_child_stands_still_until_it_is_resumed() -> None:
    """Catches a stop that returns before the child stands still."""
    with Children() as children:
        child = children.start(_echo)
        child.wait_for("ready")
        child.stop()
        assert processes.state_of(child.pid) == "T"
        child.send("one")
        child.send("two")
        child.resume()
        assert child.result() == ["one", "two"]


def test_stopped_child_is_ended() -> None:
    """Catches a cleanup that a stopped process survives."""
    with pytest.raises(ZeroDivisionError), Children() as children:
        child = children.start(_hang_here)
        child.wait_for("hanging")
        child.stop()
        raise ZeroDivisionError
    assert child.exitcode == -9


def test_environment_is_the_childs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a variable meant for one child that stays set for the tests after it."""
    monkeypatch.setenv("TAPCHANNEL_TEST_TAKEN", "parent")
    monkeypatch.delenv("TAPCHANNEL_TEST_GIVEN", raising=False)
    env = {"TAPCHANNEL_TEST_GIVEN": "child", "TAPCHANNEL_TEST_TAKEN": None}
    with Children() as children:
        given = children.start(_variable, "TAPCHANNEL_TEST_GIVEN", env=env)
        taken = children.start(_variable, "TAPCHANNEL_TEST_TAKEN", env=env)
    assert (given.result(), taken.result()) == ("child", None)
    assert "TAPCHANNEL_TEST_GIVEN" not in os.environ
    assert os.environ["TAPCHANNEL_TEST_TAKEN"] == "parent"


def _fork_with_threads(link: Link) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        Children(method="fork")
    finally:
        stop.set()
        thread.join()


def _fork_one(link: Link, name: str) -> str | None:
    with Children(method="fork") as children:
        child = children.start(_variable, name, env={name: "grandchild"})
    return child.result()


def test_children_are_forked_where_that_is_safe_only() -> None:
    """Catches a forked child that hangs in a lock of a thread that it does not have."""
    with Children() as children:
        assert children.start(_fork_one, "TAPCHANNEL_TEST_GIVEN").result() == "grandchild"
        with pytest.raises(RuntimeError, match="before torch or tapchannel is used"):
            children.start(_fork_with_threads).result()


def test_only_a_spawned_child_moves_into_a_host() -> None:
    """Catches a forked child that is left where its starter is, in silence."""
    with Children() as children:
        with pytest.raises(RuntimeError, match="only a spawned child"):
            children.start(_fork_into_a_host).result()


def _fork_into_a_host(link: Link) -> None:
    with Children(method="fork") as children:
        children.start(_variable, "HOME", host=Host("nowhere", 1, "no switch"))


def test_orphan_is_found_and_ended() -> None:
    """Catches a process that outlives the killed child which started it."""
    before = processes.running_children()
    with Children() as children:
        child = children.start(_start_one_that_stays)
        orphan = child.wait_for("started")
        child.kill()
    left = processes.running_children() - before
    assert left == {orphan}
    processes.end(left)
    assert not _is_running(orphan)


def _pytest_with_our_conftest(where: Path, source: str, *args: str) -> str:
    (where / "test_seeded.py").write_text(source)
    (where / "pytest.ini").write_text("[pytest]\nmarkers = two_gpus\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rs", *args],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )
    return done.stdout


def test_process_left_behind_fails_its_test(tmp_path: Path) -> None:
    """Catches a leak guard that does not fire: the seeded test leaves a process running."""
    output = _pytest_with_our_conftest(
        tmp_path,
        "import subprocess, sys\n"
        "keep = []\n"
        "def test_leaks():\n"
        "    program = 'import signal; signal.pause()'\n"
        "    keep.append(subprocess.Popen([sys.executable, '-c', program]))\n"
        "    print('pid', keep[0].pid)\n",
        "-s",
    )
    assert "1 passed, 1 error" in output
    assert "the test left processes behind" in output
    pid = int(output.partition("pid ")[2].split()[0])
    assert not _is_running(pid)


@pytest.mark.skipif(machine.lacks("two_gpus") is None, reason="this machine has two CUDA devices")
def test_missing_hardware_is_a_skip_with_its_reason_or_a_failure_if_required(
    tmp_path: Path,
) -> None:
    """Catches a GPU run that skips everything and passes for it."""
    reason = machine.lacks("two_gpus")
    source = "import pytest\n@pytest.mark.two_gpus\ndef test_two():\n    pass\n"
    skipped = _pytest_with_our_conftest(tmp_path, source)
    assert "1 skipped" in skipped
    assert reason in skipped.replace("\n", "")
    assert "1 error" in _pytest_with_our_conftest(tmp_path, source, "--require", "two_gpus")
