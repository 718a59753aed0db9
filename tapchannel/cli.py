"""The command line: ``tapchannel doctor``, ``demo``, ``bench`` and ``inspect``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

# Each command brings its own parser and is imported only when it runs: `inspect` must work, and
# `--help` must answer, without waiting for torch.


def _doctor(arguments: Sequence[str]) -> int:
    from .doctor import main

    return main(arguments)


def _demo(arguments: Sequence[str]) -> int:
    from .demo import main

    return main(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from .benchmark import main

    return main(arguments)


def _inspect(arguments: Sequence[str]) -> int:
    from .telemetry import inspect_main

    return inspect_main(arguments)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "doctor": (_doctor, "say what works on this machine, and test it"),
    "demo": (_demo, "train a draft on the taps of a real pipeline, every tap verified"),
    "bench": (_bench, "measure taps beside the other ways to move the same bytes"),
    "inspect": (_inspect, "read the flight recorder of a channel from outside its processes"),
}


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<9}{summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tapchannel",
        description="Carry hidden states from pipeline stages to a draft stage.",
        epilog=f"commands:\n{commands}\n\ntapchannel COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version("tapchannel"))
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 where there is no such command."""
    given = list(sys.argv[1:] if argv is None else argv)
    chosen: str = _parser().parse_args(given[:1]).command
    run, _ = COMMANDS[chosen]
    return run(given[1:])


if __name__ == "__main__":
    raise SystemExit(main())
