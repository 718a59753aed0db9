"""``tapchannel doctor`` and the command line: what is run, what is reported, which exit code."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from support.made_up_machines import gpu, machine, network
from tapchannel import cli, doctor, selftest
from tapchannel.doctor import OK, Report
from tapchannel.doctor_report import FAILED, NOT_HERE, Check
from tapchannel.machine import Machine
from tapchannel.selftest import Exchange, Finding

ALL_WORDS = selftest.ROWS * selftest.WIDTH


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let doctor see a made-up network, but where it is to see this machine."""
    if "anything_made_up" not in request.node.name:
        monkeypatch.setattr(doctor, "examine_network", lambda _: network())


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """Let every exchange succeed without running it; return those that were asked for."""
    exchanges: list[Exchange] = []

    def note(exchange: Exchange) -> Finding:
        exchanges.append(exchange)
        return Finding(seconds=0.5)

    monkeypatch.setattr(selftest, "run", note)
    return exchanges


def report_of(here: Machine, messages: int, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Let doctor examine a made-up machine."""
    monkeypatch.setattr(doctor, "examine", lambda: here)
    return doctor.diagnose(messages)


@pytest.mark.timeout(300)  # with GPUs, several exchanges more
def test_here_without_anything_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a self-test that does not run on this machine, or a machine without a GPU counted
    as a failure, or left unexplained.
    """
    code = doctor.main(["--json", "--messages", "300"])
    report = json.loads(capsys.readouterr().out)
    shm = [check for check in report["checks"] if check["exchange"]["transport"] == "shm"]
    assert [check["verdict"] for check in shm] == [OK, OK]
    assert [check["wrong_words"] for check in shm] == [0, 0]
    assert report["transports"]["shm"] == {"usable": True, "reason": ""}
    over_ucx = [check for check in report["checks"] if check["exchange"]["transport"] == "ucx"]
    if report["network"]["ucx"] is None:
        assert {check["verdict"] for check in over_ucx} == {NOT_HERE}
        assert report["transports"]["ucx"]["reason"] == report["network"]["refusal"] != ""
    else:
        assert [check["verdict"] for check in over_ucx[:1]] == [OK]
        assert over_ucx[0]["lanes"]
        assert report["transports"]["ucx"] == {"usable": True, "reason": ""}
    if not report["gpus"]:
        assert code == 0
        assert report["ok"] is True
        assert report["transports"]["cuda_ipc"]["reason"] == report["driver"]["refusal"] != ""
        assert any("GPU" in gap for gap in report["unverified"])


def test_words_of_another_message_are_counted(tmp_path: Path) -> None:
    """Catches: a self-test that cannot fail: here the producer pushes other words than those that
    the consumer looks for.
    """
    exchange = Exchange("shm", "auto", "cpu", "cpu", "host", messages=5, limit=20.0)
    store = (tmp_path / "store").as_uri()
    producer = threading.Thread(target=selftest._produce, args=(exchange, store, 1))
    producer.start()
    found = selftest._consume(exchange, store, 2)
    producer.join()
    assert found.wrong_words == 5 * ALL_WORDS


def test_exchange_that_is_refused_says_what_both_sides_saw() -> None:
    """Catches: an error in a spawned process swallowed, or a self-test that hangs after it."""
    found = selftest.run(Exchange("pigeon", "auto", "cpu", "cpu", "host", 1, limit=30.0))
    assert "consume: " in found.failure
    assert "produce: " in found.failure
    assert "pigeon" in found.failure


def test_exchange_ends_at_its_limit() -> None:
    """Catches: processes left behind, or no end, where a process is too slow."""
    found = selftest.run(Exchange("shm", "auto", "cpu", "cpu", "host", 1, limit=0.01))
    assert "said nothing" in found.failure


def test_wrong_words_fail_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: wrong words found and reported, yet exit code 0 and a transport called usable."""
    monkeypatch.setattr(doctor, "examine", lambda: machine(cuda_refusal="no driver"))
    monkeypatch.setattr(selftest, "run", lambda _: Finding(wrong_words=3))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "3 words" in out
    assert "shm: not usable" in out


def test_two_gpus_are_tested_against_each_other(
    ran: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a kind of memory or a kind of wait left out, or both processes put on one GPU where
    there are two.
    """
    report = report_of(machine(gpu(0), gpu(1)), 10, monkeypatch)
    across = [run for run in ran if run.producer_device != run.consumer_device]
    assert {run.memory for run in across} >= {"vmm", "ipc"}
    assert {run.wait for run in across if run.messages == 10} == {"stream", "host"}
    assert report.ok
    assert report.transports()["cuda_ipc"] == ""
    assert not any("NVLink" in gap for gap in report.unverified())


def test_one_gpu_leaves_the_two_roads_unverified(
    ran: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: doctor claiming more than one GPU can show."""
    report = report_of(machine(gpu(0)), 10, monkeypatch)
    assert ran
    assert any("NVLink" in gap for gap in report.unverified())


def test_litmus_left_out_is_said(ran: list[Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: ordering between two GPUs called verified by the short self-test alone."""
    report = report_of(machine(gpu(0), gpu(1)), 0, monkeypatch)
    assert all(run.messages == doctor.SELF_TEST_MESSAGES for run in ran)
    assert any("NVLink" in gap for gap in report.unverified())


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (machine(gpu(0), gpu(1), peers=False), "cannot access"),
        (machine(gpu(0, posix_fd_handles=False)), "file descriptor"),
        (machine(gpu(0, vmm=False)), "file descriptor"),
        (machine(gpu(0), cuda_refusal="torch was built without CUDA"), "without CUDA"),
    ],
    ids=["no peer access", "no descriptors", "no virtual memory management", "torch without CUDA"],
)
def test_what_cannot_work_here_is_not_run(
    here: Machine, reason: str, ran: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: exit code 1 for something that this machine just does not have, or no reason."""
    report = report_of(here, 10, monkeypatch)
    absent = [check for check in report.checks if check.verdict == NOT_HERE]
    assert absent
    assert all(reason in check.detail for check in absent)
    assert not {check.exchange for check in absent} & set(ran)
    assert report.ok


def test_one_kind_of_memory_is_enough() -> None:
    """Catches: a transport called unusable because one of its two kinds of memory is missing, or
    a failure hidden because the other kind works.
    """
    ipc = Exchange("cuda_ipc", "ipc", "cuda:0", "cuda:0", "stream", 16)
    vmm = replace(ipc, memory="vmm")
    report = Report(machine(gpu(0)), network())
    report.checks.append(Check("self-test", vmm, FAILED, detail="refused"))
    assert report.transports()["cuda_ipc"] == "refused"
    report.checks.append(Check("self-test", ipc, OK))
    assert report.transports()["cuda_ipc"] == ""
    assert not report.ok


def test_text_has_every_gpu_and_reason(
    ran: list[Exchange], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: text output that breaks, or drops what the JSON has."""
    here = machine(gpu(0), gpu(1), peers=False)
    monkeypatch.setattr(doctor, "examine", lambda: here)
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "GPU-0" in out
    assert "GPU-1" in out
    assert "for CUDA 13.0" in out
    assert "cannot access" in out
    assert "shm: usable here" in out


def test_negative_messages_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a negative count taken for zero."""
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--messages", "-1"])
    assert ended.value.code == 2
    assert "--messages" in capsys.readouterr().err


def test_command_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: options of a command swallowed by the outer parser, --help among them."""
    seen: list[Sequence[str]] = []

    def note(arguments: Sequence[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setitem(cli.COMMANDS, "demo", (note, ""))
    assert cli.main(["demo", "--stages", "2", "--help", "extra"]) == 7
    assert seen == [["--stages", "2", "--help", "extra"]]


@pytest.mark.parametrize("arguments", [[], ["dance"]])
def test_unknown_command_lists_the_known(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a traceback, or exit code 0, for a command that does not exist."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
