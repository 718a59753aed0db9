"""What the benches share: a second process, medians with their spread, tables, facts."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import platform
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import tapchannel
from tapchannel.benchmark.facts import asked, cpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
MIB = 1 << 20
ANSWER_LIMIT = 120.0  # seconds for any one answer of the other process


# ---- the other process


class Partner:
    """A spawned process that runs ``function(line, *args)``; its errors are raised here."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._line, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(theirs, function, args), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, message: object) -> None:
        """Send it something."""
        self._line.send(message)

    def hear(self) -> Any:
        """Wait for its next message.

        Raises:
            RuntimeError: it failed, ended, or said nothing in time.
        """
        try:
            if not self._line.poll(ANSWER_LIMIT):
                raise RuntimeError(f"the other process said nothing in {ANSWER_LIMIT:.0f} s")
            kind, value = self._line.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError("the other process ended") from None
        if kind == "error":
            raise RuntimeError(f"the other process failed:\n{value}")
        return value

    def ask(self, message: object) -> Any:
        """Send it something and wait for its answer."""
        self.tell(message)
        return self.hear()

    def __enter__(self) -> Partner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self.tell(None)
        self._process.join(20.0 if error is None else 1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Line:
    """The partner's own end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, value: object = None) -> None:
        """Answer."""
        self._connection.send(("value", value))

    def listen(self) -> Any:
        """Wait for the next question; None is the end."""
        if not self._connection.poll(ANSWER_LIMIT):
            return None
        return self._connection.recv()


def _run(connection: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        function(Line(connection), *args)
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("error", traceback.format_exc()))
        raise


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


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table, the first column to the left."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *rows])


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


def gpu_facts() -> dict[str, str]:
    """Tell the same of the GPUs."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpus": ", ".join(names),
        "driver": asked("nvidia-smi", *query).partition("\n")[0],
        "cuda": f"{torch.version.cuda} (torch)",
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
    }
