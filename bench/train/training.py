"""The training task, its steps, and the windows that measure the steps.

Steps with and without timers run the same operations in the same order. An epoch consists of a throughput
window without timers, then an attribution window with timers.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..measure.conditions import Conditions, Meters, peak_memory_bytes
from ..measure.exchange import Collectives
from ..measure.failures import LossNotFinite
from ..measure.findings import PartsNotTimed
from ..measure.results import Validation, Window, fewest_warmup_steps, first_steps, is_stable
from ..measure.step_parts import COMM_PARTS, StepParts, StepTimer, clock_for
from .data import Feed
from .failures import CollectiveError
from .models import DataShape, Kind, memory_format_of, spec_of
from .options import TrainOptions
from .strategies import strategy_of

_AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Task(nn.Module):
    """A module that runs a network and returns the loss.

    The loss and autocast are inside the module: for DDP's logger, backward begins when the module returns.
    """

    def __init__(self, network: nn.Module, kind: Kind, precision: str, device_type: str) -> None:
        super().__init__()
        self.network = network
        self.kind = kind
        self._device_type = device_type
        self._dtype = _AUTOCAST[precision]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the batch's mean loss, a scalar."""
        return self._loss(self._predict(inputs), targets)

    @torch.no_grad()
    def validate(self, inputs: Tensor, targets: Tensor) -> Validation:
        """Return the loss, accuracy and error sums of one validation batch."""
        predicted = self._predict(inputs).float()
        samples = float(len(targets))
        loss = samples * float(self._loss(predicted, targets))
        if self.kind == "classes":
            correct = float((predicted.argmax(dim=1) == targets).sum())
            return Validation(samples, loss, labels=samples, correct=correct)
        if self.kind == "values":
            error = (predicted - targets).double()
            return Validation(
                samples,
                loss,
                values=float(error.numel()),
                absolute_error=float(error.abs().sum()),
                squared_error=float(error.square().sum()),
            )
        return Validation(samples, loss)

    def _predict(self, inputs: Tensor) -> Tensor:
        predicted: Tensor
        if self._dtype is None:  # even a disabled autocast takes ten microseconds
            predicted = self.network(inputs)
            return predicted
        with torch.autocast(self._device_type, dtype=self._dtype):
            predicted = self.network(inputs)
        return predicted

    def _loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy, or for real values (traffic forecasts) the mean absolute error."""
        predicted = predicted.float()
        if self.kind == "values":
            return functional.l1_loss(predicted, targets)
        if self.kind == "tokens":
            return functional.cross_entropy(predicted.flatten(0, 1), targets.flatten())
        return functional.cross_entropy(predicted, targets)


def build_task(options: TrainOptions, shape: DataShape) -> Task:
    """Create the task with initial weights that depend only on the seed.

    Raises:
        SetupError: the model does not support data of this shape.
    """
    torch.manual_seed(options.seed)
    spec = spec_of(options.model)
    task = Task(spec.build(options, shape), spec.kind, options.precision, options.device)
    # torch converts the weights of convolutions, which have four dimensions; other weights stay as they are.
    task.to(memory_format=memory_format_of(options))  # type: ignore[call-overload]
    return task


def use_precision(precision: str) -> None:
    """Let matrix products and convolutions use TF32 if ``precision`` is tf32; else keep torch's settings.

    torch allows TF32 in cuDNN's convolutions by default, but not in matrix products.
    """
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


def parameters_of(task: nn.Module) -> tuple[int, int]:
    """Return the number of trained parameters, and the size of their gradients in bytes."""
    trained = [p for p in task.parameters() if p.requires_grad]
    return sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained)


#: Number of optimizer states per weight, by optimizer.
STATES_PER_WEIGHT = {"sgd": 1, "adam": 2, "adamw": 2}


def wrap(task: nn.Module, options: TrainOptions) -> nn.Module:
    """Wrap the task with the strategy of the options.

    Raises:
        SetupError: the strategy does not support this training.
    """
    if options.compile:
        task.compile()
    return strategy_of(options.strategy).wrap(task, options)


def zero_batch(task: Task, shape: DataShape, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of zeros, [samples, ...]."""
    inputs = torch.zeros((samples, *shape.inputs), device=device)
    targets = torch.zeros((samples, *shape.targets), device=device)
    return (
        inputs.long() if task.kind == "tokens" else inputs,
        targets if task.kind == "values" else targets.long(),
    )


