"""Words in pinned host memory that streams write: what a GPU's copies are watched by."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any, Final, cast

import torch

_GEQ: Final = 0


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} answered {code}")


def _runtime() -> Any:
    return cast("Any", torch.cuda).cudart()


def pin(memory: torch.Tensor) -> None:
    """Register host memory with the driver.

    Raises:
        RuntimeError: it will not.
    """
    _check(
        int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)), "cudaHostRegister"
    )


def unpin(memory: torch.Tensor) -> None:
    """Let the driver forget it, before it is unmapped."""
    _runtime().cudaHostUnregister(memory.data_ptr())


def _seen_from_device(address: int) -> ctypes.c_uint64:
    device = ctypes.c_uint64()
    code = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(device), ctypes.c_void_p(address), 0)
    _check(code, "cuMemHostGetDevicePointer")
    return device


class Gate:
    """Holds the current stream, and all that waits for it, until the host lets it go."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._word = ctypes.c_int64.from_address(self._memory.data_ptr())
        self._times = 0

    def shut(self) -> None:
        """Let the stream wait."""
        self._times += 1
        code = _driver().cuStreamWaitValue64_v2(
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            _seen_from_device(self._memory.data_ptr()),
            ctypes.c_uint64(self._times),
            _GEQ,
        )
        _check(code, "cuStreamWaitValue64")

    def open(self) -> int:
        """Let it go; give the time, in ns, at which that was."""
        began = time.monotonic_ns()
        self._word.value = self._times
        return began


def write(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Let a stream write a word of registered host memory, behind all that is queued on it."""
    device = _seen_from_device(address)
    code = _driver().cuStreamWriteValue64_v2(
        ctypes.c_void_p(stream.cuda_stream), device, ctypes.c_uint64(value), 0
    )
    _check(code, "cuStreamWriteValue64")
