"""Training steps of five kinds, in short interleaved blocks: what communication adds to a step.

=================== ======================================================================
``plain``           the step as it was trained
``timed``           with a communication hook that times every bucket's all-reduce
``noop``            with a hook that leaves the communication out
``no_sync``         without DDP's synchronisation: no buckets, no hooks
``no_sync_barrier`` the same, and a barrier at the end: what waiting for each other alone costs
=================== ======================================================================

The last three let the ranks' weights drift apart, so they come when the training is over; the
hooks go on a copy of the model. The kinds' blocks are interleaved in a seeded random order, so
that slow changes of the machine meet all of them alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from bench.measure import step_parts as ddp_logger
from bench.measure.exchange import Collectives
from bench.measure.step_parts import Clock
from bench.workload.probes.comm_hook import Buckets, BucketSpan, bucket_hook, tail_s, union_s
from bench.workload.training import Trainer
from bench.workload.windows import step_times

KINDS = ("plain", "timed", "noop", "no_sync", "no_sync_barrier")
_MOST_ROUNDS = 3
#: The copy's first steps: DDP rebuilds its buckets in the second.
_WARM_UP = 3


@dataclass(frozen=True)
class Block:
    """The steps of one kind in one round: seconds, one list per rank."""

    kind: str
    round: int
    seconds: list[list[float]]


@dataclass(frozen=True)
class StepReadings:
    """What the probes read.

    ``union_s`` and ``tail_s`` are of the timed steps, one list per rank; ``spans`` are this
    rank's buckets in each timed step.
    """

    blocks: list[Block]
    union_s: list[list[float]]
    tail_s: list[list[float]]
    spans: list[list[BucketSpan]]

    @property
    def comm_time_s(self) -> list[float]:
        """Total communication per step of each rank: the median of its timed steps (s)."""
        return [median(rank) for rank in self.union_s]

    def as_json(self) -> dict[str, Any]:
        """Return the part ``steps`` of probes.json."""
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
    """Runs the blocks of one rank: ``plain`` trains the model itself, ``hooked`` its copy."""

    def __init__(self, plain: Trainer, hooked: Trainer, *, collectives: Collectives, clock: Clock) -> None:
        self._plain = plain
        self._hooked = hooked
        self._collectives = collectives
        self._clock = clock
        self._buckets = Buckets(clock)
        self._stamps: list[tuple[Any, list[tuple[int, int, Any, Any]]]] = []
        hooked.model.register_comm_hook(self._buckets, bucket_hook)

    def run(self, steps: int, *, seed: int) -> StepReadings:
        """Train ``steps`` steps of each kind (rounded up to whole blocks) and return what they took."""
        self._warm_up()
        rounds = min(_MOST_ROUNDS, steps)
        length = -(-steps // rounds)
        own: list[tuple[str, int, list[float]]] = []
        spans: list[list[BucketSpan]] = []
        for number in range(rounds):
            for kind in random.Random(f"{seed}/{number}").sample(KINDS, len(KINDS)):
                own.append((kind, number, self._block(kind, length)))
                spans += self._read_spans() if kind == "timed" else []
        return self._gather(own, spans, length)

    def _warm_up(self) -> None:
        ddp_logger.sample_no_step(self._hooked.model)
        on_device = not self._clock.is_host
        for _ in range(ddp_logger.ALWAYS_SAMPLED + 1 if on_device else _WARM_UP):
            self._hooked.step()
        # The other kinds do nothing that has not been done by now.
        self._step_of("no_sync")()
        self._clock.settle()
        self._buckets.take()

    def _block(self, kind: str, steps: int) -> list[float]:
        self._collectives.barrier()
        return step_times(self._step_of(kind), steps, self._clock)

    def _step_of(self, kind: str) -> Callable[[], None]:
        self._buckets.communicates = kind != "noop"
        steps = {
            "plain": self._plain.step,
            "timed": self._timed,
            "noop": self._hooked.step,
            "no_sync": self._alone,
            "no_sync_barrier": self._alone_with_barrier,
        }
        return steps[kind]

    def _timed(self) -> None:
        origin = self._clock.stamp()
        self._hooked.step()
        self._stamps.append((origin, self._buckets.take()))

    def _alone(self) -> None:
        with self._plain.model.no_sync():
            self._plain.step()

    def _alone_with_barrier(self) -> None:
        self._alone()
        self._collectives.barrier()

    def _read_spans(self) -> list[list[BucketSpan]]:
        read = [self._buckets.read(stamps, origin) for origin, stamps in self._stamps]
        self._stamps.clear()
        return read

    def _gather(
        self, own: list[tuple[str, int, list[float]]], spans: list[list[BucketSpan]], length: int
    ) -> StepReadings:
        unions, tails = [union_s(step) for step in spans], [tail_s(step) for step in spans]
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
    """Return each kind's step time (s) and the differences that mean something.

    A block's step time is the longest rank's mean; a kind's is the median of its blocks.
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
