"""A communication hook that times every bucket's all-reduce, or leaves the communication out.

A DDP takes one hook, once, so one hook does both. It divides and reduces as DDP does without
a hook. (Annotations are evaluated in this module: DDP compares a hook's with types.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.measure.step_parts import Clock


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """One bucket's all-reduce, from the moment its gradients were ready: seconds after its step began."""

    index: int
    bytes: int
    begin_s: float
    end_s: float


class Buckets:
    """What the hook does (``communicates``), and the stamps it took since they were last taken away."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.communicates = True
        self._stamps: list[tuple[int, int, Any, Any]] = []

    def add(self, index: int, size: int, begin: Any, end: Any) -> None:
        """Keep one bucket's stamps."""
        self._stamps.append((index, size, begin, end))

    def take(self) -> list[tuple[int, int, Any, Any]]:
        """Return the stamps since the last call; on CUDA they can be read once the device has caught up."""
        stamps, self._stamps = self._stamps, []
        return stamps

    def read(self, stamps: Sequence[tuple[int, int, Any, Any]], origin: Any) -> list[BucketSpan]:
        """Return the spans of one step that began at ``origin``, the first to begin first."""
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
    """Reduce a bucket and keep when, or hand it back as it is."""
    gradients = bucket.buffer()
    if not state.communicates:
        unchanged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        unchanged.set_result(gradients)
        return unchanged
    index, size = bucket.index(), gradients.numel() * gradients.element_size()
    gradients.div_(dist.get_world_size())
    begin = state.clock.stamp()
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None

    def ended(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # gloo calls this from its own thread when the reduction is done; NCCL at once, with a
        # current stream that comes after the reduction, so that an event is stamped there.
        state.add(index, size, begin, state.clock.stamp())
        return reduced.value()[0]

    carried: torch.futures.Future[torch.Tensor] = work.get_future().then(ended)
    return carried


def union_s(spans: Sequence[BucketSpan]) -> float:
    """Return the seconds in which at least one bucket was on its way; their sum would count time twice."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, reached))
        reached = max(reached, span.end_s)
    return total


def tail_s(spans: Sequence[BucketSpan]) -> float:
    """Return the seconds from the last bucket's start to the end of all: communication that cannot hide."""
    return max(span.end_s for span in spans) - max(span.begin_s for span in spans) if spans else 0.0
