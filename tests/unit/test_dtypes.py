"""The element types: all of torch's, with their sizes, codes and poison."""

from __future__ import annotations

import re

import pytest
import torch

from tapchannel.dtypes import DTYPES, dtype_of
from tapchannel.errors import ConfigError


def torch_dtypes() -> list[torch.dtype]:
    """List torch's dtypes, less the quantised, bit-pattern and sub-byte shells."""
    shell = re.compile(r"torch\.(q(u?)int\d.*|bits\d.*|u?int[1-7])")
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((dtype for dtype in every if not shell.fullmatch(str(dtype))), key=str)


@pytest.mark.parametrize("dtype", torch_dtypes(), ids=str)
def test_every_torch_dtype_is_carried_with_torchs_size(dtype: torch.dtype) -> None:
    """Bug: a dtype left out of the table, or one with a wrong size, so that cells overlap."""
    assert dtype_of(dtype).itemsize == dtype.itemsize
    assert dtype_of(dtype) is dtype_of(str(dtype)) is DTYPES[str(dtype).removeprefix("torch.")]


def test_dtype_codes_are_distinct_and_fixed() -> None:
    """Bug: a renumbered table, so that peers of two versions read each other's bytes wrongly."""
    codes = {name: dtype.code for name, dtype in DTYPES.items()}
    assert len(set(codes.values())) == len(codes)
    assert (codes["float64"], codes["bfloat16"], codes["int8"], codes["bool"]) == (1, 4, 14, 22)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_poison_reads_as_nan_where_there_is_one(name: str) -> None:
    """Bug: a poisoned slot that reads as a plausible number (I4)."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this torch lacks it")
    if not (dtype.is_floating_point or dtype.is_complex) or name == "float4_e2m1fn_x2":
        assert DTYPES[name].poison_byte == 0x80
        return
    poisoned = torch.full((16,), DTYPES[name].poison_byte, dtype=torch.uint8).view(dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    if dtype is torch.complex32:
        poisoned, wide = poisoned.view(torch.float16), torch.float32
    assert poisoned.to(wide).isnan().all()


@pytest.mark.parametrize("value", ["float31", "", "torch.", "qint8", None, 7, "x" * 10**5])
def test_a_type_that_is_none_is_refused(value: object) -> None:
    """Bug: a wrong dtype noticed only at the first push; an error as long as a peer's text."""
    with pytest.raises(ConfigError) as refusal:
        dtype_of(value)  # pyright: ignore[reportArgumentType]
    assert len(str(refusal.value)) < 1000
