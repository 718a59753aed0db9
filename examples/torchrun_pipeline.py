"""A pipeline under torchrun whose last stage trains a draft on the other stages' hidden states.

    torchrun --nproc-per-node 4 examples/torchrun_pipeline.py

The policy, one residual block a stage, learns to square its input. The draft learns to say, from
what the earlier stages put out, what the policy will answer. No gradient goes back through a tap.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

import tapchannel

WIDTH, ROWS, MICROBATCHES, PASSES = 32, 64, 8, 40


class Block(nn.Module):
    """The policy's part on one stage."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, hidden):
        """Add the block's share to the hidden states."""
        return hidden + self.inner(hidden)


class ProducerStage(PipelineStage):
    """Pushes its output after every forward; the tensor goes on to the next stage as ever."""

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        """Run one microbatch. Only real ones come through here, not torch's shape inference."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.outbox.push(fwd_chunk_id, self.tap, output.detach())
        return output


class DraftStage(PipelineStage):
    """Trains the draft on the taps of a microbatch, just after its own forward of it."""

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        """Run one microbatch through the policy, then through the draft."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        with self.mailbox.recv(fwd_chunk_id) as taps:
            loss = mse_loss(self.draft(taps["features"]), output.detach())
            self.draft_optimizer.zero_grad()
            loss.backward()
            self.draft_optimizer.step()
        self.draft_losses.append(loss.item())
        return output


def train(stage, channel):
    """Run the passes; ``channel`` is this stage's outbox or mailbox."""
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)
    for step in range(PASSES):
        torch.manual_seed(step)  # so that the first and the last stage draw the same inputs
        inputs = torch.rand(MICROBATCHES * ROWS, WIDTH)
        optimizer.zero_grad()
        with channel.open_pass(step, MICROBATCHES):
            if stage.is_first:
                schedule.step(inputs)
            elif stage.is_last:
                schedule.step(target=inputs.square())
            else:
                schedule.step()
        optimizer.step()


def run_stage():
    """Be one stage of the pipeline; the process group is there already."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    store = dist.distributed_c10d._get_default_store()
    taps = [f"block{stage}" for stage in range(stages - 1)]
    plan = tapchannel.TapPlan({"features": taps}, width=WIDTH, dtype="float32", max_rows=ROWS)
    place = (Block(), rank, stages, torch.device("cpu"))
    if rank < stages - 1:
        stage = ProducerStage(*place)
        stage.tap = taps[rank]
        with tapchannel.Outbox(plan, rank, store=store) as stage.outbox:
            train(stage, stage.outbox)
        dist.barrier()
        return None
    stage = DraftStage(*place)
    stage.draft = nn.Linear(len(taps) * WIDTH, WIDTH)
    stage.draft_optimizer = torch.optim.AdamW(stage.draft.parameters(), lr=1e-2)
    stage.draft_losses = []
    sources = {producer: [tap] for producer, tap in enumerate(taps)}
    with tapchannel.Mailbox(plan, sources, depth=stages, store=store) as stage.mailbox:
        train(stage, stage.mailbox)
        dist.barrier()  # the mailbox closes after the outboxes
    return stage.draft_losses


def main():
    """Be the stage that torchrun says."""
    dist.init_process_group("gloo")
    losses = run_stage()
    if losses:
        first, last = losses[0], losses[-1]
        print(f"draft loss {first:.4f} in the first microbatch, {last:.4f} in the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
