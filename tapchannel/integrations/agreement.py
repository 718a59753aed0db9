"""What ranks tell each other before a session is built: JSON over a process group of the trainer.

torch's own way to gather objects pickles them; a report is plain data and need not be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, TypeAlias, cast

import torch
import torch.distributed as dist

from ..errors import ConfigError

Report: TypeAlias = Mapping[str, object]
MAX_REPORT: Final = 1 << 22


def gather(report: Report, group: dist.ProcessGroup | None) -> list[Report]:
    """Give every rank's report, in the order of the group's ranks; without a group, one's own.

    Blocks:     until every rank of the group has called it, to the group's own deadline.

    Raises:
        ConfigError: a report is no JSON object, or longer than 4 MiB.
    """
    if group is None:
        return [cast("Report", json.loads(json.dumps(report)))]
    text = json.dumps(report).encode("ascii")
    device = _device_of(group)
    size = dist.get_world_size(group)
    mine = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(lengths, mine, group=group)
    counts = [int(length.item()) for length in lengths]
    # Every rank sees the same counts: all of them raise, or none.
    if not all(0 < count <= MAX_REPORT for count in counts):
        raise ConfigError("a rank's report is too long", seen=f"{max(counts)} B", expected="4 MiB")
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    texts = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded, group=group)
    pairs = zip(texts, counts, strict=True)
    return [_parsed(bytes(cast("list[int]", said[:count].tolist()))) for said, count in pairs]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Give the device whose tensors the group carries."""
    backend = str(dist.get_backend(group))
    on_gpu = "nccl" in backend and "gloo" not in backend
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _parsed(text: bytes) -> Report:
    try:
        report = json.loads(text.decode("ascii"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            "a rank's report is no JSON",
            detail=str(error),
            next_step="call attach on all ranks of the group, in the same order as other "
            "collectives, with one version of tapchannel",
        ) from error
    if not isinstance(report, dict):
        raise ConfigError("a rank's report is no JSON object")
    return cast("Report", report)
