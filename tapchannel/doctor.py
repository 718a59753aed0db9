"""``tapchannel doctor``: what this machine has, what works on it, and what nobody has tried yet."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from . import selftest
from .error_text import aligned
from .machine import Machine, examine
from .selftest import MESSAGE_BYTES, Exchange

SELF_TEST_MESSAGES = 16
LITMUS_MESSAGES = 2000
SECONDS_TO_START = 60.0  # for two processes that import torch and make a CUDA context
SECONDS_A_MESSAGE = 0.02  # far more than a slow machine needs

OK, FAILED, NOT_HERE = "ok", "failed", "not here"


@dataclass(frozen=True, slots=True)
class Check:
    """One exchange that was run, or the reason why it was not."""

    kind: Literal["self-test", "litmus"]
    exchange: Exchange
    verdict: str
    wrong_words: int = 0
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All that doctor found out."""

    machine: Machine
    checks: list[Check] = field(default_factory=list[Check])

    @property
    def ok(self) -> bool:
        """Whether nothing failed that should work here."""
        return all(check.verdict != FAILED for check in self.checks)

    def transports(self) -> dict[str, str]:
        """Map each transport to the reason why it cannot be used here, empty where it can."""
        return {
            "shm": self._refusal("shm"),
            "cuda_ipc": self.machine.cuda_refusal or self._refusal("cuda_ipc"),
            "host_staged": self._refusal("host_staged"),
            "ucx": "this version has none; producers and draft stage must share one host",
        }

    def _refusal(self, transport: str) -> str:
        mine = [check for check in self.checks if check.exchange.transport == transport]
        if any(check.kind == "self-test" and check.verdict == OK for check in mine):
            return ""
        return next((check.detail for check in mine if check.detail), "it was not tested")

    def unverified(self) -> list[str]:
        """List what these checks say nothing about."""
        gaps = ["more than one host: there is no network transport in this version"]
        done = [
            (check.kind, check.exchange.producer_device, check.exchange.consumer_device)
            for check in self.checks
            if check.verdict == OK and check.exchange.transport == "cuda_ipc"
        ]
        litmus_pairs = [(here, there) for kind, here, there in done if kind == "litmus"]
        if not done:
            gaps.append("everything about GPUs: no cuda_ipc exchange was completed")
        elif not any(here != there for here, there in litmus_pairs):
            gaps.append(
                "that no stamp overtakes its payload between two GPUs, where the payload goes "
                "over NVLink and the stamp over PCIe"
            )
        elif len(self.machine.gpus) > 2:
            gaps.append("GPU pairs other than those in the table")
        return gaps

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "ok": self.ok,
            **asdict(self.machine),
            "checks": [asdict(check) for check in self.checks],
            "transports": {
                name: {"usable": not reason, "reason": reason}
                for name, reason in self.transports().items()
            },
            "unverified": self.unverified(),
        }


def _missing(machine: Machine, exchange: Exchange) -> str:
    """Say what this machine lacks for an exchange; empty where it should work."""
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
    quick, limit = SELF_TEST_MESSAGES, SECONDS_TO_START + messages * SECONDS_A_MESSAGE
    yield "self-test", Exchange("shm", "auto", "cpu", "cpu", "host", quick)
    for producer, consumer in pairs:
        yield "self-test", Exchange("cuda_ipc", "vmm", producer, consumer, "stream", quick)
        yield "self-test", Exchange("cuda_ipc", "ipc", producer, consumer, "stream", quick)
    staged = [("cpu", "cpu")] if machine.cuda_refusal else pairs
    for producer, consumer in staged:
        yield "self-test", Exchange("host_staged", "auto", producer, consumer, "stream", quick)
    if messages == 0:
        return
    yield "litmus", Exchange("shm", "auto", "cpu", "cpu", "host", messages, limit)
    for producer, consumer in pairs:
        yield "litmus", Exchange("cuda_ipc", "auto", producer, consumer, "stream", messages, limit)
        yield "litmus", Exchange("cuda_ipc", "auto", producer, consumer, "host", messages, limit)
    for producer, consumer in staged:
        exchange = Exchange("host_staged", "auto", producer, consumer, "stream", messages, limit)
        yield "litmus", exchange


def _check(machine: Machine, kind: Literal["self-test", "litmus"], exchange: Exchange) -> Check:
    lack = _missing(machine, exchange)
    if lack:
        return Check(kind, exchange, NOT_HERE, detail=lack)
    found = selftest.run(exchange)
    wrong = f"{found.wrong_words} words read are not the words pushed" if found.wrong_words else ""
    detail = found.failure or wrong
    verdict = FAILED if detail else OK
    return Check(kind, exchange, verdict, found.wrong_words, found.seconds, detail)


