"""torch.distributed: send and receive, and the way that trainers use it for taps today."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ..payload import Sources
from ..peer import Meeting, Receiver, Sender
from ..traffic import DTYPE, Place, Traffic

_LIMIT: Final = timedelta(seconds=60)
_DTYPE: Final[torch.dtype] = getattr(torch, DTYPE)


def join(traffic: Traffic, meeting: Meeting, backend: str, rank: int) -> None:
    """Join the group of all processes; the consumer is its rank 0."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast, of which send and receive have no use
    dist.init_process_group(
        backend, store=meeting.store, rank=rank, world_size=traffic.producers + 1, timeout=_LIMIT
    )
    # NCCL connects a pair in its first call, which returns once the other has made its own: not to
    # be left to a round, in which one side posts all it has before the other begins.
    here = traffic.place.producer(rank - 1) if rank else traffic.place.consumer
    greeting = torch.zeros(1, device=here if backend == "nccl" else "cpu")
    for peer in range(1, traffic.producers + 1) if rank == 0 else [0]:
        (dist.recv if rank == 0 else dist.send)(greeting, peer)


def leave() -> None:
    """Leave it; the others may have left already."""
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def nccl_absence(place: Place, producers: int) -> str | None:
    """Say why NCCL cannot connect these processes."""
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    if not place.on_gpu:
        return "NCCL moves bytes of GPUs only, and these taps are in host memory"
    if place.gpus < producers + 1:
        return f"NCCL refuses two ranks on one GPU: {producers + 1} ranks, {place.gpus} GPUs"
    return None


def gloo_absence(place: Place, producers: int) -> str | None:
    """Say why gloo cannot connect these processes."""
    if not dist.is_gloo_available():
        return "this torch has no gloo"
    return "gloo sends no GPU's tensors from rank to rank" if place.on_gpu else None


class DistributedReceiver(Receiver):
    """Posts the receives of ``depth`` messages ahead."""

    def __init__(self, traffic: Traffic, meeting: Meeting, backend: str) -> None:
        self._traffic, self._count = traffic, 0
        join(traffic, meeting, backend, 0)
        device = traffic.place.consumer
        self._slots = [
            {
                tap.name: torch.zeros((tap.rows, tap.width), dtype=_DTYPE, device=device)
                for tap in traffic.taps
            }
            for _ in range(traffic.depth)
        ]
        self._posted: deque[list[dist.Work]] = deque()

    def begin(self, step: int, count: int) -> None:
        """Post the first receives."""
        self._count = count
        for message in range(min(count, len(self._slots))):
            self._post(message)

    def _post(self, message: int) -> None:
        slot = self._slots[message % len(self._slots)]
        works = [dist.irecv(slot[tap.name], src=tap.rank + 1) for tap in self._traffic.taps]
        self._posted.append([work for work in works if work is not None])

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Wait for a message's receives."""
        for work in self._posted.popleft():
            work.wait()
        if self._traffic.place.on_gpu and self._traffic.wait == "host":
            torch.cuda.current_stream().synchronize()
        return self._slots[message % len(self._slots)]

    def release(self, message: int) -> None:
        """Post the receives of the message that takes its place."""
        if message + len(self._slots) < self._count:
            self._post(message + len(self._slots))

    def close(self) -> None:
        """Leave."""
        leave()