class Trainer:
    """Run the training steps of one rank, and sum the losses of micro-batches on the device."""

    def __init__(self, model: nn.Module, feed: Feed, options: TrainOptions) -> None:
        strategy = strategy_of(options.strategy)
        self.model = model
        self.parts = strategy.parts(model)
        self.optimizer = self.parts.optimizer = strategy.optimizer(model, options)
        self.feed = feed
        self._state = strategy.state
        self._last_micro_batch = options.grad_accum - 1
        self._loss_weight = 1.0 / options.grad_accum
        # The initial scale is often too high. If gradients overflow, a step is skipped and the scale halved.
        self._scaler = torch.amp.GradScaler(options.device) if options.precision == "fp16" else None
        self.loss_sum = torch.zeros((), device=next(model.parameters()).device)
        self.micro_batches = 0

    def step(self) -> None:
        """Train on one global batch."""
        for micro in range(self._last_micro_batch + 1):
            inputs, targets = self.feed.next()
            with self._sync_context(micro):
                loss = self.model(inputs, targets)
                self._backward(loss)
        self._update()

    def timed_step(self, timer: StepTimer) -> StepParts | None:
        """Train on one global batch and return the step's parts, or None if they are unknown."""
        timer.start()
        for micro in range(self._last_micro_batch + 1):
            timer.begin("data_load")
            inputs, targets = self.feed.next()
            timer.end()
            with self._sync_context(micro):
                timer.begin("forward")
                loss = self.model(inputs, targets)
                timer.end()
                if self.parts.times_backward():
                    self._backward(loss)
                else:
                    timer.begin("backward")
                    self._backward(loss)
                    timer.end()
        timer.begin("optimizer")
        self._update()
        timer.end()
        timer.stop()
        return timer.parts(self.parts.read())

    def take_loss(self) -> float:
        """Return the mean loss since the previous call; on CUDA this waits for the device."""
        mean = float(self.loss_sum) / max(1, self.micro_batches)
        self.loss_sum.zero_()
        self.micro_batches = 0
        return mean

    def state(self) -> dict[str, Any]:
        """Return the whole weights and optimizer states for rank 0; every rank must call this."""
        return self._state(self.parts.module, self.optimizer)

    def _sync_context(self, micro: int) -> AbstractContextManager[None]:
        """Return the context of a micro-batch: ``no_sync`` for all micro-batches except the last."""
        return nullcontext() if micro == self._last_micro_batch else self.parts.no_sync()

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


#: Steps that keep a GPU busy while its clocks are read.
_LOADED_STEPS = 3
#: Maximum number of warm-up rounds, after which the warm-up ends even if the step time is not stable.
_MAX_ROUNDS = 3


