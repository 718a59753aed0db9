"""A producer's part of every kind of round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Final

from .cuda_words import Gate
from .payload import Sources, wrong_words
from .peer import Sender, Tool
from .rounds import Answer, Round
from .schedule import order, tell, token
from .traffic import Traffic
from .work import Kernel, Stage

_SETTLE_S: Final = 0.01  # for a lane's own thread to queue what it has taken from its own queue


class Producer:
    """Sends; checks what arrived where nobody else can; computes where the round says so."""

    def __init__(
        self,
        sender: Sender,
        sources: Sources,
        traffic: Traffic,
        rank: int,
        one_sided: bool,
        acks: Sequence[Connection],
        previous: Connection | None,
        following: Connection | None,
    ) -> None:
        self._sender, self._sources, self._traffic = sender, sources, traffic
        self._rank, self._one_sided = rank, one_sided
        self._acks, self._previous, self._next = acks, previous, following
        self._stages_behind = traffic.producers - rank
        self._kernels: dict[str, Kernel] = {}
        self._stage: Stage | None = None

    @cached_property
    def _gate(self) -> Gate:
        return Gate()

    def begin(self, asked: Round) -> None:
        """Get ready."""
        if asked.work is None or asked.work.taps:
            self._sender.begin(asked.step, asked.count)
        kind = asked.work.kernel if asked.work else ""
        device = self._traffic.place.producer(self._rank)
        if kind == "sleep":
            self._stage = self._stage or Stage(device)
        elif kind and kind not in self._kernels:
            self._kernels[kind] = Kernel(kind, device)

    def go(self, asked: Round) -> Answer:
        """Run the round."""
        answer = Answer()
        run = {
            "ping": self._ping,
            "cost": self._cost,
            "work": self._work,
            "pipeline": self._pipeline,
        }
        chosen = self._tool if isinstance(self._sender, Tool) else run.get(asked.kind, self._stream)
        cpu = time.process_time()
        answer.began = time.monotonic_ns()
        chosen(asked, answer)
        answer.cpu = time.process_time() - cpu
        if asked.work is None or asked.work.taps:
            self._sender.end()
        return answer

    def _prepared(self, asked: Round) -> list[object]:
        of, prepare = self._sources.of, self._sender.prepare
        return [prepare(of(asked.step, message)) for message in range(asked.count)]

    def _tool(self, asked: Round, answer: Answer) -> None:
        tool = self._sender
        if not isinstance(tool, Tool):
            return
        if asked.kind == "ping":
            answer.values = tool.latency(asked.count)
        else:
            answer.ended = answer.began + round(tool.seconds(asked.count) * 1e9)

    def _stream(self, asked: Round, answer: Answer) -> None:
        prepared, send = self._prepared(asked), self._sender.send
        if asked.gate:
            self._gate.shut()
        answer.began = time.monotonic_ns()
        for message, taps in enumerate(prepared):
            send(message, taps)
            if asked.check and self._one_sided:
                self._check(asked, message, answer)
        if asked.gate:
            time.sleep(_SETTLE_S)
            answer.began = self._gate.open()
        self._sender.drain()
        answer.ended = time.monotonic_ns()
        self._check_last(asked, answer)

    def _ping(self, asked: Round, answer: Answer) -> None:
        prepared, send, drain = self._prepared(asked), self._sender.send, self._sender.drain
        for message, taps in enumerate(prepared):
            began = time.monotonic_ns()
            send(message, taps)
            drain()
            ended = time.monotonic_ns()
            answer.at.append(began)
            if self._one_sided:
                answer.values.append((ended - began) / 1e3)
            for ack in self._acks:
                token(ack)
        self._check_last(asked, answer)

    def _cost(self, asked: Round, answer: Answer) -> None:
        prepared, send = self._prepared(asked), self._sender.send
        for message, taps in enumerate(prepared):
            if asked.pause:
                time.sleep(asked.pause)
            began = time.perf_counter_ns()
            send(message, taps)
            answer.values.append((time.perf_counter_ns() - began) / 1e3)
        self._sender.drain()
        answer.ended = time.monotonic_ns()
        self._check_last(asked, answer)

    def _work(self, asked: Round, answer: Answer) -> None:
        if asked.work is None:
            return
        kernel, taps = self._kernels[asked.work.kernel], asked.work.taps
        prepared = self._prepared(asked) if taps else []
        took: list[Callable[[], float]] = []
        for message in range(asked.count):
            began = time.perf_counter()
            if taps:
                self._sender.send(message, prepared[message])
            answer.waited += time.perf_counter() - began
            took.append(kernel.timed())
        answer.values = [one() for one in took]
        self._sender.drain()
        answer.ended = time.monotonic_ns()

    def _pipeline(self, asked: Round, answer: Answer) -> None:
        """Be a stage before the last: push what each forward made."""
        stage, work = self._stage, asked.work
        if stage is None or work is None:
            return
        prepared = self._prepared(asked) if work.taps else []
        answer.began = time.monotonic_ns()
        for forward, message in order(self._stages_behind, asked.count):
            if forward:
                token(self._previous)
                stage.compute(work.forward)
                if prepared and not work.after:
                    self._sender.send(message, prepared[message])
                stage.settle()
                tell(self._next)
            else:
                token(self._next)
                stage.compute(2 * work.forward)
                stage.settle()
                tell(self._previous)
        if work.after:
            for message, taps in enumerate(prepared):
                self._sender.send(message, taps)
        answer.ended = time.monotonic_ns()
        self._sender.drain()

    def _check_last(self, asked: Round, answer: Answer) -> None:
        if self._one_sided and not asked.check:
            self._check(asked, asked.count - 1, answer)

    def _check(self, asked: Round, message: int, answer: Answer) -> None:
        self._sender.drain()
        landed = self._sender.landed(message)
        wrong = wrong_words(self._traffic, asked.step, message, landed, self._rank)
        answer.checked += 1
        answer.wrong += wrong != 0
