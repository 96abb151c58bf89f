"""Windows of a recording: a warm-up, then epochs of a throughput window and an attribution window.

The throughput window is measured with a clock only. In the attribution window, hooks time the parts of each
step. Two steps between epochs are not measured. After the first step, rank 0 writes files and falls behind.
In the second step, the exchange of gradients synchronises the ranks again.

Once per recording, the first of these two steps is sampled, to find its slowest calls and the lines of the
user's code that make these calls. The sample is taken with :func:`sys.setprofile` outside all windows,
because it slows the step down. The sample contains all calls that the user's files make, but not the calls
that Python, installed packages and bench make. The time of a call excludes other sampled calls within it.
"""

from __future__ import annotations

import enum
import inspect
import os
import site
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.conditions import Conditions, Meters, peak_memory_bytes
from ..measure.results import Window, fewest_warmup_steps, first_steps, is_stable
from ..measure.step_parts import Clock, StepParts
from ..measure.torch_internals import count_collectives
from ..study.run_json import SampledStep, SlowCall
from .attribution import Attribution
from .session import Lengths, Session

#: Number of calls that are kept for each part: the slowest calls.
_KEPT = 5
#: Part of a step, by the qualified name of the code that runs while the timers measure this part.
_PARTS = {
    "Batches.__iter__": "data_load",
    "Module._wrapped_call_impl": "forward",
    "Tensor.backward": "backward",
    "Optimizer.profile_hook_step.<locals>.wrapper": "optimizer",
}
_BENCH = f"{Path(__file__).resolve().parents[1]}{os.sep}"

#: A line of the user's code, the function that it calls, and the part of the step.
_Key = tuple[str, int, str, str | None]


