"""The windows of the built-in workload, in a loop that somebody else wrote.

A warm-up, then epochs of a throughput window (a clock beside the loop and nothing else) and an
attribution window (hooks that split the step). Between two epochs lie two steps that do not count: in
the first of them rank 0 writes files. It comes late to the second one, whose gradients bring the
ranks together again before anything is timed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.measure.meters import Meters, peak_memory_bytes
from bench.measure.step_parts import Clock
from bench.measure.windows import Window, fewest_warmup_steps, is_stable, parts_row
from bench.record.attribution import Attribution
from bench.record.settings import Lengths

#: A stretch of time in which the clock ran: its first and its last stamp.
Span = tuple[Any, Any]


class Phase(enum.Enum):
    """Where a recording is."""

    WARM_UP = enum.auto()
    THROUGHPUT = enum.auto()
    ATTRIBUTION = enum.auto()
    BETWEEN = enum.auto()
    DONE = enum.auto()


class Keeper(Protocol):
    """Who takes what was recorded."""

    def post(self, number: int, window: Window) -> None:
        """Take this rank's window of an epoch (counted from 1)."""

    def post_early(self, number: int, window: Window) -> None:
        """Take the same before its attribution, in case this comes to no end."""

    def look(self) -> None:
        """Write what is complete by now; this is the moment for it."""


class Windows:
    """Counts one rank's steps into windows, and hands over each window that is whole."""

    def __init__(self, clock: Clock, *, device: torch.device, lengths: Lengths) -> None:
        self._clock = clock
        self._device = device
        self._lengths = lengths
        self.phase = Phase.WARM_UP
        #: Whole steps so far, and windows that were handed over.
        self.total = 0
        self.posted = 0
        self._steps = 0  # of the phase
        self._taken: list[list[Span]] = []  # of the window's steps
        self._samples: list[float | None] = []
        self._parts: list[list[float] | None] = []
        self._clock_jumps = 0
        self._loss_sum: Tensor | None = None
        self._losses = 0
        self._window: Window | None = None
        self._stable = False

    def open(self, attribution: Attribution, keeper: Keeper) -> None:
        """Begin, at the first step."""
        self._attribution = attribution
        self._attribution.detach()  # DDP's logger stamps some steps by itself
        self._keeper = keeper
        # Every rank reads all counters; what is of a whole host or device is counted once, at the end.
        self._meters = Meters(self._device, reads_host=True, reads_device=True)
        self.warmup_steps = fewest_warmup_steps(self._lengths.warmup_steps, self._device)

    def loss(self, loss: Tensor | float) -> None:
        """Take a micro-batch's loss, without waiting for the device."""
        if self.phase is not Phase.THROUGHPUT:
            return
        value = torch.as_tensor(loss).detach().float()  # a sum in half precision soon stands still
        value = value.mean() if value.dim() else value
        self._loss_sum = value.clone() if self._loss_sum is None else self._loss_sum.add_(value)
        self._losses += 1

    def count(self, spans: list[Span], samples: float | None, now: Any) -> Any:
        """Count a whole step, and change the phase where it was the last of its window.

        Returns:
            the stamp from which the clock runs on; None where it stands still from here on.
        """
        self.total += 1
        self._steps += 1
        if self.phase is Phase.THROUGHPUT:
            self._taken.append(spans)
            self._samples.append(samples)
            return self._end_throughput() if self._steps == self._lengths.steps_per_epoch else now
        if self.phase is Phase.ATTRIBUTION:
            self._attribute()
        elif self.phase is Phase.WARM_UP:
            self._taken.append(spans)
            if self._steps == self.warmup_steps - 1:
                self._keeper.look()
            elif self._steps == self.warmup_steps:
                self._stable = is_stable(self._seconds())
                return self._next_window()
        elif self.phase is Phase.BETWEEN:
            if self._steps > 1:
                return self._next_window()
            self._keeper.look()  # this step's gradients came after every rank's record
        return now

    def leave(self) -> None:
        """Hand over what the window that is open has so far."""
        if self.phase is Phase.THROUGHPUT and self._taken:
            self._window = self._throughput()
            self._post()
        elif self.phase is Phase.ATTRIBUTION:
            self._attribution.detach()
            self._post()

    def end(self) -> None:
        """Count nothing any more."""
        self.phase = Phase.DONE

    def _next_window(self) -> Any:
        if self.posted == self._lengths.epochs:
            self.phase = Phase.DONE
            return None
        self._taken, self._samples, self._parts = [], [], []
        self._clock_jumps = 0
        self._loss_sum, self._losses = None, 0
        self._enter(Phase.THROUGHPUT)
        self._clock.settle()
        self._meters.start()
        return self._clock.stamp()

    def _end_throughput(self) -> Any:
        self._window = self._throughput()
        if self._lengths.attribution_steps:
            self._keeper.post_early(self.posted + 1, self._window)
            self._enter(Phase.ATTRIBUTION)
            self._attribution.attach()
            self._attribution.start()
        else:
            self._post()
        return self._clock.stamp()

    def _attribute(self) -> None:
        parts = self._attribution.stop()
        self._clock_jumps += self._attribution.clock_jumped
        if self._steps > 1:  # the first has other buckets' timers, and warms up the hooks
            self._parts.append(parts_row(parts))
        if self._steps > self._lengths.attribution_steps:
            self._attribution.detach()
            self._post()
        else:
            self._attribution.start()

    def _post(self) -> None:
        assert self._window is not None
        window, self._window = replace(self._window, clock_jumps=self._clock_jumps), None
        self.posted += 1
        self._keeper.post(self.posted, window)
        self._enter(Phase.BETWEEN)

    def _throughput(self) -> Window:
        """Return the throughput window that ends now; its steps' parts come after it."""
        seconds = self._seconds()
        usage = self._meters.stop()
        loss = None if self._loss_sum is None else float(self._loss_sum) / self._losses
        peak = peak_memory_bytes(self._device)
        return Window(seconds, self._samples, self._parts, loss, peak, usage, self._stable)

    def _seconds(self) -> list[float]:
        """Return the seconds of each step of the window."""
        self._clock.settle()
        return [_length(self._clock, spans) for spans in self._taken]

    def _enter(self, phase: Phase) -> None:
        self.phase, self._steps = phase, 0


def _length(clock: Clock, spans: Sequence[Span]) -> float:
    return sum(clock.seconds(*span) for span in spans)
