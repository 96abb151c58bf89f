"""A user's training script with a planted cause of lost time, for campaign_causes.py.

    python planted_training.py KIND AMOUNT RANKS WORLD_SIZE

The training mostly sleeps, so that ranks do not compete for cores. The kinds in DELAYS are delays of a part
of the step. AMOUNT is in seconds per step; for ``metrics`` and ``gather`` it is a number of collectives, for
``no-sync`` the gradients in MiB. RANKS, such as ``2,3``, are the ranks with the cause. A single rank has
none: it is the baseline. Every two ranks say that they are on a node of their own. The program forks
WORLD_SIZE ranks.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_scaling_bench.record import Recorder

#: Seconds of forward and backward of a rank, and steps of the training (more than the recorder needs).
FORWARD_S, BACKWARD_S = 0.02, 0.03
STEPS, ACCUMULATED, BATCH = 45, 4, 16
WIDTH = 32
#: Parts of the step that can take longer.
DELAYS = ("data", "forward", "backward", "optimizer", "all-reduce", "outside")
PER_NODE = 2


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

    def __init__(self, *, forward_s: float, backward_s: float, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.wide = nn.Parameter(torch.zeros(rows, WIDTH))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, then return the output of the layers."""
        time.sleep(self.forward_s)
        for layer in self.layers:
            inputs = layer(inputs)
        found: Tensor = Nap.apply(inputs, self.backward_s) + self.wide.sum(0)  # type: ignore[no-untyped-call]
        return found


class SlowSgd(torch.optim.SGD):
    """SGD that sleeps in each step."""

    nap_s = 0.0

    def step(self, closure: Any = None) -> Any:
        """Sleep, then update."""
        time.sleep(self.nap_s)
        return super().step(closure)


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


def slow_backend(nap_s: float) -> Any:
    """Return a backend of torch.compile that compiles for ``nap_s`` seconds."""

    def compile_graph(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        time.sleep(nap_s)
        return graph.forward

    return compile_graph


def slow_all_reduce(nap_s: float) -> Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]:
    """Return a communication hook of DDP whose all-reduces end ``nap_s`` seconds late."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)

        def finish(done: Any) -> Tensor:
            time.sleep(nap_s)
            found: Tensor = done.value()[0]
            return found

        return work.get_future().then(finish)  # type: ignore[no-any-return]

    hook.__annotations__ = {}  # DDP refuses annotations that are strings
    return hook


def call(compiled: Callable[[Tensor], Tensor], length: int) -> None:
    """Call a compiled function with an input of a length."""
    compiled(torch.ones(length))


def burn(seconds: float) -> None:
    """Use ``seconds`` of CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Training:
    """The training of one rank; ``kind`` and ``amount`` are the planted cause, on some ``ranks``."""

    def __init__(self, kind: str, amount: float, ranks: Sequence[int]) -> None:
        self.kind, self.amount = kind, amount
        self.is_planted = dist.get_world_size() > 1 and dist.get_rank() in ranks
        self.passes = ACCUMULATED if kind == "no-sync" else 1
        os.environ["SLURMD_NODENAME"] = f"n{dist.get_rank() // PER_NODE + 1}"

    def amount_of(self, kind: str) -> float:
        """Return AMOUNT if this cause is planted, and on this rank; else 0."""
        return self.amount if self.is_planted and self.kind == kind else 0.0

    def model(self) -> DistributedDataParallel:
        """Return the model in DDP."""
        forward_s = (FORWARD_S + self.amount_of("forward")) / self.passes
        backward_s = (BACKWARD_S + self.amount_of("backward")) / self.passes
        rows = int(self.amount * 2**20 / WIDTH / 4) if self.kind == "no-sync" else 1
        module = Network(forward_s=forward_s, backward_s=backward_s, rows=rows)
        if self.kind == "one-core":
            module.register_forward_pre_hook(lambda *_: burn(self.amount))
        if self.kind == "recompile":
            # Lengths that change in every step.
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
            backend = slow_backend(self.amount_of("recompile"))
            compiled = torch.compile(lambda inputs: inputs * 2, backend=backend, dynamic=False)
            lengths = itertools.count(1) if self.is_planted else itertools.repeat(1)
            module.register_forward_pre_hook(lambda *_: call(compiled, next(lengths)))
        model = DistributedDataParallel(module)
        if self.kind == "all-reduce":
            model.register_comm_hook(None, slow_all_reduce(self.amount_of("all-reduce")))
        return model

    def batches(self) -> Iterator[Tensor]:
        """Yield batches, each after the planted time."""
        for _ in range(STEPS):
            time.sleep(self.amount_of("data"))
            yield torch.ones(4, WIDTH)

    def run(self) -> None:
        """Train until the recorder has the requested windows."""
        model = self.model()
        optimizer = SlowSgd(model.parameters(), lr=1e-6)
        optimizer.nap_s = self.amount_of("optimizer")
        recorder = Recorder(model)
        for inputs in recorder.batches(self.batches()):
            with recorder.step(samples=BATCH):
                optimizer.zero_grad()
                loss = self.gradients(model, inputs)
                optimizer.step()
                time.sleep(self.amount_of("outside"))
                reduce_metrics(loss, int(self.amount_of("metrics")))
                gather_losses(loss, int(self.amount_of("gather")))
        recorder.close()

    def gradients(self, model: DistributedDataParallel, inputs: Tensor) -> Tensor:
        """Compute the gradients of a step."""
        for number in range(self.passes):
            with nullcontext() if self.is_planted or number == self.passes - 1 else model.no_sync():
                loss: Tensor = model(inputs).sum()
                loss.backward()  # type: ignore[no-untyped-call]
        return loss


def fork_ranks(number: int) -> None:
    """Return in each rank; the program itself waits for them and exits."""
    children = []
    for rank in range(number):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
            torch.set_num_threads(1)
            return
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


def main() -> None:
    """Train with the arguments of the command line."""
    kind, amount, ranks, world_size = sys.argv[1:]
    fork_ranks(int(world_size))
    if kind == "one-core" and int(world_size) > 1:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    dist.init_process_group("gloo")
    Training(kind, float(amount), [int(rank) for rank in ranks.split(",")]).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
