"""What a push needs to know of a tensor, and the dtypes of torch by the plan's names."""

from __future__ import annotations

import ctypes
import zlib
from typing import Final, TypeAlias

import torch

from .dtypes import DTYPES
from .errors import UsageError

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in DTYPES
    if isinstance(getattr(torch, name, None), torch.dtype)
}
_UNCHECKED: Final = -1


# Owner (keeps the rows alive), address, rows, pitch in bytes, version (-1: nothing to check).
Payload: TypeAlias = "tuple[torch.Tensor, int, int, int, int]"


def adopt(value: object, device: torch.device) -> torch.Tensor:
    """Make a tensor of an object with DLPack or ``__cuda_array_interface__``.

    A foreign object has no count of in-place changes, so it is cloned, on the current stream.

    Raises:
        UsageError: it is none of these.
    """
    try:
        if hasattr(value, "__dlpack__"):
            return torch.from_dlpack(value).clone()  # pyright: ignore[reportPrivateImportUsage]
        if hasattr(value, "__cuda_array_interface__"):
            _order_behind(value, device)
            return torch.as_tensor(value, device=device).clone()
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError("object cannot be read as a tensor", detail=str(error)) from error
    raise UsageError(
        "object to push is no tensor",
        seen=type(value).__name__,
        expected="a torch tensor, or an object with __dlpack__ or __cuda_array_interface__",
    )


def _order_behind(value: object, device: torch.device) -> None:
    """Let the current stream wait for the stream that the object says it is written on."""
    interface: object = getattr(value, "__cuda_array_interface__")  # noqa: B009
    stream = interface.get("stream") if isinstance(interface, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(stream, int) and device.type == "cuda":
        current = torch.cuda.current_stream(device)
        current.wait_stream(torch.cuda.ExternalStream(stream, device))


def rows_of(tensor: torch.Tensor, width: int, row_bytes: int) -> Payload:
    """Give the tensor's rows as the wire can read them, copying only what it cannot.

    The last dimension is the row; the others are flattened in order. A tensor whose rows are
    contiguous and evenly spaced is read in place; any other is made contiguous, on the current
    stream. So is an inference tensor, which has no count of in-place changes.

    Raises:
        UsageError: its last dimension is not the cell's width.
    """
    shape = tensor.shape
    if len(shape) == 2 and shape[1] == width:
        row_stride, element_stride = tensor.stride()
        pitch = row_stride * (row_bytes // width)
        spaced = (element_stride == 1 or width == 1) and (pitch >= row_bytes or shape[0] <= 1)
        if spaced and not (tensor.is_inference() or tensor.is_neg() or tensor.is_conj()):
            return tensor, tensor.data_ptr(), shape[0], max(pitch, row_bytes), tensor._version  # pyright: ignore[reportPrivateUsage]
    return _any_rows(tensor, width, row_bytes)


def _any_rows(tensor: torch.Tensor, width: int, row_bytes: int) -> Payload:
    """Do the same for any shape and strides."""
    if not tensor.shape or tensor.shape[-1] != width:
        raise UsageError(
            "tensor has the wrong width",
            seen=f"shape {tuple(tensor.shape)}",
            expected=f"last dimension {width}",
        )
    rows = tensor.numel() // width
    if tensor.dim() != 2 and not tensor.is_inference():
        try:
            view = tensor.detach().view(rows, width)
        except RuntimeError:  # no view of these strides
            view = None
        if view is not None and view.stride(1) == 1:
            _, address, rows, pitch, _ = rows_of(view, width, row_bytes)
            if address == tensor.data_ptr():  # still the caller's bytes, and so the caller's count
                return tensor, address, rows, pitch, tensor._version  # pyright: ignore[reportPrivateUsage]
    copy = tensor.detach().reshape(rows, width).clone(memory_format=torch.contiguous_format)
    copy = copy.resolve_conj().resolve_neg()
    return copy, copy.data_ptr(), rows, row_bytes, _UNCHECKED


def checksum(tensor: torch.Tensor) -> int:
    """Give the CRC-32 of a tensor's bytes in row order; copies them to the host."""
    local = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return zlib.crc32(ctypes.string_at(local.data_ptr(), local.nbytes)) if local.nbytes else 0
