"""Words that the GPU benches watch: pinned ones of their own, and a mailbox's stamps."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from functools import cache

import torch

from tapchannel import Mailbox, _native

WAIT_GEQ = 0
SPIN_LIMIT_NS = 30_000_000_000


@cache
def driver() -> ctypes.CDLL:
    """Load the CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, call: str) -> None:
    """Raise if the driver refused a call."""
    if code:
        raise RuntimeError(f"{call} answered {code}")


def spin_until(word: ctypes.c_int32 | ctypes.c_uint64, value: int) -> int:
    """Watch a word until it has reached the value; give the time, in ns, at which it had."""
    limit = time.monotonic_ns() + SPIN_LIMIT_NS
    while word.value < value:
        if time.monotonic_ns() > limit:
            raise RuntimeError("a word that a GPU should write was not written")
    return time.monotonic_ns()


class PinnedWord:
    """A growing word in pinned host memory, which streams wait for and write."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.host = ctypes.c_int32.from_address(self._memory.data_ptr())
        self._device = ctypes.c_uint64()
        pointer = ctypes.c_void_p(self._memory.data_ptr())
        code = driver().cuMemHostGetDevicePointer_v2(ctypes.byref(self._device), pointer, 0)
        check(code, "cuMemHostGetDevicePointer")

    def hold(self, stream: torch.cuda.Stream, value: int) -> None:
        """Let the stream wait until the word has reached the value."""
        code = driver().cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream.cuda_stream), self._device, ctypes.c_uint32(value), WAIT_GEQ
        )
        check(code, "cuStreamWaitValue32")

    def write(self, stream: torch.cuda.Stream, value: int) -> None:
        """Let the stream write the word."""
        code = driver().cuStreamWriteValue32_v2(
            ctypes.c_void_p(stream.cuda_stream), self._device, ctypes.c_uint32(value), 0
        )
        check(code, "cuStreamWriteValue32")


class Stamps:
    """The stamps of a mailbox with one lane of one cell, in a mapping of its own."""

    def __init__(self, mailbox: Mailbox) -> None:
        descriptor = mailbox._core.block_fd(0)
        self._block = mmap.mmap(descriptor, 0)
        os.close(descriptor)

    def of_slot(self, slot: int) -> ctypes.c_uint64:
        """Give the word; it stays readable as long as this object is kept."""
        first: int = _native.layout()["stamps_3_5"]  # the same for every depth
        return ctypes.c_uint64.from_buffer(self._block, first + 8 * slot)
