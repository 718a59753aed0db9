"""What doctor says of the network, on made-up machines: facts, advice, and what was not tried."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from support.made_up_machines import gpu, machine, network, rdma_device, ucx
from tapchannel import doctor, doctor_network, selftest
from tapchannel.doctor_network import (
    USUAL_MAILBOX,
    GpuRule,
    Network,
    examine_network,
    network_lines,
    size,
    went_by_rdma,
)
from tapchannel.doctor_report import NOT_HERE, OK, Check, Report
from tapchannel.errors import TransportUnavailable
from tapchannel.selftest import Exchange, Finding
from tapchannel.ucx_library import UcxChoice

DIRECT = GpuRule("owner", True, "direct")
BY_HOST = GpuRule("none", False, "by the host")
TO_GPU = Exchange("ucx", "auto", "cuda:0", "cuda:0", "stream", 100)
TO_HOST = Exchange("ucx", "auto", "cpu", "cpu", "stream", 100)


def text_of(here: Network) -> str:
    """Give all that doctor writes about a network."""
    return "\n".join(network_lines(here))


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (network(ucx("libucx wheel", verbs=False, cuda=True)), "rdma-cu12 or rdma-cu13"),
        (network(ucx("libucx wheel", verbs=False)), "no libucx wheel of PyPI has any"),
        (network(ucx(verbs=False)), "no verbs, so no RDMA"),
        (network(ucx(), rules=(BY_HOST,)), "ucx-cu12 or ucx-cu13"),
        (network(ucx(), remark="no verbs: it has no libuct_ib"), "it has no libuct_ib"),
        (network(refusal="no UCX: install the extra"), "install the extra"),
        (network(ucx(), passed_over={"system": "its version is 1.9.0"}), "its version is 1.9.0"),
        (network(ucx(), rdma_device("its port is DOWN")), "its port is DOWN"),
        (network(ucx(), rdma_device(), memlock=8 << 20), "memlock limit of 8 MiB is too small"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(here: Network, said: str) -> None:
    """Catches: a UCX without verbs or CUDA, or a limit too small, that the user has to guess."""
    assert said in text_of(here)
    assert said in json.dumps(here.as_json())


@pytest.mark.parametrize(
    "here",
    [
        network(ucx(), rdma_device(), memlock=USUAL_MAILBOX),
        network(ucx(), rdma_device(), memlock=None),
        network(ucx(), memlock=8 << 20),
        network(ucx(cuda=True), rules=(DIRECT,)),
    ],
    ids=["enough may be pinned", "anything may be pinned", "nothing to pin for", "CUDA is there"],
)
def test_nothing_is_asked_for_without_need(here: Network) -> None:
    """Catches: advice to install or raise what does for the job."""
    assert here.advice() == []
    assert "note:" not in text_of(here)


@pytest.mark.parametrize(
    ("cuda", "order", "words", "rule"),
    [
        (True, 100, "owner", "direct: streams wait on the stamp"),
        (True, 200, "all devices", "direct"),
        (True, 0, "none", "by the host, since cuda:0 does not keep the order"),
        (False, 100, "owner", "knows no CUDA: the gate copies"),
    ],
)
def test_rule_follows_from_the_gpu_and_the_library(
    cuda: bool, order: int, words: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a rule reported that is not the one which the transport will follow."""
    monkeypatch.setattr(doctor_network, "foresee", lambda: UcxChoice(ucx(cuda=cuda), {}))
    here = examine_network(machine(gpu(0, gpu_direct_rdma_writes_ordering=order)))
    found = here.rules[0]
    assert found.order == words
    assert rule in found.rule
    assert found.direct is rule.startswith("direct")
    assert here.as_json()["gpu_direct"]["gpus"][0]["rule"] == found.rule


