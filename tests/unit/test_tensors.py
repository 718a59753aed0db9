"""What a push may be given: rows are read as the tensor says, or it is refused."""

from __future__ import annotations

import ctypes
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapchannel.dtypes import DTYPES
from tapchannel.errors import UsageError
from tapchannel.tensors import TORCH_DTYPES, adopt, checksum, rows_of

CPU = torch.device("cpu")


def read(tensor: torch.Tensor, width: int = 8) -> bytes:
    """Read the rows from memory as the wire does: by address, rows and pitch alone."""
    row_bytes = width * tensor.element_size()
    owner, address, rows, pitch, _ = rows_of(tensor, width, row_bytes)
    assert pitch >= row_bytes
    read = b"".join(ctypes.string_at(address + row * pitch, row_bytes) for row in range(rows))
    del owner  # what keeps the bytes, up to here
    return read


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Give a tensor's bytes in row order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


LAYOUTS = {
    "plain": lambda: torch.randn(5, 8),
    "one row": lambda: torch.randn(1, 8),
    "no rows": lambda: torch.randn(0, 8),
    "three dimensions": lambda: torch.randn(2, 3, 8),
    "no rows, three dimensions": lambda: torch.randn(2, 0, 8),
    "one dimension": lambda: torch.randn(8),
    "columns of a wider one": lambda: torch.randn(5, 20)[:, 4:12],
    "every second row": lambda: torch.randn(10, 8)[::2],
    "one row of a wider one": lambda: torch.randn(5, 20)[2:3, 4:12],
    "transposed": lambda: torch.randn(8, 5).t(),
    "batch first": lambda: torch.randn(3, 2, 8).transpose(0, 1),
    "sequence sliced": lambda: torch.randn(3, 4, 8)[:, 1:3],
    "every second element": lambda: torch.randn(5, 16)[:, ::2],
    "one row repeated": lambda: torch.randn(1, 8).expand(5, 8),
    "one value repeated": lambda: torch.randn(1, 1).expand(5, 8),
    "overlapping rows": lambda: torch.randn(100).as_strided((5, 8), (3, 1)),
    "with an offset": lambda: torch.randn(100)[7:47].view(5, 8),
    "leaf with a gradient": lambda: torch.randn(5, 8, requires_grad=True),
    "inside a graph": lambda: torch.randn(5, 8, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.randn(5, 8)),
    "flipped": lambda: torch.randn(5, 8).flip(0),
    "negated lazily": lambda: torch._neg_view(torch.randn(5, 8)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_in_order_whatever_the_strides(layout: str) -> None:
    """Rows read along the wrong stride, a lazy bit that is dropped, a row too many or too few."""
    tensor = LAYOUTS[layout]()
    assert read(tensor) == bytes_of(tensor.reshape(-1, 8))


@pytest.mark.parametrize("layout", ["plain", "columns of a wider one", "every second row"])
def test_rows_that_can_be_read_in_place_are_not_copied(layout: str) -> None:
    """A copy that nobody asked for, of every tap of every microbatch."""
    tensor = LAYOUTS[layout]()
    owner, address, _, _, version = rows_of(tensor, 8, 32)
    assert address == tensor.data_ptr()
    assert owner is tensor
    assert version == tensor._version


def test_source_is_kept_by_what_owns_its_memory() -> None:
    """A copy that is freed before it is read: the payload must own the memory that it names."""
    tensor = torch.randn(8, 5).t()
    owner, address, *_ = rows_of(tensor, 8, 32)
    assert owner.data_ptr() == address
    assert owner is not tensor


def test_later_change_in_place_shows_in_the_count() -> None:
    """A source that is changed before its copy was done, unnoticed; also through a view of it."""
    tensor = torch.randn(2, 3, 8)
    owner, *_, version = rows_of(tensor, 8, 32)
    assert version >= 0
    tensor[0].add_(1)
    assert owner._version != version


def test_inference_tensor_is_taken_as_it_is_now() -> None:
    """A RuntimeError, since inference tensors count no changes; or a change that nobody sees."""
    with torch.inference_mode():
        tensor = torch.randn(5, 8)
        before = bytes_of(tensor)
        owner, address, *_ = rows_of(tensor, 8, 32)
        tensor.zero_()
    assert ctypes.string_at(address, 160) == before
    assert owner.data_ptr() == address


def test_complex_conjugate_is_resolved() -> None:
    """A lazy conjugate whose bytes are read as they lie."""
    tensor = torch.randn(5, 8, dtype=torch.complex64).conj()
    assert tensor.is_conj()
    assert read(tensor) == bytes_of(tensor)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_read_by_its_bytes(name: str) -> None:
    """A dtype that torch has under another name or another size."""
    if name not in TORCH_DTYPES:
        pytest.skip(f"this torch has no {name}")
    dtype = TORCH_DTYPES[name]
    assert str(dtype) == f"torch.{name}"
    raw = torch.randint(0, 2 if name == "bool" else 256, (5, 8 * dtype.itemsize), dtype=torch.uint8)
    assert DTYPES[name].itemsize == dtype.itemsize
    assert read(raw.view(dtype)) == bytes_of(raw)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(1, 6),
    st.permutations(range(4)),
    st.integers(1, 2),
)
def test_any_view_is_read_as_torch_reads_it(
    shape: list[int], width: int, order: list[int], step: int
) -> None:
    """A combination of strides that the fast path takes for even rows."""
    whole = torch.arange(1.0, 1 + 5 * 5 * 5 * 12).view(5, 5, 5, 12)
    turned = whole.permute(order)
    view = turned[tuple(slice(0, size * step, step) for size in (*shape, width))]
    view = view[(..., *[0] * (3 - len(shape)))] if len(shape) < 3 else view
    if view.shape[-1] != 0:
        assert read(view, view.shape[-1]) == bytes_of(view)


@pytest.mark.parametrize(
    "shape", [(), (0,), (7,), (9,), (5, 7), (8, 5), (5, 8, 1), (2, 5, 16), (5, 0)]
)
def test_wrong_width_is_refused(shape: tuple[int, ...]) -> None:
    """A tensor that is reshaped into rows which nobody meant."""
    with pytest.raises(UsageError) as raised:
        rows_of(torch.zeros(shape), 8, 32)
    assert str(shape) in str(raised.value)
    assert "8" in str(raised.value.expected)


def test_numpy_array_is_adopted_by_value() -> None:
    """A foreign array that is changed after the push: it has no count of its changes."""
    array = np.arange(16, dtype=np.float32).reshape(2, 8)
    made = adopt(array, CPU)
    array[:] = 0
    assert made.tolist() == [[float(n) for n in range(8)], [float(n) for n in range(8, 16)]]


class Broken:
    """An object whose DLPack export fails in a way of its own."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __dlpack__(self, **_: object) -> object:
        raise self._error

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "text",
        [1.0, 2.0],
        object(),
        Broken(BufferError("device is gone")),
        Broken(RuntimeError("requires grad")),
        Broken(NotImplementedError("no stream")),
        Broken(AttributeError("half built")),
    ],
    ids=lambda value: type(getattr(value, "_error", value)).__name__,
)
def test_what_is_no_tensor_is_refused(value: object) -> None:
    """An error of a foreign library's, in place of what to push instead."""
    with pytest.raises(UsageError) as raised:
        adopt(value, CPU)
    assert raised.value.detail or type(value).__name__ in str(raised.value)


def test_checksum_goes_by_rows() -> None:
    """A checksum of the memory between the rows, or in another order than the reader's."""
    tensor = torch.randn(5, 20)[:, 4:12]
    assert checksum(tensor) == zlib.crc32(bytes_of(tensor))
    assert checksum(tensor) == checksum(tensor.contiguous())
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(torch.zeros(0, 8)) == 0
