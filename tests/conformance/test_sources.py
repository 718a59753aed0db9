"""The values and the shape of a source arrive, whatever its strides and whoever made it (A15)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from support.channels import Maker
from support.payloads import numbers, same_bits
from tapchannel import Outbox, TapPlan, UsageError

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
WIDTH = 6

Layout = Callable[[torch.Tensor], torch.Tensor]

# Each makes a source of width 6 out of a plain tensor [20, 24] without moving its elements.
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x[:10, :12].contiguous().view(-1, 6),
    "three dimensions": lambda x: x.view(8, 10, 6)[:5],
    "transposed": lambda x: x[:6].t(),
    "every second column": lambda x: x[:, :12:2],
    "every second row": lambda x: x[::2, :6],
    "column slice": lambda x: x[:, 3:9],
    "one row": lambda x: x[4:5, 2:8],
    "one row of every third column": lambda x: x[4:5, 1:19:3],
    "expanded rows": lambda x: x[:1, :6].expand(4, -1),
    "expanded columns": lambda x: x[:, 7:8].expand(-1, 6),
    "expanded in the middle": lambda x: x[:3, None, :6].expand(3, 5, 6),
    "channels last": lambda x: x[:4].reshape(2, 4, 2, 6).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.view(4, 20, 6).permute(1, 0, 2),
    "overlapping windows": lambda x: x.view(-1).as_strided((9, 6), (2, 1)),
    "no rows of a column slice": lambda x: x[:0, 3:9],
}


def source(name: str, dtype: str, device: str) -> torch.Tensor:
    """Make the source of a layout and dtype on a device; the same values everywhere."""
    plain = numbers((name, dtype), 20, 24, dtype=getattr(torch, dtype)).to(device)
    return LAYOUTS[name](plain)


def push_layout(outbox: Outbox, name: str) -> None:
    """Push one source of each dtype; nothing but the outbox keeps it alive."""
    device = str(outbox.info()["device"])
    for dtype in DTYPES:
        outbox.push(0, dtype, source(name, dtype, device))


@pytest.mark.parametrize("name", LAYOUTS)
def test_source_layout(channel_of: Maker, name: str) -> None:
    """Bug: strides ignored, so that the bytes beside the tensor travel instead of its own.

    A copy in many pieces also shows a stamp that is ahead of it. Mutation: flush-is-enough.
    """
    plan = TapPlan({dtype: [dtype] for dtype in DTYPES}, WIDTH, {name: name for name in DTYPES}, 80)
    channel = channel_of(plan)
    with channel.open_pass(1, 1):
        channel.producer.run(push_layout, name)
        with channel.mailbox.recv(0) as taps:
            for dtype in DTYPES:
                pushed = source(name, dtype, "cpu")
                assert taps.info[dtype].shape == pushed.shape
                assert same_bits(taps[dtype], pushed.reshape(-1, WIDTH).contiguous()), dtype


def test_single_column_of_a_wider_tensor(channel_of: Maker) -> None:
    """Bug: a width of one read as contiguous, so that the columns beside it travel (A15)."""
    channel = channel_of(TapPlan({"tap": ["tap"]}, 1, "float32", 20))
    with channel.open_pass(1, 1):
        channel.producer.run(push_column)
        with channel.mailbox.recv(0) as taps:
            assert same_bits(taps["tap"], numbers("wide", 20, 24)[:, 5:6].contiguous())


def push_column(outbox: Outbox) -> None:
    """Push one column of a wide tensor."""
    device = str(outbox.info()["device"])
    outbox.push(0, "tap", numbers("wide", 20, 24).to(device)[:, 5:6])


def test_lazily_conjugated_and_negated_sources(channel_of: Maker) -> None:
    """Bug: the bytes of a lazy view travel without what the view does to them."""
    dtypes = {"complex": "complex64", "real": "float32"}
    plan = TapPlan({name: [name] for name in dtypes}, 4, dtypes, 8)
    channel = channel_of(plan)
    with channel.open_pass(1, 1):
        channel.producer.run(push_lazy)
        with channel.mailbox.recv(0) as taps:
            value = numbers("complex", 8, 4, dtype=torch.complex64)
            assert torch.equal(taps["complex"].cpu(), value.conj().resolve_conj())
            assert torch.equal(taps["real"].cpu(), -value.imag)


def push_lazy(outbox: Outbox) -> None:
    """Push a tensor with the conjugate bit and one with the negative bit."""
    value = numbers("complex", 8, 4, dtype=torch.complex64).to(str(outbox.info()["device"]))
    assert value.conj().is_conj()
    assert value.conj().imag.is_neg()
    outbox.push(0, "complex", value.conj())
    outbox.push(0, "real", value.conj().imag)


def test_zero_dim_source_is_refused(channel_of: Maker) -> None:
    """Bug: a scalar, which has no row, taken for a row of whatever lies behind it (A15)."""
    channel = channel_of(TapPlan({"tap": ["tap"]}, 4, "float32", 2))
    with channel.open_pass(1, 1):
        with pytest.raises(UsageError, match="width"):
            channel.producer.push(0, "tap", torch.tensor(1.0))
        channel.producer.push(0, "tap", torch.ones(4))
        with channel.mailbox.recv(0) as taps:
            assert torch.equal(taps["tap"].cpu(), torch.ones(1, 4))
            assert taps.info["tap"].shape == (4,)


class Exported:
    """An array of another library, as DLPack sees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **wanted: object) -> object:
        """Give the capsule."""
        return self._tensor.__dlpack__(**wanted)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Give the device."""
        return self._tensor.__dlpack_device__()


class CudaArray:
    """An array of another library that knows only ``__cuda_array_interface__``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


FOREIGN: dict[str, Callable[[torch.Tensor], object]] = {
    "dlpack": Exported,
    "the device's own": lambda x: CudaArray(x) if x.is_cuda else np.asarray(x),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_arrays_of_other_libraries(channel_of: Maker, kind: str) -> None:
    """Bug: a foreign array read without its strides, or freed before its copy was done."""
    channel = channel_of(TapPlan({"tap": ["tap"]}, 6, "float32", 10), depth=1)
    with channel.open_pass(1, 2):
        channel.producer.run(push_foreign, kind)
        for microbatch in range(2):
            with channel.mailbox.recv(microbatch) as taps:
                assert torch.equal(taps["tap"].cpu(), numbers(microbatch, 10, 24)[:, 3:9])


def push_foreign(outbox: Outbox, kind: str) -> None:
    """Push a strided foreign array with credit and one without, and overwrite both at once."""
    device = str(outbox.info()["device"])
    for microbatch in range(2):
        memory = numbers(microbatch, 10, 24).to(device)
        outbox.push(microbatch, "tap", FOREIGN[kind](memory[:, 3:9]))
        memory.fill_(-1.0)


def test_an_object_that_is_no_array_is_refused(channel_of: Maker) -> None:
    """Bug: a list that is read as an address, or an error that breaks the pass."""
    channel = channel_of(TapPlan({"tap": ["tap"]}, 2, "float32", 2))
    with channel.open_pass(1, 1):
        with pytest.raises(UsageError, match="no tensor"):
            channel.producer.run(Outbox.push, 0, "tap", [[1.0, 2.0]])
        channel.producer.push(0, "tap", torch.ones(2, 2))
        with channel.mailbox.recv(0) as taps:
            assert torch.equal(taps["tap"].cpu(), torch.ones(2, 2))
