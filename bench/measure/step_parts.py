"""Clocks that stamp a training step: the host's, and CUDA's events.

A step is stamped first and read later, because reading a CUDA event waits for the device.
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel


class Clock(Protocol):
    """Stamps now; tells the seconds between two stamps later."""

    is_host: bool

    def stamp(self) -> Any:
        """Return a mark of this moment (on the device's own timeline, where there is one)."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two stamps; only after :meth:`settle`."""

    def settle(self) -> None:
        """Wait until every stamp so far can be read."""


class HostClock:
    """The host's monotonic clock: right where work is done by the time a call returns."""

    is_host = True

    def stamp(self) -> float:
        """Return seconds since some fixed moment."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds between two stamps."""
        return end - begin

    def settle(self) -> None:
        """Do nothing: a host's stamp can be read at once."""


class CudaClock:
    """Events on the current stream: right where calls return before the device has done the work.

    An idle device stamps an event when it arrives, so waiting of the host (for data, say)
    shows in the differences as well, as long as the device had caught up before.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """Return an event that was just put on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events (CUDA resolves about half a microsecond)."""
        return float(begin.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    """Return the clock that is right for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


# What DDP's own logger knows about the last backward pass, without its lag.
#
# DDP stamps, per rank, when backward's computation starts and ends and when communication
# starts and ends. ``backward_comm_time`` is the span from the first bucket to the last, not
# communication; what the step waits for is the part of the span after the computation's end:
#
#     exposed = backward_comm_time - backward_compute_comm_overlap_time
#
# Source: ``torch/csrc/distributed/c10d/logger.cpp`` and ``reducer.cpp`` (times in nanoseconds).
# On torch 2.13 with gloo, compute + exposed is the duration of ``loss.backward()`` to 0.1 %.
#
# The logger computes its figures when the *next* forward begins. Asking it to do so right after
# the step (:func:`read`) gives this step's figures, so nothing has to be shifted; on CUDA that
# call waits for the device. Under ``no_sync`` the logger is frozen: only the micro-batch that
# synchronises can be read.

#: A sample rate that no iteration after the tenth reaches (the first ten are always sampled).
_NEVER = 2**31 - 1
#: Iterations that DDP samples whatever the rate.
DDP_ALWAYS_SAMPLED = ALWAYS_SAMPLED = 10
_SECONDS_PER_TICK = 1e-9


@dataclass(frozen=True, slots=True)
class BackwardReading:
    """One rank's backward pass: computation, and the wait for communication after it (seconds).

    ``began_ns`` is the host's wall clock when DDP took backward to begin: where its forward ended.
    """

    compute_s: float
    exposed_s: float
    began_ns: int


def enable_ddp_timing(model: DistributedDataParallel) -> None:
    """Let the logger stamp every step from now on."""
    model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]


def disable_ddp_timing(model: DistributedDataParallel) -> None:
    """Let the logger stamp nothing any more (on CUDA its stamps cost a synchronisation per step)."""
    model._set_ddp_runtime_logging_sample_rate(_NEVER)  # type: ignore[no-untyped-call]


def read_ddp_timing(model: DistributedDataParallel) -> BackwardReading | None:
    """Return the figures of the backward pass that just ended; None where DDP stamped nothing."""
    logger = model.logger
    if logger is None:
        return None
    logger.set_runtime_stats_and_log()
    figures = logger._get_ddp_logging_data().ints_map
    span = figures.get("backward_comm_time", 0)
    compute = figures.get("backward_compute_time", 0)
    if span <= 0 or compute <= 0:
        return None
    overlap = figures.get("backward_compute_comm_overlap_time", 0)
    exposed = max(0, span - overlap)
    began_ns = figures.get("backward_compute_time_start", 0)
    return BackwardReading(compute * _SECONDS_PER_TICK, exposed * _SECONDS_PER_TICK, began_ns)


sample_every_step, sample_no_step, read = enable_ddp_timing, disable_ddp_timing, read_ddp_timing

# The parts of a training step, each with a timer of its own.


@dataclass(frozen=True, slots=True)
class StepParts:
    """One step of one rank, in seconds.

    ``other_s`` is what no timer covered: the step minus all parts. It is a check on the
    timers, never the value of another part, and may be slightly negative.
    """

    step_s: float
    data_load_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float

    @property
    def other_s(self) -> float:
        """The step minus all of its parts."""
        return self.step_s - (
            self.data_load_s + self.forward_s + self.backward_s + self.exposed_s + self.optimizer_s
        )


#: How far the clocks may part in a step: a millisecond is the finest that the parts are trusted to.
_JUMP_NS = 1_000_000
#: How often the clocks are read again where the process lost its core between two readings.
_READINGS = 10


def mean_parts(steps: list[StepParts]) -> StepParts:
    """Return the mean of every part over some steps of one rank."""
    assert steps, "no step was timed"
    columns = zip(*(astuple(step) for step in steps), strict=True)
    return StepParts(*(sum(column) / len(steps) for column in columns))


