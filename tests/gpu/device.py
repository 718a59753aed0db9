"""What the GPU tests do to a device: recognisable words, long kernels, streams held by the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from tapchannel.errors import TapChannelError

KERNEL_MS = 50  # longer than any push may take
CYCLES_PER_MS = 2_000_000  # a little more than a millisecond of any GPU so far
WAIT_GEQ = 0


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} answered {code}")


def numbers(seed: int, rows: int, width: int, device: str | torch.device) -> torch.Tensor:
    """Give int32 words that differ from those of every other seed at every place."""
    words = torch.arange(rows * width, dtype=torch.int32, device=device)
    return words.mul_(1103515245).add_(seed * 7919).view(rows, width)


def wrong_words(seen: torch.Tensor, seed: int) -> int:
    """Count the words that are not those of ``numbers(seed)``. Waits for the current stream."""
    rows, width = seen.shape
    wrong = (seen != numbers(seed, rows, width, seen.device)).sum()
    return int(wrong) if seen.numel() else 0


def keep_busy(milliseconds: float) -> None:
    """Queue a kernel of about this length on the current stream."""
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


def warm_up(device: str) -> None:
    """Load the kernels that tests queue behind a held stream: a load may wait for the device."""
    words = numbers(0, 8, 8, device)
    zeros = torch.zeros_like(words)
    keep_busy(0.001)
    zeros.copy_(words)
    torch.add(zeros, 1, out=words)
    torch.full_like(words, -1)
    wrong_words(words[:, :4].contiguous(), 1)
    words.float().isnan().all()
    torch.cuda.synchronize(device)


class Gate:
    """Holds streams until the host opens it.

    Only copies, and kernels that have run before, may be queued on a held stream.
    """

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        address = ctypes.c_uint64()
        host = ctypes.c_void_p(self._word.data_ptr())
        code = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(address), host, 0)
        _check(code, "cuMemHostGetDevicePointer")
        self._address = address

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let nothing that is queued on the stream from now on run before `open`."""
        handle = ctypes.c_void_p(stream.cuda_stream)
        code = _driver().cuStreamWaitValue32_v2(handle, self._address, ctypes.c_uint32(1), WAIT_GEQ)
        _check(code, "cuStreamWaitValue32")

    def open(self) -> None:
        """Let the held streams go on."""
        self._word.fill_(1)


def current_context() -> int:
    """Give the driver's current context of this thread, 0 if it has none."""
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    return context.value or 0


class Foreign:
    """Device memory of another library, known only by its ``__cuda_array_interface__``."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self._tensor = tensor
        # The interface has no handle 0: 1 names the legacy default stream.
        handle = None if stream is None else stream.cuda_stream or 1
        self.__cuda_array_interface__ = {
            **tensor.__cuda_array_interface__,
            "version": 3,
            "stream": handle,
        }


class RawMemory:
    """int32 words at a device address, whoever owns them."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": "<i4",
            "strides": None,
            "version": 3,
        }


def refusal(call: Callable[[], object]) -> str:
    """Call it and give the name of the error class that it raises, or nothing."""
    try:
        call()
    except TapChannelError as error:
        return type(error).__name__
    return ""
