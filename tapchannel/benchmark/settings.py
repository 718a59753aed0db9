"""What the user may choose of a run, checked."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from ..errors import ConfigError
from .traffic import KIB, MIB, Place

_UNITS: Final = {"": 1, "K": KIB, "M": MIB, "G": 1024 * MIB}
DEFAULT_OUT: Final = Path("bench-results")


@dataclass(frozen=True)
class Options:
    """The options of one run. What is None is each scenario's own choice."""

    scenarios: Sequence[str]
    place: Place
    quick: bool
    peers: Sequence[str] | None
    extra: Path | None
    rounds: int | None
    sizes: Sequence[int] | None
    producers: Sequence[int] | None
    hidden: Sequence[int] | None
    rows: Sequence[int] | None
    out: Path
    plots: bool

    def rounds_of(self, usual: int) -> int:
        """Give the rounds of a case."""
        return self.rounds or (2 if self.quick else usual)

    def count_of(self, size: int, depth: int, most: int = 1024) -> int:
        """Give the messages of a round: enough to be timed, few enough to take turns.

        Four times as many as there are slots at least, so that credit is in the figure.
        """
        budget = (2048 if self.place.on_gpu else 64) * MIB
        budget = budget // 16 if self.quick else budget
        return max(4 * depth, min(most // 16 if self.quick else most, budget // size))


def add_options(parser: argparse.ArgumentParser, scenarios: Mapping[str, str]) -> None:
    """Add the options of a run."""
    parser.add_argument(
        "scenarios", nargs="+", metavar="SCENARIO", choices=["all", *scenarios], help="see below"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--gpus", type=int, metavar="N", help="use this many GPUs (all)")
    parser.add_argument("--quick", action="store_true", help="few and small messages: to try it")
    parser.add_argument("--peers", metavar="A,B", help="only these; tapchannel is one of them")
    parser.add_argument(
        "--extra-peers", type=Path, metavar="FOLDER", help="more peers (bench/peers of the tree)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds a case, all peers in each")
    parser.add_argument("--sizes", metavar="4K,1M", help="message sizes")
    parser.add_argument("--producers", metavar="1,2,4", help="numbers of producers")
    parser.add_argument("--hidden", metavar="4096,7168", help="widths of a tap (fan-in, pipeline)")
    parser.add_argument("--rows", metavar="512,8192", help="rows of a tap (fan-in, pipeline)")
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        metavar="FOLDER",
        help=f"where runs.jsonl and the plots go ({DEFAULT_OUT})",
    )
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="draw none")


def options_of(given: argparse.Namespace, scenarios: Mapping[str, str]) -> Options:
    """Check the options.

    Raises:
        ConfigError: one cannot work.
    """
    wanted = list(scenarios) if "all" in given.scenarios else list(dict.fromkeys(given.scenarios))
    if given.rounds is not None and given.rounds < 1:
        raise ConfigError("--rounds is too small", seen=given.rounds, expected="1 or more")
    return Options(
        scenarios=wanted,
        place=_place(given.device, given.gpus),
        quick=given.quick,
        peers=None if given.peers is None else given.peers.split(","),
        extra=given.extra_peers,
        rounds=given.rounds,
        sizes=_sizes(given.sizes),
        producers=_numbers("--producers", given.producers, 64),
        hidden=_numbers("--hidden", given.hidden, 1 << 16, 8),
        rows=_numbers("--rows", given.rows, 1 << 20),
        out=given.out,
        plots=given.plots,
    )


def with_peers(options: Options, known: Mapping[str, object], extra: Path | None) -> Options:
    """Check the peers' names.

    Raises:
        ConfigError: one is unknown.
    """
    for name in options.peers or ():
        if name not in known:
            raise ConfigError(
                "--peers names a peer that there is not", seen=name, expected=", ".join(known)
            )
    return replace(options, extra=extra)


def _place(device: str, gpus: int | None) -> Place:
    there = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not there:
        raise ConfigError(
            "--device cuda cannot be used",
            cause=f"torch {torch.__version__} sees no GPU here",
            next_step="run with --device cpu",
        )
    if gpus is not None and not 1 <= gpus <= max(1, there):
        raise ConfigError("--gpus cannot be had", seen=gpus, expected=f"1 to {there}")
    return Place("cuda", gpus or there) if there else Place("cpu")


def _sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    sizes: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})([KMG]?)", word)
        size = int(found[1]) * _UNITS[found[2]] if found else 0
        if not found or size % (4 * KIB) or not 0 < size <= 4096 * MIB:
            raise ConfigError(
                "--sizes has an impossible size", seen=word, expected="multiples of 4K, up to 4G"
            )
        sizes.append(size)
    return sizes


def _numbers(name: str, text: str | None, most: int, step: int = 1) -> list[int] | None:
    if text is None:
        return None
    words = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= most for word in words):
        raise ConfigError(f"{name} is no list of numbers", seen=text, expected=f"1 to {most}")
    numbers = [int(word) for word in words]
    if any(number % step for number in numbers):
        raise ConfigError(f"{name} is not a multiple of {step}", seen=text)
    return numbers
