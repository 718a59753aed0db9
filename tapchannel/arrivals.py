"""What came for one key: the announces of each tap's shares, checked to make one whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from . import _native
from .errors import ChecksumError, ProtocolError
from .keys import Key
from .plan import Cell, Lane, Tap, TapPlan
from .tensors import checksum

_Announce = tuple[int, int, tuple[int, ...], bool, int | None]
_Share = tuple[Lane, Cell]


@dataclass(frozen=True, slots=True)
class TapInfo:
    """What came for one tap: rows, shape as pushed, who pushed it, how it crossed."""

    rows: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    transport: str
    dropped: bool

    @property
    def rank(self) -> int:
        """The producer's rank; of several row or column shares, the first's."""
        return self.ranks[0]


class Shares:
    """Which lane and cell bring each tap's shares; the same for every slot of a mailbox."""

    def __init__(
        self, plan: TapPlan, lanes: Sequence[Lane], transport_of: Callable[[int], str]
    ) -> None:
        self.plan = plan
        self.transport_of = transport_of
        self.names = tuple(
            dict.fromkeys([*(g.name for g in plan.groups), *(t.name for t in plan.taps)])
        )
        self.of: Mapping[str, Sequence[_Share]] = {
            tap.name: sorted(
                ((lane, cell) for lane in lanes for cell in lane.cells if cell.tap is tap),
                key=lambda share: (share[1].shard.rows, share[1].shard.columns),
            )
            for tap in plan.taps
        }


def arrived(core: _native.Mailbox, shares: Shares, key: Key, tap: Tap) -> TapInfo:
    """Give what came for a tap of a landed key.

    Raises:
        ProtocolError: its row or column shares do not make one whole.
    """
    said = [_announce(core, share, key) for share in shares.of[tap.name]]
    if _is_whole(said):
        rows, _, shape, dropped, _ = said[0]
        lane = shares.of[tap.name][0][0]
        return TapInfo(rows, shape, (lane.rank,), shares.transport_of(lane.index), dropped)
    rows = _tiled(shares, key, tap, said)
    ranks = tuple(dict.fromkeys(lane.rank for lane, _ in shares.of[tap.name]))
    dropped = any(announce[3] for announce in said)
    wires = dict.fromkeys(shares.transport_of(lane.index) for lane, _ in shares.of[tap.name])
    return TapInfo(rows, (rows, tap.width), ranks, ", ".join(wires), dropped)


def rows_of_tap(core: _native.Mailbox, shares: Shares, key: Key, tap: Tap) -> int:
    """Give the rows alone of what came for a tap of a landed key.

    Raises:
        ProtocolError: its row or column shares do not make one whole.
    """
    said = [_announce(core, share, key) for share in shares.of[tap.name]]
    return said[0][0] if _is_whole(said) else _tiled(shares, key, tap, said)


def _is_whole(said: Sequence[_Announce]) -> bool:
    return len(said) == 1 and said[0][1] == 0


def verify(core: _native.Mailbox, shares: Shares, key: Key, tap: Tap, whole: torch.Tensor) -> None:
    """Compare the bytes of each of a tap's cells with the checksum that its producer announced.

    Raises:
        ChecksumError: the bytes in the slot are not the bytes that were pushed.
    """
    for lane, cell in shares.of[tap.name]:
        rows, begin, _, _, expected = _announce(core, (lane, cell), key)
        seen = checksum(whole[begin : begin + rows, cell.column : cell.column + cell.width])
        if expected is not None and seen != expected:
            raise ChecksumError(
                "bytes in the slot are not those that were pushed",
                key=key,
                tap=tap.name,
                lane=lane.index,
                rank=lane.rank,
                seen=f"{seen:08x}",
                expected=f"{expected:08x}",
            )


def _tiled(shares: Shares, key: Key, tap: Tap, said: Sequence[_Announce]) -> int:
    """Give the tap's rows once its row shares lie side by side without gap or overlap."""
    ends: dict[int, int] = {}
    pairs = zip(said, shares.of[tap.name], strict=True)
    placed = [(begin, rows, cell) for (rows, begin, *_), (_, cell) in pairs]
    for begin, rows, cell in sorted(placed, key=lambda place: place[:2]):
        column = cell.shard.columns[0]
        if begin != ends.get(column, 0):
            raise ProtocolError(
                "row shares of a tap do not lie side by side",
                key=key,
                tap=tap.name,
                seen=", ".join(f"[{first}, {first + count})" for first, count, _ in placed),
                expected="shares that meet, from row 0 on",
                next_step="push equal shares, or name each push's row_begin",
            )
        ends[column] = begin + rows
    if len(set(ends.values())) > 1:
        raise ProtocolError(
            "column shares of a tap have different rows", key=key, tap=tap.name, seen=ends
        )
    return max(ends.values())


def _announce(core: _native.Mailbox, share: _Share, key: Key) -> _Announce:
    lane, cell = share
    facts = core.announce(lane.index, cell.index, key.stamp())
    if facts is None:
        raise ProtocolError("announce of a landed cell is gone", key=key, rank=lane.rank)
    return facts