def diagnose(messages: int) -> Report:
    """Examine this machine and run every exchange that should work on it.

    Blocks:     until each exchange has ended, for its own limit at most; shows which one runs on
                standard error, where that is a terminal.
    """
    report = Report(examine())
    with Console(stderr=True).status("") as progress:
        for kind, exchange in _exchanges(report.machine, messages):
            progress.update(f"{kind}: {exchange.transport}, {exchange.memory} memory")
            report.checks.append(_check(report.machine, kind, exchange))
    return report


def _tables(report: Report) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    gpus = report.machine.gpus
    if gpus:
        yield (
            "GPUs",
            [
                ("GPU", "name", "UUID", "PCI", "GiB", "stream words", "fd export", "RDMA order"),
                *(_gpu_row(gpu) for gpu in gpus),
            ],
        )
    if len(gpus) > 1:
        names = [f"GPU {gpu['ordinal']}" for gpu in gpus]
        rows = zip(names, report.machine.peer_access, strict=True)
        yield (
            "Peer access",
            [
                ("from \\ to", *names),
                *((name, *("yes" if can else "-" for can in access)) for name, access in rows),
            ],
        )
    header = ("check", "transport", "memory", "from", "to", "wait", "messages", "wrong", "verdict")
    yield (
        f"Checks ({MESSAGE_BYTES // 1024} KiB a message)",
        [
            header,
            *(_check_row(check) for check in report.checks),
        ],
    )


def _gpu_row(gpu: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(gpu["ordinal"]),
        str(gpu["name"]),
        str(gpu["uuid"]),
        str(gpu["pci_bus_id"]),
        f"{gpu['total_bytes'] / 2**30:.0f}",
        "64-bit" if gpu["stream_mem_ops_64"] else "no",
        "yes" if gpu["vmm"] and gpu["posix_fd_handles"] else "no",
        str(gpu["gpu_direct_rdma_writes_ordering"]),
    )


def _check_row(check: Check) -> tuple[str, ...]:
    run = check.exchange
    ran = check.verdict != NOT_HERE
    return (
        check.kind,
        run.transport,
        run.memory,
        run.producer_device,
        run.consumer_device,
        run.wait,
        str(run.messages) if ran else "-",
        str(check.wrong_words) if ran else "-",
        f"{check.verdict} ({check.seconds:.1f} s)" if check.verdict == OK else check.verdict,
    )


def _note(check: Check) -> str:
    run = check.exchange
    what = f"{check.kind} of {run.transport} with {run.memory} memory"
    return (
        f"{what}, {run.producer_device} to {run.consumer_device}: {check.verdict}: {check.detail}"
    )


def _print(report: Report, console: Console) -> None:
    console.print(", ".join(f"{name} {text}" for name, text in report.machine.versions.items()))
    driver = report.machine.driver
    number = int(driver["driver_version"])
    usable = f"for CUDA {number // 1000}.{number % 1000 // 10}"
    console.print(f"CUDA driver: {driver['refusal'] or usable}")
    for title, rows in _tables(report):
        console.print(f"\n{title}", style="bold")
        _print_table(rows, console)
    known = report.machine.cuda_refusal  # said below, with its transport
    notes = [_note(run) for run in report.checks if run.detail and run.detail != known]
    for note in dict.fromkeys(notes):  # each once
        console.print(note)
    console.print("\nTransports", style="bold")
    for name, reason in report.transports().items():
        console.print(f"{name}: {f'not usable here: {reason}' if reason else 'usable here'}")
    console.print("\nNot verified here", style="bold")
    for gap in report.unverified():
        console.print(f"- {gap}")


def _print_table(rows: list[tuple[str, ...]], console: Console) -> None:
    if not console.is_terminal:
        console.print("\n".join(aligned(rows)))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
    for heading in rows[0]:
        table.add_column(heading, overflow="fold")  # rather two lines than half a UUID
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tapchannel doctor``; 0 unless something failed that should work here."""
    parser = argparse.ArgumentParser(
        prog="tapchannel doctor", description="Say what works on this machine, and test it."
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
    options = parser.parse_args(argv)
    if options.messages < 0:
        parser.error("--messages must be 0 or more")
    report = diagnose(options.messages)
    if options.json:
        print(json.dumps(report.as_json()))
    else:
        _print(report, Console(markup=False, highlight=False, soft_wrap=True))
    return 0 if report.ok else 1
