"""Training steps with and without communication, in short interleaved blocks.

=================== ======================================================================
``plain``           a step as in the training
``timed``           with a communication hook that times every bucket's all-reduce
``noop``            with a communication hook that skips the communication
``no_sync``         without DDP's synchronisation: no buckets, no hooks
``no_sync_barrier`` as ``no_sync``, then a barrier to measure the cost of waiting alone
=================== ======================================================================

In the last three kinds, the weights of the ranks diverge, so the probes run after the training. The hooks
are registered on a copy of the model. Blocks of all kinds alternate in a seeded random order, so that slow
changes of the machine's speed affect all kinds alike.
"""

# `from __future__ import annotations` must not be used: DDP compares the annotations of a hook with types,
# not with strings.

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from ..measure.exchange import Collectives
from ..measure.step_parts import DDP_ALWAYS_SAMPLED, Clock, disable_ddp_timing
from .training import Trainer, step_times

KINDS = ("plain", "timed", "noop", "no_sync", "no_sync_barrier")
_MAX_ROUNDS = 3
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
    """The state of :func:`bucket_hook`: its mode, and the time stamps since the last :meth:`take`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.communicates = True
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
    """Time the reduction of a bucket (``timed`` steps), or return the bucket unreduced (``noop`` steps).

    The reduction is the same as DDP's without a hook. One hook serves both kinds of steps, because DDP
    accepts only one hook.
    """
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
        # gloo calls this function from its own thread after the reduction. NCCL calls it at once, but the
        # current stream then waits for the reduction, so the event is recorded after the reduction.
        state.stamps.append((index, size, begin, state.clock.stamp()))
        return reduced.value()[0]

    carried: torch.futures.Future[torch.Tensor] = work.get_future().then(ended)
    return carried


def union_s(spans: Sequence[BucketSpan]) -> float:
    """Return the time in seconds during which at least one bucket was being reduced."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, reached))
        reached = max(reached, span.end_s)
    return total


def unhidden_tail_s(spans: Sequence[BucketSpan]) -> float:
    """Return the seconds from the start of the last all-reduce until all have ended (never hidden)."""
    return max(span.end_s for span in spans) - max(span.begin_s for span in spans) if spans else 0.0


@dataclass(frozen=True)
class Block:
    """Consecutive steps of one kind; ``seconds`` has one list of step times per rank."""

    kind: str
    round: int
    seconds: list[list[float]]


@dataclass(frozen=True)
class StepReadings:
    """The measurements of all kinds of steps.

    ``union_s`` and ``tail_s`` contain one list per rank, with one value per step of kind ``timed``: the
    results of :func:`union_s` and :func:`unhidden_tail_s`. ``spans`` contains this rank's buckets of each of
    these steps.
    """

    blocks: list[Block]
    union_s: list[list[float]]
    tail_s: list[list[float]]
    spans: list[list[BucketSpan]]

    @property
    def comm_time_s(self) -> list[float]:
        """Total communication time per step (s) of each rank: the median over its ``timed`` steps."""
        return [median(rank) for rank in self.union_s]

    def as_json(self) -> dict[str, Any]:
        """Return the value of ``steps`` in probes.json."""
        return {
            **summary(self.blocks),
            "comm_time_s": self.comm_time_s,
            "comm_tail_s": [median(rank) for rank in self.tail_s],
            "blocks": [asdict(block) for block in self.blocks],
            "timed_union_s": self.union_s,
            "timed_tail_s": self.tail_s,
            "timed_buckets_rank_0": [
                [[span.index, span.bytes, span.begin_s, span.end_s] for span in step] for step in self.spans
            ],
        }


