"""On what a run was made, and by which command; nothing that names the machine."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from .. import __version__
from .traffic import Place

_TREE: Final = Path(__file__).parents[2]
_OWN_PATHS: Final = ("--out", "--extra-peers")


def facts(arguments: Sequence[str], place: Place) -> dict[str, str]:
    """Gather what a reader has to know of a run."""
    known = {
        "commit": os.environ.get("TAPCHANNEL_COMMIT") or _commit(),
        "command": " ".join(["tapchannel bench", *_without_paths(arguments)]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tapchannel": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "kernel": platform.release(),
        "cpu": f"{cpu()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
    }
    return known | (_gpus(place) if place.on_gpu else {})


def _gpus(place: Place) -> dict[str, str]:
    names = [torch.cuda.get_device_name(index) for index in range(place.gpus)]
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpus": ", ".join(names),
        "driver": asked(*query).partition("\n")[0],
        "cuda": f"{torch.version.cuda} (torch)",
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
    }


def _without_paths(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in arguments:
        if not skip and not word.startswith(tuple(f"{name}=" for name in _OWN_PATHS)):
            skip = word in _OWN_PATHS
            if not skip:
                kept.append(word)
        else:
            skip = False
    return kept


def _commit() -> str:
    return asked("git", "rev-parse", "HEAD") if (_TREE / ".git").exists() else "unknown"


def asked(*command: str, folder: Path = _TREE) -> str:
    """Give what a command answers, "unknown" if it cannot."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def cpu() -> str:
    """Name the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
