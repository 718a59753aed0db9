"""One rank of a pipeline under test: a schedule's steps with taps, or without, and what came of it.

The functions that begin with a desk are run by `support.workers`, on all ranks at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn.functional import mse_loss

from integration.pipelining_policy import LAYERS_A_STAGE, MAX_ROWS, WIDTH, Whole, data, part, train
from support.payloads import same_bits
from tapchannel.errors import ConfigError, TapChannelError, UsageError
from tapchannel.integrations.pipelining import TapStage, attach
from tapchannel.integrations.session import Session

LIMIT = 20.0  # seconds, of every wait
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A pipeline, and what is done to it."""

    schedule: str
    stages_each: int = 1
    v: bool = False
    microbatches: int = 6
    steps: int = 3
    replayed: bool = False
    # Its loss is added to the policy's ("joined"), so also as a part of the stage ("inside"), or
    # goes back at once ("apart").
    draft: str = "joined"
    depth: int | None = None
    fewer: int = 0  # slots less than the schedule can use
    compiled: str = ""  # "layers", "in place", "stage"

    def stages(self, rank: int, ranks: int) -> list[int]:
        """Give the stages of a rank."""
        if self.v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + turn * ranks for turn in range(self.stages_each)]

    def taps(self, ranks: int) -> list[str]:
        """Give the tapped layers: the first of every stage."""
        stages = ranks * (2 if self.v else self.stages_each)
        return [f"layers.{stage * LAYERS_A_STAGE}" for stage in range(stages)]


@dataclass
class Report:
    """What a rank saw."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)  # of the leases: step, microbatch
    wrong: list[str] = field(default_factory=list)  # what differs from the whole policy
    pushes: int = 0
    deferred: int = 0
    own_taps: int = 0
    depth: int = 0
    is_consumer: bool = False


class Draft:
    """A linear layer on all taps, and the loss function that feeds it."""

    def __init__(self, taps: Sequence[str], case: Case, report: Report) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(99)
            self.layer = nn.Linear(len(taps) * WIDTH, WIDTH)
            self.shadow = nn.Linear(len(taps) * WIDTH, WIDTH)
        self.shadow.load_state_dict(self.layer.state_dict())
        self._taps, self._case, self._report = taps, case, report
        self.session: Session | None = None
        self.before_take: Callable[[], object] = lambda: None
        self.hidden: list[dict[str, torch.Tensor]] = []  # of the step, from the whole policy

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compare the microbatch's taps with the whole policy; add the draft's loss."""
        policy = mse_loss(output, target)
        if self.session is None:
            return policy
        self._report.losses.append(policy.detach())
        final = output.detach().reshape(-1, WIDTH)
        self.before_take()
        with self.session.take() as taps:
            known = self.hidden[taps.key.microbatch]
            self._report.keys.append((taps.key.step, taps.key.microbatch))
            features = torch.cat([known[tap] for tap in self._taps], dim=1)
            pairs = {tap: (taps[tap], known[tap]) for tap in self._taps}
            pairs["features"] = (taps["features"], features)
            pairs["output"] = (final, known[list(known)[-1]])
            for name, (seen, expected) in pairs.items():
                if not same_bits(seen, expected):
                    self._report.wrong.append(f"{name} of {taps.key}")
            del pairs, seen
            loss = mse_loss(self.layer(taps["features"]), final)
        if not torch.is_grad_enabled():
            return policy
        mse_loss(self.shadow(features), final).backward()
        if self._case.draft != "apart":
            return policy + loss
        loss.backward()
        return policy

    def check_gradients(self, step: int) -> None:
        """Hold the draft's gradients against those of the same draft on the whole policy."""
        for mine, other in zip(self.layer.parameters(), self.shadow.parameters(), strict=True):
            if self._case.draft == "inside":  # torch scales the gradients of all the stage has
                other.grad /= self._case.microbatches
            if mine.grad is None or not same_bits(mine.grad, other.grad):
                self._report.wrong.append(f"gradient of the draft in step {step}")
            mine.grad = other.grad = None


def compiled(module: nn.Module, how: str) -> nn.Module:
    """Compile a stage's module, or its layers, by one of the ways to do it."""
    if how == "stage":
        return torch.compile(module, backend="eager")
    for name, layer in module.layers.items():
        if how == "in place":
            layer.compile(backend="eager", fullgraph=True)
        elif how == "layers":
            module.layers[name] = torch.compile(layer, backend="eager", fullgraph=True)
    return module


