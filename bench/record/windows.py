"""Windows of a recording: a warm-up, then epochs of a throughput window and an attribution window.

The throughput window is measured with a clock only. In the attribution window, hooks time the parts of each
step. Two steps between epochs are not measured: after the first, rank 0 writes files and falls behind; in the
second, the exchange of gradients synchronises the ranks again. The first one of these steps is sampled in one
epoch (see :mod:`bench.record.step_sample`).
"""

from __future__ import annotations

import enum
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.measure.conditions import Conditions
from bench.measure.meters import Meters, peak_memory_bytes
from bench.measure.step_parts import Clock, StepParts
from bench.measure.windows import Window, fewest_warmup_steps, is_stable
from bench.record.attribution import Attribution
from bench.record.session import Session
from bench.record.settings import Lengths
from bench.record.step_sample import StepSampler

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
    """Groups one rank's steps into windows, and sends every complete window to rank 0."""

    def __init__(self, clock: Clock, *, device: torch.device, lengths: Lengths) -> None:
        self._clock = clock
        self._device = device
        self._lengths = lengths
        self.phase = Phase.WARM_UP
        #: Number of complete steps so far, and of windows sent.
        self.total = 0
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

    def open(self, attribution: Attribution, session: Session, sampler: StepSampler) -> None:
        """Begin recording at the first step."""
        self._attribution = attribution
        self._sampler = sampler
        self._attribution.detach()  # by default DDP's logger stamps the first steps
        self._session = session
        # Every rank reads all counters; merge_windows keeps each host's and device's values only once.
        self._meters = Meters(self._device, reads_host=True, reads_device=True)
        self._conditions = Conditions(
            self._device,
            os.environ,
            reads_node=session.launch.local_rank == 0,
            gradient_bytes=session.gradient_bytes,
        )
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
        """Count a complete step, and change the phase after the last step of its window.

        Returns the time stamp from which the clock continues; None if the clock stops.
        """
        self.total += 1
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
                self._stable = is_stable(self._step_times())
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
        """Discard the sampled step, because the clock stopped in it; the next epoch repeats it."""
        if self._sampler is not None:
            self._sampler.discard()

    def _end_sample(self) -> None:
        sample = None if self._sampler is None else self._sampler.stop(self._session.launch.rank)
        if sample is not None:
            self._sampler = None
            self._session.post_sample(sample)

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
            self._attribution.attach()
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
            passes = self._sync_passes(len(window.step_s))
            window.conditions["rank"] |= self._conditions.synchronised(passes)
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
        known = [count for count in self._samples if count is not None]
        samples = sum(known) if len(known) == len(self._samples) else None
        return Window(
            step_s,
            self._samples,
            self._parts,
            loss,
            peak_memory_bytes(self._device),
            usage,
            self._stable,
            conditions=self._conditions.stop(samples=samples, sync_passes=None),
        )

    def _sync_passes(self, steps: int) -> int | None:
        """Return the synchronising passes of ``steps`` steps, at the rate of the attribution window."""
        if not self._steps or not self._attribution.sees_sync_passes:
            return None
        return round(self._attribution.sync_passes / self._steps * steps)

    def _step_times(self) -> list[float]:
        """Return the duration of every step of the window in seconds."""
        self._clock.synchronize()
        return [sum(self._clock.seconds(*span) for span in spans) for spans in self._spans]

    def _enter(self, phase: Phase) -> None:
        self.phase, self._steps = phase, 0
