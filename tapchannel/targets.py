"""Where a push goes: the cell of each tap of a lane, and the errors of what does not fit it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from .errors import ConfigError, UsageError
from .keys import MAX_MICROBATCHES, checked_int
from .plan import MAX_ROWS, Cell
from .tensors import TORCH_DTYPES

# What a push looks up: the cell's index, dtype, width, row_bytes, and which row share it is.
Target: TypeAlias = "tuple[int, torch.dtype, int, int, int]"


def targets_of(cells: Sequence[Cell]) -> dict[str, Target]:
    """Index the cells by tap.

    Raises:
        UsageError: the lane has two shares of one tap, which a push could not tell apart.
    """
    targets: dict[str, Target] = {}
    for cell in cells:
        if cell.tap.name in targets:
            raise UsageError(
                "a rank may push one share of a tap",
                tap=cell.tap.name,
                seen="several shares in the mailbox's sources",
                next_step="give each share to a rank of its own",
            )
        dtype = TORCH_DTYPES[cell.tap.dtype.name]
        targets[cell.tap.name] = (cell.index, dtype, cell.width, cell.row_bytes, cell.shard.rows[0])
    return targets


def not_mine(tap: object, mine: Iterable[str]) -> UsageError:
    """Build the error for a tap that is not this lane's."""
    return UsageError(
        f"push: tap {tap!r} is not this rank's",
        expected=", ".join(repr(name) for name in mine),
        next_step="name it in the mailbox's sources for this rank",
    )


def bad_argument(
    microbatch: object, tap: object, rows: object, row_begin: object, mine: Iterable[str]
) -> UsageError | ConfigError | None:
    """Build the error for the argument that is not of its type, or out of all range."""
    if not isinstance(tap, str):
        return not_mine(tap, mine)
    try:
        checked_int("microbatch", microbatch, 0, MAX_MICROBATCHES - 1)
        for name, value in (("rows", rows), ("row_begin", row_begin)):
            if value is not None:
                checked_int(name, value, 0, MAX_ROWS)
    except ConfigError as error:
        return error
    return None


def named(
    error: UsageError | ConfigError, channel: str, rank: int, tap: object
) -> UsageError | ConfigError:
    """Say in an error of a push where it was."""
    error.channel, error.rank = channel, rank
    error.tap = tap if isinstance(tap, str) else None
    return error


def wrong_kind(
    tap: str, dtype: torch.dtype, device: torch.device, source: torch.Tensor
) -> UsageError:
    """Build the error for a tensor of another dtype, or on another device."""
    return UsageError(
        "push: tensor is of the wrong dtype or on the wrong device",
        tap=tap,
        seen=_kind_of(source),
        expected=f"{str(dtype).removeprefix('torch.')} on {device}",
        next_step="convert it before the push, or change the plan's dtype or the outbox's device=",
    )


def without_memory(tap: str, source: torch.Tensor) -> UsageError:
    """Build the error for a tensor that has rows, but not at any address."""
    return UsageError(
        "push: tensor has no memory of its own",
        tap=tap,
        seen=type(source).__name__,
        expected="a tensor that holds its rows",
        next_step="push what it wraps; of a DTensor, to_local()",
    )


def odd(source: torch.Tensor) -> bool:
    """Tell whether a tensor has no rows in memory that could be read: sparse, or nested."""
    return source.layout is not torch.strided or source.is_nested


def _kind_of(source: torch.Tensor) -> str:
    layout = "" if source.layout is torch.strided else f" ({source.layout})"
    return f"{str(source.dtype).removeprefix('torch.')} on {source.device}{layout}"


def first_rows(source: torch.Tensor, rows: int) -> torch.Tensor:
    """Give the first rows of a tensor, its leading dimensions flattened.

    Raises:
        UsageError: it has not that many.
    """
    if source.dim() == 0:
        return source  # no rows to choose from; its width is refused like any other
    flat = source.reshape(-1, source.shape[-1])
    checked_int("rows", rows, -(1 << 63), MAX_ROWS)
    if not 0 <= rows <= flat.shape[0]:
        raise UsageError(
            "push: rows is more than the tensor has", seen=rows, expected=f"0 to {flat.shape[0]}"
        )
    return flat[:rows]


def current_stream(ordinal: int | None) -> int:
    """Give the driver's handle of the current stream; 0 in host memory."""
    if ordinal is None:
        return 0
    # torch.cuda.current_stream() builds an object; this is what it asks, at a third of the cost.
    return torch._C._cuda_getCurrentRawStream(ordinal)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownVariableType]
