"""make stress: many messages in any way, every one checked; then channels made and closed.

python -m stress [--messages 10000000] [--producers 8] [--seconds 1800] [--cycles 1000] [--seed 1]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

from stress.run import Orders, run, said
from support import machine, processes


def ordered() -> Orders:
    """Read the arguments."""
    usual = Orders()
    parser = argparse.ArgumentParser(prog="stress", description=__doc__)
    parser.add_argument("--messages", type=int, default=usual.messages, help="at least so many")
    parser.add_argument("--producers", type=int, default=usual.producers, help="at most so many")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="begin no leg later")
    parser.add_argument("--cycles", type=int, default=usual.cycles, help="on each wire")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--short", action="store_true", help="no pass of 262143 microbatches")
    given = parser.parse_args()
    lacks = machine.lacks("ucx")
    if lacks:
        print(f"only over shm: {lacks}")
    return Orders(
        seed=given.seed,
        messages=given.messages,
        producers=given.producers,
        seconds=given.seconds,
        cycles=given.cycles,
        wires=("shm",) if lacks else usual.wires,
        longest=not given.short,
    )


def main() -> int:
    """Run; an error's text names the leg."""
    processes.adopt_orphans()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        total = run(ordered(), f"file://{folder}")
    print(f"{time.monotonic() - began:.0f} s: {said(total)}: none stale, mixed, lost or doubled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