class Windows:
    """Run one rank's windows: warm-up, throughput (steps timed as a whole), attribution (timed by part).

    ``samples_per_step`` is this rank's number of samples per step. ``conditions``, if given, samples the
    state of the rank and its node around each window.
    """

    def __init__(
        self,
        trainer: Trainer,
        collectives: Collectives,
        meters: Meters,
        device: torch.device,
        *,
        samples_per_step: int,
        conditions: Conditions | None = None,
    ) -> None:
        self._trainer = trainer
        self._collectives = collectives
        self._meters = meters
        self._device = device
        self._samples_per_step = samples_per_step
        self._conditions = conditions
        self._sees_communication = trainer.parts.sees_communication or collectives.world_size == 1
        #: The reason why the parts of a step cannot be measured, if the last attribution found one.
        self.untimed: PartsNotTimed | None = None

    def warm_up(self, fewest: int) -> tuple[int, bool]:
        """Train one to three rounds of ``fewest`` steps, until every rank's step time is stable.

        On CUDA a round has more steps, because the first ones do not resemble later steps.

        Returns:
            The number of steps, and whether the step time became stable.

        Raises:
            CollectiveError: the loss is not finite.
        """
        self._trainer.parts.stop()
        fewest = fewest_warmup_steps(fewest, self._device)
        step_s: list[float] = []
        stable = False
        for _ in range(_MAX_ROUNDS):
            step_s += self._steps(fewest)
            is_settled = is_stable(step_s, first=first_steps(self._device))
            unstable, *_ = self._collectives.maxima([0.0 if is_settled else 1.0])
            self.check_losses(self._trainer.take_loss(), None)
            stable = not unstable
            if stable:
                break
        return len(step_s), stable

    def throughput(self, steps: int) -> Window:
        """Train ``steps`` steps, measured with a clock only."""
        if self._conditions is not None:
            self._conditions.sample()
        self._collectives.barrier()
        self._meters.start()
        if self._conditions is not None:
            self._conditions.start()
        began = time.perf_counter()
        step_s = self._steps(steps)
        seconds = time.perf_counter() - began
        usage = self._meters.stop()
        conditions = None
        if self._conditions is not None:
            # Only the last micro-batch of a step synchronises gradients.
            syncs = steps if self._trainer.parts.sees_communication else 0
            syncs_seen = syncs if self._sees_communication else None
            conditions = self._conditions.stop(steps=steps, sync_passes=syncs_seen)
        return Window(
            step_s=step_s,
            samples=[self._samples_per_step] * steps,
            parts=[],
            loss=self._trainer.take_loss(),
            peak_mem_bytes=peak_memory_bytes(self._device),
            usage=usage,
            window_s=seconds,
            conditions=conditions,
        )

    def sample_loaded(self, window: Window) -> None:
        """On CUDA, add the clocks of the busy GPU to the conditions of ``window``, in steps of their own."""
        if self._device.type == "cuda" and self._conditions is not None and window.conditions is not None:
            for _ in range(_LOADED_STEPS):
                self._trainer.step()
            self._conditions.add_loaded(window.conditions)
            self._trainer.take_loss()

    def attribution(self, window: Window, steps: int) -> Window:
        """Train ``steps`` steps with a timer on each part of a step, and add the parts to ``window``.

        One more step runs first and is not measured. A step's parts are None if this rank's wall clock was
        set during the step. If a step's parts are unknown for another reason, ``parts`` is empty.
        Communication that the strategy cannot see is NaN.
        """
        parts, timer = self._trainer.parts, StepTimer(clock_for(self._device))
        self.untimed = parts.start(timer)
        if self.untimed is not None:
            return window
        self._collectives.barrier()
        timed, jumps = [], []
        for _ in range(steps + 1):
            timed.append(self._trainer.timed_step(timer))
            jumps.append(timer.clock_jumped)
        parts.stop()
        self._trainer.take_loss()
        del timed[0], jumps[0]
        if not self._sees_communication:
            timed = [step and replace(step, **dict.fromkeys(COMM_PARTS, math.nan)) for step in timed]
        unread = any(step is None and not jump for step, jump in zip(timed, jumps, strict=True))
        return replace(window, parts=[] if unread else timed, clock_jumps=sum(jumps))

    def check_losses(self, own: float | None, epoch: int | None) -> None:
        """Check that the losses of all ranks are finite, after an epoch or (None) the warm-up.

        Raises:
            CollectiveError: a loss is NaN or infinite; every rank raises the same error.
        """
        losses = [row[0] for row in self._collectives.rows([math.nan if own is None else own])]
        wrong = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if wrong:
            # NaN on one rank reaches the other ranks with the next all-reduce of gradients.
            everywhere = len(wrong) == len(losses)
            value: Literal["NaN", "infinite"] = (
                "NaN" if any(math.isnan(losses[rank]) for rank in wrong) else "infinite"
            )
            raise CollectiveError(
                LossNotFinite(epoch=epoch, ranks=tuple(wrong), everywhere=everywhere, value=value)
            )

    def _steps(self, steps: int) -> list[float]:
        """Train ``steps`` steps and return the duration of each in seconds.

        On CUDA the host waits for the device once, at the end.
        """
        clock, step = clock_for(self._device), self._trainer.step
        if clock.is_host:
            now = time.perf_counter
            marks = [now()]
            for _ in range(steps):
                step()
                marks.append(now())
            return [end - begin for begin, end in pairwise(marks)]
        clock.synchronize()
        stamps = [clock.stamp()]
        for _ in range(steps):
            step()
            stamps.append(clock.stamp())
        clock.synchronize()
        return [clock.seconds(begin, end) for begin, end in pairwise(stamps)]