class DistributedSender(Sender):
    """Keeps at most ``depth`` messages on their way."""

    def __init__(self, traffic: Traffic, rank: int, meeting: Meeting, backend: str) -> None:
        self._depth, self._on_gpu = traffic.depth, traffic.place.on_gpu
        self._sent: deque[list[dist.Work]] = deque()
        join(traffic, meeting, backend, rank + 1)

    def send(self, message: int, prepared: Any) -> None:
        """Send every tap."""
        if len(self._sent) == self._depth:
            self._wait()
        works = [dist.isend(tensor, dst=0) for tensor in prepared.values()]
        self._sent.append([work for work in works if work is not None])

    def _wait(self) -> None:
        for work in self._sent.popleft():
            work.wait()

    def drain(self) -> None:
        """Wait for what is on its way."""
        while self._sent:
            self._wait()
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leave."""
        leave()


class GatherReceiver(Receiver):
    """Per tap: its shape, then its bytes, then a clone; per group a concatenation of them all."""

    def __init__(self, traffic: Traffic, meeting: Meeting, backend: str) -> None:
        self._traffic = traffic
        join(traffic, meeting, backend, 0)
        self._held: dict[int, Mapping[str, torch.Tensor]] = {}

    def receive(self, message: int) -> Mapping[str, torch.Tensor]:
        """Receive tap by tap, and put the groups together."""
        place, came = self._traffic.place, dict[str, torch.Tensor]()
        for tap in self._traffic.taps:
            shape = torch.zeros(2, dtype=torch.int64, device=place.consumer)
            dist.recv(shape, src=tap.rank + 1)
            rows, width = shape[0].item(), shape[1].item()
            tensor = torch.empty((int(rows), int(width)), dtype=_DTYPE, device=place.consumer)
            dist.recv(tensor, src=tap.rank + 1)
            came[tap.name] = tensor.clone()
        landed = dict[str, torch.Tensor]()
        for names in self._traffic.groups.values():
            whole = torch.cat([came[name] for name in names], dim=-1)
            begin = 0
            for name in names:
                landed[name] = whole[:, begin : begin + came[name].shape[1]]
                begin += came[name].shape[1]
        if place.on_gpu and self._traffic.wait == "host":
            torch.cuda.current_stream().synchronize()
        self._held[message] = landed
        return landed

    def release(self, message: int) -> None:
        """Forget it."""
        del self._held[message]

    def close(self) -> None:
        """Leave."""
        leave()


class GatherSender(Sender):
    """Clones what it keeps of its forward, then sends shape and bytes tap by tap, blocking."""

    def __init__(self, traffic: Traffic, rank: int, meeting: Meeting, backend: str) -> None:
        self._device = traffic.place.producer(rank)
        self._on_gpu = traffic.place.on_gpu
        join(traffic, meeting, backend, rank + 1)

    def send(self, message: int, prepared: Any) -> None:
        """Send every tap."""
        kept = [tensor.detach().clone() for tensor in prepared.values()]
        for tensor in kept:
            dist.send(torch.tensor(tensor.shape, device=self._device), dst=0)
            dist.send(tensor, dst=0)

    def drain(self) -> None:
        """Wait for what is on its way."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leave."""
        leave()


class Distributed:
    """One backend, plain or as a gathering."""

    one_sided = unchecked = False

    def __init__(self, name: str, about: str, backend: str, gather: bool) -> None:
        self.name, self.about = name, about
        self._backend, self._gather = backend, gather
        self.blocking = gather

    def absence(self, place: Place, producers: int) -> str | None:
        """Say why the backend cannot be had."""
        if self._backend_of(place) == "nccl":
            return nccl_absence(place, producers)
        return gloo_absence(place, producers)

    def _backend_of(self, place: Place) -> str:
        return self._backend or ("nccl" if place.on_gpu else "gloo")

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Make rank 0."""
        kind = GatherReceiver if self._gather else DistributedReceiver
        return kind(traffic, meeting, self._backend_of(traffic.place))

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Make the producer's rank."""
        kind = GatherSender if self._gather else DistributedSender
        return kind(traffic, rank, meeting, self._backend_of(traffic.place))


PEERS: Final = (
    Distributed("gloo", "torch.distributed isend and irecv, as many ahead as slots", "gloo", False),
    Distributed("nccl", "torch.distributed isend and irecv, as many ahead as slots", "nccl", False),
    Distributed(
        "clone-gather",
        "as trainers do it today: shape, blocking receive, clone, cat, tap by tap",
        "",
        True,
    ),
)
