"""Fork: a child cannot use its parent's channel, does it no harm, keeps nothing of it alive."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.children import Children
from support.link import Link
from support.small_channel import LIMIT, NAME, SmallChannel, attach, refused, small_channel, states
from tapchannel import Lease
from tapchannel.errors import PeerLostError, TapChannelError
from tapchannel.sockets import connect

ROWS = torch.ones(5, 8)
HUNG = 5  # seconds that a forked child may take
Uses = dict[str, Callable[[], object]]


def uses(channel: SmallChannel, lease: Lease) -> Uses:
    """Give what a forked child may try."""
    mailbox, outbox = channel.mailbox, channel.outboxes[7]
    return {
        "push": lambda: outbox.push(1, "high", ROWS),
        "outbox.open_pass": lambda: outbox.open_pass(99, 1),
        "flush": lambda: outbox.flush(1),
        "recv": lambda: mailbox.recv(1, timeout=1),
        "try_recv": lambda: mailbox.try_recv(1),
        "mailbox.open_pass": lambda: mailbox.open_pass(99, 1),
        "reset": lambda: mailbox.reset(),
        "wait_ready": lambda: mailbox.wait_ready(1),
        "view": lambda: lease["high"],
        "lease.info": lambda: lease.info,
        "clone": lambda: lease.clone(),
    }


HARMLESS: dict[str, Callable[[SmallChannel], object]] = {
    "outbox.abort": lambda channel: channel.outboxes[7].abort("in a child"),
    "outbox.info": lambda channel: channel.outboxes[7].info(),
    "outbox.events": lambda channel: channel.outboxes[7].events(),
    "outbox.close": lambda channel: channel.outboxes[7].close(),
    "mailbox.abort": lambda channel: channel.mailbox.abort("in a child"),
    "mailbox.info": lambda channel: channel.mailbox.info(),
    "mailbox.events": lambda channel: channel.mailbox.events(),
    "mailbox.epoch": lambda channel: channel.mailbox.epoch,
    "mailbox.close": lambda channel: channel.mailbox.close(),
}


def in_fork(work: Callable[[], Any], limit: int = HUNG) -> Any:
    """Run work in a forked child; give what it returns, over a pipe, as JSON.

    A child that hangs is ended by its alarm, and told by ``{"ended by": signal}``.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit)
        code = 1
        try:
            os.write(writing, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"ended by": signal.Signals(os.WTERMSIG(status)).name}
    assert os.WEXITSTATUS(status) == 0
    return json.loads(said)


def tried(each: Uses) -> dict[str, list[str]]:
    """Try each use; give the class and the text of what it raised."""
    outcomes: dict[str, list[str]] = {}
    for name, use in each.items():
        try:
            use()
            outcomes[name] = ["nothing", ""]
        except TapChannelError as error:
            outcomes[name] = [type(error).__name__, str(error)]
        except Exception as error:  # noqa: BLE001 - the test names it
            outcomes[name] = [f"untyped {type(error).__name__}", str(error)]
    return outcomes


def _fork_and_use(link: Link, folder: Path, transport: str) -> dict[str, list[str]]:
    """Fork in mid-pass, let the child try everything, and finish the pass."""
    with small_channel(folder, transport=transport) as channel, channel.open_pass(2):
        for outbox, taps in ((channel.outboxes[3], ("low", "embedding")),
                             (channel.outboxes[7], ("high",))):  # fmt: skip
            for tap in taps:
                outbox.push(0, tap, ROWS)
        lease = channel.mailbox.recv(0)
        each = uses(channel, lease)
        outcomes = in_fork(lambda: tried(each))
        assert torch.equal(lease["high"], ROWS)
        each.clear()
        lease.release()
        channel.deliver(1)
    return outcomes


@pytest.mark.parametrize("transport", ["shm", "host_staged"])
def test_every_use_after_fork_is_refused_and_the_parent_goes_on(
    tmp_path: Path, transport: str
) -> None:
    """A child that pushes into its parent's pass, or waits for a thread that it has not."""
    with Children(limit=40) as children:
        outcomes = children.start(_fork_and_use, tmp_path, transport).result()
    assert "ended by" not in outcomes
    for name, (kind, text) in outcomes.items():
        assert kind == "UsageError", f"{name}: {kind}: {text}"
        assert "fork" in text, name
        assert "spawn" in text, name


def _fork_and_meddle(link: Link, folder: Path) -> dict[str, Any]:
    """Fork, let the child do each harmless thing, and carry a pass after each."""
    outcomes: dict[str, Any] = {}
    with small_channel(folder) as channel:
        for name, use in HARMLESS.items():

            def work(use: Callable[[SmallChannel], object] = use) -> str:
                use(channel)
                return "done"

            outcomes[name] = in_fork(lambda work=work: tried({"it": work})["it"])
            channel.carry(1)
    return outcomes


def test_looking_and_closing_in_a_child_does_no_harm(tmp_path: Path) -> None:
    """A `close` or an `abort` in a child that ends its parent's channel; a look that hangs."""
    with Children(limit=60) as children:
        outcomes = children.start(_fork_and_meddle, tmp_path).result()
    for name, outcome in outcomes.items():
        assert outcome[0] in ("nothing", "UsageError"), f"{name}: {outcome}"


