"""The consumer's part of every kind of round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import torch

from .payload import wrong_words
from .peer import Receiver
from .rounds import Answer, Round
from .schedule import order, tell, token
from .traffic import Traffic
from .work import Kernel, Stage

Landed = Mapping[str, torch.Tensor]
Mark = float | torch.cuda.Event


class Consumer:
    """Receives, checks, releases; computes where the round says so."""

    def __init__(
        self,
        receiver: Receiver,
        traffic: Traffic,
        acks: Sequence[Connection],
        previous: Connection | None,
    ) -> None:
        self._receiver, self._traffic = receiver, traffic
        self._acks, self._previous = acks, previous
        self._kernels: dict[str, Kernel] = {}
        self._stage: Stage | None = None
        self._last: Landed | None = None

    def begin(self, asked: Round) -> None:
        """Get ready."""
        if asked.work is None or asked.work.taps:
            self._receiver.begin(asked.step, asked.count)
        kind = asked.work.kernel if asked.work else ""
        if kind == "sleep":
            self._stage = self._stage or Stage(self._traffic.place.consumer)
        elif kind and kind not in self._kernels:
            self._kernels[kind] = Kernel(kind, self._traffic.place.consumer)

    def go(self, asked: Round) -> Answer:
        """Run the round."""
        answer = Answer()
        run = {"ping": self._ping, "work": self._work, "pipeline": self._pipeline}
        cpu = time.process_time()
        answer.began = time.monotonic_ns()
        run.get(asked.kind, self._stream)(asked, answer)
        answer.cpu = time.process_time() - cpu
        if asked.work is None or asked.work.taps:
            self._receiver.end()
        return answer

    def _stream(self, asked: Round, answer: Answer) -> None:
        if asked.gate:
            self._drain(asked, answer)
            return
        receiver = self._receiver
        for message in range(asked.count):
            landed = receiver.receive(message)
            answer.ended = time.monotonic_ns()
            if asked.check or message == asked.count - 1:
                self._check(asked, message, landed, answer)
            receiver.release(message)

    def _drain(self, asked: Round, answer: Answer) -> None:
        """Take the last message of each of a lane's two streams first, and stop the clock.

        Behind a gate the wire is what is measured, not this host's loop over what has landed, nor
        its naps.
        """
        receiver, last = self._receiver, asked.count - 1
        landed = receiver.receive_awake(last)
        receiver.receive_awake(last - 1)
        answer.ended = time.monotonic_ns()
        self._check(asked, last, landed, answer)
        for message in range(asked.count):
            if message < last - 1:
                receiver.receive(message)
            receiver.release(message)

    def _ping(self, asked: Round, answer: Answer) -> None:
        receiver = self._receiver
        for message in range(asked.count):
            landed = receiver.receive(message)
            answer.at.append(time.monotonic_ns())
            if asked.check or message == asked.count - 1:
                self._check(asked, message, landed, answer)
            receiver.release(message)
            answer.released.append(time.monotonic_ns())
            for ack in self._acks:
                ack.send_bytes(b"a")
        answer.ended = answer.at[-1]

    def _work(self, asked: Round, answer: Answer) -> None:
        if asked.work is None:
            return
        kernel, taps = self._kernels[asked.work.kernel], asked.work.taps
        took: list[Callable[[], float]] = []
        for message in range(asked.count):
            began = time.perf_counter()
            landed = self._receiver.receive(message) if taps else None
            answer.waited += time.perf_counter() - began
            took.append(kernel.timed())
            if landed is not None:
                self._leave(asked, message, landed)
        answer.values = [one() for one in took]
        answer.ended = time.monotonic_ns()
        self._check_last(asked, answer)

    def _pipeline(self, asked: Round, answer: Answer) -> None:
        """Be the last stage: forward, the draft on the taps, backward; 1F1B has no warm-up here."""
        stage, work = self._stage, asked.work
        if stage is None or work is None:
            return
        waits: list[Callable[[], float]] = []
        for forward, message in order(0, asked.count):
            if not forward:
                stage.compute(2 * work.forward)
                stage.settle()
                tell(self._previous)
                continue
            token(self._previous)
            stage.compute(work.forward)
            if not work.after:
                self._draft(asked, message, waits)
        if work.after:
            for message in range(asked.count):
                self._draft(asked, message, waits)
        stage.settle()
        answer.ended = time.monotonic_ns()
        answer.waited = sum(one() for one in waits)
        self._check_last(asked, answer)

    def _draft(self, asked: Round, message: int, waits: list[Callable[[], float]]) -> None:
        """Train the draft on a microbatch's taps, or without any."""
        stage, work = self._stage, asked.work
        if stage is None or work is None:
            return
        landed = None
        if work.taps:
            begun = _mark(self._traffic)
            landed = self._receiver.receive(message)
            waits.append(_since(begun))
        stage.compute(work.draft)
        if landed is not None:
            self._leave(asked, message, landed)

    def _leave(self, asked: Round, message: int, landed: Landed) -> None:
        """Release a message; the last one is kept, to be compared when the clock has stopped."""
        if message == asked.count - 1:
            self._last = landed
        else:
            self._receiver.release(message)

    def _check_last(self, asked: Round, answer: Answer) -> None:
        landed, self._last = self._last, None
        if landed is not None:
            self._check(asked, asked.count - 1, landed, answer)
            self._receiver.release(asked.count - 1)

    def _check(self, asked: Round, message: int, landed: Landed, answer: Answer) -> None:
        answer.checked += 1
        answer.wrong += wrong_words(self._traffic, asked.step, message, landed) != 0


def _mark(traffic: Traffic) -> Mark:
    """Note the time: the stream's, where the taps are awaited by it."""
    if not traffic.place.on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _since(begun: Mark) -> Callable[[], float]:
    """Give, once it is asked for, the seconds from a mark to here."""
    if not isinstance(begun, torch.cuda.Event):
        took = time.perf_counter() - begun
        return lambda: took
    end = torch.cuda.Event(enable_timing=True)
    end.record()

    def elapsed() -> float:
        end.synchronize()
        return begun.elapsed_time(end) / 1e3

    return elapsed
