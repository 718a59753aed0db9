"""What taps cost a Megatron-Core pipeline's step: the same steps with and without, by turns.

    python bench/megatron_step.py --stages 2

One process a stage. CUDA_DEVICE_MAX_CONNECTIONS is what the caller sets, or nothing. With as many
GPUs as stages each has its own, and NCCL between them; with fewer they share, and gloo carries
activations through host memory: that only shows that nothing stalls. The policy and the schedule
are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import multiprocessing  # noqa: E402

from support.megatron_models import (  # noqa: E402
    Shape,
    build,
    end_groups,
    run_schedule,
    start_groups,
)
from support.megatron_shim import carry_over_gloo, import_megatron  # noqa: E402
from tapchannel.benchmark.facts import facts  # noqa: E402
from tapchannel.benchmark.samples import ratios  # noqa: E402
from tapchannel.benchmark.traffic import Place  # noqa: E402
from tapchannel.integrations.megatron import attach  # noqa: E402
from tapchannel.integrations.session import Session  # noqa: E402

WARM_UP = 3


def shape_of(options: argparse.Namespace) -> Shape:
    """Give the policy that the options ask for."""
    return Shape(
        pipeline=options.stages,
        layers=options.layers,
        hidden=options.hidden,
        length=options.length,
        batch=1,
        dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
        config={"num_attention_heads": max(4, options.hidden // 128)},
    )


def place(rank: int, stages: int) -> bool:
    """Choose this rank's GPU; tell whether NCCL may carry the pipeline."""
    if not torch.cuda.is_available():
        return False
    count = torch.cuda.device_count()
    torch.cuda.set_device(rank % count)
    return count >= stages


def read_taps(session: Session, output: torch.Tensor) -> torch.Tensor:
    """Stand in for a draft that reads every tap once."""
    if session.is_consumer:
        with session.take() as taps:
            for group in session.plan.groups:
                taps[group.name].sum()
    return output.float().mean()


def one_step(
    shape: Shape, model: list[Any], session: Session, microbatches: int, tapped: bool
) -> float:
    """Run one step; give its milliseconds, from barrier to barrier."""
    lengths = [shape.length] * microbatches
    model[0].zero_grad(set_to_none=True)
    _settle()
    began = time.perf_counter()
    if tapped:
        with session.step(microbatches):
            run_schedule(shape, model, lengths, lambda output: read_taps(session, output))
    else:
        run_schedule(shape, model, lengths, lambda output: output.float().mean())
    _settle()
    return (time.perf_counter() - began) * 1e3


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def work(rank: int, options: argparse.Namespace) -> None:
    """Be one stage; the last one prints."""
    torch.set_num_threads(1)
    import_megatron()
    by_nccl = place(rank, options.stages)
    address = f"tcp://127.0.0.1:{options.port}"
    backend = "nccl" if by_nccl else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=options.stages)
    if torch.cuda.is_available() and not by_nccl:
        carry_over_gloo()
    shape = shape_of(options)
    start_groups(shape)
    model: list[Any] = [chunk.to(shape.dtype) for chunk in build(shape)]
    layers = [round(1 + index * (shape.layers - 2) / 2) for index in range(3)]
    with attach(model, layers, True, max_rows=shape.rows) as session:
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(WARM_UP + options.steps):
            for tapped in (False, True) if turn % 2 else (True, False):
                taken = one_step(shape, model, session, options.microbatches, tapped)
                if turn >= WARM_UP:
                    times[tapped].append(taken)
        if session.is_consumer:
            report(options, backend, layers, times, session)
        dist.barrier()
    end_groups()
    dist.destroy_process_group()


def report(
    options: argparse.Namespace,
    backend: str,
    layers: list[int],
    times: dict[bool, list[float]],
    session: Session,
) -> None:
    """Print a line for people and a line of JSON."""
    off, on = statistics.median(times[False]), statistics.median(times[True])
    longer = statistics.median(100 * (ratio - 1) for ratio in ratios(times[False], times[True]))
    lanes: Any = session.info()["mailbox"]
    known = {
        **facts(
            [],
            Place("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else Place("cpu"),
        ),
        "command": " ".join(["python bench/megatron_step.py", *sys.argv[1:]]),
        "stages": options.stages,
        "backend": backend,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "shape": [options.length, options.hidden, options.layers, options.microbatches],
        "layers": layers,
        "depth": session.depth,
        "tap_bytes_per_step": session.plan.slot_bytes * options.microbatches,
        "wait_s": [lane["wait_s"] for lane in lanes["lanes"]],
        "off_ms": times[False],
        "on_ms": times[True],
    }
    spread = [f"{min(one):.2f}–{max(one):.2f}" for one in (times[False], times[True])]
    print(
        f"{options.stages} stages, {backend}: step {off:.2f} ms ({spread[0]}) without taps, "
        f"{on:.2f} ms ({spread[1]}) with {len(layers)} layers and the embedding: "
        f"{longer:+.1f} % (neighbouring steps)"
    )
    print(json.dumps(known))


def main() -> None:
    """Start a process for each stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--port", type=int, default=29517)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.spawn(work, (options,), nprocs=options.stages)


if __name__ == "__main__":
    main()
