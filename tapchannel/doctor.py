"""``tapchannel doctor``: what this machine has, what works on it, and what nobody has tried yet."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Console

from . import litmus_command, selftest
from .doctor_network import Network, examine_network
from .doctor_report import FAILED, NOT_HERE, OK, Check, Report
from .doctor_text import print_report
from .machine import Machine, examine
from .selftest import TO_START, Exchange

SELF_TEST_MESSAGES = 16
LITMUS_MESSAGES = 2000
SECONDS_A_MESSAGE = 0.02  # far more than a slow machine needs


def _missing(machine: Machine, network: Network, exchange: Exchange) -> str:
    """Say what this machine lacks for an exchange; empty where it should work."""
    if exchange.transport == "ucx" and network.refusal:
        return network.refusal
    if exchange.consumer_device == "cpu":
        return ""
    if machine.cuda_refusal or exchange.transport != "cuda_ipc":
        return machine.cuda_refusal
    devices = (exchange.producer_device, exchange.consumer_device)
    producer, consumer = (int(device.removeprefix("cuda:")) for device in devices)
    if producer != consumer and not machine.peer_access[producer][consumer]:
        return f"GPU {producer} cannot access the memory of GPU {consumer}"
    owner = machine.gpus[consumer]
    if exchange.memory == "vmm" and not (owner["vmm"] and owner["posix_fd_handles"]):
        return f"GPU {consumer} cannot export memory as a file descriptor"
    return ""


def _exchanges(
    machine: Machine, messages: int
) -> Iterator[tuple[Literal["self-test", "litmus"], Exchange]]:
    pairs = [("cuda:0", "cuda:0")]
    if len(machine.gpus) > 1:
        pairs.append(("cuda:1", "cuda:0"))
    wired = [("cpu", "cpu")] if machine.cuda_refusal else [("cpu", "cpu"), *pairs]
    quick, limit = SELF_TEST_MESSAGES, TO_START + messages * SECONDS_A_MESSAGE
    yield "self-test", Exchange("shm", "auto", "cpu", "cpu", "host", quick)
    for producer, consumer in pairs:
        yield "self-test", Exchange("cuda_ipc", "vmm", producer, consumer, "stream", quick)
        yield "self-test", Exchange("cuda_ipc", "ipc", producer, consumer, "stream", quick)
    staged = [("cpu", "cpu")] if machine.cuda_refusal else pairs
    for producer, consumer in staged:
        yield "self-test", Exchange("host_staged", "auto", producer, consumer, "stream", quick)
    for producer, consumer in wired:
        yield "self-test", Exchange("ucx", "auto", producer, consumer, "stream", quick)
    if messages == 0:
        return
    yield "litmus", Exchange("shm", "auto", "cpu", "cpu", "host", messages, limit)
    for producer, consumer in pairs:
        yield "litmus", Exchange("cuda_ipc", "auto", producer, consumer, "stream", messages, limit)
        yield "litmus", Exchange("cuda_ipc", "auto", producer, consumer, "host", messages, limit)
    for producer, consumer in staged:
        exchange = Exchange("host_staged", "auto", producer, consumer, "stream", messages, limit)
        yield "litmus", exchange
    for producer, consumer in wired:
        yield "litmus", Exchange("ucx", "auto", producer, consumer, "stream", messages, limit)
        if consumer != "cpu":
            yield "litmus", Exchange("ucx", "auto", producer, consumer, "host", messages, limit)


def _check(report: Report, kind: Literal["self-test", "litmus"], exchange: Exchange) -> Check:
    lack = _missing(report.machine, report.network, exchange)
    if lack:
        return Check(kind, exchange, NOT_HERE, detail=lack)
    found = selftest.run(exchange)
    wrong = f"{found.wrong_words} words read are not the words pushed" if found.wrong_words else ""
    detail = found.failure or wrong
    verdict = FAILED if detail else OK
    return Check(kind, exchange, verdict, found.wrong_words, found.seconds, detail, found.lanes)


def diagnose(messages: int) -> Report:
    """Examine this machine and run every exchange that should work on it.

    Blocks:     until each exchange has ended, for its own limit at most; shows which one runs on
                standard error, where that is a terminal.
    """
    machine = examine()
    report = Report(machine, examine_network(machine))
    with Console(stderr=True).status("") as progress:
        for kind, exchange in _exchanges(report.machine, messages):
            progress.update(f"{kind}: {exchange.transport}, {exchange.memory} memory")
            report.checks.append(_check(report, kind, exchange))
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tapchannel doctor``; 0 unless something failed that should work here."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["litmus"]:
        return litmus_command.main(given[1:])
    parser = argparse.ArgumentParser(
        prog="tapchannel doctor",
        description="Say what works on this machine, and test it.",
        epilog="tapchannel doctor litmus --help: the same between two hosts.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--messages",
        type=int,
        default=LITMUS_MESSAGES,
        metavar="N",
        help="messages of each litmus, which looks for a stamp that overtook its payload; "
        "0 leaves the litmus out (default %(default)s)",
    )
    options = parser.parse_args(given)
    if options.messages < 0:
        parser.error("--messages must be 0 or more")
    report = diagnose(options.messages)
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        print_report(report, Console(markup=False, highlight=False, soft_wrap=True))
    return 0 if report.ok else 1
