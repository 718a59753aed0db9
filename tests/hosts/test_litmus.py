"""``tapchannel doctor litmus`` on two hosts: it counts, and it says why it cannot."""

from __future__ import annotations

import contextlib
import io
import shlex
from typing import Any, NamedTuple

import pytest
import torch

from hosts.conftest import Pair
from support.children import Child, Children
from support.hosts import CABLE
from support.link import Link
from tapchannel import cli, litmus, selftest

pytestmark = pytest.mark.ucx

MESSAGES = 12
LONG = 100_000  # of which the test sees the first
PORT = 47100
SECRET = {"TAPCHANNEL_SECRET": "correct horse battery"}
OTHER = {"TAPCHANNEL_SECRET": "correct horse barrery"}
NONE = {"TAPCHANNEL_SECRET": None}


class Ended(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


class Told(io.StringIO):
    """Standard output whose line for the other host is handed on at once."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def write(self, text: str) -> int:
        """Keep the text."""
        if "--peer" in text:
            self._link.reach("command", text.strip())
        return super().write(text)


def run(link: Link, *arguments: str) -> Ended:
    """Run the command in this process."""
    out, err = Told(link), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(["doctor", "litmus", *arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def run_misled(link: Link, *arguments: str) -> Ended:
    """Run the command in a consumer that looks for the words of another seed."""

    def other(seed: int, device: str, rows: int) -> torch.Tensor:
        return selftest.pattern(seed ^ 1, device, rows)

    litmus.pattern = other
    return run(link, *arguments)


def run_doomed(link: Link, *arguments: str) -> Ended:
    """Run the command in a producer that says when it pushes."""
    give = litmus._give

    def tell_first(*given: Any) -> None:
        link.reach("pushing")
        give(*given)

    litmus._give = tell_first
    return run(link, *arguments)


def listen(children: Children, pair: Pair, *more: str, **settings: Any) -> Child:
    """Start the listening side on the near host."""
    at = f"{pair[0].address}:{PORT}"
    role = settings.pop("role", run)
    given = {"host": pair[0], "env": SECRET, **settings}
    return children.start(role, "--listen", at, "--messages", str(MESSAGES), *more, **given)


def peer(children: Children, pair: Pair, *more: str, **settings: Any) -> Child:
    """Start the pushing side on the far host."""
    at = f"{pair[0].address}:{PORT}"
    role = settings.pop("role", run)
    given = {"host": pair[1], "env": SECRET, **settings}
    return children.start(role, "--peer", at, "--messages", str(MESSAGES), *more, **given)


def test_two_hosts_and_no_violation(pair: Pair, children: Children) -> None:
    """Catches: a litmus that does not run between hosts, a side that does not hear the result, or
    a printed command that does not lead to the other side.
    """
    consumer = children.start(
        run, "--listen", "--messages", str(MESSAGES), host=pair[0], env=NONE, name="consumer"
    )
    secret, *command = shlex.split(consumer.wait_for("command"))
    name, _, value = secret.partition("=")
    assert command[:3] == ["tapchannel", "doctor", "litmus"]
    producer = children.start(run, *command[3:], host=pair[1], env={name: value}, name="producer")
    ends = consumer.result(), producer.result()
    for end in ends:
        assert (end.code, "no violation" in end.out) == (0, True), end
        assert f"tcp/{CABLE}" in end.out
        assert "a flush completed at the target" in end.out
        for size in ("4 KiB", "64 KiB", "1 MiB"):
            line = next(line for line in end.out.splitlines() if line.startswith(size))
            assert line.split()[2:5] == [str(MESSAGES), "0", "0"]
    assert f"from host {pair[1].name}" in ends[0].out
    assert f"to host {pair[0].name}" in ends[1].out


def test_wrong_words_are_counted_on_both_sides(pair: Pair, children: Children) -> None:
    """Catches: a litmus that cannot fail: here the consumer looks for other words."""
    consumer = listen(children, pair, role=run_misled)
    producer = peer(children, pair)
    for end in (consumer.result(), producer.result()):
        assert end.code == 1, end
        assert f"VIOLATED: {3 * MESSAGES} messages" in end.out
        line = next(line for line in end.out.splitlines() if line.startswith("1 MiB"))
        assert line.split()[2:5] == [str(MESSAGES), str(MESSAGES), str(MESSAGES << 17)]


def test_no_peer_in_time(pair: Pair, children: Children) -> None:
    """Catches: a consumer that waits for ever, or that does not say for whom."""
    end = listen(children, pair, "--limit", "0.5").result()
    assert end.code == 1
    assert "1 producer has not attached" in end.err
    assert "waited" in end.err


def test_nobody_listens(pair: Pair, children: Children) -> None:
    """Catches: a producer that waits for ever, or that does not say whom it called."""
    end = peer(children, pair, "--limit", "0.5").result()
    assert end.code == 1
    assert f"{pair[0].address}:{PORT}" in end.err
    assert "refused" in end.err


def test_peers_that_do_not_fit_are_told_why(pair: Pair, children: Children) -> None:
    """Catches: a peer let in without the secret or with another number of messages, or told
    nothing; a consumer that a stranger's knock ends.
    """
    consumer = listen(children, pair)
    consumer.wait_for("command")
    stranger = peer(children, pair, env=OTHER, name="stranger")
    other = peer(children, pair, "--messages", "99", name="other")
    refused = stranger.result()
    assert (refused.code, refused.out) == (1, "")
    assert "job secret is missing or wrong" in refused.err
    refused = other.result()
    assert (refused.code, refused.out) == (1, "")
    assert "--messages 99" in refused.err
    assert f"--messages {MESSAGES}" in refused.err
    assert consumer.exitcode is None
    assert peer(children, pair, name="awaited").result().code == 0
    assert consumer.result().code == 0


def test_consumer_that_gives_up_says_whom_it_refused(pair: Pair, children: Children) -> None:
    """Catches: a consumer that only says that nobody came, though somebody was at the door."""
    consumer = listen(children, pair, "--limit", "8")
    consumer.wait_for("command")
    assert peer(children, pair, env=OTHER).result().code == 1
    end = consumer.result()
    assert end.code == 1
    assert "job secret is missing or wrong" in end.err


def test_producer_that_dies_ends_the_consumer(pair: Pair, children: Children) -> None:
    """Catches: a consumer that waits for a peer which has gone, or calls half a litmus sound."""
    consumer = listen(children, pair, "--messages", str(LONG))
    consumer.wait_for("command")
    producer = peer(children, pair, "--messages", str(LONG), role=run_doomed)
    producer.wait_for("pushing")
    producer.kill()
    end = consumer.result()
    assert (end.code, end.out.count("no violation")) == (1, 0)
    assert "peer" in end.err
