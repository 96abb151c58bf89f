"""Windows of a recording: a warm-up, then epochs of a throughput window and an attribution window.

The throughput window is measured with a clock only. In the attribution window, hooks time the parts of each
step. Two steps between epochs are not measured. After the first step, rank 0 writes files and falls behind.
In the second step, the exchange of gradients synchronises the ranks again.

Once per recording, the first of these two steps is sampled (see :mod:`ddp_scaling_bench.record.step_sample`).
"""

from __future__ import annotations

import enum
import math
import os
from dataclasses import asdict, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from ..measure.conditions import Conditions, Meters, peak_memory_bytes
from ..measure.findings import ModelNotCalled, OtherDdp, PartsNotTimed
from ..measure.results import Window, fewest_warmup_steps, first_steps, is_stable
from ..measure.step_parts import Clock, StepParts, without_skipped
from .attribution import Attribution
from .replicas import ReplicaSampler, digest
from .session import Session
from .settings import Lengths
from .step_sample import StepSampler

#: An interval during which the clock ran: its first and last time stamp.
Span = tuple[Any, Any]
#: Fewest steps of a window that show whether the host gets ahead of the device.
_LEAST_STEPS_FOR_LEAD = 4


class Phase(enum.Enum):
    """The phase of a recording, which determines how the next step is measured."""

    WARM_UP = enum.auto()
    THROUGHPUT = enum.auto()
    ATTRIBUTION = enum.auto()
    BETWEEN = enum.auto()
    DONE = enum.auto()


