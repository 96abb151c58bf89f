"""A user's training script with a planted cause of lost time, for campaign_causes.py.

    python planted_training.py KIND AMOUNT PLANTED BATCH_PER_RANK [RANKS WORLD_SIZE]

The training mostly sleeps, so that ranks do not compete for cores. AMOUNT is in seconds per step; for
``metrics`` and ``gather`` it is a number of collectives, for ``no-sync`` the gradients in MiB. With
PLANTED 0, the training is the same without the cause. RANKS, such as ``2,3``, are the ranks with the cause;
without it, all have it.

The kinds in DELAYS are delays of a part of the step. A single rank has no delay: it is the baseline. Every
two ranks say that they are on a node of their own. Without a launcher, the program forks WORLD_SIZE ranks.

Each rank writes ``planted<rank>.json``: the median time of a step and of the cause in it, in seconds, on its
own clock. On a busy machine, a sleep takes longer than its argument, so AMOUNT is not the true time; it
stands for causes that the training does not time.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_scaling_bench.record import Recorder

#: Seconds of forward and backward of a rank, and steps of the training (more than the recorder needs).
FORWARD_S, BACKWARD_S = 0.02, 0.03
STEPS, WARM_UP, ACCUMULATED = 45, 5, 4
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


def burn(seconds: float) -> float:
    """Use ``seconds`` of CPU time; return for how long this process waited for a core."""
    began, end = time.perf_counter(), time.process_time() + seconds
    while time.process_time() < end:
        pass
    return time.perf_counter() - began - seconds


class Training:
    """The training of one rank.

    Attributes:
        kind: the planted cause.
        amount: its AMOUNT, also with PLANTED 0.
        batch: samples per step of this rank.
        spent_s: the time that the cause took in each step.
    """

    def __init__(self, kind: str, amount: float, *, planted: bool, batch: int, ranks: Sequence[int]) -> None:
        self.kind, self.amount, self.planted, self.batch = kind, amount, planted, batch
        self.rank = dist.get_rank()
        self.has_cause = not ranks or self.rank in ranks
        self.is_last = self.rank == dist.get_world_size() - 1 > 0
        if kind == "late-node":
            self.has_cause = os.environ.get("SLURMD_NODENAME") == "n2"
        if kind in DELAYS:
            self.has_cause &= dist.get_world_size() > 1
            os.environ["SLURMD_NODENAME"] = f"n{self.rank // PER_NODE + 1}"
        self.passes = ACCUMULATED if kind == "no-sync" else 1
        self.spent_s: list[float] = []

    def amount_of(self, *kinds: str) -> float:
        """Return AMOUNT if one of these causes is planted, and on this rank; else 0."""
        return self.amount if self.planted and self.kind in kinds and self.has_cause else 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record the time of the planted cause."""
        began = time.perf_counter()
        yield
        self.spent_s.append(time.perf_counter() - began)

    def times(self) -> tuple[float, float]:
        """Return the seconds of forward and backward in a step."""
        both_s = self.amount_of("late-node") / 2
        forward_s = FORWARD_S + self.amount_of("forward") + both_s
        backward_s = BACKWARD_S + self.amount_of("backward") + both_s
        if self.amount_of("uneven-split") and self.is_last:
            more = self.batch * (1 + self.amount / (forward_s + backward_s))
            more = round(more) / self.batch
            self.batch = round(self.batch * more)
            return forward_s * more, backward_s * more
        if self.kind == "strong":
            return forward_s * self.batch / 16 + self.amount_of("strong"), backward_s * self.batch / 16
        return forward_s, backward_s

    def model(self) -> DistributedDataParallel:
        """Return the model in DDP."""
        forward_s, backward_s = (seconds / self.passes for seconds in self.times())
        rows = int(self.amount * 2**20 / WIDTH / 4) if self.kind == "no-sync" else 1
        module = Network(forward_s=forward_s, backward_s=backward_s, rows=rows)
        if self.kind in ("one-core", "overlap"):
            module.register_forward_pre_hook(lambda *_: self.spent_s.append(burn(self.amount)))
        if self.kind == "recompile":
            # Lengths that change in every step.
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
            backend = slow_backend(self.amount_of("recompile"))
            self.compiled = torch.compile(lambda inputs: inputs * 2, backend=backend, dynamic=False)
            self.lengths = itertools.count(1)
            module.register_forward_pre_hook(lambda *_: self.recompile())
        model = DistributedDataParallel(module)
        if self.kind == "all-reduce":
            model.register_comm_hook(None, slow_all_reduce(self.amount_of("all-reduce")))
        return model

    def recompile(self) -> None:
        """Call a compiled function with a new length."""
        with self.timed():
            self.compiled(torch.ones(next(self.lengths) if self.planted else 1))

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
        starts = []
        for inputs in recorder.batches(self.batches()):
            with recorder.step(samples=self.batch):
                starts.append(time.perf_counter())
                optimizer.zero_grad()
                if self.amount_of("augmentation"):
                    with self.timed():
                        inputs = augment(inputs, self.amount)
                loss = self.gradients(model, inputs)
                optimizer.step()
                time.sleep(self.amount_of("outside"))
                self.after(model, loss)
        recorder.close()
        self.write(starts)

    def write(self, starts: Sequence[float]) -> None:
        """Write the median times of a step."""
        steps = [after - before for before, after in itertools.pairwise(starts[WARM_UP:])]
        spent_s = statistics.median(self.spent_s[WARM_UP:]) if self.spent_s else None
        content = {"step_s": statistics.median(steps), "spent_s": spent_s, "amount": self.amount}
        Path(os.environ["BENCH_RUN_DIR"], f"planted{self.rank}.json").write_text(json.dumps(content))

    def gradients(self, model: DistributedDataParallel, inputs: Tensor) -> Tensor:
        """Compute the gradients of a step."""
        for number in range(self.passes):
            with nullcontext() if self.planted or number == self.passes - 1 else model.no_sync():
                loss: Tensor = model(inputs).sum()
                loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def after(self, model: DistributedDataParallel, loss: Tensor) -> None:
        """Execute the planted cause if it follows the optimizer in a step."""
        actions: dict[str, Callable[[float], object]] = {
            "logging": lambda amount: log(loss, amount),
            "checkpoint": lambda amount: save_checkpoint(model, amount),
            "validation": lambda amount: validate(model.module, amount),
            "metrics": lambda amount: reduce_metrics(loss, int(amount)),
            "gather": lambda amount: gather_losses(loss, int(amount)),
        }
        action = actions.get(self.kind)
        if action and self.planted and (self.rank == 0 or self.kind not in ("checkpoint", "validation")):
            with self.timed():
                action(self.amount)


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
    kind, amount, planted, batch, ranks, world_size = (*sys.argv[1:], "", "1")[:6]
    if "RANK" not in os.environ:
        fork_ranks(int(world_size))
    if kind == "one-core" and planted == "1":
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    dist.init_process_group("gloo")
    late = [int(rank) for rank in ranks.split(",") if rank]
    Training(kind, float(amount), planted=planted == "1", batch=int(batch), ranks=late).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
