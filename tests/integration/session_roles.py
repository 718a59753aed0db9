"""A rank of a pipeline without a framework: two stages by tensor-parallel ranks, over gloo."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.link import Link
from tapchannel.integrations.opening import open_session
from tapchannel.integrations.session import Session
from tapchannel.integrations.wiring import Settings, TapShape

WIDTH = 6
GROUPS = {"features": ["layer1", "layer2"]}
MICROBATCHES = 3
STAGES = 2


@dataclass(frozen=True)
class Job:
    """What all ranks of a test's pipeline share; ranks are stage × tensor-parallel rank."""

    folder: Path
    tp: int = 1
    settings: Settings = Settings(GROUPS, max_rows=9, timeout=20.0)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return STAGES * self.tp


def hidden(step: int, microbatch: int, layer: int, rows: int) -> torch.Tensor:
    """Give what a layer puts out in one forward, all rows of it."""
    base = torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH)
    return base + 1000 * (step * 100 + microbatch * 10 + layer)


def rows_of(microbatch: int) -> int:
    """Give the rows of a microbatch: they vary."""
    return 9 - 2 * microbatch


def join(job: Job, rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Join the job; give this rank's pipeline and its tensor-parallel group."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=30),
    )
    pipelines = [dist.new_group([t, job.tp + t]) for t in range(job.tp)]
    rows = [dist.new_group(list(range(s * job.tp, (s + 1) * job.tp))) for s in range(STAGES)]
    return pipelines[rank % job.tp], rows[rank // job.tp] if job.tp > 1 else None


def attach(job: Job, rank: int, **options: Any) -> Session:
    """Open the session as a trainer of this job would: stage s makes layer s + 1."""
    pp_group, tp_group = join(job, rank)
    layer = f"layer{rank // job.tp + 1}"
    made = options.pop("produces", {layer: TapShape(WIDTH, "float32")})
    settings = options.pop("settings", job.settings)
    return open_session(
        settings,
        made,
        pp_group=pp_group,
        tp_group=tp_group,
        device="cpu",
        microbatches=MICROBATCHES,
        **{"depth": 2, **options},
    )


def run_forward(job: Job, session: Session, rank: int, step: int, microbatch: int) -> None:
    """Run one microbatch's forward of this rank, pushing and telling as an adapter's hooks do."""
    stage, t = divmod(rank, job.tp)
    whole = hidden(step, microbatch, stage + 1, rows_of(microbatch))
    own = whole
    if job.settings.sequence_parallel:
        own = whole.chunk(job.tp)[t]
    session.enter(0, microbatch)
    try:
        session.tap(f"layer{stage + 1}", own)
        if session.is_consumer:
            session.saw(own)
    finally:
        session.leave(0)


def train(link: Link, job: Job, rank: int, steps: int) -> dict[str, Any]:
    """Run some steps; give what the draft saw, and what this rank's lanes carried."""
    seen: list[torch.Tensor] = []
    with attach(job, rank) as session:
        for step in range(1, steps + 1):
            run_forward(job, session, rank, step, 0)  # outside a step: evaluation
            with session.step():
                for microbatch in range(MICROBATCHES):
                    run_forward(job, session, rank, step, microbatch)
                    if session.is_consumer:
                        with session.take() as taps:
                            seen.append(taps["features"].clone())
        dist.barrier()  # the draft has taken all of it
        info = session.info()
    dist.destroy_process_group()
    lanes = info["outboxes"]
    assert isinstance(lanes, list)
    return {
        "seen": seen,
        "pushes": [lane["pushes"] for lane in lanes],
        "bytes": [lane["bytes"] for lane in lanes],
    }


def fail_once(link: Link, job: Job, rank: int, guilty: int) -> list[str]:
    """Let one rank raise in the first step; then run a good one. Give what each step came to."""
    said: list[str] = []
    with attach(job, rank) as session:
        for step in (1, 2):
            try:
                with session.step():
                    for microbatch in range(MICROBATCHES):
                        if (step, microbatch, rank) == (1, 1, guilty):
                            raise ArithmeticError("loss is not a number")
                        run_forward(job, session, rank, step, microbatch)
                        if session.is_consumer:
                            with session.take() as taps:
                                said.append(f"{float(taps['features'][0, 0]):.0f}")
                said.append("closed")
            except Exception as error:  # noqa: BLE001 - what it is, is what the test asks
                said.append(type(error).__name__)
            dist.barrier()
    dist.destroy_process_group()
    return said


def refused(link: Link, job: Job, rank: int, options: dict[str, Any]) -> str:
    """Attach with what this rank is given; give the error's text."""
    try:
        attach(job, rank, **options).close()
    except Exception as error:  # noqa: BLE001 - what it is, is what the test asks
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return "attached"