class Rig:
    """A rank's stages, its schedule and, if it is tapped, its session."""

    def __init__(self, group: dist.ProcessGroup, case: Case, tapped: bool) -> None:
        self.case, self.report = case, Report()
        rank, ranks = group.rank(), group.size()
        taps = case.taps(ranks)
        kind = TapStage if tapped else PipelineStage
        self.parts = {
            index: compiled(part(index, case.replayed), case.compiled)
            for index in case.stages(rank, ranks)
        }
        self.draft = Draft(taps, case, self.report)
        if case.draft == "inside" and len(taps) - 1 in self.parts:
            self.parts[len(taps) - 1].draft = self.draft.layer
        self.stages = [
            kind(module, index, len(taps), CPU, group=group) for index, module in self.parts.items()
        ]
        self.whole = Whole(len(taps), case.microbatches)
        self.renew()
        self.session: Session | None = None
        if tapped:
            self.session = self._attach(taps, case.depth)
            if case.fewer:
                depth = self.session.depth - case.fewer
                self.session.close()
                self.session = self._attach(taps, depth)
            self.draft.session = self.session

    def _attach(self, taps: Sequence[str], depth: int | None) -> Session:
        return attach(
            self.schedule,
            self.stages,
            taps,
            max_rows=MAX_ROWS,
            width=WIDTH,
            depth=depth,
            timeout=LIMIT,
        )

    def renew(self) -> None:
        """Make the schedule anew: after an error in a step torch's cannot be used again."""
        kind = get_schedule_class(self.case.schedule)
        many = issubclass(kind, PipelineScheduleMulti)
        stages = self.stages if many else self.stages[0]
        self.schedule = kind(stages, self.case.microbatches, loss_fn=self.draft.loss)

    @property
    def is_first(self) -> bool:
        """Tell whether the inputs go in here."""
        return any(stage.is_first for stage in self.stages)

    @property
    def is_last(self) -> bool:
        """Tell whether the loss is computed here."""
        return any(stage.is_last for stage in self.stages)

    def run(self, step: int, evaluate: bool = False) -> list[torch.Tensor]:
        """Run the schedule on a step's data; give the losses, where they are computed."""
        inputs, targets = data(step, self.case.microbatches)
        losses: list[torch.Tensor] = []
        self.draft.hidden = self.whole.hidden(step)
        args = [inputs] if self.is_first else []
        kwargs = {"target": targets, "losses": losses} if self.is_last else {}
        with torch.no_grad() if evaluate else contextlib.nullcontext():
            (self.schedule.eval if evaluate else self.schedule.step)(*args, **kwargs)
        return [loss.detach() for loss in losses]

    def train(self, step: int) -> None:
        """Run a step, with its pass around it if there are taps, and train the policy."""
        if self.session is None:
            self.report.losses += self.run(step)
        else:
            with self.session.step(step=step):
                self.run(step)
            if self.is_last:
                self.draft.check_gradients(step)
        gradients: dict[str, torch.Tensor] = {}
        for module in self.parts.values():
            gradients |= train(module)
        self.report.gradients.append(gradients)
        self._compare(step, gradients)

    def _compare(self, step: int, gradients: dict[str, torch.Tensor]) -> None:
        _, whole = self.whole.train(step)
        differing = [name for name in gradients if not same_bits(gradients[name], whole[name])]
        self.report.wrong += [f"gradient of {name} in step {step}" for name in differing]

    def pushes(self) -> int:
        """Count what this rank has pushed."""
        return sum(outbox.info()["pushes"] for outbox in self.session.outboxes)

    def close(self) -> Report:
        """End the session; give what was seen."""
        if self.session is not None:
            self.report.pushes = self.pushes()
            for outbox in self.session.outboxes:
                self.report.deferred += outbox.info()["deferred"]
            self.report.depth = self.session.depth
            self.report.is_consumer = self.session.is_consumer
            self.session.close()
        self.report.own_taps = len(self.stages)  # the first layer of each
        return self.report


