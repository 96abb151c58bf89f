"""Measure the parts of a training step, using clocks, the strategy's reading and a timer for each part.

Time stamps are taken during a step and read after it, because reading a CUDA event waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist


class HostClock:
    """The host's monotonic clock, for work that is complete when a call returns."""

    is_host = True

    def stamp(self) -> Any:
        """Return the current time in seconds, since an arbitrary moment."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two stamps."""
        return float(end - begin)

    def synchronize(self) -> None:
        """Do nothing, because the host's time stamps can be read immediately."""


class CudaClock:
    """A clock of events on the current CUDA stream, for calls that return before the work is complete.

    An idle device records an event's time when the event arrives. If the device is idle, the clock
    therefore also measures the time in which the host waits, for example for data.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Any:
        """Record an event on the current stream and return it."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events (CUDA's resolution is about half a microsecond)."""
        return float(begin.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


Clock = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """Return the clock for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


#: DDP samples its first iterations regardless of this interval.
DDP_ALWAYS_SAMPLED = 10


@dataclass(frozen=True, slots=True)
class BackwardReading:
    """The times (s) of one rank's backward pass: the computation, and the wait for communication after it.

    ``began_ns`` is the wall-clock time at which DDP's logger starts backward, which is also the end of
    forward. ``forward_s`` and ``forward_began_ns`` are the logger's duration and start of forward.
    """

    compute_s: float
    exposed_s: float
    began_ns: int
    forward_s: float = 0.0
    forward_began_ns: int = 0


@dataclass(frozen=True, slots=True)
class StepParts:
    """The durations of the parts of one step on one rank, in seconds.

    Forward, backward and optimizer are without the waits for communication, which are parts of their own:
    in forward, in backward while it has still computation to do, and at the end, after its last computation.
    ``other_s``, the rest, shows how complete the timers are, and can be slightly negative.
    """

    step_s: float
    data_load_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    comm_forward_s: float
    comm_backward_s: float
    comm_end_s: float

    @property
    def exposed_s(self) -> float:
        """All exposed communication of the step, without that in forward if only this is unknown."""
        in_forward_s = 0.0 if math.isnan(self.comm_forward_s) else self.comm_forward_s
        return in_forward_s + self.comm_backward_s + self.comm_end_s

    @property
    def other_s(self) -> float:
        """The duration of the step minus all other parts."""
        measured_s = self.data_load_s + self.forward_s + self.backward_s + self.exposed_s + self.optimizer_s
        return self.step_s - measured_s


def mean_parts(steps: list[StepParts]) -> StepParts:
    """Return the mean of every part over the steps of one rank."""
    assert steps, "no step was timed"
    columns = zip(*(astuple(step) for step in steps), strict=True)
    return StepParts(*(sum(column) / len(steps) for column in columns))


#: The parts of a step that are unknown if the communication is.
COMM_PARTS = ("comm_forward_s", "comm_backward_s", "comm_end_s")
#: The places of waits within a part, other than forward.
_PLACES: dict[str | None, str] = {"backward": "backward", "optimizer": "end"}
#: Largest accepted difference between the wall clock and the monotonic clock in a step. Parts are accurate
#: to a millisecond at best.
_MAX_DRIFT_NS = 1_000_000


def _wall_clock_offset_ns() -> int:
    """Return the wall clock minus the monotonic clock, repeating the reading if it was interrupted."""
    for _ in range(10):
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        if after - before < _MAX_DRIFT_NS // 10:
            break
    return wall - (before + after) // 2


class StepTimer:
    """Time the parts of one training step, which can have several micro-batches.

    In the micro-batch that synchronises, the backward pass exchanges gradients with other ranks.

    Example::

        timer.start()
        timer.begin("data_load"); batch = next(data); timer.end()
        ...
        timer.stop(); parts = timer.parts(reading)

    Do not use a ``backward`` timer for the micro-batch that synchronises: DDP's logger measures its
    computation and its wait for communication separately.

    DDP's logger uses the wall clock, and this timer a monotonic clock. If they disagree about the length of
    a step, the wall clock was set, and the logger's values are wrong. Slewing changes both clocks alike.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: list[tuple[str, Any, Any]] = []
        #: Waits for communication: the part around each, its place, its begin, and its possible ends.
        self._waits: list[tuple[str | None, str, Any, tuple[Any, ...]]] = []
        self._open_waits: list[tuple[str | None, str, Any, tuple[Any, ...]]] = []
        #: The part that is being timed, and its start.
        self.open_part: str | None = None
        self._part_begin: Any = None
        #: Begin and end of forward passes on the wall clock, like the logger's stamps, and on the timer's.
        self._forwards: list[tuple[int, int, Any, Any]] = []
        self._forward_began_ns = 0
        self._is_in_backward = False
        #: True while communication follows the last computation of backward.
        self.at_end = False
        #: Spans that the logger counts as backward: in earlier passes of the step, and in the latest pass.
        self._in_backward: list[tuple[Any, Any]] = []
        self._in_last_backward: list[tuple[Any, Any]] = []
        self._step_begin: Any = None
        self._step_end: Any = None
        self._offset_ns = 0
        #: True if the wall clock was set during the last step, which then has no parts.
        self.clock_jumped = False

    def start(self) -> None:
        """Wait until the device is idle and begin a step, so that earlier work is not counted."""
        self.clock.synchronize()
        for kept in (self._spans, self._waits, self._forwards, self._in_backward, self._in_last_backward):
            kept.clear()
        self.open_part = None
        self._offset_ns = _wall_clock_offset_ns()
        self._step_begin = self.clock.stamp()

    def start_logged_backward(self, *, again: bool) -> None:
        """Record that DDP's logger measures backward; ``again``: no backward pass followed the last call."""
        if not again:
            self._in_backward += self._in_last_backward
        self._in_last_backward.clear()

    def begin(self, part: str, *, in_backward: bool = False) -> None:
        """Begin ``part``: data_load, forward, backward or optimizer.

        ``in_backward``: DDP's logger counts it as backward, because it follows the synchronising forward.
        """
        assert self.open_part is None, "parts do not nest"
        if part == "forward":
            self._forward_began_ns = time.time_ns()
        self._is_in_backward = in_backward
        self._open_waits = []
        self.open_part, self._part_begin = part, self.clock.stamp()

    def discard(self) -> None:
        """Discard the part that is being timed, if any, because its end cannot be observed."""
        self.open_part = None

    def waited(self, begin: Any, *ends: Any) -> None:
        """Record a wait for communication, no computation, from ``begin`` to the earliest of ``ends``."""
        part = self.open_part
        place = "end" if self.at_end else _PLACES.get(part, "forward")
        waits = self._waits if part is None else self._open_waits
        waits.append((part, place, begin, ends))

    def time_wait(self, call: Callable[[], Any]) -> Any:
        """Make a call that waits for communication, and return its result."""
        begin = self.clock.stamp()
        result = call()
        self.waited(begin, self.clock.stamp())
        return result

    def end(self) -> None:
        """End the open part."""
        part, begin = self.open_part, self._part_begin
        assert part is not None, "no part is open"
        end = self.clock.stamp()
        self._spans.append((part, begin, end))
        self._waits += self._open_waits
        self.open_part = None
        if self._is_in_backward:
            self._in_last_backward.append((begin, end))
        elif part == "forward":
            self._forwards.append((self._forward_began_ns, time.time_ns(), begin, end))

    def stop(self) -> None:
        """End the step."""
        self._step_end = self.clock.stamp()
        self.clock.synchronize()
        # On a device the logger uses events, which do not depend on the host's clocks.
        drift_ns = abs(_wall_clock_offset_ns() - self._offset_ns) if self.clock.is_host else 0
        self.clock_jumped = drift_ns > _MAX_DRIFT_NS

    def parts(self, reading: BackwardReading | None) -> StepParts | None:
        """Return the parts of the stopped step, or None if DDP's logger has no times or wrong times."""
        if reading is None or self.clock_jumped:
            return None
        total = dict.fromkeys((field.name.removesuffix("_s") for field in fields(StepParts)), 0.0)
        total |= {"step": self.clock.seconds(self._step_begin, self._step_end), "comm_end": reading.exposed_s}
        for part, begin, end in self._spans:
            total[part] += self.clock.seconds(begin, end)
        for around, place, begin, ends in self._waits:
            wait_s = max(0.0, min(self.clock.seconds(begin, end) for end in ends))
            total[f"comm_{place}"] += wait_s
            if around is not None:
                total[around] -= wait_s
        total["backward"] += reading.compute_s - self._counted_twice_s(reading)
        return StepParts(**{f"{name}_s": seconds for name, seconds in total.items()})

    def _counted_twice_s(self, reading: BackwardReading) -> float:
        """Return the seconds that are counted both in the logger's backward and by one of the timers.

        These are the parts between the forward and the backward pass, and the gap of some 10 microseconds
        between DDP's end of forward and this timer's end of forward.
        """
        spans = (*self._in_backward, *self._in_last_backward)
        known = sum(self.clock.seconds(*span) for span in spans)
        if not self.clock.is_host:
            return known + self._gap_on_device_s(reading)
        begin, end = reading.began_ns, reading.began_ns + round(reading.compute_s * 1e9)
        shared = (min(end, ended) - max(begin, began) for began, ended, *_ in self._forwards)
        return known + sum(max(0, ns) for ns in shared) * 1e-9

    def _gap_on_device_s(self, reading: BackwardReading) -> float:
        """Return the device's time between DDP's end of forward and this timer's end of forward.

        It is 0 if the device is busy then, and the host's time if the device waits for the host. The logger's
        events cannot be compared with those of this timer, but durations can: the timer's forward is the
        host's time until DDP starts forward, the logger's forward, and the gap.
        """
        for began_ns, ended_ns, begin, end in self._forwards:
            if began_ns <= reading.forward_began_ns <= ended_ns:
                entered_s = (reading.forward_began_ns - began_ns) * 1e-9
                gap_s = self.clock.seconds(begin, end) - entered_s - reading.forward_s
                return max(0.0, min(gap_s, (ended_ns - reading.began_ns) * 1e-9))
        return 0.0


class ShardingTimer:
    """Time the waits of FSDP2 within the parts that a timer measures; it makes each observed ``call`` itself.

    On CUDA, a wait lasts from an event on the stream of the computation to one after the collective.
    """

    def __init__(self, timer: StepTimer) -> None:
        self._timer, self._clock = timer, timer.clock
        #: True if collectives are complete when they return, so that nothing waits for them later.
        self.is_on_host = timer.clock.is_host
        #: Ends of the latest collectives: each group's all-gather, the reduce-scatter, and the all-reduce
        #: that follows it if there are replicas.
        self._gathered: dict[Any, Any] = {}
        self._scattered = self._reduced = self._reduction_began = self._post_backward_began = None
        #: The number of backward passes that reduced gradients.
        self.passes = 0
        self._has_scattered = False

    def gathers(self, group: object, call: Callable[[], Any]) -> Any:
        """Make the call of an all-gather; the stream of the computation waits for it later."""
        work, end = self._communicate(call)
        if work is not None:  # the user asked for an asynchronous one
            return _TimedWork(work, self._timer)
        self._gathered[group] = end
        return None

    def scatters(self, call: Callable[[], Any]) -> Any:
        """Make the call of a reduce-scatter."""
        work, end = self._communicate(call)
        self._has_scattered = True
        self._scattered = self._reduced = self._reduction_began = end
        return work

    def allocates(self) -> None:
        """Record that memory is allocated for a reduction: the group has waited for the previous one."""
        self._reduction_began = now = self._clock.stamp()
        if self._post_backward_began is not None and self._scattered is not None:
            self._timer.waited(self._post_backward_began, now, self._scattered)
        self._post_backward_began = None

    def all_reduced(self) -> None:
        """Record the end of the all-reduce over the replicas."""
        self._reduced = self._clock.stamp()
        if self.is_on_host:
            self._timer.waited(self._reduction_began, self._reduced)

    def waits_for_gather(self, group: object, call: Callable[[], Any]) -> Any:
        """Let the group wait for its all-gather."""
        if (end := self._gathered.pop(group, None)) is not None:
            self._timer.waited(self._clock.stamp(), end)
        return call()

    def post_backward(self, call: Callable[[], Any]) -> Any:
        """Let a group wait for an earlier reduce-scatter, and reduce its gradients."""
        self._post_backward_began = self._clock.stamp()
        result = call()
        if self._post_backward_began is not None:  # without gradients, the group has only waited
            self.allocates()
        return result

    def finalizes(self, call: Callable[[], Any]) -> Any:
        """Let a group wait for the last reductions, within :meth:`ends`."""
        began = self._clock.stamp()
        result = call()
        if self._reduced is not None:
            self._timer.waited(began, self._clock.stamp(), self._reduced)
        return result

    def ends(self, call: Callable[[], Any]) -> Any:
        """Make the call that follows the last computation of backward."""
        self._timer.at_end = True
        try:
            return call()
        finally:
            self._timer.at_end = False
            self.passes += self._has_scattered  # also in this call, for the weights of the root
            self._has_scattered = False

    def _communicate(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        """Make the call of a collective; return its work if it is asynchronous, and the stamp after it."""
        if not self.is_on_host:
            return call(), self._clock.stamp()
        begin = self._clock.stamp()
        work, end = call(), self._clock.stamp()
        if work is None:
            self._timer.waited(begin, end)
        return work, end


class _TimedWork(dist.Work):
    """A collective that runs, with a timer on the wait for it."""

    def __init__(self, work: Any, timer: StepTimer) -> None:
        super().__init__()
        self._work, self._timer = work, timer

    def wait(self, *timeout: Any) -> Any:
        """Wait for the collective."""
        return self._timer.time_wait(lambda: self._work.wait(*timeout))
