"""Tensors with a content of their own for every key, the same in every process."""

from __future__ import annotations

import zlib

import torch

from tapchannel.plan import DTYPES
from tapchannel.tensors import TORCH_DTYPES

EVERY_DTYPE = tuple(name for name in DTYPES if name in TORCH_DTYPES)


def payload(label: object, rows: int, width: int, dtype: str = "float32") -> torch.Tensor:
    """Return ``[rows, width]`` of arbitrary bytes that follow from the label alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(label).encode()))
    size = (rows, width * DTYPES[dtype].itemsize)
    octets = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    if dtype == "bool":
        octets &= 1  # any other byte is no bool
    return octets.view(TORCH_DTYPES[dtype])


def numbers(label: object, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers that follow from the label alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(label).encode()))
    return torch.randn(*shape, generator=generator).to(dtype)


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a contiguous tensor on a device; as bytes, since torch cannot copy every dtype."""
    return tensor if device == "cpu" else tensor.view(torch.uint8).to(device).view(tensor.dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have one shape, one dtype and the same bytes, NaNs included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_octets(one), _octets(other))


def is_poison(tensor: torch.Tensor) -> bool:
    """Tell whether every byte of a tensor is its dtype's poison pattern."""
    name = str(tensor.dtype).removeprefix("torch.")
    return bool((_octets(tensor) == DTYPES[name].poison_byte).all())


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes in row order, on the host. A row's elements must lie side by side."""
    # Viewed as bytes before it is copied: torch has no strided copy for some dtypes.
    flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return flat.view(torch.uint8).cpu().contiguous()
