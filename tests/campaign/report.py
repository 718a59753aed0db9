"""The campaign's table, for the terminal and for docs/campaign.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from campaign.cells import FAULTS, MOMENTS, VICTIMS, WIRES, Cell, cells_of
from campaign.run import Result

HEAD = """# Fault campaign

`make campaign` runs a consumer and a producer, each a process of its own, to a moment of their
channel's life, and lets a fault strike one of them. Both must end, within their deadline and 6 s,
in data, every word of it compared, or in an error that names the channel and the peer. Then the
survivor aborts or resets, the other side comes back, and a pass is carried. In the end each living
process holds no more descriptors, threads, pinned memory and GPU memory than before, and nothing
new lies in /dev/shm.

A cell gives the end of the side that was not struck; behind a stroke that of the one that was, if
it lived on. `data` may well be the end of a survivor that had all it needed.

| fault | what it is |
|---|---|
{faults}

| moment | the producer | the consumer |
|---|---|---|
{moments}

On `ucx` each side lives on a host of its own (network namespaces, TCP). A message that is held by
halves, lost, doubled, torn, or overtaken by its stamp: `tests/campaign/test_faulty_wire.py`.
"""


def table(wire: str, results: Sequence[Result]) -> list[str]:
    """Give the rows of a wire's table."""
    by_cell = {result.cell: result for result in results}
    lines = [f"| fault | of the | {' | '.join(MOMENTS)} |", "|---|---|" + "---|" * len(MOMENTS)]
    for fault in FAULTS:
        for victim in VICTIMS:
            cells = [Cell(wire, fault, victim, moment) for moment in MOMENTS]
            texts = [entry(cell, by_cell.get(cell)) for cell in cells]
            lines.append(f"| {fault} | {victim} | {' | '.join(texts)} |")
    return lines


def entry(cell: Cell, result: Result | None) -> str:
    """Give the text of a cell."""
    if cell.impossible:
        return "–"
    if result is None:
        return ""
    if result.wrong:
        return "**FAILED**"
    other = "consumer" if cell.victim == "producer" else "producer"
    ends = [result.ends[other]]
    if cell.victim in result.ends and cell.fault != "exception":
        ends.append(result.ends[cell.victim])
    return " / ".join(dict.fromkeys(ends))


def section(wire: str, results: Sequence[Result], facts: str) -> str:
    """Give a wire's section of the page."""
    impossible = {cell.impossible for cell in cells_of(wire) if cell.impossible}
    failed = sum(bool(result.wrong) for result in results)
    lines = [
        f"## {wire}",
        "",
        f"{len(results)} cells run, {failed} failed ({facts}).",
        "",
        *table(wire, results),
    ]
    lines += ["", *(f"–: {reason}." for reason in sorted(impossible))] if impossible else []
    return "\n".join(lines) + "\n"


def write(page: Path, sections: dict[str, str]) -> None:
    """Write the page anew; wires that were not run keep their sections."""
    kept = sections_of(page.read_text()) if page.exists() else {}
    faults = "\n".join(f"| {name} | {text} |" for name, text in FAULTS.items())
    moments = "\n".join(f"| {name} | {a} | {b} |" for name, (a, b) in MOMENTS.items())
    texts = {**kept, **sections}
    body = [texts[wire].rstrip() + "\n" for wire in WIRES if wire in texts]
    page.write_text("\n".join([HEAD.format(faults=faults, moments=moments), *body]))


def sections_of(text: str) -> dict[str, str]:
    """Give the sections of a page by wire."""
    parts = re.split(r"^(?=## )", text, flags=re.M)[1:]
    return {part.splitlines()[0].removeprefix("## "): part for part in parts}


def keep(file: Path, results: Sequence[Result]) -> None:
    """Add results to a file, a line each."""
    with file.open("a") as lines:
        lines.writelines(json.dumps(asdict(result)) + "\n" for result in results)


def kept(file: Path) -> list[Result]:
    """Read what keep() has written."""
    values = [json.loads(line) for line in file.read_text().splitlines()]
    return [Result(**{**value, "cell": Cell(**value["cell"])}) for value in values]
