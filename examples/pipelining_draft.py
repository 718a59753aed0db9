"""A draft beside a policy in any of torch's pipeline schedules, attached by `tapchannel`.

    torchrun --nproc-per-node 2 examples/pipelining_draft.py [1F1B | Interleaved1F1B | DualPipeV …]

The policy, two residual blocks a stage, learns to square its input. The draft learns to say, from
the hidden states of the first block of every stage, what the policy will answer.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn.functional import mse_loss

from tapchannel.integrations.pipelining import TapStage, attach

WIDTH, ROWS, MICROBATCHES, STEPS = 32, 64, 8, 40
DEVICE = torch.device("cpu")


class Block(nn.Module):
    """A residual block of the policy."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, hidden):
        """Add the block's share to the hidden states."""
        return hidden + self.inner(hidden)


class Policy(nn.Module):
    """The blocks of one stage, called as in the whole policy."""

    def __init__(self, stage):
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block() for layer in (2 * stage, 2 * stage + 1)})

    def forward(self, hidden):
        """Run the blocks."""
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


def own_stages(schedule_class, rank, ranks):
    """Say which stages are this rank's, and how many there are."""
    if not issubclass(schedule_class, PipelineScheduleMulti):
        return [rank], ranks
    if schedule_class.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, 2 * ranks - 1 - rank], 2 * ranks  # a V: the last stage is on rank 0
    return [rank, ranks + rank], 2 * ranks


def main():
    """Be the rank that torchrun says."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    schedule_class = get_schedule_class(sys.argv[1] if len(sys.argv) > 1 else "1F1B")
    indices, count = own_stages(schedule_class, rank, dist.get_world_size())
    parts = nn.ModuleList([Policy(stage) for stage in indices])
    stages = [TapStage(*pair, count, DEVICE) for pair in zip(parts, indices, strict=True)]
    draft, losses = nn.Linear(count * WIDTH, WIDTH), []

    def loss_fn(output, target):
        with session.take() as taps:
            loss = mse_loss(draft(taps["features"]), output.detach())
            loss.backward()  # at once: a zero-bubble schedule would not train the draft
        losses.append(loss.item())
        return mse_loss(output, target)

    several = issubclass(schedule_class, PipelineScheduleMulti)
    schedule = schedule_class(stages if several else stages[0], MICROBATCHES, loss_fn=loss_fn)
    taps = {f"layers.{2 * stage}": f"layer{2 * stage}" for stage in range(count)}
    optimizer = torch.optim.AdamW([*parts.parameters(), *draft.parameters()], lr=3e-3)
    with attach(schedule, stages, taps, max_rows=ROWS, width=WIDTH) as session:
        for step in range(STEPS):
            torch.manual_seed(step)  # so that the first and the last stage draw the same inputs
            inputs = torch.rand(MICROBATCHES * ROWS, WIDTH)
            with session.step():
                schedule.step(
                    *([inputs] if stages[0].is_first else []),
                    target=inputs.square() if session.is_consumer else None,
                )
            optimizer.step()
            optimizer.zero_grad()
        if session.is_consumer:
            first, last = losses[0], losses[-1]
            print(f"draft loss {first:.4f} in the first microbatch, {last:.4f} in the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
