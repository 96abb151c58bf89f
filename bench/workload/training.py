"""Training steps, with and without timers; both run the same operations in the same order."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from bench.matrix.workload import WorkloadOptions
from bench.measure.step_parts import StepParts, StepTimer, read_ddp_timing
from bench.workload.data.feed import Feed
from bench.workload.task import Task

#: The momentum of SGD, with the value that is usual for ResNet-50.
_MOMENTUM = 0.9
#: Number of optimizer states per weight, by optimizer.
STATES_PER_WEIGHT = {"sgd": 1, "adam": 2, "adamw": 2}


def wrap(task: Task, options: WorkloadOptions) -> DistributedDataParallel:
    """Wrap the task in DDP with the settings that the measurement needs.

    Gradients are views of the buckets; otherwise copies would count as communication. Buffers are not
    broadcast in forward; otherwise the wait for a late rank would count as forward.
    """
    if options.compile:
        task.compile()
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.13 renames the argument broadcast_buffers and deprecates the old name.
    buffers: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers": False
    }
    device = next(task.parameters()).device
    return DistributedDataParallel(
        task,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=options.bucket_cap_mb,  # a fraction of a MiB is fine
        gradient_as_bucket_view=True,
        **buffers,
    )


class Trainer:
    """Runs the training steps of one rank, and sums the losses of micro-batches on the device."""

    def __init__(self, model: DistributedDataParallel, feed: Feed, options: WorkloadOptions) -> None:
        self.model = model
        self.optimizer = _optimizer(model, options)
        self._feed = feed
        self._last_micro_batch = options.grad_accum - 1
        self._loss_weight = 1.0 / options.grad_accum
        # The initial scale is often too high. If gradients overflow, a step is skipped and the scale halved.
        self._scaler = torch.amp.GradScaler(options.device) if options.precision == "fp16" else None
        self.loss_sum = torch.zeros((), device=next(model.parameters()).device)
        self.micro_batches = 0

    def step(self) -> None:
        """Train on one global batch."""
        for micro in range(self._last_micro_batch + 1):
            inputs, targets = self._feed.next()
            with self._sync_context(micro):
                loss = self.model(inputs, targets)
                self._backward(loss)
        self._update()

    def timed_step(self, timer: StepTimer) -> StepParts | None:
        """Train on one global batch and return the parts of the step; None if DDP's logger has no times."""
        timer.start()
        for micro in range(self._last_micro_batch + 1):
            timer.begin("data_load")
            inputs, targets = self._feed.next()
            timer.end()
            with self._sync_context(micro):
                timer.begin("forward")
                loss = self.model(inputs, targets)
                timer.end()
                if micro == self._last_micro_batch:
                    self._backward(loss)
                else:
                    timer.begin("backward")
                    self._backward(loss)
                    timer.end()
        timer.begin("optimizer")
        self._update()
        timer.end()
        timer.stop()
        return timer.parts(read_ddp_timing(self.model))

    def take_loss(self) -> float:
        """Return the mean loss since the last call; on CUDA this waits for the device."""
        mean = float(self.loss_sum) / max(1, self.micro_batches)
        self.loss_sum.zero_()
        self.micro_batches = 0
        return mean

    def _sync_context(self, micro: int) -> AbstractContextManager[None]:
        """Return the context of a micro-batch; all but the last use ``no_sync``."""
        return nullcontext() if micro == self._last_micro_batch else self.model.no_sync()

    def _backward(self, loss: Tensor) -> None:
        self.loss_sum += loss.detach()
        self.micro_batches += 1
        scaled = loss * self._loss_weight if self._last_micro_batch else loss
        if self._scaler is not None:
            scaled = self._scaler.scale(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]

    def _update(self) -> None:
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def _optimizer(model: DistributedDataParallel, options: WorkloadOptions) -> Optimizer:
    if options.optimizer == "sgd":
        return SGD(model.parameters(), lr=options.learning_rate, momentum=_MOMENTUM)
    kind = Adam if options.optimizer == "adam" else AdamW
    return kind(model.parameters(), lr=options.learning_rate)
