"""The report of ``tapchannel doctor`` as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from .doctor_network import network_lines
from .doctor_report import NOT_HERE, OK, Check, Report
from .error_text import aligned
from .selftest import MESSAGE_BYTES


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
    header = ("check", "transport", "memory", "from", "to", "wait", "lanes")
    header += ("messages", "wrong", "verdict")
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
        ", ".join(check.lanes) or "-",
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


def print_report(report: Report, console: Console) -> None:
    """Print all of it."""
    console.print(", ".join(f"{name} {text}" for name, text in report.machine.versions.items()))
    driver = report.machine.driver
    number = int(driver["driver_version"])
    usable = f"for CUDA {number // 1000}.{number % 1000 // 10}"
    console.print(f"CUDA driver: {driver['refusal'] or usable}")
    for title, rows in _tables(report):
        console.print(f"\n{title}", style="bold")
        _print_table(rows, console)
    known = report.machine.cuda_refusal, report.network.refusal  # said with their transports
    notes = [_note(run) for run in report.checks if run.detail and run.detail not in known]
    for note in dict.fromkeys(notes):  # each once
        console.print(note)
    console.print("\nNetwork", style="bold")
    for line in network_lines(report.network):
        console.print(line)
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
