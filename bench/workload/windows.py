"""Run the windows of an epoch: a throughput window without instruments, then an attribution window."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from bench.measure.conditions import Conditions
from bench.measure.exchange import Collectives
from bench.measure.meters import Meters, peak_memory_bytes
from bench.measure.step_parts import Clock, StepTimer, clock_for, disable_ddp_timing, enable_ddp_timing
from bench.measure.windows import Window, fewest_warmup_steps, is_stable
from bench.workload.failures import CollectiveError
from bench.workload.training import Trainer

#: Maximum number of warm-up rounds, after which the warm-up ends even if the step time is not stable.
_MAX_ROUNDS = 3


class Windows:
    """Runs the windows of one rank.

    ``samples_per_step`` is this rank's number of samples per step. Without ``conditions``, none are sampled.
    """

    def __init__(
        self,
        trainer: Trainer,
        collectives: Collectives,
        meters: Meters,
        device: torch.device,
        *,
        samples_per_step: int,
        conditions: Conditions | None = None,
    ) -> None:
        self._trainer = trainer
        self._collectives = collectives
        self._meters = meters
        self._device = device
        self._samples_per_step = samples_per_step
        self._conditions = conditions

    def warm_up(self, fewest: int) -> tuple[int, bool]:
        """Train ``fewest`` steps, and up to twice as many more until every rank's step time is stable.

        On CUDA the warm-up includes the iterations that DDP's logger always samples.

        Returns:
            The number of steps, and whether the step time became stable.

        Raises:
            CollectiveError: the loss is not finite.
        """
        disable_ddp_timing(self._trainer.model)
        fewest = fewest_warmup_steps(fewest, self._device)
        step_s: list[float] = []
        stable = False
        for _ in range(_MAX_ROUNDS):
            step_s += self._steps(fewest)
            unstable, *_ = self._collectives.maxima([0.0 if is_stable(step_s) else 1.0])
            self.check_losses(self._trainer.take_loss(), "the warm-up")
            stable = not unstable
            if stable:
                break
        return len(step_s), stable

    def throughput(self, steps: int) -> Window:
        """Train ``steps`` steps, measured with a clock only."""
        if self._conditions is not None:
            self._conditions.sample()
        self._collectives.barrier()
        self._meters.start()
        if self._conditions is not None:
            self._conditions.start()
        began = time.perf_counter()
        step_s = self._steps(steps)
        seconds = time.perf_counter() - began
        usage = self._meters.stop()
        conditions = None
        if self._conditions is not None:
            samples = self._samples_per_step * steps
            # Only the last micro-batch of a step synchronises gradients.
            conditions = self._conditions.stop(samples=samples, sync_passes=steps)
        return Window(
            step_s=step_s,
            samples=[self._samples_per_step] * steps,
            parts=[],
            loss=self._trainer.take_loss(),
            peak_mem_bytes=peak_memory_bytes(self._device),
            usage=usage,
            window_s=seconds,
            conditions=conditions,
        )

    def attribution(self, window: Window, steps: int) -> Window:
        """Train ``steps`` steps with a timer on each part and add their parts to ``window``.

        One more step runs first and is not measured. The parts of a step are None if this rank's wall clock
        was set during the step. If DDP's logger lacks the times of any other step, all parts are None.
        """
        model, timer = self._trainer.model, StepTimer(clock_for(self._device))
        enable_ddp_timing(model)
        self._collectives.barrier()
        timed, jumps = [], []
        for _ in range(steps + 1):
            timed.append(self._trainer.timed_step(timer))
            jumps.append(timer.clock_jumped)
        disable_ddp_timing(model)
        self._trainer.take_loss()
        del timed[0], jumps[0]
        unread = any(parts is None and not jump for parts, jump in zip(timed, jumps, strict=True))
        return replace(window, parts=[] if unread else timed, clock_jumps=sum(jumps))

    def check_losses(self, own: float | None, section: str) -> None:
        """Check that the losses of all ranks are finite.

        Raises:
            CollectiveError: a loss is NaN or infinite; every rank raises the same error.
        """
        losses = [row[0] for row in self._collectives.rows([math.nan if own is None else own])]
        wrong = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if wrong:
            name = "NaN" if any(math.isnan(losses[rank]) for rank in wrong) else "infinite"
            # NaN on one rank reaches the other ranks with the next all-reduce of gradients.
            everywhere = len(wrong) == len(losses)
            ranks = "every rank" if everywhere else f"rank {', '.join(str(rank) for rank in wrong)}"
            raise CollectiveError(
                f"the loss became {name} in {section} on {ranks}",
                remedy="lower --learning-rate, use bf16 or fp32 for fp16, or look for NaN in the data",
            )

    def _steps(self, steps: int) -> list[float]:
        return step_times(self._trainer.step, steps, clock_for(self._device))


def step_times(step: Callable[[], None], steps: int, clock: Clock) -> list[float]:
    """Call ``step`` repeatedly (``steps`` times) and return the duration of each call in seconds.

    On CUDA the host waits for the device once, at the end.
    """
    if clock.is_host:
        now = time.perf_counter
        marks = [now()]
        for _ in range(steps):
            step()
            marks.append(now())
        return [end - begin for begin, end in pairwise(marks)]
    clock.synchronize()
    stamps = [clock.stamp()]
    for _ in range(steps):
        step()
        stamps.append(clock.stamp())
    clock.synchronize()
    return [clock.seconds(begin, end) for begin, end in pairwise(stamps)]
