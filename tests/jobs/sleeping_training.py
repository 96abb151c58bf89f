"""A training that sleeps instead of computing, with one planted cause of lost efficiency.

    python sleeping_training.py CAUSE BATCH_PER_RANK

Nodes that share two cores cannot compute in parallel, but ranks can sleep in parallel. The forward
pass takes ``SAMPLE_S`` per sample; the time of the cause is independent of the number of ranks.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.record import Recorder

SAMPLE_S = 8e-3
PLANTED_S = 0.1
STEPS = 32
#: Gradients of 4 MB for the cause "communication", and of a few hundred bytes for the other.
WIDE, NARROW = 1000, 8


class Sleeper(nn.Module):
    """A linear layer that sleeps first."""

    def __init__(self, width: int, nap_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.nap_s = nap_s

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, then return the layer's output."""
        time.sleep(self.nap_s)
        outputs: Tensor = self.layer(inputs)
        return outputs


def main(cause: str, batch: int) -> None:
    """Train until the recorder has the requested windows."""
    # Slurm binds the ranks of all nodes to the same core: here, the nodes are one machine.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width = WIDE if cause == "communication" else NARROW
    extra_s = PLANTED_S if cause == "straggler" and dist.get_rank() == 1 else 0.0
    model = DistributedDataParallel(Sleeper(width, SAMPLE_S * batch + extra_s))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    recorder = Recorder(model)
    batches = [torch.ones(1, width)] * STEPS
    for inputs in recorder.batches(batches):
        with recorder.step(samples=batch):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    recorder.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
