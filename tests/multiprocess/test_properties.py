"""Two processes, any sizes, rows, orders and delays: every lease shows its own key."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multiprocess.conftest import Crew
from multiprocess.roles import LIMIT
from support.effort import repeated
from support.payloads import payload, same_bits
from support.workers import Worker
from tapchannel import Lease, Mailbox, Outbox, TapPlan
from tapchannel.errors import WouldBlock

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64")
_names = itertools.count()

Cell = tuple[int, str]  # microbatch, tap


@dataclass(frozen=True)
class Scenario:
    """One channel and one pass through it."""

    groups: dict[str, list[str]]
    dtypes: dict[str, str]
    widths: dict[str, int]
    max_rows: int
    depth: int
    rows: dict[Cell, int]
    order: list[Cell]  # as pushed
    gates: set[int]  # places in the order before which the producer waits until it is told
    together: list[int]  # how many leases to hold, at most, before microbatch k is received
    lowest: list[bool]  # which lease to give back first, the oldest or the newest that may go

    @property
    def microbatches(self) -> int:
        """Count the pass's microbatches."""
        return len(self.together)

    def plan(self) -> TapPlan:
        """Build the tap plan."""
        return TapPlan(self.groups, self.widths, self.dtypes, self.max_rows)

    def tensor(self, cell: Cell) -> torch.Tensor:
        """Give what is pushed for a cell."""
        microbatch, tap = cell
        group = next(group for group, taps in self.groups.items() if tap in taps)
        return payload(cell, self.rows[cell], self.widths[tap], self.dtypes[group])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw a scenario in which the consumer never needs more slots than there are."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    groups = {f"g{i}": [f"t{i}.{k}" for k in range(count)] for i, count in enumerate(counts)}
    taps = [tap for group in groups.values() for tap in group]
    microbatches, depth = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    max_rows = draw(st.integers(1, 40))
    rows: dict[Cell, int] = {}
    for microbatch, group in itertools.product(range(microbatches), groups.values()):
        count = draw(st.integers(0, max_rows))
        rows |= {(microbatch, tap): count for tap in group}
    order = draw(st.permutations(list(rows)))
    return Scenario(
        groups=groups,
        dtypes={group: draw(st.sampled_from(DTYPES)) for group in groups},
        widths={tap: draw(st.integers(1, 33)) for tap in taps},
        max_rows=max_rows,
        depth=depth,
        rows=rows,
        order=list(order),
        gates=draw(st.sets(st.integers(0, len(order) - 1), max_size=4)),
        together=[draw(st.integers(0, depth - 1)) for _ in range(microbatches)],
        lowest=[draw(st.booleans()) for _ in range(microbatches)],
    )


def push_scenario(desk: SimpleNamespace, scenario: Scenario, store: str, name: str) -> None:
    """Attach, push as the scenario says, and leave when all is copied."""
    with Outbox(scenario.plan(), 0, store=store, name=name, timeout=LIMIT) as outbox:
        with outbox.open_pass(0, scenario.microbatches):
            for place, cell in enumerate(scenario.order):
                if place in scenario.gates:
                    desk.link.receive()
                outbox.push(*cell, scenario.tensor(cell))


class Receiver:
    """Receives a pass, holding several leases at a time and giving them back in any order."""

    def __init__(self, mailbox: Mailbox, scenario: Scenario, producer: Worker) -> None:
        self._mailbox = mailbox
        self._scenario = scenario
        self._producer = producer
        self._gates = sorted(scenario.gates)
        self._held: dict[int, Lease] = {}

    def run(self) -> None:
        """Receive every microbatch and check every tap."""
        scenario = self._scenario
        with self._mailbox.open_pass(0, scenario.microbatches):
            for microbatch in range(scenario.microbatches):
                self._give_back_for(microbatch)
                self._open_gates_before(microbatch)
                self._held[microbatch] = self._mailbox.recv(microbatch)
                self._check_all()
            for lease in self._held.values():
                self._leave(lease)

    def _open_gates_before(self, microbatch: int) -> None:
        """Let the producer go on as far as it must; until then nothing may be given out."""
        last = max(
            place for place, cell in enumerate(self._scenario.order) if cell[0] == microbatch
        )
        while self._gates and self._gates[0] <= last:
            try:
                self._mailbox.try_recv(microbatch)
            except WouldBlock:
                self._producer.send()
                self._gates.pop(0)
            else:
                raise AssertionError(f"microbatch {microbatch} was given out before it was pushed")

    def _give_back_for(self, microbatch: int) -> None:
        """Give back the lease in whose slot the microbatch will lie, and what is over the limit."""
        scenario = self._scenario
        due = microbatch - scenario.depth
        while self._held and (due in self._held or len(self._held) > scenario.together[microbatch]):
            oldest = scenario.lowest[microbatch]
            self._leave(self._held.pop((min if oldest else max)(self._held)))

    def _check_all(self) -> None:
        """See that every lease still shows its own key, whatever was pushed since."""
        for microbatch, lease in self._held.items():
            for tap, width in self._scenario.widths.items():
                wanted = self._scenario.tensor((microbatch, tap))
                assert same_bits(lease[tap], wanted), f"{tap} of microbatch {microbatch}"
                assert lease.info[tap].shape == (wanted.shape[0], width)
            for group, taps in self._scenario.groups.items():
                cells = [self._scenario.tensor((microbatch, tap)).view(torch.uint8) for tap in taps]
                assert torch.equal(lease[group].view(torch.uint8), torch.cat(cells, 1)), group

    @staticmethod
    def _leave(lease: Lease) -> None:
        with lease:
            pass


@pytest.fixture
def producer(crew: Crew) -> Worker:
    """Give the worker that pushes every example."""
    return crew.worker()


@settings(max_examples=repeated(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scenario=scenarios())
def test_any_pass_arrives_as_it_was_pushed(
    producer: Worker, store: str, scenario: Scenario
) -> None:
    """Catches a place, a row length, an order or a release that only some sizes get right."""
    name = f"example {next(_names)}"
    options = {"depth": scenario.depth, "store": store, "name": name, "timeout": LIMIT}
    with Mailbox(scenario.plan(), {0: list(scenario.widths)}, **options) as mailbox:
        producer.begin(push_scenario, scenario, store, name)
        Receiver(mailbox, scenario, producer).run()
        producer.finish()
