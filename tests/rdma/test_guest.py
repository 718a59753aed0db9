"""guest.sh with a stand-in for QEMU: what it hands on, what ends it, what it says if it cannot."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = 20.0

# Finds what guest.sh told QEMU to write to, then does what the test says.
QEMU = """#!/usr/bin/env bash
for word; do
  case $word in
    *id=orders,path=*) orders=${word##*path=} ;;
    *id=output,path=*) output=${word##*path=} ;;
    *id=console,path=*) echo "words of the kernel" >"${word##*path=}" ;;
  esac
done
"""
RUN = 'touch "$orders/started"; exec >"$output"; '
STAY = "exec sleep 60"


class Machine:
    """A copy of the scripts, and a folder of programs that stand in for the machine's own."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "tests" / "rdma" / "guest.sh"
        self.programs = folder / "bin"
        self.temporary = folder / "tmp"
        for made in (self.script.parent, self.programs, self.temporary):
            made.mkdir(parents=True)
        for name in ("guest.sh", "guest_init.sh", "guest_run.sh"):
            shutil.copy(HERE / name, self.script.parent)
        self.program(self.script.parent / "guest_build.sh", 'mkdir -p "$1"; echo >"$1/first_root"')
        self.program(self.programs / "dpkg-query", "echo 'ii '")

    @staticmethod
    def program(path: Path, text: str) -> None:
        """Put a shell script in place of a program."""
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def start(self, qemu: str, *command: str, **settings: str) -> subprocess.Popen[str]:
        """Start guest.sh; ``qemu`` is what QEMU does there."""
        self.program(self.programs / "qemu-system-x86_64", QEMU + qemu)
        environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "TMPDIR": str(self.temporary),
            **settings,
        }
        return subprocess.Popen(
            [self.script, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, qemu: str, *command: str, **settings: str) -> tuple[int, str, str]:
        """Run guest.sh; give its exit code and what it says on each stream."""
        with self.start(qemu, *(command or ("true",)), **settings) as running:
            try:
                out, err = running.communicate(timeout=LIMIT)
            finally:
                running.kill()
        return running.returncode, out, err


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Give a machine on which the guest can run."""
    return Machine(tmp_path)


@pytest.mark.parametrize("code", [0, 42])
def test_output_and_exit_code_are_the_commands(machine: Machine, code: int) -> None:
    """Catches a failed test run that passes, and output that is lost at the end."""
    seen, out, _ = machine.run(RUN + f'seq 20000; echo {code} >"$orders/code"')
    assert seen == code
    assert out.split() == [str(number) for number in range(1, 20001)]
    assert os.listdir(machine.temporary) == []


def test_command_folder_and_environment_arrive_whole(machine: Machine) -> None:
    """Catches words that are split, and a variable or a folder that the guest does not see."""
    told = 'cat "$orders/command" "$orders/folder"; source "$orders/environment"; echo "$SEEN"'
    words = ("say", "two words", "$HOME", "it's")
    _, out, _ = machine.run(f'{RUN}{told}; echo 0 >"$orders/code"', *words, SEEN="a b")
    command, rest = out.split(os.getcwd())
    asked = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True
    )
    assert tuple(asked.stdout.splitlines()) == words
    assert rest.split("\n")[1] == "a b"


@pytest.mark.parametrize(
    "qemu",
    ["exit 1", RUN + "exit 0"],
    ids=["QEMU does not start", "the kernel gives up"],
)
def test_guest_that_ends_early_is_no_success(machine: Machine, qemu: str) -> None:
    """Catches a crash of the guest that passes, and one that does not show the kernel's log."""
    code, _, err = machine.run(qemu)
    assert code == 125
    assert "did not run the command to its end" in err
    assert "words of the kernel" in err
    assert os.listdir(machine.temporary) == []


def test_guest_that_does_not_start_is_ended(machine: Machine) -> None:
    """Catches a boot that hangs until somebody looks."""
    code, _, err = machine.run(STAY, RDMA_GUEST_BOOT_LIMIT="0")
    assert code == 125
    assert "no guest after 0 s" in err
    assert "words of the kernel" in err


def test_command_that_takes_too_long_is_ended(machine: Machine) -> None:
    """Catches a hung test that keeps the machine, and output that is lost when it is ended."""
    code, out, err = machine.run(RUN + "echo so far; " + STAY, RDMA_GUEST_LIMIT="0")
    assert code == 124
    assert "ended after 0 s" in err
    assert out in ("", "so far\n")


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_guest_ends_with_its_script(machine: Machine, ended_by: signal.Signals) -> None:
    """Catches a guest that goes on, unseen, when its script is ended."""
    with machine.start(RUN + "echo $$; " + STAY, "true") as running:
        assert running.stdout is not None
        watched = os.pidfd_open(int(running.stdout.readline()))
        running.send_signal(ended_by)
        running.communicate(timeout=LIMIT)
        assert select.select([watched], [], [], LIMIT)[0]
        os.close(watched)
    assert running.returncode == (-9 if ended_by == signal.SIGKILL else 128 + ended_by)
    if ended_by != signal.SIGKILL:
        assert os.listdir(machine.temporary) == []


def test_guest_is_made_once(machine: Machine) -> None:
    """Catches a download for every run, and an old guest that is kept when the scripts change."""
    done = RUN + 'echo 0 >"$orders/code"'
    said = [machine.run(done)[2] for _ in range(2)]
    with (machine.script.parent / "guest_init.sh").open("a") as script:
        script.write("# changed\n")
    said.append(machine.run(done)[2])
    assert ["making the guest" in text for text in said] == [True, False, True]


def test_what_cannot_be_installed_is_named(machine: Machine) -> None:
    """Catches a run without QEMU that is skipped, or that fails without saying what is missing."""
    machine.program(machine.programs / "dpkg-query", "exit 1")
    machine.program(machine.programs / "apt-get", "echo no network >&2; exit 100")
    code, _, err = machine.run("exit 0")
    assert code == 125
    assert "no network" in err
    assert "could not install qemu-system-x86" in err


def test_guest_that_cannot_be_made_is_no_success(machine: Machine) -> None:
    """Catches a failed download behind which the run goes on."""
    machine.program(machine.script.parent / "guest_build.sh", "exit 1")
    code, _, err = machine.run("exit 0")
    assert (code, err) == (125, "guest.sh: making the guest\nguest.sh: could not make the guest\n")


def test_others_than_root_are_told() -> None:
    """Catches a permission error from the middle of the run."""
    asked = ["setpriv", "--reuid", "65534", "--clear-groups", "bash", HERE / "guest.sh", "true"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (125, "guest.sh: needs root\n")


def test_no_command_is_no_success(machine: Machine) -> None:
    """Catches a make target whose command got lost."""
    with machine.start("exit 0") as running:
        _, err = running.communicate(timeout=LIMIT)
    assert running.returncode == 125
    assert "usage: guest.sh COMMAND..." in err
