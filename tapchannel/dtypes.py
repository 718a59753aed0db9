"""The element types a tap may have: every dtype of torch, by name, without importing torch."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from .errors import ConfigError

if TYPE_CHECKING:
    import torch

    DTypeLike: TypeAlias = "str | torch.dtype | DType"

_NAN_IS_ALL_ONES: Final = 0xFF
_TOP_BIT_ONLY: Final = 0x80


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: its torch name, its size in bytes, its code on the wire, its poison.

    A slot filled with ``poison_byte`` reads as NaN where the type has one; the ``fnuz`` types have
    their only NaN at 0x80, and integers get a value that stands out.
    """

    name: str
    itemsize: int
    code: int
    poison_byte: int


# Codes travel in announces: append new ones, never renumber.
_TABLE: Final = (
    DType("float64", 8, 1, _NAN_IS_ALL_ONES),
    DType("float32", 4, 2, _NAN_IS_ALL_ONES),
    DType("float16", 2, 3, _NAN_IS_ALL_ONES),
    DType("bfloat16", 2, 4, _NAN_IS_ALL_ONES),
    DType("float8_e4m3fn", 1, 5, _NAN_IS_ALL_ONES),
    DType("float8_e5m2", 1, 6, _NAN_IS_ALL_ONES),
    DType("float8_e4m3fnuz", 1, 7, _TOP_BIT_ONLY),
    DType("float8_e5m2fnuz", 1, 8, _TOP_BIT_ONLY),
    DType("float8_e8m0fnu", 1, 9, _NAN_IS_ALL_ONES),
    DType("float4_e2m1fn_x2", 1, 10, _TOP_BIT_ONLY),  # two values a byte, one element to torch
    DType("complex32", 4, 11, _NAN_IS_ALL_ONES),
    DType("complex64", 8, 12, _NAN_IS_ALL_ONES),
    DType("complex128", 16, 13, _NAN_IS_ALL_ONES),
    DType("int8", 1, 14, _TOP_BIT_ONLY),
    DType("int16", 2, 15, _TOP_BIT_ONLY),
    DType("int32", 4, 16, _TOP_BIT_ONLY),
    DType("int64", 8, 17, _TOP_BIT_ONLY),
    DType("uint8", 1, 18, _TOP_BIT_ONLY),
    DType("uint16", 2, 19, _TOP_BIT_ONLY),
    DType("uint32", 4, 20, _TOP_BIT_ONLY),
    DType("uint64", 8, 21, _TOP_BIT_ONLY),
    DType("bool", 1, 22, _TOP_BIT_ONLY),
)

DTYPES: Final[Mapping[str, DType]] = MappingProxyType({dtype.name: dtype for dtype in _TABLE})


def dtype_of(value: DTypeLike) -> DType:
    """Give the element type of a name (``"bfloat16"``) or of a ``torch.dtype``.

    Raises:
        ConfigError: no tap can have this type.
    """
    if isinstance(value, DType):
        return value
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            "dtype cannot be carried", seen=reprlib.repr(name), expected=", ".join(DTYPES)
        )
    return DTYPES[name]