class WallClock:
    """Tells whether the host's wall clock was set while something was timed.

    DDP's logger stamps with the wall clock, everything here with a monotonic one. Where the two
    disagree about how long a step took, somebody set the wall clock (NTP, an administrator, a virtual
    machine that was moved), and the logger's figures are wrong by as much.
    """

    def __init__(self) -> None:
        self._apart_ns = 0

    def start(self) -> None:
        """Begin to compare."""
        self._apart_ns = _apart_ns()

    def jumped(self) -> bool:
        """Tell whether the clocks have parted since the start (slewing moves both alike)."""
        return abs(_apart_ns() - self._apart_ns) > _JUMP_NS


def _apart_ns() -> int:
    """Return the wall clock minus the monotonic one, from readings that nothing came between."""
    for _ in range(_READINGS):
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        if after - before < _JUMP_NS // 10:
            break
    return wall - (before + after) // 2


class StepTimer:
    """Stamps one training step; a step may have several micro-batches.

    Use, in the order of a step::

        timer.begin("data_load"); batch = next(data); timer.end()
        ...
        timer.stop(); parts = timer.parts(ddp_logger.read(model))

    The micro-batch that synchronises gets no ``backward`` timer: DDP's logger tells its
    computation from the wait for communication.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: list[tuple[str, Any, Any]] = []
        self._open: tuple[str, Any] | None = None
        self._forwards_ns: list[tuple[int, int]] = []  # of the host's wall clock, as the logger's
        self._forward_began_ns = 0
        self._is_within = False
        self._within: list[tuple[Any, Any]] = []
        self._within_last: list[tuple[Any, Any]] = []  # of the backward pass that was prepared last
        self._step_begin: Any = None
        self._step_end: Any = None
        self._wall_clock = WallClock()
        #: Whether the wall clock was set during the last step, which then has no parts.
        self.clock_jumped = False

    def start(self) -> None:
        """Begin a step; the device has caught up, so that its timeline starts with the step."""
        self._clock.settle()
        self._spans.clear()
        self._forwards_ns.clear()
        self._within.clear()
        self._within_last.clear()
        self._open = None
        self._wall_clock.start()
        self._step_begin = self._clock.stamp()

    def backward_is_prepared(self, *, anew: bool) -> None:
        """Say that the logger takes backward to begin here.

        Args:
            anew: whether no backward pass came since the last time, which then does not count.
        """
        if not anew:
            self._within += self._within_last
        self._within_last.clear()

    def begin(self, part: str, *, within_backward: bool = False) -> None:
        """Begin ``part`` (data_load, forward, backward or optimizer).

        Args:
            part: which.
            within_backward: whether the logger takes this time for backward: it comes between the
                forward pass and the backward pass that synchronises.
        """
        assert self._open is None, "parts do not nest"
        if part == "forward":
            self._forward_began_ns = time.time_ns()
        self._is_within = within_backward
        self._open = (part, self._clock.stamp())

    @property
    def open_part(self) -> str | None:
        """The part that was begun and not ended yet."""
        return None if self._open is None else self._open[0]

    def drop(self) -> None:
        """Forget the part that is open, if one is: its end will not be seen."""
        self._open = None

    def end(self) -> None:
        """End the part that is open."""
        assert self._open is not None, "no part is open"
        part, begin = self._open
        end = self._clock.stamp()
        self._spans.append((part, begin, end))
        self._open = None
        if self._is_within:
            self._within_last.append((begin, end))
        elif part == "forward":
            self._forwards_ns.append((self._forward_began_ns, time.time_ns()))

    def stop(self) -> None:
        """End the step."""
        self._step_end = self._clock.stamp()
        self._clock.settle()
        # On a device the logger uses events, which no clock of the host moves.
        self.clock_jumped = self._clock.is_host and self._wall_clock.jumped()

    def parts(self, reading: BackwardReading | None) -> StepParts | None:
        """Return the parts of the step that was stopped; None where the logger had no reading to trust."""
        if reading is None or self.clock_jumped:
            return None
        total = dict.fromkeys(("data_load", "forward", "backward", "optimizer"), 0.0)
        for part, begin, end in self._spans:
            total[part] += self._clock.seconds(begin, end)
        return StepParts(
            step_s=self._clock.seconds(self._step_begin, self._step_end),
            data_load_s=total["data_load"],
            forward_s=total["forward"],
            backward_s=total["backward"] + reading.compute_s - self._counted_twice_s(reading),
            exposed_s=reading.exposed_s,
            optimizer_s=total["optimizer"],
        )

    def _counted_twice_s(self, reading: BackwardReading) -> float:
        """Return the time that both the logger's clock of backward and a timer of ours cover.

        What comes between the forward and the backward pass is known as such. The time between DDP's end of
        forward and ours is microseconds, unless the processor was given to another process in
        between; the device's timeline has nothing there.
        """
        within = sum(self._clock.seconds(*span) for span in (*self._within, *self._within_last))
        if not self._clock.is_host:
            return within
        begin, end = reading.began_ns, reading.began_ns + round(reading.compute_s * 1e9)
        shared = (min(end, ended) - max(begin, began) for began, ended in self._forwards_ns)
        return within + sum(max(0, ns) for ns in shared) * 1e-9
