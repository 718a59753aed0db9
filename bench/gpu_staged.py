"""The way through pinned memory of the host, by bare copies and by ``host_staged``."""

from __future__ import annotations

import ctypes
import time

import torch
from common import Partner
from gpu_roles import CONSUMER, SETTLE_S, Producer
from words import check, driver, spin_until

from tapchannel import Outbox


class StagedProducer(Producer):
    """Bare copies go down to pinned memory and up again, as the pushes do."""

    transport = "host_staged"

    def __init__(self, partner: Partner, outbox: Outbox, device: str, size: int) -> None:
        super().__init__(partner, outbox, device, size)
        self._staged = [torch.empty_like(one, device="cpu").pin_memory() for one in self._sources]
        self._up = torch.cuda.Stream(CONSUMER)
        self._arrived = [torch.cuda.Event() for _ in self._sources]
        torch.cuda.synchronize()

    def bare_queued(self, count: int) -> float:
        """Copy, with all copies queued behind a gate before the clock starts."""
        self._round += 1
        self._gate.hold(self._stream, self._round)
        self._copies.wait_stream(self._stream)
        down = ctypes.c_void_p(self._copies.cuda_stream)
        up = ctypes.c_void_p(self._up.cuda_stream)
        size = ctypes.c_size_t(self._size)
        for index in range(count):
            source = ctypes.c_uint64(self._sources[index].data_ptr())
            target = ctypes.c_uint64(self._targets[index].data_ptr())
            staged = ctypes.c_void_p(self._staged[index].data_ptr())
            code = driver().cuMemcpyDtoHAsync_v2(staged, source, size, down)
            check(code, "cuMemcpyDtoHAsync")
            self._hand_over(index)
            with torch.cuda.device(CONSUMER):
                code = driver().cuMemcpyHtoDAsync_v2(target, staged, size, up)
            check(code, "cuMemcpyHtoDAsync")
        self._end_of_round()
        time.sleep(SETTLE_S)
        began = self._open_gate()
        return (spin_until(self._end.host, self._round) - began) / 1e9

    def copy_from_python(self, count: int) -> float:
        """Copy by Tensor.copy_, as a trainer would; the clock starts before the first call."""
        self._round += 1
        began = time.monotonic_ns()
        for index in range(count):
            with torch.cuda.stream(self._copies):
                self._staged[index].copy_(self._sources[index], non_blocking=True)
            self._hand_over(index)
            with torch.cuda.stream(self._up):
                self._targets[index].copy_(self._staged[index], non_blocking=True)
        self._end_of_round()
        return (spin_until(self._end.host, self._round) - began) / 1e9

    def _hand_over(self, index: int) -> None:
        self._arrived[index].record(self._copies)
        self._up.wait_event(self._arrived[index])

    def _end_of_round(self) -> None:
        with torch.cuda.device(CONSUMER):
            self._end.write(self._up, self._round)
