"""Training steps that time the all-reduce of every bucket of gradients.

A communication hook on a copy of the model takes the times, after the training.
"""

# `from __future__ import annotations` must not be used: DDP compares the annotations of a hook with types,
# not with strings.

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..measure.exchange import Collectives
from ..measure.step_parts import DDP_ALWAYS_SAMPLED, Clock
from .training import Trainer

#: Number of warm-up steps of the copy; DDP rebuilds its buckets in the second step.
_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """Begin and end of one bucket's all-reduce, in seconds after the step's start."""

    index: int
    bytes: int
    begin_s: float
    end_s: float


class Buckets:
    """The state of :func:`bucket_hook`: the time stamps since the last :meth:`take`."""

    def __init__(self, clock: Clock, dtype: torch.dtype) -> None:
        self.clock = clock
        self.dtype = dtype
        self.stamps: list[tuple[int, int, Any, Any]] = []

    def take(self) -> list[tuple[int, int, Any, Any]]:
        """Return and remove the time stamps; on CUDA they can be read after a synchronisation."""
        stamps, self.stamps = self.stamps, []
        return stamps

    def read(self, stamps: Sequence[tuple[int, int, Any, Any]], origin: Any) -> list[BucketSpan]:
        """Convert the stamps of a step that began at ``origin`` to spans, sorted by their begin."""
        seconds = self.clock.seconds
        spans = [
            BucketSpan(index, size, seconds(origin, begin), seconds(origin, end))
            for index, size, begin, end in stamps
        ]
        return sorted(spans, key=lambda span: span.begin_s)


def bucket_hook(
    state: Buckets,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Time the reduction of a bucket, which is the same as DDP's without a hook or with torch's fp16 hook."""
    gradients: torch.Tensor = bucket.buffer()
    sent = gradients.to(state.dtype)  # the same tensor if the type is the same
    index, size = bucket.index(), sent.numel() * sent.element_size()
    sent.div_(dist.get_world_size())
    begin = state.clock.stamp()
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None

    def ended(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # gloo calls this function from its own thread after the reduction. NCCL calls it at once, but the
        # current stream then waits for the reduction, so the event is recorded after the reduction.
        state.stamps.append((index, size, begin, state.clock.stamp()))
        if sent is not gradients:
            gradients.copy_(sent)
        return gradients

    carried: torch.futures.Future[torch.Tensor] = work.get_future().then(ended)
    return carried


def union_s(spans: Sequence[BucketSpan]) -> float:
    """Return the time in seconds during which at least one bucket was being reduced."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, reached))
        reached = max(reached, span.end_s)
    return total


@dataclass(frozen=True)
class StepReadings:
    """The measurements of all timed steps.

    ``union_s`` contains one list per rank, with the result of :func:`union_s` for each step. ``spans``
    contains this rank's buckets of each step.
    """

    union_s: list[list[float]]
    spans: list[list[BucketSpan]]

    @property
    def comm_time_s(self) -> list[float]:
        """Total communication time per step (s) of each rank: the median over its steps."""
        return [median(rank) for rank in self.union_s]

    def as_json(self) -> dict[str, Any]:
        """Return the value of ``steps`` in probes.json."""
        return {
            "comm_time_s": self.comm_time_s,
            "timed_union_s": self.union_s,
            "timed_buckets_rank_0": [
                [[span.index, span.bytes, span.begin_s, span.end_s] for span in step] for step in self.spans
            ],
        }


def time_buckets(
    trainer: Trainer, steps: int, *, collectives: Collectives, clock: Clock, dtype: torch.dtype
) -> StepReadings:
    """Train ``steps`` steps on one rank; return the times of their buckets on all ranks.

    ``dtype`` is the type in which gradients are sent.
    """
    buckets = Buckets(clock, dtype)
    trainer.parts.hook_buckets(buckets, bucket_hook)
    trainer.parts.stop()
    for _ in range(_WARM_UP_STEPS if clock.is_host else DDP_ALWAYS_SAMPLED + 1):
        trainer.step()
    clock.synchronize()
    buckets.take()
    collectives.barrier()
    stamps = []
    for _ in range(steps):
        origin = clock.stamp()
        trainer.step()
        stamps.append((origin, buckets.take()))
    clock.synchronize()
    spans = [buckets.read(taken, origin) for origin, taken in stamps]
    return StepReadings(collectives.rows([*map(union_s, spans)]), spans)