def test_without_any_ucx_nothing_of_it_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a machine without UCX called broken, or its exchanges run all the same."""

    def foresee() -> UcxChoice:
        raise TransportUnavailable("no UCX library does for the job", next_step="install it")

    ran: list[Exchange] = []

    def run(exchange: Exchange) -> Finding:
        ran.append(exchange)
        return Finding()

    monkeypatch.setattr(doctor_network, "foresee", foresee)
    monkeypatch.setattr(doctor, "examine", lambda: machine(cuda_refusal="no driver"))
    monkeypatch.setattr(selftest, "run", run)
    report = doctor.diagnose(10)
    assert report.ok
    assert "install it" in report.transports()["ucx"]
    assert {run.transport for run in ran} == {"shm", "host_staged"}
    over_ucx = [check for check in report.checks if check.exchange.transport == "ucx"]
    assert {check.verdict for check in over_ucx} == {NOT_HERE}
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.count("install it") == 2  # with the network, and its transport


def test_ucx_is_tried_with_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a machine with GPUs whose network is tried with host memory only."""
    ran: list[Exchange] = []

    def run(exchange: Exchange) -> Finding:
        ran.append(exchange)
        return Finding(lanes=("tcp/lo",))

    monkeypatch.setattr(selftest, "run", run)
    monkeypatch.setattr(doctor, "examine", lambda: machine(gpu(0), gpu(1)))
    monkeypatch.setattr(doctor, "examine_network", lambda _: network())
    report = doctor.diagnose(10)
    over_ucx = [run for run in ran if run.transport == "ucx"]
    ways = {(run.producer_device, run.consumer_device) for run in over_ucx}
    assert ways == {("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:0")}
    assert {run.wait for run in over_ucx if run.messages == 10} == {"stream", "host"}
    assert report.transports()["ucx"] == ""
    lanes = {check.lanes for check in report.checks if check.exchange.transport == "ucx"}
    assert lanes == {("tcp/lo",)}


@pytest.mark.parametrize(
    ("check", "gap", "there"),
    [
        (Check("litmus", TO_GPU, OK, lanes=("rc_mlx5/mlx5_0:1",)), "GPU memory", False),
        (Check("litmus", TO_GPU, OK, lanes=("tcp/eth0",)), "GPU memory", True),
        (Check("litmus", TO_HOST, OK, lanes=("rc_mlx5/mlx5_0:1",)), "GPU memory", True),
        (Check("self-test", TO_GPU, OK, lanes=("rc_mlx5/mlx5_0:1",)), "GPU memory", True),
        (Check("litmus", TO_GPU, "failed", lanes=("rc_mlx5/mlx5_0:1",)), "GPU memory", True),
        (Check("litmus", TO_HOST, OK, lanes=("rc_verbs/a:1", "rc_verbs/b:1")), "rails", False),
        (Check("litmus", TO_HOST, OK, lanes=("rc_verbs/a:1", "tcp/eth0")), "rails", True),
    ],
)
def test_what_was_not_tried_is_listed(check: Check, gap: str, there: bool) -> None:
    """Catches: doctor claiming more than its exchanges have shown, or less."""
    report = Report(machine(gpu(0)), network(rules=(DIRECT,)), [check])
    assert any(gap in text for text in report.unverified()) is there
    assert any("more than one host" in text for text in report.unverified())
    assert any("fabric handles" in text for text in report.unverified())
    if gap == "GPU memory" and not there:  # through host memory, the device never writes to a GPU
        by_host = replace(report, network=network(rules=(BY_HOST,)))
        assert any(gap in text for text in by_host.unverified())


def test_sizes_and_lanes_are_read_right() -> None:
    """Catches: a wrong unit, or TCP taken for RDMA."""
    assert [size(65536), size(8 << 20), size(3 << 29), size(None)] == [
        "64 KiB",
        "8 MiB",
        "1.5 GiB",
        "unlimited",
    ]
    assert went_by_rdma(["tcp/eth0", "cuda_copy/cuda"]) == []
    assert went_by_rdma(["cuda_ipc/cuda", "rc_mlx5/mlx5_0:1"]) == []  # a GPU of the same host
    assert went_by_rdma(["rc_mlx5/mlx5_0:1", "ud_verbs/mlx5_0:1", "dc_mlx5/mlx5_1:1"]) == [
        "mlx5_0:1",
        "mlx5_1:1",
    ]
