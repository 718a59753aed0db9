"""What is moved: where its two ends are, which taps make a message, how many slots there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..plan import TapPlan

KIB: Final = 1 << 10
MIB: Final = 1 << 20
DTYPE: Final = "bfloat16"
ITEM: Final = 2  # bytes of it
_STREAM_WIDTH: Final = 2048  # rows of 4 KiB: every size is a whole number of them
# A larger message has fewer slots, so that all peers fit beside each other.
_ROOMY: Final = {"cpu": 64 * MIB, "cuda": 512 * MIB}


@dataclass(frozen=True)
class Place:
    """The devices of the two ends."""

    device: str
    gpus: int = 0

    @property
    def on_gpu(self) -> bool:
        """Tell whether the taps are on GPUs."""
        return self.device == "cuda"

    @property
    def consumer(self) -> str:
        """Name the consumer's device."""
        return "cuda:0" if self.on_gpu else "cpu"

    def producer(self, rank: int) -> str:
        """Name a producer's device: a GPU of its own where there is one, else the consumer's."""
        if not self.on_gpu:
            return "cpu"
        return f"cuda:{1 + rank % (self.gpus - 1)}" if self.gpus > 1 else "cuda:0"

    def text(self) -> str:
        """Say it."""
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.on_gpu else "CPU"


@dataclass(frozen=True)
class TapShape:
    """One tap of a message, and the producer that pushes it."""

    name: str
    rank: int
    rows: int
    width: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.rows * self.width * ITEM


@dataclass(frozen=True)
class Traffic:
    """Messages of one shape. A message is a microbatch: every tap of it, from all producers."""

    place: Place
    taps: tuple[TapShape, ...]
    groups: Mapping[str, Sequence[str]]
    depth: int
    wait: str = "host"

    @property
    def producers(self) -> int:
        """Count the producers."""
        return 1 + max(tap.rank for tap in self.taps)

    @property
    def message_bytes(self) -> int:
        """Give the bytes of one message."""
        return sum(tap.bytes for tap in self.taps)

    def of(self, rank: int) -> list[TapShape]:
        """Give a producer's taps."""
        return [tap for tap in self.taps if tap.rank == rank]

    def plan(self) -> TapPlan:
        """Give the same as a tap plan."""
        widths = {tap.name: tap.width for tap in self.taps}
        rows = max(tap.rows for tap in self.taps)
        return TapPlan(self.groups, width=widths, dtype=DTYPE, max_rows=rows)

    def sources(self) -> dict[int, list[str]]:
        """Say who pushes what."""
        return {rank: [tap.name for tap in self.of(rank)] for rank in range(self.producers)}


def stream_traffic(place: Place, size: int, depth: int = 4, producers: int = 1) -> Traffic:
    """Give messages of one tap of ``size`` bytes from each producer."""
    depth = depth if size <= _ROOMY[place.device] else min(depth, 2)
    rows = size // (_STREAM_WIDTH * ITEM)
    taps = tuple(TapShape(f"state{rank}", rank, rows, _STREAM_WIDTH) for rank in range(producers))
    return Traffic(place, taps, {tap.name: [tap.name] for tap in taps}, depth)


PLANS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    # What EAGLE-3 reads: three layers side by side, and the embedding.
    "eagle3": {"features": ("low", "middle", "high"), "embedding": ("embedding",)},
    # A draft of blocks: five layers side by side.
    "block5": {"features": ("layer1", "layer2", "layer3", "layer4", "layer5")},
}


def plan_traffic(
    place: Place, plan: str, hidden: int, rows: int, producers: int, wait: str = "host"
) -> Traffic:
    """Give a draft's real taps, dealt out to the producers in the order of their stages."""
    groups = PLANS[plan]
    names = [name for group in reversed(groups.values()) for name in group]  # embedding first
    producers = min(producers, len(names))
    taps = tuple(
        TapShape(name, number * producers // len(names), rows, hidden)
        for number, name in enumerate(names)
    )
    depth = 4 if sum(tap.bytes for tap in taps) <= 4 * _ROOMY["cpu"] else 2
    return Traffic(place, taps, groups, depth, wait)


def size_text(size: int) -> str:
    """Print a number of bytes that is a whole number of KiB."""
    return f"{size // MIB} MiB" if size >= MIB and size % MIB == 0 else f"{size // KIB} KiB"
