"""A user's training script with one planted cause of lost time, for campaign_causes.py.

    python planted_training.py KIND AMOUNT PLANTED BATCH_PER_RANK

The training mostly sleeps, so that ranks do not compete for cores. AMOUNT is in seconds per step; for
``metrics`` and ``gather`` it is a number of collectives, for ``no-sync`` the gradients in MiB, for ``unused``
a number of layers. With PLANTED 0, the training is the same without the cause.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.record import Recorder

#: Seconds of forward and backward of a rank, and steps of the training (more than the recorder needs).
FORWARD_S, BACKWARD_S = 0.02, 0.03
STEPS, ACCUMULATED = 60, 4
WIDTH = 32


class Nap(torch.autograd.Function):
    """Return the input; sleep in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        """Remember how long to sleep."""
        ctx.seconds = seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sleep, and pass on the gradient."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class Network(nn.Module):
    """Layers that take the given times in forward and backward."""

    def __init__(self, *, forward_s: float, backward_s: float, layers: int = 2, rows: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.wide = nn.Parameter(torch.zeros(rows, WIDTH))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, then return the output of the layers."""
        time.sleep(self.forward_s)
        for layer in self.layers:
            inputs = layer(inputs)
        found: Tensor = Nap.apply(inputs, self.backward_s) + self.wide.sum(0)  # type: ignore[no-untyped-call]
        return found


class Convolution(nn.Module):
    """A convolution of one pixel in channels_last, whose gradients have other strides than DDP's buckets."""

    def __init__(self, *, forward_s: float, backward_s: float, strided: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1024, 1024, 1, bias=False)
        self.forward_s, self.backward_s, self.strided = forward_s, backward_s, strided

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, then return the output."""
        time.sleep(self.forward_s)
        images = inputs.sum() + torch.ones(2, 1024, 2, 2)
        if self.strided:
            images = images.contiguous(memory_format=torch.channels_last)
        found: Tensor = Nap.apply(self.conv(images), self.backward_s)  # type: ignore[no-untyped-call]
        return found


class SlowSgd(torch.optim.SGD):
    """SGD that sleeps in each step."""

    nap_s = 0.0

    def step(self, closure: Any = None) -> Any:
        """Sleep, then update."""
        time.sleep(self.nap_s)
        return super().step(closure)


def batches(nap_s: float) -> Iterator[Tensor]:
    """Yield batches, each after ``nap_s`` seconds."""
    for _ in range(STEPS):
        time.sleep(nap_s)
        yield torch.ones(4, WIDTH)


def save_checkpoint(model: nn.Module, nap_s: float) -> None:
    """Save a checkpoint to a slow file system."""
    torch.save(model.state_dict(), Path(os.environ["BENCH_RUN_DIR"]) / "checkpoint.pt")
    time.sleep(nap_s)


def log(loss: Tensor, nap_s: float) -> None:
    """Log to a slow file system."""
    with Path(os.environ["BENCH_RUN_DIR"], f"log{dist.get_rank()}.txt").open("a") as file:
        file.write(f"{float(loss)}\n")
    time.sleep(nap_s)


def augment(inputs: Tensor, nap_s: float) -> Tensor:
    """Augment a batch on the CPU in the training loop."""
    time.sleep(nap_s)
    return inputs + 1


def reduce_metrics(loss: Tensor, number: int) -> list[float]:
    """Average metrics over the ranks, one by one."""
    metrics = [loss.detach().clone() for _ in range(number)]
    for metric in metrics:
        dist.all_reduce(metric)
    return [metric.item() for metric in metrics]


def gather_losses(loss: Tensor, number: int) -> list[object]:
    """Gather Python objects from all ranks, one by one."""
    found: list[object] = [None] * dist.get_world_size()
    for _ in range(number):
        dist.all_gather_object(found, float(loss))
    return found


def validate(module: nn.Module, nap_s: float) -> Tensor:
    """Evaluate the model for ``nap_s`` seconds, or one forward pass if that takes longer."""
    time.sleep(max(nap_s - FORWARD_S, 0))
    with torch.no_grad():
        found: Tensor = module(torch.ones(4, WIDTH))
    return found


def slow_backend(nap_s: float) -> Any:
    """Return a backend of torch.compile that compiles for ``nap_s`` seconds."""

    def compile_graph(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        time.sleep(nap_s)
        return graph.forward

    return compile_graph


def burn(seconds: float) -> None:
    """Use ``seconds`` of CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Training:
    """The training of one rank.

    Attributes:
        kind: name of the planted cause.
        amount: seconds per step, or a number; 0 if nothing is planted.
        batch: samples per step of this rank.
    """

    def __init__(self, kind: str, amount: float, *, planted: bool, batch: int) -> None:
        self.kind, self.planted, self.batch = kind, planted, batch
        self.given, self.amount = amount, amount * planted
        self.rank = dist.get_rank()
        self.is_late = self.rank == dist.get_world_size() - 1 > 0
        if kind == "late-node":
            self.is_late = os.environ.get("SLURMD_NODENAME") == "n2"
        self.passes = ACCUMULATED if kind == "no-sync" else 1

    def nap_s(self, *kinds: str) -> float:
        """Return the planted seconds if the kind is one of these; a late rank has them alone."""
        here = self.kind in kinds and (self.is_late or not self.kind.startswith("late-"))
        return self.amount if here else 0.0

    def times(self) -> tuple[float, float]:
        """Return the seconds of forward and backward in a step."""
        both_s = self.nap_s("late-node") / 2
        forward_s = FORWARD_S + self.nap_s("late-forward") + both_s
        backward_s = BACKWARD_S + self.nap_s("late-backward") + both_s
        if self.kind == "uneven-split" and self.is_late and self.planted:
            more = round(self.batch * (1 + self.amount / (forward_s + backward_s))) / self.batch
            self.batch = round(self.batch * more)
            return forward_s * more, backward_s * more
        if self.kind in ("unused", "grad-strides"):
            # What DDP does for them is short, so the rest of the step is short as well.
            return forward_s / 20, backward_s / 20
        if self.kind == "strong":
            return forward_s * self.batch / 16 + self.amount, backward_s * self.batch / 16
        return forward_s, backward_s

    def model(self) -> DistributedDataParallel:
        """Return the model in DDP."""
        forward_s, backward_s = (seconds / self.passes for seconds in self.times())
        if self.kind == "grad-strides":
            convolution = Convolution(forward_s=forward_s, backward_s=backward_s, strided=self.planted)
            return DistributedDataParallel(convolution)
        layers = int(self.given) if self.kind == "unused" else 2
        rows = int(self.given * 2**20 / WIDTH / 4) if self.kind == "no-sync" else 1
        module = Network(forward_s=forward_s, backward_s=backward_s, layers=layers, rows=rows)
        if self.kind == "one-core":
            module.register_forward_pre_hook(lambda *_: burn(self.given))
        elif self.kind == "recompile":
            # Lengths that change in every step.
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
            backend = slow_backend(self.amount)
            compiled = torch.compile(lambda inputs: inputs * 2, backend=backend, dynamic=False)
            lengths = itertools.count(1)
            module.register_forward_pre_hook(lambda *_: (compiled(torch.ones(next(lengths))), None)[1])
        return DistributedDataParallel(module, find_unused_parameters=self.kind == "unused" and self.planted)

    def run(self) -> None:
        """Train until the recorder has the requested windows."""
        model = self.model()
        optimizer = SlowSgd(model.parameters(), lr=1e-6)
        optimizer.nap_s = self.nap_s("late-optimizer")
        recorder = Recorder(model)
        for inputs in recorder.batches(batches(self.nap_s("loader", "late-loader"))):
            with recorder.step(samples=self.batch):
                optimizer.zero_grad()
                if self.nap_s("augmentation"):
                    inputs = augment(inputs, self.amount)
                loss = self.gradients(model, inputs)
                optimizer.step()
                self.after(model, loss)
        recorder.close()

    def gradients(self, model: DistributedDataParallel, inputs: Tensor) -> Tensor:
        """Compute the gradients of a step."""
        for number in range(self.passes):
            with nullcontext() if self.planted or number == self.passes - 1 else model.no_sync():
                loss: Tensor = model(inputs).sum()
                loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def after(self, model: DistributedDataParallel, loss: Tensor) -> None:
        """Do what follows the optimizer in a step."""
        if not self.planted:
            return
        if self.kind == "checkpoint" and self.rank == 0:
            save_checkpoint(model, self.amount)
        elif self.kind == "logging":
            log(loss, self.amount)
        elif self.kind == "metrics":
            reduce_metrics(loss, int(self.amount))
        elif self.kind == "gather":
            gather_losses(loss, int(self.amount))
        elif self.kind == "validation" and self.rank == 0:
            validate(model.module, self.amount)


def main() -> None:
    """Train with the words of the command line."""
    kind, amount, planted, batch = sys.argv[1:]
    if kind == "one-core" and planted == "1":
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    dist.init_process_group("gloo")
    Training(kind, float(amount), planted=planted == "1", batch=int(batch)).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
