"""The same pipeline under Ray: one actor a stage, the process group made inside the actors.

    python examples/ray_pipeline.py

Nothing of it knows of Ray: the stages meet in the process group's own store, as under torchrun.
"""

import ray
import torch.distributed as dist
from torchrun_pipeline import run_stage

STAGES = 3


@ray.remote(num_cpus=1)
class Stage:
    """One stage of the pipeline."""

    def hold_store(self):
        """Open the store in which all stages meet; give its address."""
        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, STAGES, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def run(self, rank, address):
        """Join the process group, train, and give the draft's losses where the draft is."""
        store = self.store if rank == 0 else dist.TCPStore(*address, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES)
        losses = run_stage()
        dist.destroy_process_group()
        return losses


def main():
    """Start the actors and wait for what the last one says."""
    ray.init("local", num_cpus=STAGES, include_dashboard=False, object_store_memory=100 << 20)
    stages = [Stage.remote() for _ in range(STAGES)]
    address = ray.get(stages[0].hold_store.remote())
    running = [stage.run.remote(rank, address) for rank, stage in enumerate(stages)]
    losses = ray.get(running)[-1]
    print(f"draft loss {losses[0]:.4f} in the first microbatch, {losses[-1]:.4f} in the last")
    ray.shutdown()


if __name__ == "__main__":
    main()
