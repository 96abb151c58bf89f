"""The parts of a training step, each with a timer of its own."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, fields
from typing import Any

from bench.measurement.clock import Clock
from bench.measurement.ddp_logger import BackwardReading


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
#: The fields of :class:`StepParts`, in the order of :func:`mean_parts`' result.
PART_FIELDS = tuple(field.name for field in fields(StepParts))


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
