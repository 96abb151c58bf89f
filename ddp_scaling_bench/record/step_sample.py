"""Sample one step: its slowest calls, and the lines of the user's code that make them.

The sample is taken with :func:`sys.setprofile` outside all windows, because it slows the step down. It
contains all calls that the user's files make, but not the calls that Python, installed packages and this
package make. The time of a call excludes other sampled calls within it.
"""

from __future__ import annotations

import inspect
import operator
import os
import site
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.node import increase
from ..measure.torch_internals import count_collectives
from ..records import SampledStep, SlowCall

#: Number of calls that are kept for each part: the slowest calls, and all that begin with the second name.
_KEPT, _COLLECTIVES = 5, "torch.distributed."
#: Part of a step, by the qualified name of the code that runs while the timers measure this part.
_PARTS = {
    "Batches.__iter__": "data_load",
    "Module._wrapped_call_impl": "forward",
    "Tensor.backward": "backward",
    "Optimizer.profile_hook_step.<locals>.wrapper": "optimizer",
}
_qualname = operator.attrgetter("co_qualname")
_BENCH = f"{Path(__file__).parents[1]}{os.sep}"  # as in the names of code, which do not follow links

#: A line of the user's code, the function that it calls, and the part of the step.
_Key = tuple[str, int, str, str | None]


class StepSampler:
    """Sample one step of this thread. ``model`` is the module whose forward pass the recorder times."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self.is_active = False
        os.register_at_fork(after_in_child=self.discard)  # workers of a DataLoader are not sampled

    def start(self) -> None:
        """Begin to sample, unless a profiler of the user is active, or the program is of this package.

        Before Python 3.11, code has no qualified names.
        """
        main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
        if sys.getprofile() is not None or not hasattr(CodeType, "co_qualname") or main.startswith(_BENCH):
            return
        self._open: list[_Call] = []
        self._seconds: defaultdict[_Key, float] = defaultdict(float)
        self._calls: Counter[_Key] = Counter()
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
        collectives = increase(called, self._collectives)
        return SampledStep(rank, round(seconds, 6), collectives, list(self._slow_calls()))

    def _slow_calls(self) -> Iterator[SlowCall]:
        kept: Counter[str | None] = Counter()
        for key, seconds in sorted(self._seconds.items(), key=lambda one: -one[1]):
            path, line, function, part = key
            kept[part] += 1
            if kept[part] <= _KEPT or function.startswith(_COLLECTIVES):
                yield SlowCall(path, line, function, self._calls[key], round(seconds, 6), part)

    def _observe(self, frame: FrameType, event: str, argument: Any) -> None:
        """Handle an event of :func:`sys.setprofile`; the time that this takes is not part of any call."""
        began = time.perf_counter()
        self._now = began - self._own_s
        self._handle(frame, event, argument)
        self._own_s += time.perf_counter() - began

    def _handle(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if _qualname(frame.f_code) in _PARTS:
                self._begin_part(frame)
            caller = frame.f_back
            if caller is not None and is_users(caller.f_code.co_filename):
                self._begin(frame, caller, None)
        elif event == "c_call":
            if is_users(frame.f_code.co_filename):
                self._begin(frame, frame, argument)
        else:
            is_builtin = event != "return"
            if self._open and self._open[-1].frame is frame and self._open[-1].is_builtin is is_builtin:
                self._end()
            if frame is self._part_frame and not is_builtin:
                # The timers count all time between the forward and the backward pass as backward.
                self._part = "backward" if self._part == "forward" else None
                self._part_frame = None

    def _begin(self, frame: FrameType, caller: FrameType, builtin: Any) -> None:
        code = frame.f_code
        if builtin is None and code.co_filename.startswith(_BENCH) and _qualname(code) not in _PARTS:
            return
        name = _name(frame) if builtin is None else _name_of_builtin(builtin)
        key = (caller.f_code.co_filename, caller.f_lineno, name, self._part)
        self._calls[key] += 1
        self._open.append(_Call(frame, key, self._now, builtin is not None))

    def _end(self) -> None:
        call = self._open.pop()
        seconds = self._now - call.began
        self._seconds[call.key] += seconds - call.inner_s
        if self._open:
            self._open[-1].inner_s += seconds

    def _begin_part(self, frame: FrameType) -> None:
        part = _PARTS[_qualname(frame.f_code)]
        if part == "forward" and frame.f_locals.get("self") is not self._model:
            return
        if self._part_frame is None:
            self._part, self._part_frame = part, frame


@dataclass(slots=True)
class _Call:
    """A call that has not returned. ``inner_s`` is the time of other calls from the user's code within it."""

    frame: FrameType
    key: _Key
    began: float
    is_builtin: bool
    inner_s: float = 0.0


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
    if _qualname(code) == "Batches.__iter__":
        return f"next({type(getattr(frame.f_locals.get('self'), 'loader', None)).__name__})"
    if _qualname(code) == "Module._wrapped_call_impl":
        return f"{type(frame.f_locals.get('self')).__name__}.__call__"
    # A decorator's inner function holds the function that it wraps.
    wrapped = frame.f_locals.get("func", frame.f_locals.get("fn")) if "<locals>" in _qualname(code) else None
    if inspect.isfunction(wrapped):
        code, module = wrapped.__code__, wrapped.__module__
    return _public_name(code, module)


@cache
def _public_name(code: CodeType, module: str) -> str:
    name: str = _qualname(code)
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
