"""The consumer's part in a stress: every payload is checked when it comes and when it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from stress.aged import AgedLane
from stress.course import Leg, Turn
from stress.producing import LIMIT, WIRES, Halt, dawdle
from stress.words import Words
from support.workers import Worker
from tapchannel import Key, Lease, Mailbox
from tapchannel.errors import PassAborted, UsageError
from tapchannel.keys import MAX_EPOCH


class Receiver:
    """Receives one leg's passes, holds leases for a while and gives them back in any order."""

    def __init__(self, leg: Leg, crew: list[Worker], store: str) -> None:
        wire = WIRES[leg.wire]
        self.mailbox = Mailbox(
            leg.plan,
            leg.sources,
            depth=leg.depth,
            store=store,
            name=str(leg.seed),
            timeout=LIMIT,
            transport=wire.transport,
            listen=wire.listen,
        )
        self.count: Counter[str] = Counter()
        self._leg, self._crew = leg, crew
        self._words = Words(leg)
        self._held: dict[int, tuple[Lease, Key, tuple[int, ...]]] = {}  # by slot
        self._chance = leg.chance("consumer")
        if leg.aged:
            self._age()
        for _ in range(leg.first_epoch - 1):
            self.mailbox.reset()

    def run_life(self, life: int) -> None:
        """Receive a life's passes."""
        for turn in self._leg.lives[life]:
            rows = list(zip(*self._leg.rows(turn), strict=True))
            self.count["passes"] += 1
            try:
                self._receive(turn, rows)
            except (Halt, PassAborted):
                if turn.calm:
                    raise
                self.count["aborted"] += 1

    def begin_life(self, life: int) -> int:
        """Reset, unless the life before ended that way; give the epoch."""
        epoch = self._leg.first_epoch + life
        if self.mailbox.epoch < epoch:
            self._reset()
        assert self.mailbox.epoch == epoch
        # Between hosts: a pass that is opened before the epoch is known would be the old one's.
        assert self.mailbox._core.carried(LIMIT)
        return epoch

    def close(self) -> None:
        """Give everything back, and end the channel."""
        for slot in list(self._held):
            self._leave(slot)
        if self._leg.last_epochs:
            assert self.mailbox.epoch == MAX_EPOCH
        if self._leg.aged:
            self._count_wraps()
        self.mailbox.close()

    def _receive(self, turn: Turn, rows: list[tuple[int, ...]]) -> None:
        mailbox, chance = self.mailbox, self._chance
        epoch = mailbox.epoch
        together = chance.randrange(self._leg.depth)
        with mailbox.open_pass(turn.step, turn.microbatches):
            for microbatch in range(turn.microbatches):
                if turn.consumer == microbatch:
                    if turn.reset:
                        self._await_opened(turn)
                        self._reset()
                    raise Halt("consumer")
                dawdle(chance)
                self._leave(microbatch % self._leg.depth)
                while len(self._held) > together:
                    self._leave(chance.choice(list(self._held)))
                lease = mailbox.recv(microbatch)
                entry = lease, Key(epoch, turn.step, microbatch), rows[microbatch]
                self._held[microbatch % self._leg.depth] = entry
                self._check(*entry)
                self.count["messages"] += len(self._leg.widths)
        self.count["whole"] += 1

    def _await_opened(self, turn: Turn) -> None:
        """Wait until all have opened this very pass; some have said so of passes given up since."""
        for worker in self._crew:
            while worker.wait_for("opened") != self._leg.name_of(turn):
                pass

    def _reset(self) -> None:
        if self.mailbox.epoch < MAX_EPOCH:
            self.mailbox.reset()
            self.count["resets"] += 1
        else:
            with pytest.raises(UsageError, match="epochs"):
                self.mailbox.reset()
            self.count["resets refused"] += 1

    def _leave(self, slot: int) -> None:
        """Give a slot back, once its lease has shown that it still holds what it held."""
        entry = self._held.pop(slot, None)
        if entry is not None:
            self._check(*entry)
            with entry[0]:
                pass

    def _check(self, lease: Lease, key: Key, rows: tuple[int, ...]) -> None:
        for group, count in zip(self._leg.groups, rows, strict=True):
            seen = lease[group]
            if not torch.equal(seen, self._words.of_group(group, key, count)):
                pytest.fail(self._words.complaint(group, key, count, seen))

    def _lanes(self) -> Iterator[AgedLane]:
        for rank, taps in self._leg.sources.items():
            yield AgedLane(self.mailbox, rank, self._leg.depth, len(taps))

    def _age(self) -> None:
        for lane in self._lanes():
            lane.age()
            lane.close()

    def _count_wraps(self) -> None:
        """Count what has wrapped; see that the recorders still tell events in their order."""
        for lane in self._lanes():
            self.count["wraps"] += sum(lane.wrapped())
            lane.close()
        for rank in self._leg.sources:
            for producer in (False, True):
                told = self.mailbox._core.events(rank, producer)
                numbers = [event[0] for event in told]
                assert numbers == list(range(numbers[0], numbers[-1] + 1)), self._leg
