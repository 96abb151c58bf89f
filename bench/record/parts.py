"""The parts of a training step, each with a timer of its own."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, fields
from typing import Any

from bench.record.clock import Clock
from bench.record.ddp_logger import BackwardReading


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


#: The fields of :class:`StepParts`, in the order of :func:`mean_parts`' result.
PART_FIELDS = tuple(field.name for field in fields(StepParts))


def mean_parts(steps: list[StepParts]) -> StepParts:
    """Return the mean of every part over some steps of one rank."""
    assert steps, "no step was timed"
    columns = zip(*(astuple(step) for step in steps), strict=True)
    return StepParts(*(sum(column) / len(steps) for column in columns))


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
        self._forward_ended_ns = 0
        self._step_begin: Any = None
        self._step_end: Any = None

    def start(self) -> None:
        """Begin a step; the device has caught up, so that its timeline starts with the step."""
        self._clock.settle()
        self._spans.clear()
        self._step_begin = self._clock.stamp()

    def begin(self, part: str) -> None:
        """Begin ``part`` (data_load, forward, backward or optimizer)."""
        assert self._open is None, "parts do not nest"
        self._open = (part, self._clock.stamp())

    def end(self) -> None:
        """End the part that is open."""
        assert self._open is not None, "no part is open"
        part, begin = self._open
        self._spans.append((part, begin, self._clock.stamp()))
        self._open = None
        if part == "forward":
            self._forward_ended_ns = time.time_ns()

    def stop(self) -> None:
        """End the step."""
        self._step_end = self._clock.stamp()
        self._clock.settle()

    def parts(self, reading: BackwardReading | None) -> StepParts | None:
        """Return the parts of the step that was stopped; None where the logger had no reading."""
        if reading is None:
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
        """Return the time between DDP's end of forward and ours, which both timers cover.

        It is microseconds, unless the processor was given to another process in between.
        The device's timeline has nothing there.
        """
        if not self._clock.is_host:
            return 0.0
        return min(max(0, self._forward_ended_ns - reading.began_ns) * 1e-9, reading.compute_s)
