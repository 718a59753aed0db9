"""make campaign: run the cells that can be run here, print their table, write docs/campaign.md.

python -m campaign [--wire shm] [--fault kill] [--moment put] [--short] [--no-page]
python -m campaign --results FILE --fault kill  # a part, kept; on a GPU it wants to be alone
python -m campaign --page-of FILE FILE ...         # the page, of parts that make a whole
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

from campaign.cells import FAULTS, MOMENTS, SHORT, VICTIMS, WIRES, Cell, cells_of
from campaign.report import keep, kept, section, write
from campaign.run import Result, lab, run
from support import machine, processes
from support.hosts import refuse_without_tools

PAGE = Path(__file__).parents[2] / "docs" / "campaign.md"


def lacks(wire: str) -> str | None:
    """Say why a wire's cells cannot be run here."""
    if wire == "cuda_ipc":  # asked elsewhere: the driver must not start in what is forked
        ask = "from support import machine; print(machine.lacks('gpu') or '', end='')"
        answer = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, check=True)
        return answer.stdout.decode() or None
    if wire == "shm":
        return None
    try:
        refuse_without_tools()
    except RuntimeError as error:
        return str(error)
    return machine.lacks("ucx")


def wanted(arguments: argparse.Namespace) -> list[Cell]:
    """Give the cells to run."""
    cells = SHORT if arguments.short else [cell for wire in WIRES for cell in cells_of(wire)]
    return [
        cell
        for cell in cells
        if not cell.impossible
        and all(
            getattr(arguments, name) in (None, getattr(cell, name))
            for name in ("wire", "fault", "victim", "moment")
        )
    ]


def run_all(wire: str, cells: list[Cell]) -> list[Result]:
    """Run the cells of a wire, and tell of each."""
    results: list[Result] = []
    with lab(wire) as place:
        for cell in cells:
            result = run(cell, place)
            ends = ", ".join(f"{side}: {end}" for side, end in result.ends.items())
            verdict = f"FAILED: {'; '.join(result.wrong)}" if result.wrong else "ok"
            print(f"{cell} ({result.seconds:.1f} s): {ends}: {verdict}", flush=True)
            results.append(result)
    return results


def facts(results: list[Result]) -> str:
    """Say how long it took, and on what."""
    seconds = sum(result.seconds for result in results)
    return f"{seconds / 60:.1f} minutes on {platform.machine()}"


def write_page_of(files: list[Path]) -> int:
    """Write the wires' sections of kept results; refuse a wire of which cells are missing."""
    results = [result for file in files for result in kept(file)]
    sections: dict[str, str] = {}
    for wire in dict.fromkeys(result.cell.wire for result in results):
        mine = {result.cell: result for result in results if result.cell.wire == wire}
        missing = [str(cell) for cell in cells_of(wire) if not cell.impossible and cell not in mine]
        if missing:
            sys.exit(f"no page: {len(missing)} cells are missing, such as {missing[0]}")
        sections[wire] = section(wire, list(mine.values()), facts(list(mine.values())))
    write(PAGE, sections)
    return int(any(result.wrong for result in results))


def parsed() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--wire", choices=WIRES)
    parser.add_argument("--fault", choices=list(FAULTS))
    parser.add_argument("--victim", choices=VICTIMS)
    parser.add_argument("--moment", choices=list(MOMENTS))
    parser.add_argument("--short", action="store_true", help="a few cells of each kind")
    parser.add_argument("--no-page", action="store_true", help="leave docs/campaign.md alone")
    parser.add_argument("--results", type=Path, help="add the cells' results to this file")
    parser.add_argument("--page-of", type=Path, nargs="+", help="run nothing: write the page")
    return parser.parse_args()


def main() -> int:
    """Run; return 0 if no cell has failed."""
    arguments = parsed()
    if arguments.page_of:
        return write_page_of(arguments.page_of)
    processes.adopt_orphans()
    sections: dict[str, str] = {}
    failed = 0
    for wire in WIRES:
        cells = [cell for cell in wanted(arguments) if cell.wire == wire]
        reason = lacks(wire)
        if not cells or reason:
            print(f"{wire}: not run ({reason or 'not asked for'})")
            continue
        results = run_all(wire, cells)
        failed += sum(bool(result.wrong) for result in results)
        if arguments.results:
            keep(arguments.results, results)
        sections[wire] = section(wire, results, facts(results))
        print(sections[wire])
    whole = not (arguments.short or arguments.fault or arguments.victim or arguments.moment)
    if whole and not arguments.no_page:
        write(PAGE, sections)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
