"""``tapchannel doctor litmus``: what it is told, what it believes, what it says."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tapchannel import cli, doctor, litmus, litmus_command
from tapchannel.errors import AttachTimeout, PassAborted, ProtocolError
from tapchannel.litmus import ROWS, Result, Settings, Tally

SECRET = "correct horse battery"


def result(*violations: int, lanes: tuple[str, ...] = ("tcp/eth0",)) -> Result:
    """Make up a result."""
    tallies = tuple(
        Tally(rows, bad, 7 * bad, 1.5) for rows, bad in zip(ROWS, violations, strict=True)
    )
    return Result("b03", "cpu", 20, tallies, lanes, "the rule")


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPCHANNEL_SECRET", SECRET)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--listen --peer"),
        (["--listen", "--peer", "a:1"], "not allowed with"),
        (["--peer"], "expected one argument"),
        (["--peer", "a03"], "HOST:PORT"),
        (["--peer", "*:47000"], "HOST:PORT"),
        (["--peer", "a03:70000"], "HOST:PORT"),
        (["--peer", "unix:///a.sock"], "HOST:PORT"),
        (["--listen", "a03:0"], "port from 1"),
        (["--listen", "unix:///a.sock"], "tcp://HOST"),
        (["--listen", "--messages", "0"], "--messages"),
        (["--listen", "--messages", "many"], "--messages"),
        (["--listen", "--limit", "-1"], "--limit"),
        (["--listen", "--limit", "inf"], "--limit"),
        (["--listen", "--device", "tpu:0"], "tpu:0"),
    ],
)
def test_bad_arguments_end_it_at_once(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a typing error that is found out on another host, or not at all."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "litmus", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_producer_without_the_secret_is_told_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a refusal by the other host that this side could have foreseen."""
    monkeypatch.delenv("TAPCHANNEL_SECRET")
    with pytest.raises(SystemExit) as ended:
        doctor.main(["litmus", "--peer", "a03:47000"])
    assert ended.value.code == 2
    assert "TAPCHANNEL_SECRET is not set" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["a03:47000", "tcp://a03:47000"])
def test_address_may_leave_the_scheme_out(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an address that the other side has printed, and this side does not take."""
    seen: list[Settings] = []

    def produce(settings: Settings) -> Result:
        seen.append(settings)
        return result(0, 0, 0)

    monkeypatch.setattr(litmus_command, "produce", produce)
    assert doctor.main(["litmus", "--peer", given, "--device", "cuda:1", "--messages", "9"]) == 0
    assert seen == [Settings("tcp://a03:47000", 9, litmus_command.PEER_LIMIT, "cuda:1", SECRET)]


@pytest.mark.parametrize(
    ("violations", "code"), [((0, 0, 0), 0), ((0, 3, 0), 1)], ids=["none", "three"]
)
def test_violations_are_the_exit_code(
    violations: tuple[int, ...],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches: violations that are counted and yet called a success, in text or in JSON."""
    monkeypatch.setattr(litmus_command, "produce", lambda _: result(*violations))
    assert doctor.main(["litmus", "--peer", "a03:47000"]) == code
    text = capsys.readouterr().out
    assert ("VIOLATED: 3 messages" in text) is bool(code)
    assert "the rule" in text
    assert "tcp/eth0" in text
    assert "not verified by this: RDMA" in text
    assert doctor.main(["litmus", "--peer", "a03:47000", "--json"]) == code
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is not bool(code)
    assert [tally["violations"] for tally in facts["tallies"]] == list(violations)
    assert facts["ordering"] == "the rule"


def test_rdma_over_two_rails_is_no_gap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: something called unverified that has just been verified."""
    lanes = ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")
    monkeypatch.setattr(litmus_command, "produce", lambda _: result(0, 0, 0, lanes=lanes))
    assert doctor.main(["litmus", "--peer", "a03:47000"]) == 0
    assert "not verified" not in capsys.readouterr().out


def test_failure_is_said_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a traceback, or exit code 0, where the other side never came."""

    def produce(_: Settings) -> Result:
        raise AttachTimeout("outbox did not attach", waited=1.0)

    monkeypatch.setattr(litmus_command, "produce", produce)
    assert doctor.main(["litmus", "--peer", "a03:47000"]) == 1
    assert "outbox did not attach" in capsys.readouterr().err


@pytest.mark.parametrize("made_up", [True, False], ids=["secret made up", "secret of the job"])
def test_listening_side_prints_the_other_sides_command(
    made_up: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a command that lacks the secret, or the job's own secret printed."""
    if made_up:
        monkeypatch.delenv("TAPCHANNEL_SECRET")
    seen: list[Settings] = []

    def consume(settings: Settings, ready: Callable[..., None]) -> Result:
        seen.append(settings)
        ready(("tcp://10.0.0.1:5", "tcp://[fd00::1]:5"))
        return result(0, 0, 0)

    monkeypatch.setattr(litmus_command, "consume", consume)
    assert doctor.main(["litmus", "--listen", "--messages", "20"]) == 0
    out = capsys.readouterr().out
    assert seen[0].address == "tcp://*"
    assert "tapchannel doctor litmus --peer tcp://10.0.0.1:5 --messages 20" in out
    assert "--peer tcp://[fd00::1]:5 --messages 20" in out
    assert (f"TAPCHANNEL_SECRET={seen[0].secret} " in out) is made_up
    assert SECRET not in out


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff" * 4096,
        b'{"seed": -1, "host": "b03", "lanes": []}',
        b'{"seed": 1, "host": 3, "lanes": []}',
        b'{"seed": 1, "host": "b03", "lanes": {}}',
        b"[" * 4096,
    ],
)
def test_first_message_is_not_believed(row: bytes) -> None:
    """Catches: a crash, or nonsense shown as facts, on a peer's bytes (I8)."""
    with pytest.raises(ProtocolError):
        litmus._heard_first(row)


def test_counts_go_there_and_back() -> None:
    """Catches: counts that are cut off on their way, or put to the wrong size."""
    tallies = tuple(Tally(rows, rows * 10**5, 10**15 + rows, 123.456) for rows in ROWS)
    text = litmus._as_text(tallies)
    assert len(text) <= 240  # of a pass's reason
    assert litmus._from_text(text, PassAborted("flush")) == tallies


@pytest.mark.parametrize(
    "text", ['{"violations": [0, 0]}', "{", '{"violations": [0, 0, -1], "words": [], "x": []}']
)
def test_counts_are_not_believed(text: str) -> None:
    """Catches: counts that are none (I8)."""
    with pytest.raises(ProtocolError):
        litmus._from_text(text, PassAborted("flush"))


def test_consumers_failure_is_the_producers_error() -> None:
    """Catches: a consumer that gave up, and a producer that says it does not understand why."""
    with pytest.raises(PassAborted, match="flush"):
        litmus._from_text("StampTimeout: too late", PassAborted("flush", reason="StampTimeout"))