class StepSampler:
    """Sample one step of this thread. ``model`` is the module whose forward pass the recorder times."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self.is_active = False
        os.register_at_fork(after_in_child=self.discard)  # workers of a DataLoader are not sampled

    def start(self) -> None:
        """Begin to sample, unless a profiler of the user is active."""
        if sys.getprofile() is not None:
            return
        self._open: list[_Call] = []
        self._seconds: defaultdict[_Key, float] = defaultdict(float)
        self._calls: Counter[_Key] = Counter()
        self._bytes: Counter[_Key] = Counter()
        self._part: str | None = None
        self._part_frame: FrameType | None = None
        self._collectives = count_collectives()
        self._own_s = 0.0
        self.is_active = True
        self._began = time.perf_counter()
        observe: Any = self._observe
        if "torch._dynamo" in sys.modules:  # in a compiled region, it would compile this module, too
            observe = torch.compiler.disable(observe)  # type: ignore[no-untyped-call]
        sys.setprofile(observe)

    def discard(self) -> None:
        """End the sample without a result."""
        if self.is_active:
            sys.setprofile(None)
            self.is_active = False

    def stop(self, rank: int) -> SampledStep | None:
        """End the sample and return it, or None if no step was sampled."""
        if not self.is_active:
            return None
        self.discard()
        seconds, called = time.perf_counter() - self._began - self._own_s, count_collectives()
        known = called is not None and self._collectives is not None
        collectives = (called or 0) - (self._collectives or 0) if known else None
        return SampledStep(rank, round(seconds, 6), collectives, list(self._slow_calls()))

    def _slow_calls(self) -> Iterator[SlowCall]:
        kept: Counter[str | None] = Counter()
        for key, seconds in sorted(self._seconds.items(), key=lambda one: -one[1]):
            path, line, function, part = key
            kept[part] += 1
            if kept[part] <= _KEPT or key in self._bytes:
                yield SlowCall(
                    path, line, function, self._calls[key], round(seconds, 6), part, self._bytes.get(key)
                )

    def _observe(self, frame: FrameType, event: str, argument: Any) -> None:
        """Handle an event of :func:`sys.setprofile`; the time that this takes is not part of any call."""
        began = time.perf_counter()
        self._now = began - self._own_s
        self._handle(frame, event, argument)
        self._own_s += time.perf_counter() - began

    def _handle(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code.co_qualname in _PARTS:
                self._begin_part(frame)
            caller = frame.f_back
            if caller is not None and is_users(caller.f_code.co_filename):
                self._begin(frame, caller, None)
        elif event == "return":
            if self._open and self._open[-1].frame is frame and not self._open[-1].is_builtin:
                self._end()
            if frame is self._part_frame:
                self._end_part()
        elif event == "c_call":
            if is_users(frame.f_code.co_filename):
                self._begin(frame, frame, argument)
        elif self._open and self._open[-1].frame is frame and self._open[-1].is_builtin:
            self._end()

    def _begin(self, frame: FrameType, caller: FrameType, builtin: Any) -> None:
        code = frame.f_code
        if builtin is None and code.co_filename.startswith(_BENCH) and code.co_qualname not in _PARTS:
            return
        name = _name(frame) if builtin is None else _name_of_builtin(builtin)
        key = (caller.f_code.co_filename, caller.f_lineno, name, self._part)
        self._calls[key] += 1
        if name.startswith("torch.distributed.") and (size := _bytes_passed(frame)):
            self._bytes[key] += size
        self._open.append(_Call(frame, key, self._now, is_builtin=builtin is not None))

    def _end(self) -> None:
        call = self._open.pop()
        seconds = self._now - call.began
        self._seconds[call.key] += seconds - call.inner_s
        if self._open:
            self._open[-1].inner_s += seconds

    def _begin_part(self, frame: FrameType) -> None:
        part = _PARTS[frame.f_code.co_qualname]
        if part == "forward" and frame.f_locals.get("self") is not self._model:
            return
        if self._part_frame is None:
            self._part, self._part_frame = part, frame

    def _end_part(self) -> None:
        # The timers count all time between the forward and the backward pass as backward.
        self._part = "backward" if self._part == "forward" else None
        self._part_frame = None


class _Call:
    """A call that has not returned. ``inner_s`` is the time of other calls from the user's code within it."""

    __slots__ = ("began", "frame", "inner_s", "is_builtin", "key")

    def __init__(self, frame: FrameType, key: _Key, began: float, *, is_builtin: bool) -> None:
        self.frame, self.key, self.began, self.is_builtin = frame, key, began, is_builtin
        self.inner_s = 0.0


@cache
def is_users(path: str) -> bool:
    """Return whether a source file is the user's own, and does not belong to Python, a package or bench."""
    if path.startswith(("<", _BENCH)):
        return False
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and _is_installed(main):  # python -m PACKAGE
        return path.startswith(f"{Path(main).parent}{os.sep}") or not _is_installed(path)
    return not _is_installed(path)


def _is_installed(path: str) -> bool:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, names), site.getusersitepackages(), str(Path(torch.__file__).parent)]
    inside = any(folder and path.startswith(folder + os.sep) for folder in folders)
    return inside or bool({"site-packages", "dist-packages"}.intersection(Path(path).parts))


def _name(frame: FrameType) -> str:
    """Return the public name of a Python function: ``torch.save``, ``Tensor.backward``, ``Net.__call__``."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
    if code.co_qualname == "Batches.__iter__":
        return f"next({type(getattr(frame.f_locals.get('self'), 'loader', None)).__name__})"
    if code.co_qualname == "Module._wrapped_call_impl":
        return f"{type(frame.f_locals.get('self')).__name__}.__call__"
    # A decorator's inner function holds the function that it wraps.
    wrapped = frame.f_locals.get("func", frame.f_locals.get("fn")) if "<locals>" in code.co_qualname else None
    if inspect.isfunction(wrapped):
        code, module = wrapped.__code__, wrapped.__module__
    return _public_name(code, module)


@cache
def _public_name(code: CodeType, module: str) -> str:
    name = code.co_qualname
    if "." in name and "<locals>" not in name:
        return name  # a method
    parts = module.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        found = getattr(sys.modules.get(package), name, None)
        if getattr(inspect.unwrap(found) if callable(found) else None, "__code__", None) is code:
            return f"{package}.{name}"
    return name if module in ("__main__", "") else f"{module}.{name}"


def _name_of_builtin(function: Any) -> str:
    """Return the name of a function that is written in C: ``time.sleep``, ``Tensor.item``, ``print``."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Tensor):
        return f"Tensor.{function.__name__}"
    name = str(getattr(function, "__qualname__", "?"))
    module = getattr(function, "__module__", None) or (owner.__name__ if inspect.ismodule(owner) else "")
    return name if module in ("", "builtins") or "." in name else f"{module}.{name}"


