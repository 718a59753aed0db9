"""A pipeline under torchrun whose last stage trains a draft on the other stages' hidden states.

    torchrun --nproc-per-node 4 examples/torchrun_pipeline.py

The policy, one residual block a stage, learns to square its input. The draft learns to say, from
what the earlier stages put out, what the policy will answer. No gradient goes back through a tap.
The stages tell the session themselves what they run: a trainer of your own would do it like this.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

from tapchannel.integrations.opening import open_session
from tapchannel.integrations.wiring import Settings, TapShape

WIDTH, ROWS, MICROBATCHES, PASSES = 32, 64, 8, 40


class Block(nn.Module):
    """The policy's part on one stage."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, hidden):
        """Add the block's share to the hidden states."""
        return hidden + self.inner(hidden)


class TappedStage(PipelineStage):
    """Says what it runs. Its output is pushed, and goes on to the next stage as ever."""

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        """Run one microbatch. Only real ones come through here, not torch's shape inference."""
        self.session.enter(self.stage_index, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            self.session.saw(output)
            with self.session.take() as taps:
                self.draft.learn(taps["features"], output.detach())
        else:
            self.session.tap(f"block{self.stage_index}", output)
        self.session.leave(self.stage_index)
        return output


class Draft(nn.Module):
    """Guesses the last stage's output from all others'."""

    def __init__(self, taps):
        super().__init__()
        self.guess = nn.Linear(taps * WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.losses = []

    def learn(self, features, output):
        """Train on one microbatch."""
        loss = mse_loss(self.guess(features), output)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def run_stage():
    """Be one stage of the pipeline; give the draft's losses where the draft is."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    taps = [f"block{stage}" for stage in range(stages - 1)]
    stage = TappedStage(Block(), rank, stages, torch.device("cpu"))
    stage.draft = Draft(len(taps))
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)
    with open_session(
        Settings({"features": taps}, max_rows=ROWS),
        {tap: TapShape(WIDTH, "float32") for tap in taps[rank : rank + 1]},
        pp_group=dist.group.WORLD,
        device="cpu",
        depth=stages,
        microbatches=MICROBATCHES,
    ) as stage.session:
        for step in range(PASSES):
            torch.manual_seed(step)  # so that the first and the last stage draw the same inputs
            inputs = torch.rand(MICROBATCHES * ROWS, WIDTH)
            arguments = (inputs,) if stage.is_first else ()
            optimizer.zero_grad()
            with stage.session.step():
                schedule.step(*arguments, target=inputs.square() if stage.is_last else None)
            optimizer.step()
        dist.barrier()  # the mailbox closes after the outboxes
    return stage.draft.losses


def main():
    """Be the stage that torchrun says."""
    dist.init_process_group("gloo")
    losses = run_stage()
    if losses:
        print(f"draft loss {losses[0]:.4f} in the first microbatch, {losses[-1]:.4f} in the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