def _fork_under_load(link: Link, folder: Path, forks: int) -> list[dict[str, list[str]]]:
    """Fork while another thread pushes and receives without pause: locks are held at any moment."""
    stop = threading.Event()
    failed: list[BaseException] = []
    with small_channel(folder) as channel:

        def load() -> None:
            try:
                while not stop.is_set():
                    channel.carry(4)
            except BaseException as error:  # noqa: BLE001 - handed to the main thread
                failed.append(error)

        def work() -> dict[str, list[str]]:
            mailbox, outbox = channel.mailbox, channel.outboxes[7]
            return tried(
                {
                    "outbox.open_pass": lambda: outbox.open_pass(1 << 20, 1),
                    "flush": lambda: outbox.flush(1),
                    "outbox.info": outbox.info,
                    "outbox.close": outbox.close,
                    "mailbox.open_pass": lambda: mailbox.open_pass(1 << 20, 1),
                    "wait_ready": lambda: mailbox.wait_ready(0.1),
                    "mailbox.info": mailbox.info,
                    "mailbox.close": mailbox.close,
                }
            )

        loader = threading.Thread(target=load)
        loader.start()
        outcomes = [in_fork(work, limit=2) for _ in range(forks)]
        stop.set()
        loader.join(LIMIT)
        assert not failed, failed
        channel.carry()
    return outcomes


def test_fork_while_locks_are_held_hangs_nobody(tmp_path: Path) -> None:
    """A lock that another thread held at the fork: in the child nobody will ever open it."""
    with Children(limit=60) as children:
        outcomes = children.start(_fork_under_load, tmp_path, 20).result()
    hung = [outcome for outcome in outcomes if "ended by" in outcome]
    assert not hung, f"{len(hung)} of {len(outcomes)} children hung"
    for outcome in outcomes:
        for name, (kind, text) in outcome.items():
            assert kind in ("nothing", "UsageError"), f"{name}: {kind}: {text}"


def _attach_fork_and_die(link: Link, folder: Path, release: Any) -> None:
    """Attach, fork a child that lives on, and wait to be killed."""
    outbox = attach(folder, 7)
    if os.fork() == 0:
        release.wait(LIMIT * 4)
        os._exit(0)
    outbox.open_pass(1, 1)
    link.reach("forked")
    link.receive()


def test_child_does_not_keep_its_dead_parent_attached(tmp_path: Path) -> None:
    """A worker that inherited the socket: the mailbox would never see its producer die."""
    with small_channel(tmp_path, ranks=(3,)) as channel, Children(limit=40) as children:
        release = children.context.Event()
        channel.open_next(1)
        channel.outboxes[3].push(0, "low", ROWS)
        channel.outboxes[3].push(0, "embedding", ROWS)
        child = children.start(_attach_fork_and_die, tmp_path, release)
        child.wait_for("forked")
        child.kill()
        with refused(PeerLostError, channel=NAME, rank=7, pid=child.pid):
            channel.mailbox.recv(0, timeout=LIMIT)
        assert states(channel.mailbox)[7] == "lost"
        channel.abort()
        channel.outboxes[7] = attach(tmp_path, 7)
        channel.carry()
        release.set()


def _serve_fork_and_die(link: Link, folder: Path, release: Any) -> None:
    """Be a mailbox, fork a child that lives on, and wait to be killed."""
    with small_channel(folder, ranks=(), listen="tcp://127.0.0.1") as channel:
        link.reach("listening", channel.mailbox.addresses)
        channel.mailbox.wait_ready(LIMIT)
        if os.fork() == 0:
            release.wait(LIMIT * 4)
            os._exit(0)
        link.reach("forked")
        link.receive()


def test_child_does_not_keep_its_dead_parent_s_mailbox_alive(tmp_path: Path) -> None:
    """A data loader that inherited the mailbox's sockets: producers push on, to nobody."""
    with Children(limit=40) as children:
        release = children.context.Event()
        child = children.start(_serve_fork_and_die, tmp_path, release)
        addresses = child.wait_for("listening")
        outboxes = [attach(tmp_path, rank) for rank in (3, 7)]
        child.wait_for("forked")
        child.kill()
        for address in addresses:
            with pytest.raises(ConnectionError):
                connect(address, LIMIT)
        for outbox in outboxes:
            with refused(PeerLostError, channel=NAME):
                for step in range(1, 1000):  # until it is noticed
                    outbox.open_pass(step, 1)
                    outbox.abort("not yet noticed")
                    time.sleep(0.005)  # not synchronisation: paces the attempts
            outbox.close()
        with small_channel(tmp_path) as second:
            second.carry()
        release.set()


def test_child_keeps_what_took_over_a_closed_mailbox_s_numbers(tmp_path: Path) -> None:
    """A child whose data files are closed since their numbers had once been the mailbox's."""
    with small_channel(tmp_path, listen="tcp://127.0.0.1"):
        pass
    opened = [os.memfd_create("data") for _ in range(64)]
    here = sorted(os.listdir("/proc/self/fd"), key=int)
    there = in_fork(lambda: sorted(os.listdir("/proc/self/fd"), key=int))
    for fd in opened:
        os.close(fd)
    assert set(map(str, opened)) <= set(here) & set(there)


EXITS = textwrap.dedent(
    """
    import gc, os, sys
    from pathlib import Path
    from support.small_channel import small_channel

    def main(folder, ending):
        with small_channel(folder) as channel, channel.open_pass(2):
            channel.deliver(0)
            pid = os.fork()
            if pid == 0:
                if ending == "drop":
                    channel.mailbox = None
                    channel.outboxes.clear()
                    gc.collect()
                    os._exit(0)
                sys.exit(0)
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
            channel.deliver(1)
        print("carried on")

    main(Path(sys.argv[1]), sys.argv[2])
    """
)


@pytest.mark.parametrize("ending", ["exit", "drop"])
def test_exit_of_a_child_leaves_the_parent_s_channel(tmp_path: Path, ending: str) -> None:
    """A child whose ordinary exit, or whose collector, closes what its parent is using."""
    told = subprocess.run(
        [sys.executable, "-c", EXITS, str(tmp_path), ending],
        capture_output=True,
        text=True,
        timeout=40,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert "carried on" in told.stdout
    gc.collect()