def _bytes_passed(frame: FrameType) -> int:
    """Return the size in bytes of a function's largest argument that is a tensor or a list of tensors."""
    values = list(frame.f_locals.values())
    values += [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
    return max(map(_size, values), default=0)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list) else 0


#: An interval during which the clock ran: its first and last time stamp.
Span = tuple[Any, Any]


class Phase(enum.Enum):
    """The phase of a recording, which determines how the next step is measured."""

    WARM_UP = enum.auto()
    THROUGHPUT = enum.auto()
    ATTRIBUTION = enum.auto()
    BETWEEN = enum.auto()
    DONE = enum.auto()


class Windows:
    """Group one rank's steps into windows, and send every complete window to rank 0."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self.phase = Phase.WARM_UP
        #: Number of windows sent.
        self.posted = 0
        self._steps = 0  # steps in the current phase
        self._spans: list[list[Span]] = []  # one list per step of the current window
        self._samples: list[float | None] = []
        self._parts: list[StepParts | None] = []
        self._clock_jumps = 0
        self._loss_sum: Tensor | None = None
        self._losses = 0
        self._window: Window | None = None
        self._stable = False
        self._sampler: StepSampler | None = None  # None before the first step and after the sample

    def open(self, clock: Clock, attribution: Attribution, session: Session, sampler: StepSampler) -> None:
        """Begin recording at the first step; ``clock`` is that of the session's device."""
        self._clock = clock
        self._device = session.device
        self._attribution = attribution
        self._sampler = sampler
        self._attribution.detach()  # by default DDP's logger stamps the first steps
        self._session = session
        # Every rank reads all counters; merge_windows keeps the values of each host and device only once.
        self._meters = Meters(self._device, reads_host=True, reads_device=True)
        self._conditions = Conditions(self._device, os.environ, reads_node=session.launch.local_rank == 0)
        self.warmup_steps = fewest_warmup_steps(self._lengths.warmup_steps, self._device)

    def loss(self, loss: Tensor | float) -> None:
        """Add a micro-batch's loss without waiting for the device."""
        if self.phase is not Phase.THROUGHPUT:
            return
        value = torch.as_tensor(loss).detach().float()  # a sum in half precision soon stops growing
        value = value.mean() if value.dim() else value
        self._loss_sum = value.clone() if self._loss_sum is None else self._loss_sum.add_(value)
        self._losses += 1

    def count(self, spans: list[Span], samples: float | None, now: Any) -> Any:
        """Count a complete step, and change the phase after the final step of a window.

        Returns the time stamp from which the clock continues, or None if the clock stops.
        """
        self._steps += 1
        if self.phase is Phase.THROUGHPUT:
            self._spans.append(spans)
            self._samples.append(samples)
            return self._end_throughput() if self._steps == self._lengths.steps_per_epoch else now
        if self.phase is Phase.ATTRIBUTION:
            self._attribute()
        elif self.phase is Phase.WARM_UP:
            self._spans.append(spans)
            if self._steps == self.warmup_steps - 1:
                self._prepare_window()
            elif self._steps == self.warmup_steps:
                first = first_steps(self._device)
                self._stable = is_stable(self._step_times(), first=first, prepares=True)
                return self._start_window()
        elif self.phase is Phase.BETWEEN:
            if self._steps > 1:
                return self._start_window()
            self._end_sample()
            self._prepare_window()  # every rank sent its record before its gradients of this step
        return now

    def leave(self) -> None:
        """Close the current window early and send its steps to rank 0."""
        if self.phase is Phase.THROUGHPUT and self._spans:
            self._window = self._measured_window()
            self._post()
        elif self.phase is Phase.ATTRIBUTION:
            self._attribution.detach()
            self._post()
        self.discard_sample()

    def discard_sample(self) -> None:
        """Discard the sampled step, because the clock stopped in it; the next epoch repeats the sample."""
        if self._sampler is not None:
            self._sampler.discard()

    def _end_sample(self) -> None:
        sample = None if self._sampler is None else self._sampler.stop(self._session.launch.rank)
        if sample is not None:
            self._sampler = None
            self._session.exchange.post("sample", asdict(sample))

    def _prepare_window(self) -> None:
        """Write files and sample conditions, which delays this rank; the next step synchronises the ranks."""
        self._session.write()
        self._conditions.sample()

    def _start_window(self) -> Any:
        if self.posted == self._lengths.epochs:
            self.phase = Phase.DONE
            return None
        self._spans, self._samples, self._parts = [], [], []
        self._clock_jumps = 0
        self._loss_sum, self._losses = None, 0
        self._enter(Phase.THROUGHPUT)
        self._clock.synchronize()
        self._meters.start()
        self._conditions.start()
        return self._clock.stamp()

    def _end_throughput(self) -> Any:
        self._window = self._measured_window()
        if self._lengths.attribution_steps:
            self._session.post(self.posted + 1, self._window, early=True)
            self._enter(Phase.ATTRIBUTION)
            untimed = self._attribution.attach()
            if untimed is not None and self._session.launch.rank == 0:
                self._session.add(untimed)
            self._attribution.start()
        else:
            self._post()
        return self._clock.stamp()

    def _attribute(self) -> None:
        parts = self._attribution.stop()
        self._clock_jumps += self._attribution.clock_jumped
        if self._steps > 1:  # the first step warms up the hooks, and DDP's buckets have other timers in it
            self._parts.append(parts)
        if self._steps > self._lengths.attribution_steps:
            self._attribution.detach()
            self._post()
        else:
            self._attribution.start()

    def _post(self) -> None:
        assert self._window is not None
        window, self._window = replace(self._window, clock_jumps=self._clock_jumps), None
        if self.phase is Phase.ATTRIBUTION and window.conditions is not None:
            window.conditions["rank"]["sync_passes"] = self._sync_passes(len(window.step_s))
        self.posted += 1
        self._session.post(self.posted, window)
        self._enter(Phase.BETWEEN)
        if self._sampler is not None:
            self._sampler.start()

    def _measured_window(self) -> Window:
        """Return the throughput window that ends now; ``parts`` is filled in later."""
        step_s = self._step_times()
        usage = self._meters.stop()
        loss = None if self._loss_sum is None else float(self._loss_sum) / self._losses
        return Window(
            step_s,
            self._samples,
            self._parts,
            loss,
            peak_memory_bytes(self._device),
            usage,
            self._stable,
            conditions=self._conditions.stop(steps=len(step_s) + 1, sync_passes=None),
        )

    def _sync_passes(self, steps: int) -> int | None:
        """Estimate from the attribution window how many backward passes synchronise in ``steps`` steps."""
        if not self._steps or not self._attribution.sees_sync_passes:
            return None
        return round(self._attribution.sync_passes / self._steps * steps)

    def _step_times(self) -> list[float]:
        """Return the duration of every step of the window in seconds."""
        self._clock.synchronize()
        return [sum(self._clock.seconds(*span) for span in spans) for spans in self._spans]

    def _enter(self, phase: Phase) -> None:
        self.phase, self._steps = phase, 0
