"""Bare copies against push to landed, between two processes on the GPUs that are here.

This process pushes, the other owns the mailbox and watches the stamps. See README.md for how.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import (
    MIB,
    RESULTS,
    Partner,
    Spread,
    facts,
    gpu_facts,
    markdown,
    ratio_of,
    size_text,
    spread_of,
    table,
)
from gpu_roles import CONSUMER, COUNTS, Producer, UcxProducer, consume, producer_of
from gpu_staged import StagedProducer

WARM_UP = 3
COST_ROUNDS = 10
KINDS = (Producer, StagedProducer, UcxProducer)
UCX_ROUNDS = 3  # over TCP a round takes seconds
PAUSE_S = 0.001  # between pushes: long enough for the lane's own thread to fall asleep


def measure_size(producer: Producer, size: int, rounds: int) -> dict[str, Spread]:
    """Measure all ways at one size, in turns, so that a change of clocks meets all alike."""
    count = COUNTS[size]
    ways: dict[str, tuple[Callable[[int], float], int]] = {
        "bare GB/s": (producer.bare_queued, count),
        "push GB/s": (producer.push_queued, count),
        "copy_ GB/s": (producer.copy_from_python, count),
        "Python push GB/s": (producer.push_from_python, count),
        "one copy_ us": (producer.copy_from_python, 1),
        "one push us": (producer.push_from_python, 1),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + rounds):
        for name, (way, messages) in ways.items():
            seconds = way(messages)
            samples[name].append(
                seconds * 1e6 if name.endswith("us") else messages * size / seconds / 1e9
            )
    kept = {name: taken[WARM_UP:] for name, taken in samples.items()}
    ratios = {
        "of bare": ratio_of(kept["push GB/s"], kept["bare GB/s"]),
        "of copy_": ratio_of(kept["Python push GB/s"], kept["copy_ GB/s"]),
    }
    return {name: spread_of(taken) for name, taken in kept.items()} | ratios


def measure_cost(producer: Producer) -> dict[str, Spread]:
    """Measure the caller's microseconds a push."""
    close, spaced, native = [], [], []
    for _ in range(COST_ROUNDS):
        close += producer.push_costs(64, 0.0)
        spaced += producer.push_costs(64, PAUSE_S)
        native += producer.native_costs(64)
    return {
        "push, back to back": spread_of(close),
        "push, 1 ms apart": spread_of(spaced),
        "its native part, back to back": spread_of(native),
    }


HEADS = (
    "from → to, message",
    "bare GB/s",
    "push GB/s",
    "of bare",
    "Python: copy_",
    "push GB/s",
    "of copy_",
    "alone: copy_ µs",
    "push µs",
)


def _row(label: str, seen: dict[str, Spread]) -> list[str]:
    return [
        label,
        seen["bare GB/s"].text(0),
        seen["push GB/s"].text(0),
        f"{100 * seen['of bare'].median:.1f} %",
        seen["copy_ GB/s"].text(0),
        seen["Python push GB/s"].text(0),
        f"{100 * seen['of copy_'].median:.1f} %",
        seen["one copy_ us"].text(0),
        seen["one push us"].text(0),
    ]


def _write(folder: Path, report: dict[str, Any], text: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"gpu-{torch.cuda.get_device_name(0)}-x{torch.cuda.device_count()}"
    path = folder / name.lower().replace(" ", "-")
    plain = json.dumps(report, indent=1, default=asdict)
    json_path, text_path = path.with_suffix(".json"), path.with_suffix(".md")
    json_path.write_text(plain + "\n")
    text_path.write_text(text)
    return [json_path, text_path]


def _measure(store: str, rounds: int) -> tuple[list[list[str]], dict[str, Any], dict[str, Any]]:
    rows: list[list[str]] = []
    speeds: dict[str, Any] = {}
    costs: dict[str, Any] = {}
    devices = [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]
    with Partner(consume, store) as partner:
        for kind, device, size in product(KINDS, devices, COUNTS):
            way = "" if kind is Producer else f" by {kind.transport}"
            with producer_of(kind, partner, store, device, size) as producer:
                label = f"{device} → {CONSUMER}{way}, {size_text(size)}"
                few = min(rounds, UCX_ROUNDS) if kind is UcxProducer else rounds
                speeds[label] = measure_size(producer, size, few)
                rows.append(_row(label, speeds[label]))
                if size == MIB:
                    costs[device + way] = measure_cost(producer)
    return rows, speeds, costs


def main() -> None:
    """Run all, write the results, print the table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds a size, all ways in each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and Markdown")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tapchannel-") as folder:
        rows, speeds, costs = _measure(f"file://{folder}", options.rounds)
    known = facts() | gpu_facts()
    cost_rows = [
        [f"{device}: {name}", cost.text(2), str(cost.count)]
        for device, named in costs.items()
        for name, cost in named.items()
    ]
    cost_heads = ("host µs", "median (10 %–90 %)", "calls")
    lines = [f"- {name}: {value}" for name, value in known.items()]
    text = "\n\n".join(
        (
            "# Bare copy against push to landed",
            "\n".join(lines),
            markdown(HEADS, rows),
            markdown(cost_heads, cost_rows),
            "How it is measured: `bench/README.md`.\n",
        )
    )
    written = _write(options.out, {"facts": known, "speeds": speeds, "host us": costs}, text)
    print(*(f"wrote {path}" for path in written), sep="\n")
    print(f"{table(cost_heads, cost_rows)}\n\n{table(HEADS, rows)}")


if __name__ == "__main__":
    main()
