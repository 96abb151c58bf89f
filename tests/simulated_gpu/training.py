"""A simulated training with DDP, and a replay of the logger of DDP.

The replay follows the order of torch 2.13: ``torch/csrc/distributed/c10d/reducer.cpp``, ``reducer_cuda.cpp``,
``reducer_timer.hpp`` and ``logger.cpp``, and ``_pre_forward`` and ``_post_forward`` of
``torch/nn/parallel/distributed.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.simulated_gpu.device import TIME, Event, Rank, Work, here

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

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        self.iterations = 0
        self.sample_rate = 100
        self.missing = missing
        self.ints_map: dict[str, int] = {}
        self.strs_map: dict[str, str] = {}
        self._events = {name: Event() for name in EVENTS}
        self._host_ns: dict[str, int] = {}

    def collects(self) -> bool:
        """Return ``should_collect_runtime_stats``."""
        return self.iterations > 0 and (self.iterations <= 10 or self.iterations % self.sample_rate == 0)

    def record(self, name: str) -> None:
        """Record an event on the current stream if this iteration is sampled."""
        if self.collects() and name not in self.missing:
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
        begin, finish = self._events[start], self._events[end]
        if not (begin.is_recorded and finish.is_recorded):
            return None
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

    Autograd calls the backward pass and its callbacks, as with the reducer of torch. ``missing`` are events
    that the logger never records.
    """

    def __init__(self, rank: Rank, work: Model, *, missing: tuple[str, ...] = ()) -> None:
        torch.nn.Module.__init__(self)
        self.rank, self.work = rank, work
        self.reducer = self.logger = Reducer(missing)
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
        self.hook = lambda place, size: hook(state, Bucket(place, size))

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
        loss: torch.Tensor = _Pass.apply(self.weight, self)
        return loss

    def run_backward(self) -> None:
        """Run the backward pass, reduce each bucket as soon as it is ready, and queue the callback."""
        syncs = self.require_backward_grad_sync
        for place, size in enumerate(self.work.buckets):
            self._kernels(self.work.backward_s, parts=len(self.work.buckets))
            if syncs:
                if not place:
                    self.reducer.record("comm_start")
                reduced = self.hook(place, size) if self.hook else self.rank.all_reduce(size)
                self.works.append(reduced)
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


class _Pass(torch.autograd.Function):
    """The forward and backward pass of a :class:`Ddp`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, model: Ddp) -> torch.Tensor:
        ctx.model = model
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.model.run_backward()
        return torch.zeros(2), None


@dataclass(frozen=True)
class Bucket:
    """``dist.GradBucket``."""

    place: int
    size: int

    def index(self) -> int:
        """Return the bucket's number."""
        return self.place

    def buffer(self) -> torch.Tensor:
        """Return its gradients."""
        return torch.zeros(self.size // 4)


@dataclass
class Feed:
    """Batches that the host prepares and copies to the device."""

    model: Model

    def next(self) -> tuple[None, None]:
        """Prepare a batch."""
        here().spend(self.model.load_host_s)
        here().launch(self.model.copy_s)
        return None, None


@dataclass
class Optimizer:
    """One kernel per step."""

    model: Model

    def step(self) -> None:
        """Update the weights."""
        for _ in range(self.model.kernels):
            here().launch(self.model.optimizer_s / self.model.kernels)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""
