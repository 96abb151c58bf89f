"""Measure the parts of a training step, using clocks, the strategy's reading and a timer for each part.

Time stamps are taken during a step and read after it, because reading a CUDA event waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class HostClock:
    """The host's monotonic clock, for work that is complete when a call returns."""

    is_host = True

    def is_capturing(self) -> bool:
        """Return False: no CUDA graph is captured."""
        return False

    def stamp(self) -> Any:
        """Return the current time in seconds, since an arbitrary moment."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two stamps."""
        return float(end - begin)

    def launch_seconds(self, begin: Any, end: Any) -> float:
        """Return NaN, because the host computes itself instead of launching work."""
        return math.nan

    def synchronize(self) -> None:
        """Do nothing, because the host's time stamps can be read immediately."""

    def is_busy(self, last: Any) -> bool:
        """Return False, because no work is left."""
        return False

    def drain(self, began: Any, last: Any) -> float:
        """Return 0, because no work is left."""
        return 0.0


class Stamp(NamedTuple):
    """An event on the device, and the host's time (s) when it was recorded.

    ``event`` is None if the stream captured a CUDA graph, in which an event has no time.
    """

    event: Any
    host_s: float


#: Least time (s), and least share of the measured time, for which work of other streams counts.
_LEAST_TAIL_S, _LEAST_TAIL_SHARE = 1e-3, 0.02
#: The device falls behind from this share of the host's time of a micro-batch.
_LEAST_BEHIND = 0.1


