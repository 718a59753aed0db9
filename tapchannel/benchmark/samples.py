"""Medians with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of some samples, and the tenth and ninetieth of a hundred."""

    median: float
    low: float
    high: float

    def text(self) -> str:
        """Print it."""
        digits = digits_of(self.median)
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def digits_of(value: float) -> int:
    """Give the decimals that leave about three figures."""
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0


def spread_of(samples: Sequence[float]) -> Spread:
    """Reduce the samples."""
    return Spread(statistics.median(samples), quantile(samples, 0.1), quantile(samples, 0.9))


def quantile(samples: Sequence[float], share: float) -> float:
    """Give the sample below which this share of them lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratios(whole: Sequence[float], part: Sequence[float]) -> list[float]:
    """Compare what was measured in turns, each sample with its neighbour: the machine drifts."""
    return [one / other for one, other in zip(part, whole, strict=False) if other]
