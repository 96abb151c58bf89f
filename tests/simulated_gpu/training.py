"""A simulated training with DDP under the recorder, and a replay of the logger of DDP.

The replay follows the order of torch 2.13: ``torch/csrc/distributed/c10d/reducer.cpp``, ``reducer_cuda.cpp``,
``reducer_timer.hpp`` and ``logger.cpp``, and ``_pre_forward`` and ``_post_forward`` of
``torch/nn/parallel/distributed.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ddp_scaling_bench.measure.exchange import Met, StoreExchange
from ddp_scaling_bench.measure.launch import Launch
from ddp_scaling_bench.measure.ranks import own_facts
from ddp_scaling_bench.measure.results import Window
from ddp_scaling_bench.record import Recorder
from ddp_scaling_bench.train.options import TrainOptions
from ddp_scaling_bench.train.rank import measure
from ddp_scaling_bench.train.training import Trainer
from tests.simulated_gpu.device import TIME, Collectives, Event, Rank, Work, World, here

#: The events of a timer of the reducer, in the order of ``Timer::Event``.
EVENTS = ("forward_start", "compute_start", "compute_end", "comm_start", "comm_end")
#: The durations that the logger computes, with the events at their start and end.
DURATIONS = {
    "forward_compute_time": ("forward_start", "compute_start"),
    "backward_compute_time": ("compute_start", "compute_end"),
    "backward_comm_time": ("comm_start", "comm_end"),
    "backward_compute_comm_overlap_time": ("comm_start", "compute_end"),
}
#: The host's stamps that the logger reports, with their events.
STAMPS = {
    "forward_compute_time_start": "forward_start",
    "backward_compute_time_start": "compute_start",
    "backward_comm_time_start": "comm_start",
    "backward_compute_time_end": "compute_end",
    "backward_comm_time_end": "comm_end",
}


class Reducer:
    """The counters and timers of ``c10d::Reducer``, and the values of ``c10d::Logger``."""

    def __init__(self) -> None:
        self.iterations = 0
        self.sample_rate = 100
        self.missing = ""
        self.missing_from = 0
        self.ints_map: dict[str, int] = {}
        self.strs_map: dict[str, str] = {}
        self._events = {name: Event() for name in EVENTS}
        self._host_ns: dict[str, int] = {}

    def collects(self) -> bool:
        """Return ``should_collect_runtime_stats``."""
        return self.iterations > 0 and (self.iterations <= 10 or self.iterations % self.sample_rate == 0)

    def record(self, name: str) -> None:
        """Record an event on the current stream if this iteration is sampled."""
        is_missing = name == self.missing and self.iterations >= self.missing_from
        if self.collects() and not is_missing:
            self._host_ns[name] = TIME.time_ns()
            self._events[name].record()

    def prepare_for_forward(self) -> None:
        """Begin an iteration."""
        self.iterations += 1
        self.record("forward_start")

    def set_runtime_stats_and_log(self) -> None:
        """Compute the values of the last iteration, if it was sampled; this waits for its events."""
        if not self.collects():
            return
        self.ints_map["iteration"] = self.iterations
        self.ints_map |= dict.fromkeys((*DURATIONS, *STAMPS), 0)
        for name, (start, end) in DURATIONS.items():
            if (duration_ns := self._difference_ns(start, end)) is not None:
                self.ints_map[name] = duration_ns
        for name, event in STAMPS.items():
            if event in self._host_ns:
                self.ints_map[name] = self._host_ns[event]

    def _get_ddp_logging_data(self) -> Reducer:
        return self

    def _difference_ns(self, start: str, end: str) -> int | None:
        """Return ``CudaTimer::measureDifference``."""
        if not self._host_ns.keys() >= {start, end}:
            return None
        begin, finish = self._events[start], self._events[end]
        begin.synchronize()
        finish.synchronize()
        milliseconds = begin.elapsed_time(finish)
        return None if milliseconds < 0 else int(milliseconds * 1_000_000)


@dataclass(frozen=True)
class Model:
    """The work of a step. Kernels are launched in equal pieces.

    ``buckets`` has the bytes of each bucket; their gradients are ready at equal intervals of backward.
    ``enter_s`` and ``return_s`` are host times of the call of DDP before its forward begins and after its
    backward has begun according to its logger. ``finalize_s`` is host time per bucket after backward.
    """

    forward_s: float = 8e-3
    backward_s: float = 16e-3
    optimizer_s: float = 1e-3
    copy_s: float = 0.1e-3
    load_host_s: float = 0.2e-3
    kernels: int = 20
    buckets: tuple[int, ...] = (25 * 2**20,) * 4
    enter_s: float = 100e-6
    return_s: float = 100e-6
    finalize_s: float = 5e-6

    @property
    def step_s(self) -> float:
        """The device's time of a step if all communication is hidden."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.copy_s


