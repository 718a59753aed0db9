"""What the bench of two hosts prints: medians with their spread, tables, facts."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import tapchannel
from tapchannel.benchmark.facts import asked, cpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
MIB = 1 << 20


# ---- numbers


@dataclass(frozen=True)
class Spread:
    """The median of some samples, and the tenth and ninetieth of a hundred."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int = 1) -> str:
        """Print it."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def spread_of(samples: Sequence[float]) -> Spread:
    """Reduce the samples."""
    return Spread(
        statistics.median(samples), quantile(samples, 0.1), quantile(samples, 0.9), len(samples)
    )


def quantile(samples: Sequence[float], share: float) -> float:
    """Give the sample below which this share of them lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio_of(whole: Sequence[float], part: Sequence[float]) -> Spread:
    """Compare what was measured in turns, each sample with its neighbour: the machine drifts."""
    return spread_of([one / other for one, other in zip(whole, part, strict=True)])


def size_text(size: int) -> str:
    """Print a number of bytes that is a whole number of KiB."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


# ---- tables and facts


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out an aligned table, the first column to the left."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def facts() -> dict[str, str]:
    """Tell what was measured, on what, and by which command; nothing that names the machine."""
    return {
        "commit": os.environ.get("TAPCHANNEL_COMMIT")
        or asked("git", "rev-parse", "HEAD", folder=ROOT),
        "command": f"python {' '.join([f'bench/{Path(sys.argv[0]).name}', *sys.argv[1:]])}",
        "date": datetime.date.today().isoformat(),
        "tapchannel": tapchannel.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "cpu": f"{cpu()}, {os.cpu_count()} cores",
    }
