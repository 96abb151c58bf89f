"""Time the parts of a step in a user's loop, using hooks that exist only during an attribution window.

- *data*: the time in the loader's ``next``, as measured by the recorder.
- *forward*: from the call of the model to its return (module hooks).
- *backward*: from the end of forward to the end of the backward pass, without the wait for communication. A
  loss that is computed outside of the model is included, because its end cannot be observed.
- *exposed*: the exposed communication according to DDP's logger, or with FSDP2 to timers on its collectives;
  exactly 0 for one process without DDP.
- *optimizer*: the optimizers' ``step`` (torch's global hooks), without forward and backward in a closure.

A part that no hook observed is NaN, never 0. In a wrapper other than DDP and FSDP2, only *data* is timed:
collectives take place in forward and in backward, and cannot be told from computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..measure.findings import PartsNotTimed
from ..measure.step_parts import COMM_PARTS, BackwardReading, Clock, StepParts, StepTimer
from ..measure.torch_internals import backward_callbacks, observe_compiled_calls
from ..train.strategies import Parts, Strategy
from ..train.strategies.spec import NO_COMMUNICATION


class Attribution:
    """Time the parts of steps: call ``attach``, then ``start`` and ``stop`` per step, then ``detach``."""

    def __init__(
        self,
        model: nn.Module | None,
        strategy: tuple[Strategy | None, Parts],
        clock: Clock,
        world_size: int,
        micro_batches: int | None,
        model_parallel: int = 1,
    ) -> None:
        self._micro_batches = micro_batches
        known, self._strategy_parts = strategy
        #: False if only the loading of data can be timed.
        self.times_model = known is None or not known.untimed
        self._model = model if self.times_model else None
        sees_all = world_size == 1 or self._strategy_parts.sees_communication
        sees_all &= model_parallel == 1  # nothing times what the ranks of a replica exchange
        self._sees_communication = self.times_model and sees_all
        self.timer = StepTimer(clock)
        self._at_end_of_backward = backward_callbacks()
        self._expects_backward = False  # whether a backward pass that synchronises is to follow
        self._handles: list[RemovableHandle] = []
        self._end_observation: Callable[[], None] | None = None  # of a model that is compiled in place
        #: True if the model has been called in a step with hooks.
        self.was_called = False
        #: True if another model's optimizer has stepped between forward and backward of the model.
        self.has_several = False
        #: True if a step with hooks has ended.
        self.has_timed = False
        #: Passes in complete steps since ``attach``: forward passes that a backward pass follows, and
        #: backward passes that synchronised gradients.
        self._forwards = self._syncs = 0
        self._reset()

    @property
    def was_missed(self) -> bool:
        """Whether steps with hooks have ended, but none of them called the model."""
        return self.has_timed and self._model is not None and not self.was_called

    def attach(self) -> PartsNotTimed | None:
        """Register the hooks; return the reason if the parts of a step cannot be measured, except *data*."""
        self._forwards = self._syncs = 0
        untimed = self._strategy_parts.start(self.timer)
        if untimed is not None:
            self.times_model, self._model, self._sees_communication = False, None, False
        begins, ended, model = self.forward_begins, self.forward_ended, self._model
        if model is not None:
            self._end_observation = observe_compiled_calls(model, begins, ended)
            if self._end_observation is None:
                self._handles += [
                    model.register_forward_pre_hook(lambda *_: begins(), prepend=True),
                    model.register_forward_hook(lambda *values: ended(values[-1])),
                ]
        if self.times_model:
            self._handles.append(register_optimizer_step_pre_hook(self.optimizer_begins))
            self._handles.append(register_optimizer_step_post_hook(self.optimizer_ended))
        return untimed

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        if self._end_observation is not None:
            self._end_observation()
            self._end_observation = None
        self._strategy_parts.stop()

    def start(self) -> None:
        """Begin a step."""
        self._reset()
        self.timer.start()

    def passes_per_step(self, steps: int) -> tuple[float | None, float | None]:
        """Return forward passes and synchronising backward passes per step of ``steps`` since ``attach``."""
        parts, counts = self._strategy_parts, self._at_end_of_backward is not None
        if self._micro_batches is not None:
            syncs = 1.0 if parts.sees_communication else 0.0
            return self._micro_batches, syncs if self._sees_communication else None
        if not steps or not counts or not self.times_model:
            return None, None
        syncs = (self._syncs if parts.sync_passes is None else parts.sync_passes) / steps
        return self._forwards / steps or None, syncs if self._sees_communication else None

    def void(self) -> None:
        """Discard the current step because it was interrupted or the clock was stopped."""
        self._is_void = True

    def data_begins(self) -> None:
        """Record that the loop requests a batch."""
        self._suspend_backward()
        self.timer.begin("data_load", in_backward=self._expects_backward)
        self._observed.add("data_load_s")

    def data_ended(self) -> None:
        """Record the arrival of the batch."""
        self._end("data_load")
        self._resume_backward()

    def forward_begins(self) -> None:
        """Record the start of a call of the model."""
        if not self.times_model:
            return
        self.was_called = True
        if not self._expects_backward:
            # The logger keeps the times of only one pass, which the next pass would overwrite.
            self._take_reading()
        self._end("optimizer")  # the optimizer's step calls a closure that runs the model
        self._suspend_backward()
        self.timer.begin("forward", in_backward=self._expects_backward)
        self._observed.add("forward_s")

    def forward_ended(self, output: Any) -> None:
        """Record that the model returned ``output``."""
        if not self.times_model:
            return
        self._end("forward")
        tensor = _first_differentiable(output) if torch.is_grad_enabled() else None
        at_end = self._at_end_of_backward
        if tensor is None or at_end is None:
            self._resume_backward()
            return
        self._is_suspended = False
        self._step_forwards += 1
        self._observed.add("backward_s")
        if self._strategy_parts.times_backward():
            # After two forward passes, the logger's backward starts at the end of the second forward pass.
            self.timer.start_logged_backward(again=self._expects_backward)
            self._awaits_reading = self._expects_backward = True
        else:
            self.timer.begin("backward")
        # DDP later queues its callback, which waits for communication. This callback must run after DDP's.
        tensor.register_hook(  # type: ignore[no-untyped-call]
            lambda _: at_end(lambda: at_end(self._backward_ended))
        )

    def stop(self) -> StepParts | None:
        """End the step and return its parts, or None if it was discarded or its times are unknown."""
        self.has_timed = True
        self.timer.discard()
        self.timer.stop()
        reading = self._sum_readings()
        self._forwards += self._step_forwards
        self._syncs += len(self._readings)
        parts = None if self._is_void or reading is None else self.timer.parts(reading)
        if parts is None:
            return None
        missing = {"data_load_s", "forward_s", "backward_s", "optimizer_s"} - self._observed
        if not self._sees_communication:
            missing |= {*COMM_PARTS}
        elif not self._strategy_parts.sees_forward:
            missing.add("comm_forward_s")
        return replace(parts, **dict.fromkeys(missing, math.nan))

    def _reset(self) -> None:
        self._observed: set[str] = set()
        self._readings: list[BackwardReading | None] = []
        self._step_forwards = 0
        self._is_void = self._at_end_of_backward is None  # the end of backward cannot be observed
        self._awaits_reading = self._expects_backward = self._is_suspended = False
        self._optimizer_depth = 0  # above 1 if one optimizer calls another

    def _sum_readings(self) -> BackwardReading | None:
        """Return the times of all backward passes that synchronise, summed, or None if any is missing."""
        self._take_reading()
        readings = [reading for reading in self._readings if reading is not None]
        if len(readings) < len(self._readings) or not readings:
            return None if self._readings else NO_COMMUNICATION
        compute = sum(reading.compute_s for reading in readings)
        exposed = sum(reading.exposed_s for reading in readings)
        return replace(readings[-1], compute_s=compute, exposed_s=exposed)

    def _take_reading(self) -> None:
        if self._awaits_reading:
            self._awaits_reading = False
            self._readings.append(self._strategy_parts.read())

    def _suspend_backward(self) -> None:
        """Stop timing backward, because the loop loads data or runs the model before the backward pass."""
        self._is_suspended = self.timer.open_part == "backward"
        if self._is_suspended:
            self.timer.end()
        self.timer.discard()

    def _resume_backward(self) -> None:
        if self._is_suspended:
            self._is_suspended = False
            self.timer.begin("backward")

    def _end(self, part: str) -> None:
        if self.timer.open_part == part:
            self.timer.end()

    def _backward_ended(self) -> None:
        self._expects_backward = False
        self._end("backward")
        if self._optimizer_depth and self.timer.open_part is None:  # the optimizer continues after a closure
            self.timer.begin("optimizer")

    def optimizer_begins(self, *details: Any) -> None:
        """Record the start of an optimizer's step, or of what belongs to it."""
        is_pending = self._expects_backward or self.timer.open_part == "backward"
        if is_pending and details and not self._optimizer_depth:
            self.has_several = self._is_void = True  # of another model, such as a discriminator
        self._expects_backward = False  # in case the loss was not computed from the hooked output
        self._optimizer_depth += 1
        self._observed.add("optimizer_s")
        if self._optimizer_depth == 1 and self.timer.open_part != "forward":
            self.timer.discard()
            self.timer.begin("optimizer")

    def optimizer_ended(self, *details: Any) -> None:
        """Record the end of what :meth:`optimizer_begins` started."""
        self._optimizer_depth -= 1
        if self._optimizer_depth == 0:
            self._end("optimizer")


def _first_differentiable(output: Any) -> Tensor | None:
    """Return the first tensor of a model's output from which a backward pass can start."""
    if isinstance(output, Tensor):
        return output if output.requires_grad and output.grad_fn is not None else None
    inner: Iterable[Any] = output if isinstance(output, (list, tuple)) else ()
    if isinstance(output, Mapping):
        inner = output.values()
    elif is_dataclass(output):
        inner = (getattr(output, field.name) for field in fields(output))
    return next((found for one in inner if (found := _first_differentiable(one)) is not None), None)
