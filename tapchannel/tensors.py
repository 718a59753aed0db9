"""What a push needs to know of a tensor, and the dtypes of torch by the plan's names."""

from __future__ import annotations

import ctypes
import zlib
from typing import Final, NamedTuple

import torch

from .dtypes import DTYPES
from .errors import UsageError
from .plan import Cell

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
_UNCHECKED: Final = -1


class Payload(NamedTuple):
    """Rows in memory, and the object that keeps them alive."""

    owner: torch.Tensor
    address: int
    rows: int
    pitch: int
    version: int


def adopt(value: object, stream_device: torch.device | None) -> torch.Tensor:
    """Take a tensor, or make one of an object with DLPack or ``__cuda_array_interface__``.

    A foreign object has no count of in-place changes, so it is cloned, on the current stream.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        if hasattr(value, "__dlpack__"):
            return torch.from_dlpack(value).clone()  # pyright: ignore[reportPrivateImportUsage]
        if hasattr(value, "__cuda_array_interface__") or hasattr(value, "__array_interface__"):
            return torch.as_tensor(value, device=stream_device).clone()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError("object cannot be read as a tensor", detail=str(error)) from error
    raise UsageError(
        "object to push is no tensor",
        seen=type(value).__name__,
        expected="a torch tensor, or an object with __dlpack__ or __cuda_array_interface__",
    )


def rows_of(tensor: torch.Tensor, cell: Cell) -> Payload:
    """Give the tensor's rows as the wire can read them, copying only what it cannot.

    The last dimension is the row; the others are flattened in order. A tensor whose rows are
    contiguous and evenly spaced is read in place; any other is made contiguous, on the current
    stream.

    Raises:
        UsageError: its last dimension is not the cell's width.
    """
    shape = tensor.shape
    if not shape or shape[-1] != cell.width:
        raise UsageError(
            "tensor has the wrong width",
            tap=cell.tap.name,
            seen=f"shape {tuple(shape)}",
            expected=f"last dimension {cell.width}",
        )
    if tensor.is_inference():
        flat = tensor.clone().view(-1, cell.width)  # no count of in-place changes: take the value now
    elif len(shape) != 2:
        try:
            flat = tensor.view(-1, cell.width) if tensor.numel() else tensor.reshape(-1, cell.width)
        except RuntimeError:  # no view of these strides: a copy, on the caller's stream
            flat = tensor.reshape(-1, cell.width)
    else:
        flat = tensor
    rows = flat.shape[0]
    row_stride, element_stride = flat.stride()
    pitch = row_stride * flat.element_size()
    even = (element_stride == 1 or cell.width == 1) and (rows <= 1 or pitch >= cell.row_bytes)
    if not even or tensor.is_conj() or tensor.is_neg():
        flat = flat.resolve_conj().resolve_neg().contiguous()
        pitch = cell.row_bytes
    if rows <= 1:
        pitch = cell.row_bytes
    # A tensor made here is ours alone; one that shares the caller's storage shares its count too.
    version = _UNCHECKED if flat.data_ptr() != tensor.data_ptr() else tensor._version  # pyright: ignore[reportPrivateUsage]
    owner = tensor if version != _UNCHECKED else flat
    return Payload(owner, flat.data_ptr(), rows, pitch, version)


def checksum(tensor: torch.Tensor) -> int:
    """Give the CRC-32 of a tensor's bytes in row order. Copies to the host: for TAPCHANNEL_CHECK."""
    local = tensor.detach().contiguous().cpu()
    return zlib.crc32(ctypes.string_at(local.data_ptr(), local.nbytes)) if local.nbytes else 0