def join(desk: SimpleNamespace, folder: str, pids: Sequence[int]) -> None:
    """Join the other ranks' process group."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT)
    place = f"file://{folder}/gloo"
    dist.init_process_group(
        "gloo", place, rank=pids.index(os.getpid()), world_size=len(pids), timeout=limit
    )


def among(desk: SimpleNamespace, count: int, role: Callable[..., object], *args: object) -> object:
    """Run a role on the first ranks, in a process group of its own: errors may spoil that."""
    group = dist.new_group(list(range(count)), timeout=timedelta(seconds=LIMIT))
    if dist.get_rank() >= count:
        return None
    try:
        return role(group, *args)
    finally:
        dist.destroy_process_group(group)


def leave(desk: SimpleNamespace) -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def run(group: dist.ProcessGroup, case: Case, tapped: bool = True) -> Report:
    """Train some steps."""
    rig = Rig(group, case, tapped)
    for step in range(1, case.steps + 1):
        rig.train(step)
    return rig.close()


def starve(group: dist.ProcessGroup) -> Report:
    """Train with one slot, which the draft frees only when the first stage has pushed again."""
    rig = Rig(group, Case("1F1B", depth=1), tapped=True)
    rig.train(1)  # the dry run is behind us
    forwards = itertools.count(1)
    store = dist.distributed_c10d._get_default_store()
    if rig.is_first:
        rig.parts[0].register_forward_hook(
            lambda *_: store.set("starved", "") if next(forwards) == 2 else None
        )
    else:
        rig.draft.before_take = lambda: store.wait(["starved"])
    rig.train(2)
    return rig.close()


def fail(group: dist.ProcessGroup) -> tuple[str, Report]:
    """Let both ranks raise in the middle of a step, between the same two messages; train on."""
    rig = Rig(group, Case("1F1B"), tapped=True)
    rig.train(1)
    forwards = itertools.count(1)

    def refuse(*_: object) -> None:
        if rig.is_last or next(forwards) == 2:
            raise ArithmeticError("not a number")

    handles = []
    if rig.is_first:  # the layer before it has pushed the second microbatch
        handles.append(rig.parts[0].layers["1"].register_forward_hook(refuse))
    rig.draft.before_take = refuse
    errors: list[Exception] = []  # kept: its frames hold a send, which gloo must see to its end
    try:
        with rig.session.step(step=2):
            rig.run(2)
    except (ArithmeticError, RuntimeError, TapChannelError) as error:
        errors.append(error)
    for handle in handles:
        handle.remove()
    rig.draft.before_take = lambda: None
    rig.report.losses.clear()
    rig.renew()
    rig.train(3)
    rig.train(4)
    return str(errors[0]), rig.close()


def evaluate(group: dist.ProcessGroup) -> tuple[int, Report]:
    """Evaluate between training steps, without taps and with; train on when all is closed."""
    rig = Rig(group, Case("1F1B"), tapped=True)
    rig.train(1)
    pushed = rig.pushes()
    rig.draft.session = None
    rig.run(2, evaluate=True)
    pushed = rig.pushes() - pushed
    rig.draft.session = rig.session
    with rig.session.step(step=2):
        rig.run(2, evaluate=True)
    rig.train(3)
    report = rig.close()
    rig.draft.session = rig.session = None
    rig.train(4)
    return pushed, report


def refuse(group: dist.ProcessGroup, mistake: str) -> str:
    """Attach wrongly on the first rank; give the error's text."""
    rank = dist.get_rank()
    wrong = mistake if rank == 0 else ""
    kind = PipelineStage if wrong == "plain stage" else TapStage
    stage = kind(part(rank), rank, group.size(), CPU, group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)
    given = stage
    if wrong == "another stage":
        given = TapStage(part(rank), rank, group.size(), CPU, group=group)
    taps = ["layers.0", "layers.9" if mistake == "unknown layer" else "layers.2"]
    width = None if wrong == "no width" else WIDTH
    session = None
    try:
        session = attach(schedule, given, taps, max_rows=MAX_ROWS, width=width, timeout=LIMIT)
        if mistake == "twice":
            attach(schedule, given, taps, max_rows=MAX_ROWS, width=width, timeout=LIMIT)
    except ConfigError as error:
        return str(error)
    finally:
        if session is not None:
            session.close()
    return "attached"


def neglect_draft(group: dist.ProcessGroup) -> str:
    """Add the draft's loss to the policy's where a schedule would not train the draft."""
    rig = Rig(group, Case("ZBVZeroBubble", v=True), tapped=True)
    try:
        rig.train(1)
    except UsageError as error:
        return str(error)
    finally:
        rig.close()
    return "trained"
