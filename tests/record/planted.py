"""A user's loop and the built-in training with the same planted delays, on a clock that only they advance.

The ranks' clocks meet in each collective, as real ones would: a rank that comes early waits for a late one.
"""

import os
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_scaling_bench.measure import step_parts
from ddp_scaling_bench.measure.torch_internals import _groups, _sharding_states
from ddp_scaling_bench.record import Recorder
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.train import rank as rank_module
from ddp_scaling_bench.train import training
from ddp_scaling_bench.train.data import Feed, open_feed
from ddp_scaling_bench.train.models.spec import Blocks
from ddp_scaling_bench.train.session import read_task
from ddp_scaling_bench.train.strategies import ddp, strategy_of
from tests.record.loops import PlantedClock
from tests.train.scenarios import join_group, rank_of_env

#: A planted delay of each kind, in seconds.
SECONDS = {
    "loader": 0.3,
    "late rank": 0.9,
    "forward": 0.5,
    "backward": 0.8,
    "optimizer": 0.7,
    "outside": 1.1,
    "all-gather": 1.3,
    "reduce-scatter": 1.7,
    "all-reduce": 1.9,
    "broadcast": 2.3,
}


class SharedClock(PlantedClock):
    """The clock of a rank, with which it can also read the wall clock's stamps of DDP's logger."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[tuple[int, float]] = []  # the wall clock after each change, and the time since
        self._all_reduce = dist.all_reduce
        self.group: Any = None

    def sleep(self, kind: str) -> None:  # type: ignore[override]
        self._set(self.now + SECONDS[kind])

    def meet(self) -> None:
        latest = torch.tensor([self.now], dtype=torch.float64)
        self._all_reduce(latest, op=dist.ReduceOp.MAX, group=self.group)
        self._set(float(latest))

    def _set(self, now: float) -> None:
        self.now = now
        self._changes.append((time.time_ns(), now))

    def at(self, wall_ns: int) -> int:
        changes = bisect(self._changes, (wall_ns, float("inf")))
        return round(self._changes[changes - 1][1] * 1e9) if changes else 0


CLOCK = SharedClock()


class Nap(torch.autograd.Function):
    """A part of the computation, which takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, points: Tensor) -> Tensor:
        CLOCK.sleep("forward")
        return points.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        CLOCK.sleep("backward")
        return gradients[0]


def late(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that waits for the latest rank, and takes its time."""

    def call(*values: Any, **named: Any) -> Any:
        CLOCK.meet()
        CLOCK.sleep(kind)
        return function(*values, **named)

    return call


def allreduce_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket while backward continues; the delay begins when backward has ended, and waits."""
    buffer, done = bucket.buffer().div_(dist.get_world_size()), torch.futures.Future()
    work, thread = dist.all_reduce(buffer, async_op=True), os.getpid()  # the number of the main thread

    def finish() -> None:
        work.wait()
        asleep = 0
        while asleep < 3:  # once or twice, it may only wait for Python's lock
            time.sleep(0.001)
            state = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
        CLOCK.meet()
        CLOCK.sleep("all-reduce")
        done.set_result(buffer)

    Thread(target=finish).start()
    return done


def times_on_the_clock(model: Any, plain: Callable[..., Any] = ddp.ddp_times) -> dict[str, int]:
    """Return what DDP's logger would have measured with the planted clock."""
    values = plain(model)
    kinds = {"forward_compute", "backward_compute", "backward_comm"}
    if not values.get("backward_comm_time"):
        return {}
    found = {f"{kind}_time_start": CLOCK.at(values[f"{kind}_time_start"]) for kind in kinds}
    ends = {kind: CLOCK.at(values[f"{kind}_time_start"] + values[f"{kind}_time"]) for kind in kinds}
    found |= {f"{kind}_time": ends[kind] - found[f"{kind}_time_start"] for kind in kinds}
    overlap = ends["backward_compute"] - found["backward_comm_time_start"]
    return found | {"backward_compute_comm_overlap_time": overlap}


def feed_of(*given: Any) -> Feed:
    feed = open_feed(*given)

    def batches() -> Iterator[Any]:
        for batch in feed.batches:
            CLOCK.sleep("loader")
            if rank_of_env() == 1:
                CLOCK.sleep("late rank")
            yield batch

    return replace(feed, batches=batches())


def task_of(*given: Any) -> training.Task:
    task = training.build_task(*given)
    for blocks in [one for one in task.modules() if isinstance(one, Blocks)]:
        for block in blocks:
            block.register_forward_hook(lambda module, inputs, output: Nap.apply(output))
    return task


def wrapped(*given: Any) -> nn.Module:
    model = training.wrap(*given)
    CLOCK.group = dist.new_group(backend="gloo")
    if hasattr(model, "register_comm_hook"):
        model.register_comm_hook(None, allreduce_hook)
    for group in [one for state in _sharding_states(model) for one in _groups(state)]:
        for kind, name in (("all-gather", "_all_gather_comm"), ("reduce-scatter", "_reduce_scatter_comm")):
            plain = type(getattr(group, name))
            changed = type(plain.__name__, (plain,), {"__call__": late(kind, plain.__call__)})
            setattr(group, name, object.__new__(changed))
            dist.all_reduce = late("all-reduce", CLOCK._all_reduce)
    return model


def plant_in(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: CLOCK.sleep("optimizer"))
    if hasattr(optimizer, "_sync_params"):
        optimizer._sync_params = late("broadcast", optimizer._sync_params)


class Trainer(training.Trainer):
    """The built-in training's steps, with delays in the optimizer and outside of all parts."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        plant_in(self.optimizer)

    def backward(self, *given: Any, **named: Any) -> Tensor:
        loss = super().backward(*given, **named)
        CLOCK.sleep("outside")
        return loss


def built_in() -> int:
    step_parts.time, ddp.ddp_times = CLOCK, times_on_the_clock
    rank_module.open_feed, rank_module.build_task = feed_of, task_of
    rank_module.wrap, rank_module.Trainer = wrapped, Trainer
    from ddp_scaling_bench.train.__main__ import main  # imports torch._dynamo, which takes seconds

    return main()


def users() -> int:
    """The same training as a user's program."""
    step_parts.time, ddp.ddp_times = CLOCK, times_on_the_clock
    cell, options = read_task(RunFolder(Path(os.environ["BENCH_RUN_DIR"])))
    feed = feed_of(options, cell.per_gpu_batch, join_group(), cell.world_size, torch.device("cpu"))
    model, strategy = wrapped(task_of(options, feed.shape), options), strategy_of(options.strategy)
    optimizer = strategy.optimizer(model, options)
    plant_in(optimizer)
    recorder = Recorder(model, optimizer=optimizer, warmup_rounds=3)
    for number, batch in enumerate(recorder.batches(iter(feed.next, None)), start=1):
        is_last = number % options.grad_accum == 0
        with recorder.step(update=is_last):
            with nullcontext() if is_last else strategy.parts(model).no_sync():
                loss = model(*batch)
                recorder.loss(loss)
                (loss / options.grad_accum).backward()
            CLOCK.sleep("outside")
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        if recorder.done:
            break
    recorder.close()
    dist.barrier()
    return 0