class Windows:
    """Group one rank's steps into windows, and send every complete window to rank 0."""

    def __init__(self, lengths: Lengths, *, warmup_rounds: int = 1) -> None:
        self._lengths = lengths
        self._warmup_rounds = warmup_rounds
        self.phase = Phase.WARM_UP
        #: Number of windows sent.
        self.posted = 0
        #: This rank's mean loss in the last window, or in the warm-up before it; None if it is unknown.
        self.last_loss: float | None = None
        #: Whether the first batch has yet to be compared between the ranks.
        self.wants_inputs = False
        self._steps = 0  # steps in the current phase
        self._all_steps = 0  # steps in the phases before
        self._unsampled: int | None = None  # the window after which the parameters have yet to be sampled
        self._spans: list[list[Span]] = []  # one list per step of the current window
        self._samples: list[float | None] = []
        self._parts: list[StepParts | None] = []
        self._loops: dict[str, Any] = {}  # what the window contains about the loops that begin in it
        self._clock_jumps = 0
        self._loss_sum: Tensor | None = None
        self._losses = 0
        self._window: Window | None = None
        self._stable = False
        self._rounds = 1  # of the warm-up
        self._sampler: StepSampler | None = None  # None before the first step and after the sample

    def open(
        self,
        clock: Clock,
        attribution: Attribution,
        session: Session,
        sampler: StepSampler,
        replica: ReplicaSampler,
    ) -> None:
        """Begin recording at the first step; ``clock`` is that of the session's device."""
        self._clock, self._attribution, self._session, self._sampler = clock, attribution, session, sampler
        self._replica, self._unsampled = replica, 0
        self.wants_inputs = session.launch.world_size > 1
        self._device = session.device
        self._attribution.detach()  # by default DDP's logger stamps the first steps
        # Every rank reads all counters; merge_windows keeps the values of each host and device only once.
        self._meters = Meters(self._device)
        self._conditions = Conditions(self._device, os.environ, reads_node=session.reads_node)
        self._steps_per_round = fewest_warmup_steps(self._lengths.warmup_steps, self._device)
        self._session.warmup_steps = self.warmup_steps

    @property
    def warmup_steps(self) -> int:
        """The number of steps of the warm-up so far."""
        return self._rounds * self._steps_per_round

    def loss(self, loss: Tensor | float) -> None:
        """Add a micro-batch's loss without waiting for the device."""
        if self.phase is not Phase.THROUGHPUT and self.phase is not Phase.WARM_UP:
            return
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        if value.dim():
            value = value.mean()
        if self._loss_sum is None:
            self._loss_sum = value.float().clone()  # a sum in half precision soon stops growing
        else:
            self._loss_sum += value
        self._losses += 1

    def inputs(self, batch: Any) -> None:
        """Send a checksum of this rank's first batch to rank 0."""
        self.wants_inputs = False
        if (found := digest(batch)) is not None:
            self._session.exchange.post("inputs", found)

    def first_batch(self, wait_s: float, loader: object) -> None:
        """Note the wait for the first batch of a loop over ``loader``; loops in the warm-up do not count."""
        if self.phase is Phase.THROUGHPUT:
            self._loops.setdefault("first_waits_s", []).append(wait_s)
            keeps = getattr(loader, "persistent_workers", False)
            self._loops["restarts_workers"] = getattr(loader, "num_workers", 0) > 0 and not keeps

    def clock_stops(self) -> None:
        """Stop the counters with the clock."""
        self._conditions.pause()

    def clock_starts(self) -> None:
        """Let the counters continue with the clock, which also starts after each throughput window.

        By then the loop has ended its step, so that parameters that it averages afterwards are equal, too.
        """
        self._conditions.resume()
        self._sample_parameters()

    def conclude(self) -> None:
        """Report what the steps so far show on this rank."""
        if self._attribution.was_missed and self._session.writer is not None:
            self._session.writer.add(ModelNotCalled())

    def _sample_parameters(self) -> None:
        if self._unsampled is not None:
            number, self._unsampled = self._unsampled, None
            sample = {"steps": self._all_steps, "values": self._replica.values()}
            self._session.exchange.post(f"parameters/{number}", sample | {"shapes": self._replica.shapes})

    def count(self, spans: list[Span], samples: float | None, now: Any) -> Any:
        """Count a step; return the time stamp from which the clock continues, or None if the clock stops."""
        self._steps += 1
        if self.phase is Phase.THROUGHPUT:
            self._spans.append(spans)
            self._samples.append(samples)
            if self._steps < self._lengths.steps_per_epoch:
                return now
            self._end_throughput(now)
            return None  # the clock starts again with the next step, which is not measured
        if self.phase is Phase.ATTRIBUTION:
            self._attribute()
        elif self.phase is Phase.WARM_UP:
            self._spans.append(spans)
            return self._warm_up(now)
        elif self.phase is Phase.BETWEEN:
            if self._steps > 1:
                return self._start_window()
            self._end_sample()
            self._prepare_window()  # every rank sent its record before its gradients of this step
        return now

    def leave(self) -> None:
        """Close the current window early and send its steps to rank 0."""
        if self.phase is Phase.THROUGHPUT and self._spans:
            self._window = self._measured_window(self._step_times())
            self._post()
        elif self.phase is Phase.ATTRIBUTION:
            self._attribution.detach()
            self._post()
        self._sample_parameters()
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

    def _warm_up(self, now: Any) -> Any:
        """Repeat the warm-up while a rank's step time is not stable, then start the first window.

        Each rank votes before its gradients of a round's last step, so all ranks know all votes after it.
        """
        left, vote = self.warmup_steps - self._steps, f"unstable/{self._rounds}"
        may_repeat = self._rounds < self._warmup_rounds
        if left == 1:
            if may_repeat:
                self._session.exchange.count(vote, int(not self._is_stable()))
            self._prepare_window()
        if left:
            return now
        self._clock.synchronize()  # then the exchange of gradients has ended on the device, too
        if may_repeat and self._session.exchange.count(vote, 0):
            self._rounds += 1
            self._session.warmup_steps = self.warmup_steps
            return now
        self._stable = self._is_stable(prepares=True)
        self.last_loss = self._mean_loss()
        return self._start_window()

    def _is_stable(self, *, prepares: bool = False) -> bool:
        return is_stable(self._step_times(), first=first_steps(self._device), prepares=prepares)

    def _prepare_window(self) -> None:
        """Write files and read counters, which delays this rank; the next step synchronises the ranks."""
        if self.posted == self._lengths.epochs:
            self.conclude()
        if self._session.writer is not None:
            self._session.writer.write()
        self._conditions.sample()
        self._meters.read()

    def _start_window(self) -> Any:
        if self.posted == self._lengths.epochs:
            writer = self._session.writer
            if writer is None or writer.is_finished:
                self.phase = Phase.DONE
                return None
            writer.write()  # a record of another rank was late; look again after each step
            return self._clock.stamp()
        self._spans, self._samples, self._parts, self._loops = [], [], [], {}
        self._clock_jumps = 0
        self._loss_sum, self._losses = None, 0
        self._enter(Phase.THROUGHPUT)
        self._clock.synchronize()
        self._meters.start()
        self._conditions.start()
        self._began = self._clock.stamp()
        return self._began

    def _end_throughput(self, last: Any) -> None:
        loaded = self._conditions.clocks() if self._clock.is_busy(last) else None
        side_s = self._clock.drain(self._began, last) / self._steps
        window = self._measured_window([one + side_s for one in self._step_times()], loaded)
        self._window = replace(window, side_s=side_s)
        if self._lengths.attribution_steps:
            self._session.post(self.posted + 1, self._window, early=True)
            self._enter(Phase.ATTRIBUTION)
            untimed = self._attribution.attach()
            if untimed is not None and self._session.writer is not None:
                self._session.writer.add(untimed)
        else:
            self._post()

    def _attribute(self) -> None:
        parts = self._attribution.stop()
        self._clock_jumps += self._attribution.timer.clock_jumped
        if self._steps > 1:  # the first step warms up the hooks, and DDP's buckets have other timers in it
            self._parts.append(parts)
        if self._steps > self._lengths.attribution_steps:
            self._attribution.detach()
            self._post()
        else:
            self._attribution.start()

    def _post(self) -> None:
        assert self._window is not None
        window, self._window = self._window, None
        is_attributed = self.phase is Phase.ATTRIBUTION
        forwards, syncs = self._attribution.passes_per_step(self._steps if is_attributed else 0)
        waits = self._attribution.host_waits if is_attributed else None
        window = replace(window, parts=without_skipped(self._parts), host_waits=waits)
        window = replace(window, clock_jumps=self._clock_jumps, micro_batches=forwards)
        if window.conditions is not None and syncs is not None:
            window.conditions["rank"]["sync_passes"] = round(syncs * len(window.step_s))
        self.posted += 1
        self._session.post(self.posted, window)
        if self._session.writer is not None:
            if self._attribution.has_several:
                self._session.writer.add(PartsNotTimed(several=True))
            if self._attribution.has_others:
                self._session.writer.add(OtherDdp())
        self._enter(Phase.BETWEEN)
        if self._sampler is not None:
            self._sampler.start()

    def _measured_window(self, step_s: list[float], loaded: dict[str, Any] | None = None) -> Window:
        """Return the throughput window that ends now; ``parts`` is filled in later."""
        usage = self._meters.stop(sum(step_s))
        self._unsampled = self.posted + 1
        self.last_loss, peak = self._mean_loss(), peak_memory_bytes(self._device)
        found = self._conditions.stop(steps=len(step_s) + 1, loaded=loaded)
        values = (self._samples, self._parts, self.last_loss, peak, usage, self._stable)
        lead_s, paused_s = self._lead_s(), self._paused_s()
        return Window(step_s, *values, conditions=found, paused_s=paused_s, lead_s=lead_s, **self._loops)

    def _mean_loss(self) -> float | None:
        return None if self._loss_sum is None else float(self._loss_sum) / self._losses

    def _step_times(self) -> list[float]:
        """Return the duration of every step of the window in seconds."""
        self._clock.synchronize()
        return [sum(self._clock.seconds(*span) for span in spans) for spans in self._spans]

    def _lead_s(self) -> float:
        """Return by how much the host gets ahead of the device in a step of the window's second half."""
        if len(self._spans) < _LEAST_STEPS_FOR_LEAD:
            return math.nan
        later = self._spans[len(self._spans) // 2 :]
        spans = chain.from_iterable(later)
        return sum(self._clock.seconds(*one) - self._clock.launch_seconds(*one) for one in spans) / len(later)

    def _paused_s(self) -> float:
        """Return the time in the window for which the clock stood; exactly 0 if it never stopped."""
        stamps = [self._began, *chain.from_iterable(chain.from_iterable(self._spans))]
        gaps = [pair for pair in list(pairwise(stamps))[::2] if pair[0] is not pair[1]]
        return sum(self._clock.seconds(*gap) for gap in gaps)

    def _enter(self, phase: Phase) -> None:
        self._all_steps += self._steps
        self.phase, self._steps = phase, 0
