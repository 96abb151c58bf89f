"""The windows of an epoch: throughput without instruments, then the attribution of the step's time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from bench.measure import step_parts as ddp_logger
from bench.measure.exchange import Collectives
from bench.measure.meters import Meters, Usage
from bench.measure.step_parts import Clock, StepParts, StepTimer, clock_for
from bench.measure.windows import is_stable
from bench.workload.failures import CollectiveError
from bench.workload.training import Trainer

#: The warm-up ends after this many times its fewest steps, stable or not.
_MOST_ROUNDS = 3


@dataclass(frozen=True)
class Throughput:
    """One rank's throughput window: its whole time, and that of each step (seconds)."""

    seconds: float
    step_s: list[float]
    loss: float
    usage: Usage


@dataclass(frozen=True)
class WarmUp:
    """How many steps the warm-up took, and whether the step time had become stable."""

    steps: int
    stable: bool


class Windows:
    """Runs the windows of one rank."""

    def __init__(
        self, trainer: Trainer, collectives: Collectives, meters: Meters, device: torch.device
    ) -> None:
        self._trainer = trainer
        self._collectives = collectives
        self._meters = meters
        self._device = device
        #: Attributed steps that were dropped because some rank's wall clock was set during them.
        self.clock_jumps = 0

    def warm_up(self, fewest: int) -> WarmUp:
        """Train ``fewest`` steps, and up to twice as many more until every rank's step time is stable.

        On CUDA the iterations that DDP's logger samples in any case are part of it.

        Raises:
            CollectiveError: the loss is no number.
        """
        ddp_logger.sample_no_step(self._trainer.model)
        if self._device.type == "cuda":
            fewest = max(fewest, ddp_logger.ALWAYS_SAMPLED + 1)
        times: list[float] = []
        stable = False
        for _ in range(_MOST_ROUNDS):
            times += self._steps(fewest)
            unstable, *_ = self._collectives.maxima([0.0 if is_stable(times) else 1.0])
            self.check_losses(self._trainer.take_loss(), "the warm-up")
            stable = not unstable
            if stable:
                break
        return WarmUp(len(times), stable)

    def throughput(self, steps: int) -> Throughput:
        """Train ``steps`` steps with a clock beside them and nothing else."""
        self._collectives.barrier()
        self._meters.start()
        began = time.perf_counter()
        step_s = self._steps(steps)
        seconds = time.perf_counter() - began
        usage = self._meters.stop()
        return Throughput(seconds, step_s, self._trainer.take_loss(), usage)

    def attribution(self, steps: int) -> list[StepParts]:
        """Train ``steps`` steps with a timer on each part; one more before them is not counted.

        A step during which any rank's wall clock was set counts on no rank. Returns no steps where DDP's
        logger has nothing to say on any rank.
        """
        model, timer = self._trainer.model, StepTimer(clock_for(self._device))
        ddp_logger.sample_every_step(model)
        self._collectives.barrier()
        timed, jumps = [], []
        for _ in range(steps + 1):
            timed.append(self._trainer.timed_step(timer))
            jumps.append(float(timer.clock_jumped))
        ddp_logger.sample_no_step(model)
        self._trainer.take_loss()
        del timed[0], jumps[0]
        jumped = self._collectives.maxima(jumps)
        self.clock_jumps += sum(1 for one in jumped if one)
        unread = [float(parts is None and not jump) for parts, jump in zip(timed, jumps, strict=True)]
        if any(self._collectives.maxima(unread)):
            return []
        kept = zip(timed, jumped, strict=True)
        return [parts for parts, jump in kept if parts is not None and not jump]

    def check_losses(self, own: float, where: str) -> list[float]:
        """Return every rank's loss.

        Raises:
            CollectiveError: one of them is not a number; the same on every rank.
        """
        losses = [row[0] for row in self._collectives.rows([own])]
        wrong = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if wrong:
            name = "NaN" if any(math.isnan(losses[rank]) for rank in wrong) else "infinite"
            # A rank's NaN reaches the others with the next gradients.
            everywhere = len(wrong) == len(losses)
            ranks = "every rank" if everywhere else f"rank {', '.join(str(rank) for rank in wrong)}"
            raise CollectiveError(
                f"the loss became {name} in {where} on {ranks}",
                remedy="lower --learning-rate, use bf16 or fp32 for fp16, or look for NaN in the data",
            )
        return losses

    def _steps(self, steps: int) -> list[float]:
        return step_times(self._trainer.step, steps, clock_for(self._device))


def step_times(step: Callable[[], None], steps: int, clock: Clock) -> list[float]:
    """Call ``step`` so often, with a clock beside it and nothing else; return each call's seconds.

    On CUDA the device is waited for once, at the end.
    """
    if clock.is_host:
        now = time.perf_counter
        marks = [now()]
        for _ in range(steps):
            step()
            marks.append(now())
        return [end - begin for begin, end in pairwise(marks)]
    clock.settle()
    stamps = [clock.stamp()]
    for _ in range(steps):
        step()
        stamps.append(clock.stamp())
    clock.settle()
    return [clock.seconds(begin, end) for begin, end in pairwise(stamps)]