class StepProbes:
    """Run blocks of steps on one rank; ``plain`` trains the model, ``hooked`` a copy with a DDP hook."""

    def __init__(self, plain: Trainer, hooked: Trainer, *, collectives: Collectives, clock: Clock) -> None:
        self._plain = plain
        self._hooked = hooked
        self._collectives = collectives
        self._clock = clock
        self._buckets = Buckets(clock)
        self._stamps: list[tuple[Any, list[tuple[int, int, Any, Any]]]] = []
        hooked.model.register_comm_hook(self._buckets, bucket_hook)

    def run(self, steps: int, *, seed: int) -> StepReadings:
        """Train ``steps`` steps of each kind (rounded up to whole blocks) and return the readings."""
        self._warm_up()
        rounds = min(_MAX_ROUNDS, steps)
        length = -(-steps // rounds)
        own: list[tuple[str, int, list[float]]] = []
        spans: list[list[BucketSpan]] = []
        for number in range(rounds):
            for kind in random.Random(f"{seed}/{number}").sample(KINDS, len(KINDS)):
                own.append((kind, number, self._block(kind, length)))
                spans += self._read_spans() if kind == "timed" else []
        return self._gather(own, spans, length)

    def _warm_up(self) -> None:
        disable_ddp_timing(self._hooked.model)
        on_device = not self._clock.is_host
        for _ in range(DDP_ALWAYS_SAMPLED + 1 if on_device else _WARM_UP_STEPS):
            self._hooked.step()
        # no_sync_barrier needs no warm-up, because it is no_sync with a barrier.
        self._step_of("no_sync")()
        self._clock.synchronize()
        self._buckets.take()

    def _block(self, kind: str, steps: int) -> list[float]:
        self._collectives.barrier()
        return step_times(self._step_of(kind), steps, self._clock)

    def _step_of(self, kind: str) -> Callable[[], None]:
        self._buckets.communicates = kind != "noop"
        steps = {
            "plain": self._plain.step,
            "timed": self._timed_step,
            "noop": self._hooked.step,
            "no_sync": self._no_sync_step,
            "no_sync_barrier": self._no_sync_barrier_step,
        }
        return steps[kind]

    def _timed_step(self) -> None:
        origin = self._clock.stamp()
        self._hooked.step()
        self._stamps.append((origin, self._buckets.take()))

    def _no_sync_step(self) -> None:
        with self._plain.model.no_sync():
            self._plain.step()

    def _no_sync_barrier_step(self) -> None:
        self._no_sync_step()
        self._collectives.barrier()

    def _read_spans(self) -> list[list[BucketSpan]]:
        read = [self._buckets.read(stamps, origin) for origin, stamps in self._stamps]
        self._stamps.clear()
        return read

    def _gather(
        self, own: list[tuple[str, int, list[float]]], spans: list[list[BucketSpan]], length: int
    ) -> StepReadings:
        unions, tails = [union_s(step) for step in spans], [unhidden_tail_s(step) for step in spans]
        flat = [seconds for _, _, block in own for seconds in block]
        rows = self._collectives.rows([*flat, *unions, *tails])
        blocks = [
            Block(kind, number, [row[at * length : (at + 1) * length] for row in rows])
            for at, (kind, number, _) in enumerate(own)
        ]
        end = len(flat) + len(unions)
        return StepReadings(
            blocks, [row[len(flat) : end] for row in rows], [row[end:] for row in rows], spans
        )


def summary(blocks: Sequence[Block]) -> dict[str, float]:
    """Return the step time of each kind and the costs derived from them, in seconds.

    The step time of a block is the mean on its slowest rank, and that of a kind is the median of its blocks.
    """
    times = {
        kind: median(max(fmean(rank) for rank in block.seconds) for block in blocks if block.kind == kind)
        for kind in KINDS
    }
    return {f"{kind}_s": seconds for kind, seconds in times.items()} | {
        "communication_tax_s": times["plain"] - times["noop"],
        "bookkeeping_s": times["noop"] - times["no_sync"],
        "barrier_s": times["no_sync_barrier"] - times["no_sync"],
        "hook_overhead_s": times["timed"] - times["plain"],
    }