class CudaClock:
    """A clock of events on the current CUDA stream, for calls that return before the work is complete.

    An idle device records an event's time when the event arrives. If the device is idle, the clock
    therefore also measures the time in which the host waits, for example for data.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is captured on the current stream: its work does not run yet."""
        return torch.cuda.is_current_stream_capturing()

    def stamp(self) -> Stamp:
        """Record an event on the current stream and return it."""
        event = None
        if not self.is_capturing():
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return Stamp(event, time.perf_counter())

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Return the device's seconds between two stamps (CUDA's resolution is about half a microsecond)."""
        if begin.event is None or end.event is None:
            return math.nan
        return float(begin.event.elapsed_time(end.event)) / 1e3

    def launch_seconds(self, begin: Stamp, end: Stamp) -> float:
        """Return the host's seconds between two stamps, which it needs to launch the work between them."""
        return end.host_s - begin.host_s

    def synchronize(self) -> None:
        """Wait for the device, unless a CUDA graph is captured, which a wait would end."""
        if not self.is_capturing():
            torch.cuda.synchronize(self._device)

    def is_busy(self, last: Stamp) -> bool:
        """Return whether the device still works on what was launched before ``last``."""
        return last.event is not None and not last.event.query()

    def drain(self, began: Stamp, last: Stamp) -> float:
        """Wait for the device; return for how long other streams worked after the current one (``last``).

        Short times are 0, because a call to the device takes some time.
        """
        if last.event is None or self.is_capturing():
            return 0.0
        last.event.synchronize()
        ended = time.perf_counter()
        self.synchronize()
        tail_s, known_s = time.perf_counter() - ended, self.seconds(began, last)
        return tail_s if tail_s > max(_LEAST_TAIL_S, _LEAST_TAIL_SHARE * known_s) else 0.0


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
    ``other_s``, the rest, shows how complete the timers are, and can be slightly negative. ``launch_s`` is
    the host's time to launch the step's work, and ``host_s`` includes the loading of data; NaN on a CPU.
    """

    step_s: float
    data_load_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    comm_forward_s: float
    comm_backward_s: float
    comm_end_s: float
    launch_s: float = math.nan
    host_s: float = math.nan

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


def without_skipped(steps: Sequence[StepParts | None]) -> list[StepParts | None]:
    """Leave out steps without an optimizer's step if others have it, because GradScaler skipped theirs."""
    lack = [step is not None and math.isnan(step.optimizer_s) for step in steps]
    known = [step for step, lacks in zip(steps, lack, strict=True) if step is not None and not lacks]
    return [None if lacks and known else step for step, lacks in zip(steps, lack, strict=True)]


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
        #: Waits for communication: the part around each, its place, its begin, its limit, and its ends.
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
        #: The host's time (s) in which it loaded data, and in which :meth:`reads` let it wait.
        self._load_s = self._read_s = 0.0
        #: The host's time (s) from the step's start to the end of each backward pass, without these two.
        self._launched_s: list[float] = []
        self._tail_s = 0.0  # for which other streams worked after the step
        #: True if the wall clock was set during the last step, which then has no parts.
        self.clock_jumped = False

    def start(self) -> None:
        """Wait until the device is idle and begin a step, so that earlier work is not counted."""
        self.clock.synchronize()
        for kept in (self._spans, self._waits, self._forwards, self._in_backward, self._in_last_backward):
            kept.clear()
        self.open_part = None
        self._load_s = self._read_s = 0.0
        self._launched_s.clear()
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

    def waited(self, begin: Any, limit: Any, *ends: Any) -> None:
        """Record a wait for communication, no computation, from ``begin`` to ``limit``.

        It ends earlier if all of ``ends``, those of the collectives, are earlier.
        """
        part = self.open_part
        place = "end" if self.at_end else _PLACES.get(part, "forward")
        waits = self._waits if part is None else self._open_waits
        waits.append((part, place, begin, (limit, *ends)))

    def reads(self, call: Callable[[], Any]) -> Any:
        """Make a call with which bench, not the user's loop, waits for the device; return its result."""
        began = time.perf_counter()
        result = call()
        self._read_s += time.perf_counter() - began
        return result

    def backward_ended(self) -> None:
        """Record that a micro-batch's backward pass has ended on the host."""
        if not self.clock.is_host:
            spent_s = time.perf_counter() - self._step_begin.host_s
            self._launched_s.append(spent_s - self._load_s - self._read_s)

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
        if part == "data_load":
            self._load_s += self.clock.launch_seconds(begin, end)
        self._waits += self._open_waits
        self.open_part = None
        if self._is_in_backward:
            self._in_last_backward.append((begin, end))
        elif part == "forward":
            self._forwards.append((self._forward_began_ns, time.time_ns(), begin, end))

    def stop(self) -> None:
        """End the step."""
        self._step_end = self.clock.stamp()
        self._tail_s = self.clock.drain(self._step_begin, self._step_end)
        # On a device the logger uses events, which do not depend on the host's clocks.
        drift_ns = abs(_wall_clock_offset_ns() - self._offset_ns) if self.clock.is_host else 0
        self.clock_jumped = drift_ns > _MAX_DRIFT_NS

    def parts(self, reading: BackwardReading | None) -> StepParts | None:
        """Return the parts of the stopped step, or None if a clock or DDP's logger has no or wrong times."""
        if reading is None or self.clock_jumped:
            return None
        seconds = self.clock.seconds
        total = dict.fromkeys((field.name.removesuffix("_s") for field in fields(StepParts)), 0.0)
        total["step"] = seconds(self._step_begin, self._step_end) + self._tail_s
        total["launch"] = self._launch_s()
        total["host"] = total["launch"] + self._load_s
        total["comm_end"] = reading.exposed_s
        for part, begin, end in self._spans:
            total[part] += seconds(begin, end)
        for around, place, begin, (limit, *ends) in self._waits:
            known_s = [seconds(begin, end) for end in ends]
            wait_s = max(0.0, min([seconds(begin, limit), *([max(known_s)] if known_s else [])]))
            total[f"comm_{place}"] += wait_s
            if around is not None:
                total[around] -= wait_s
        total["backward"] += reading.compute_s - self._counted_twice_s(reading)
        if any(math.isnan(value) for name, value in total.items() if name not in ("launch", "host")):
            return None  # a CUDA graph was captured
        return StepParts(**{f"{name}_s": seconds for name, seconds in total.items()})

    def _launch_s(self) -> float:
        """Return the host's time to launch the step.

        If the device falls behind in several micro-batches, its queue may be full, so that the host waits in
        launches. Then the time of the first micro-batch stands for each of them.
        """
        launched_s, seconds = self._launched_s, self.clock.launch_seconds
        launch_s = seconds(self._step_begin, self._step_end) - self._load_s - self._read_s
        if len(launched_s) < 2 or self._behind_s() <= _LEAST_BEHIND * launched_s[0]:
            return launch_s
        return launch_s - launched_s[-1] + launched_s[0] * len(launched_s)

    def _behind_s(self) -> float:
        """Return how far the device is behind the host when the last forward pass begins."""
        begins = [begin for part, begin, _ in self._spans if part == "forward"]
        if not begins:
            return math.inf
        last = (self._step_begin, begins[-1])
        return self.clock.seconds(*last) - self.clock.launch_seconds(*last)

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
        #: Ends of the latest collectives: each group's all-gather, the reduce-scatter of all groups, and each
        #: group's all-reduce, which follows it if there are replicas.
        self._gathered: dict[Any, Any] = {}
        self._reduced: dict[Any, Any] = {}
        self._scattered: Any = None
        self._reduction_began: Any = None
        self._post_backward_began: Any = None
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
        self._scattered = self._reduction_began = end
        return work

    def allocates(self, group: object) -> None:
        """Record that memory is allocated for a reduction.

        The group has waited for the previous reduce-scatter, and for its own all-reduce of an earlier
        backward pass, if no pass since then was the last of its step (``set_is_last_backward``).
        """
        self._reduction_began = now = self._clock.stamp()
        if self._post_backward_began is not None and self._scattered is not None:
            ends = (self._scattered, self._reduced.get(group, self._scattered))
            self._timer.waited(self._post_backward_began, now, *ends)
        self._post_backward_began = None

    def all_reduced(self, group: object) -> None:
        """Record the end of the all-reduce over the replicas."""
        self._reduced[group] = end = self._clock.stamp()
        if self.is_on_host:
            self._timer.waited(self._reduction_began, end)

    def waits_for_gather(self, group: object, call: Callable[[], Any]) -> Any:
        """Let the group wait for its all-gather."""
        if (end := self._gathered.pop(group, None)) is not None:
            self._timer.waited(self._clock.stamp(), end)
        return call()

    def post_backward(self, group: object, call: Callable[[], Any]) -> Any:
        """Let a group wait for an earlier reduce-scatter, and reduce its gradients."""
        self._post_backward_began = self._clock.stamp()
        result = call()
        if self._post_backward_began is not None:  # without gradients, the group has only waited
            self.allocates(group)
        return result

    def finalizes(self, call: Callable[[], Any]) -> Any:
        """Let a group wait for the last reductions, within :meth:`ends`."""
        began = self._clock.stamp()
        result = call()
        if self._scattered is not None:
            self._timer.waited(began, self._clock.stamp(), self._scattered, *self._reduced.values())
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
