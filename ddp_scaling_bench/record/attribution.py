"""Time the parts of a step in a user's loop, using hooks that exist only during an attribution window.

- *data*: the time in the loader's ``next``, as measured by the recorder.
- *forward*: from the call of the model to its return (module hooks).
- *backward*: from the end of forward to the end of the backward pass, without the wait for communication. A
  loss that is computed outside of the model is included, because its end cannot be observed.
- *exposed*: the exposed communication according to DDP's logger, or with FSDP2 to timers on its collectives;
  exactly 0 for one process without DDP.
- *optimizer*: the optimizers' ``step`` (torch's global hooks), without forward and backward in a closure.

A part that no hook observed is NaN, never 0. A step in which a CUDA graph is captured has no parts. In a
wrapper other than DDP and FSDP2, only *data* is timed: collectives take place in forward and in backward, and
cannot be told from computation.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..measure.findings import PartsNotTimed
from ..measure.host_waits import HostWaits
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
        self._may_have_others = world_size > 1
        self.timer = StepTimer(clock)
        self._host_waits = HostWaits()
        #: The number of waits for the device in the first step since ``attach``, or None if it is unknown.
        self.host_waits: int | None = None
        self._at_end_of_backward = backward_callbacks()
        self._expects_backward = False  # whether a backward pass that synchronises is to follow
        #: What ends the hooks, and the observation of models that are compiled in place.
        self._ends: list[Callable[[], None]] = []
        #: Other models with DDP that exist after the warm-up.
        self._others: list[nn.Module] | None = None
        #: True if one of them trains, too: its communication is not seen.
        self.has_others = False
        #: True if the model has been called in a step with hooks.
        self.was_called = False
        #: True if another model's optimizer has stepped between forward and backward of the model.
        self.has_several = False
        self._has_captured = False  # whether a CUDA graph was captured in the step
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
        self.host_waits, self._has_captured = None, False
        untimed = self._strategy_parts.start(self.timer)
        if untimed is not None:
            self.times_model, self._model, self._sees_communication = False, None, False
        if self._model is not None:
            self._observe(self._model, self.forward_begins, self.forward_ended)
        if self._sees_communication and self._may_have_others:
            if self._others is None:
                self._others = _ddp_models(self._strategy_parts.model)
            for other in self._others:
                self._observe(other, lambda: None, self._other_ended)
        if self.times_model:
            self._ends.append(register_optimizer_step_pre_hook(self.optimizer_begins).remove)
            self._ends.append(register_optimizer_step_post_hook(self.optimizer_ended).remove)
        return untimed

    def _observe(self, model: nn.Module, begins: Callable[[], None], ended: Callable[[Any], None]) -> None:
        """Call ``begins`` and ``ended`` around each call of a model."""
        if (end := observe_compiled_calls(model, begins, ended)) is not None:
            self._ends.append(end)
            return
        self._ends.append(model.register_forward_pre_hook(lambda *_: begins(), prepend=True).remove)
        self._ends.append(model.register_forward_hook(lambda *values: ended(values[-1])).remove)

    def _other_ended(self, output: Any) -> None:
        if torch.is_grad_enabled() and _first_differentiable(output) is not None:
            self.has_others, self._sees_communication = True, False

    def detach(self) -> None:
        """Remove the hooks."""
        self.stops_early()
        while self._ends:
            self._ends.pop()()
        self._strategy_parts.stop()

    def start(self) -> None:
        """Begin a step."""
        self._reset()
        if self._has_captured:
            self._has_captured = False
            self._strategy_parts.start(self.timer)
        self.timer.start()
        if self.host_waits is None and not self.timer.clock.is_host:
            self._host_waits.start()

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

    def stops_early(self) -> None:
        """Give the user's settings back, because the clock stops, perhaps after an error."""
        self._host_waits.stop()

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
        if self.timer.clock.is_capturing():  # DDP's logger would wait for the device
            self._is_void = self._has_captured = True
            self._strategy_parts.stop()
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
        waits = self._host_waits.stop()
        if not self._is_void and self.host_waits is None:
            self.host_waits = waits
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
        if self.host_waits or _waits_always(os.environ):  # the host's time contains that of the device
            missing |= {"launch_s", "host_s"}
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
            self._readings.append(None if self._is_void else self.timer.reads(self._strategy_parts.read))

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
        if self._expects_backward or self.timer.open_part == "backward":  # not again for a second loss
            self.timer.backward_ended()
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


def _waits_always(env: Mapping[str, str]) -> bool:
    """Return whether variables let each launch, or each collective, wait for the device."""
    names = ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT")
    return any(env.get(name, "0").strip().lower() not in ("", "0", "false", "n", "no") for name in names)


def _ddp_models(own: nn.Module) -> list[nn.Module]:
    """Return all models of the process with DDP, except the recorder's own.

    An instance refers to its class. ``gc.get_objects`` would also refer to tuples that other threads build,
    which ends in an error there.
    """
    kinds: list[type] = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds and one is not own]


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
