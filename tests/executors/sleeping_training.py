"""A training whose computation sleeps, with one cause of lost efficiency planted: a command for a cell.

    python sleeping_training.py CAUSE BATCH_PER_RANK

Nodes that share two cores cannot compute side by side; sleeping ranks can. A sample takes
``SAMPLE_S`` of forward; what the cause adds does not shrink as ranks are added.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.record import Recorder

SAMPLE_S = 8e-3
PLANTED_S = 0.1
STEPS = 32
#: Gradients of 4 MB over the link, of a few hundred bytes where another cause is planted.
WIDE, NARROW = 1000, 8


class Sleeper(nn.Module):
    """One linear layer behind a nap."""

    def __init__(self, width: int, nap_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.nap_s = nap_s

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layer's output, later."""
        time.sleep(self.nap_s)
        outputs: Tensor = self.layer(inputs)
        return outputs


def batches(width: int, nap_s: float) -> Iterator[Tensor]:
    """Yield batches, each after a nap."""
    while True:
        time.sleep(nap_s)
        yield torch.ones(1, width)


def main(cause: str, batch: int) -> None:
    """Train until the recorder has what the cell asks for."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width = WIDE if cause == "communication" else NARROW
    is_late = cause == "straggler" and dist.get_rank() == 1
    extra_s = PLANTED_S if is_late or cause == "serial" else 0.0
    model = DistributedDataParallel(Sleeper(width, SAMPLE_S * batch + extra_s))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    recorder = Recorder(model)
    loader = batches(width, PLANTED_S if cause == "loader" else 0.0)
    for step, inputs in enumerate(recorder.batches(loader), 1):
        with recorder.step(samples=batch):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
        if step == STEPS:
            break
    recorder.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
