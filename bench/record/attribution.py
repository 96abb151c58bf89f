"""The parts of a step of somebody else's loop, found with hooks that are there only while needed.

- *data*: the time in the loader's ``next``, told by the recorder.
- *forward*: from the model's call to its return (module hooks).
- *backward*: from there to the end of the backward pass, without the wait for communication. A loss
  that is computed outside of the model falls in here: nothing tells where it ends.
- *exposed*: what DDP's logger says; exactly nothing where there is one process only.
- *optimizer*: the optimizers' ``step`` (torch's global hooks), less what a closure does in it.

What no hook saw is NaN, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bench.measure import step_parts as ddp_logger
from bench.measure.step_parts import BackwardReading, Clock, StepParts, StepTimer

_NO_COMMUNICATION = BackwardReading(0.0, 0.0, 0)


class Attribution:
    """Times the parts of one rank's steps; attach, then per step: start ... stop; detach."""

    def __init__(self, model: nn.Module | None, clock: Clock, *, world_size: int) -> None:
        self._model = model
        self._ddp = find_ddp(model)
        self._world_size = world_size
        self._timer = StepTimer(clock)
        self._handles: list[RemovableHandle] = []
        self._is_prepared = False  # a backward pass that synchronises is to come
        #: Whether the model was ever called in an instrumented step.
        self.was_called = False
        self._forget()

    # -- the window ---------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks in place."""
        if self._model is not None:
            self._handles.append(self._model.register_forward_pre_hook(self._before_forward))
            self._handles.append(self._model.register_forward_hook(self._after_forward))
        self._handles.append(register_optimizer_step_pre_hook(self._optimizer_begins))
        self._handles.append(register_optimizer_step_post_hook(self._optimizer_ended))
        if self._ddp is not None:
            ddp_logger.sample_every_step(self._ddp)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._ddp is not None:
            ddp_logger.sample_no_step(self._ddp)

    # -- one step -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin a step."""
        self._forget()
        self._timer.start()

    @property
    def clock_jumped(self) -> bool:
        """Whether the step that was stopped last has no parts because the wall clock was set during it."""
        return self._timer.clock_jumped

    def void(self) -> None:
        """Give the step up: it was interrupted, or the clock stood still within it."""
        self._is_void = True

    def data_begins(self) -> None:
        """The loader is asked for a batch."""
        self._set_aside()
        self._timer.begin("data_load", within_backward=self._is_prepared)
        self._seen.add("data_load_s")

    def data_ended(self) -> None:
        """The batch is here."""
        self._end("data_load")
        self._take_up()

    def forward_begins(self) -> None:
        """The model is called."""
        self.was_called = True
        if not self._is_prepared:
            # The logger keeps one pass only; the next would overwrite it.
            self._take_reading()
        self._end("optimizer")  # whose step calls a closure
        self._set_aside()
        self._timer.begin("forward", within_backward=self._is_prepared)
        self._seen.add("forward_s")

    def forward_ended(self, output: Any) -> None:
        """The model returned ``output``."""
        self._end("forward")
        tensor = _differentiable(output) if torch.is_grad_enabled() else None
        if tensor is None:
            self._take_up()
            return
        self._is_set_aside = False
        self._seen.add("backward_s")
        if self._ddp is not None and self._ddp.require_backward_grad_sync:
            # Of two forward passes before one backward pass the logger counts from the second's end.
            self._timer.backward_is_prepared(anew=self._is_prepared)
            self._awaits_reading = self._is_prepared = True
        else:
            self._timer.begin("backward")
        tensor.register_hook(self._backward_reached_output)  # type: ignore[no-untyped-call]

    def stop(self) -> StepParts | None:
        """End the step and return its parts; None where it is void or DDP stamped nothing."""
        self._timer.drop()
        self._timer.stop()
        reading = self._reading()
        parts = None if self._is_void or reading is None else self._timer.parts(reading)
        if parts is None:
            return None
        unseen = {"data_load_s", "forward_s", "backward_s", "optimizer_s"} - self._seen
        if self._ddp is None and self._world_size > 1:
            unseen.add("exposed_s")
        return replace(parts, **dict.fromkeys(unseen, math.nan))

    def _forget(self) -> None:
        self._seen: set[str] = set()
        self._readings: list[BackwardReading | None] = []
        self._is_void = self._awaits_reading = False
        self._is_prepared = False
        self._is_set_aside = False
        self._depth = 0

    def _reading(self) -> BackwardReading | None:
        """Return the sum of what DDP's logger said of this step's synchronising passes."""
        self._take_reading()
        if any(reading is None for reading in self._readings):
            return None
        told = [reading for reading in self._readings if reading is not None]
        if not told:
            return _NO_COMMUNICATION
        exposed = sum(reading.exposed_s for reading in told)
        return BackwardReading(sum(reading.compute_s for reading in told), exposed, told[-1].began_ns)

    def _take_reading(self) -> None:
        if self._awaits_reading:
            assert self._ddp is not None
            self._awaits_reading = False
            self._readings.append(ddp_logger.read(self._ddp))

    def _set_aside(self) -> None:
        """Interrupt a backward part whose pass has not begun: a batch or another forward pass comes first."""
        self._is_set_aside = self._timer.open_part == "backward"
        if self._is_set_aside:
            self._timer.end()
        self._timer.drop()

    def _take_up(self) -> None:
        if self._is_set_aside:
            self._is_set_aside = False
            self._timer.begin("backward")

    def _end(self, part: str) -> None:
        if self._timer.open_part == part:
            self._timer.end()

    # -- hooks --------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        self.forward_begins()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.forward_ended(output)

    def _backward_reached_output(self, gradient: Tensor) -> None:
        # DDP's own callback, which waits for communication, is queued later: queue up behind it.
        _at_end_of_backward(lambda: _at_end_of_backward(self._backward_ended))

    def _backward_ended(self) -> None:
        self._is_prepared = False
        self._end("backward")
        if self._depth and self._timer.open_part is None:  # the rest of a step with a closure
            self._timer.begin("optimizer")

    def _optimizer_begins(self, *details: Any) -> None:
        self._is_prepared = False  # also where the loss does not come from the output that has the hook
        self._depth += 1  # optimizers are wrapped in optimizers
        self._seen.add("optimizer_s")
        if self._depth == 1 and self._timer.open_part != "forward":
            self._timer.drop()
            self._timer.begin("optimizer")

    def _optimizer_ended(self, *details: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end("optimizer")


def _at_end_of_backward(call: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def find_ddp(model: nn.Module | None) -> DistributedDataParallel | None:
    """Return the first module under DDP in ``model``, itself included (torch.compile wraps it)."""
    if model is None:
        return None
    return next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)


def _differentiable(output: Any) -> Tensor | None:
    """Return the first tensor of a model's output that a backward pass can start from."""
    if isinstance(output, Tensor):
        return output if output.requires_grad and output.grad_fn is not None else None
    if isinstance(output, Mapping):
        inner: Sequence[Any] = list(output.values())
    elif isinstance(output, (list, tuple)):
        inner = output
    elif is_dataclass(output):
        inner = [getattr(output, field.name) for field in fields(output)]
    else:
        return None
    return next((found for one in inner if (found := _differentiable(one)) is not None), None)