class Ddp(DistributedDataParallel):
    """DDP on one rank; its forward and backward passes launch ``work.kernels`` each.

    Autograd calls the backward pass and its callbacks, as with the reducer of torch.
    """

    def __init__(self, rank: Rank, work: Model) -> None:
        torch.nn.Module.__init__(self)
        self.rank, self.work = rank, work
        self.reducer = self.logger = Reducer()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.hook: Any = None
        self.works: list[Work] = []
        #: The host's time of each forward pass in seconds.
        self.forward_host_s: list[float] = []
        self.require_backward_grad_sync = self.gradient_as_bucket_view = True
        self.find_unused_parameters = self.static_graph = self.broadcast_buffers = False

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.reducer.sample_rate = rate

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Let ``hook`` reduce the buckets."""

        def reduce(place: int, size: int) -> Any:
            return hook(state, SimpleNamespace(index=lambda: place, buffer=lambda: torch.zeros(size // 4)))

        self.hook = reduce

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Neither exchange gradients nor log."""
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = True

    def forward(self, inputs: Any = None, targets: Any = None) -> torch.Tensor:
        """Return a loss of 0, with which the backward pass of the simulation begins."""
        began, syncs = self.rank.now, self.require_backward_grad_sync
        self.rank.spend(self.work.enter_s)
        if syncs:
            self.logger.set_runtime_stats_and_log()
            self.reducer.prepare_for_forward()
        self._kernels(self.work.forward_s)
        if syncs:
            self.reducer.record("compute_start")
        self.rank.spend(self.work.return_s)
        self.forward_host_s.append(self.rank.now - began)
        loss: torch.Tensor = Pass.apply(self.weight, self)
        return loss

    def run_backward(self) -> None:
        """Run the backward pass, reduce each bucket as soon as it is ready, and queue the callback."""
        syncs = self.require_backward_grad_sync
        for place, size in enumerate(self.work.buckets):
            self._kernels(self.work.backward_s, parts=len(self.work.buckets))
            if syncs:
                if not place:
                    self.reducer.record("comm_start")
                self.works.append(self.hook(place, size) if self.hook else self.rank.all_reduce(size))
        if syncs:
            torch.autograd.Variable._execution_engine.queue_callback(self._finalize)

    def _finalize(self) -> None:
        self.reducer.record("compute_end")
        for work in self.works:
            work.wait()
            self.rank.spend(self.work.finalize_s)
        self.works.clear()
        self.reducer.record("comm_end")

    def _kernels(self, seconds: float, parts: int = 1) -> None:
        amount = max(1, self.work.kernels // parts)
        for _ in range(amount):
            self.rank.launch(seconds / parts / amount)


class Pass(torch.autograd.Function):
    """The forward and backward pass of a simulated model."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, model: Any) -> torch.Tensor:
        ctx.model = model
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.model.run_backward()
        return torch.zeros(2), None


@dataclass
class Feed:
    """Batches that the host prepares and copies to the device."""

    model: Model
    #: The host's time at the start of each batch in seconds.
    began_s: list[float] = field(default_factory=list)

    def next(self) -> tuple[torch.Tensor, None]:
        """Prepare a batch of 8 samples."""
        self.began_s.append(here().now)
        here().spend(self.model.load_host_s)
        here().launch(self.model.copy_s)
        return torch.zeros(8), None


@dataclass
class Optimizer:
    """Kernels that update the weights."""

    model: Model

    def step(self) -> None:
        """Update the weights."""
        for _ in range(self.model.kernels):
            here().launch(self.model.optimizer_s / self.model.kernels)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""


def train(recorder: Recorder, model: Ddp, **options: Any) -> Trainer:
    """Run the built-in training to its end."""
    trainer = Trainer(model, Feed(model.work), TrainOptions(val_steps=0, **options))
    recorder.watch(model, trainer.optimizer, micro_batches=trainer.micro_batches)
    session: Any = SimpleNamespace(options=TrainOptions(val_steps=0, **options))
    measure(session, Collectives(model.rank), trainer, recorder)
    return trainer


def loop(recorder: Recorder, model: torch.nn.Module, update: Callable[[], None]) -> None:
    """Train to the end of the recording, in a loop as users write it."""
    for _ in recorder.batches(iter(Feed(Model()).next, None)):
        with recorder.step():
            model().backward()
            update()
        if recorder.done:
            break


#: On CUDA, the warm-up has nine more steps than here.
LENGTHS = {"warmup_steps": 10, "steps_per_epoch": 10, "attribution_steps": 10, "epochs": 1}


def record(
    world: World, folder: Path, program: Callable[[Rank, Recorder], Any], **lengths: int
) -> list[Window]:
    """Record a program on all ranks, which are on one host, and return the last window of each rank."""
    store, ranks = HashStore(), range(len(world.ranks))
    facts = [own_facts(rank, rank, {}) for rank in ranks]

    def recorded(rank: Rank) -> Window:
        met = Met(Launch("srun", rank.number, rank.number, len(ranks)), store, facts, 0.0)
        with Recorder(run_dir=folder, warmup_rounds=3, **{**LENGTHS, **lengths}) as recorder:
            recorder.open(met)
            program(rank, recorder)
        content = StoreExchange(met).read_each(f"window/{recorder.epochs}")[rank.number]
        assert content is not None
        return Window.from_json(content)

    return world.run(recorded)
