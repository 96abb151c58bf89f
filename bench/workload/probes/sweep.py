"""All-reduces of many sizes, by themselves: what the fabric does without a training around it.

For S bytes on N ranks in t seconds, as nccl-tests defines them (its doc/PERFORMANCE.md):

    algbw = S / t          busbw = algbw · 2(N − 1)/N

A ring all-reduce sends 2(N − 1)/N · S bytes from each rank, so that busbw is also the rate at
which each rank's link carries them, where the ring is the algorithm in use.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.measure.exchange import Collectives
from bench.measure.step_parts import Clock

_KIB, _MIB = 2**10, 2**20
_SMALLEST = 4 * _KIB
#: Without a limit given, the sweep goes as far as the gradients do, within these.
_LEAST_TOP, _MOST_TOP = 16 * _MIB, 64 * _MIB
#: Kinds of buckets that are swept; a network of equal blocks has few.
_MOST_BUCKETS = 16
#: Repeats: the most that fit into a share of time for each size, and the fewest where time is short.
_REPEATS, _MOST_REPEATS, _FEWEST_REPEATS = 5, 20, 3
_SHARE_S = 0.02
#: A rested link lets a first burst pass above its rate (buffers, a shaper's credit of some 100 KiB).
#: For messages that are to tell the rate, it is spent by so many bytes that nobody times.
_BURST = 512 * _KIB


@dataclass(frozen=True)
class Size:
    """One message size; ``buckets`` is how many of the model's buckets have it."""

    bytes: int
    buckets: int = 0


@dataclass
class Sweep:
    """Times by size, one list of ranks per repeat (s); ``dropped`` sizes were left out, and why."""

    world_size: int
    dtype: str
    sizes: list[Size] = field(default_factory=list)
    times_s: list[list[list[float]]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)

    def time_s(self, at: int) -> float:
        """Return the time of the size at this place: the median of its repeats, each the longest rank's."""
        return median(max(ranks) for ranks in self.times_s[at])

    def standalone_s(self, buckets: Sequence[int]) -> float | None:
        """Return what the model's buckets take one after another; None where one was not swept."""
        times = {size.bytes: self.time_s(at) for at, size in enumerate(self.sizes)}
        found = [times.get(size) for size in buckets]
        return None if None in found or not found else math.fsum(time for time in found if time is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the part ``all_reduce`` of probes.json."""
        factor = 2 * (self.world_size - 1) / self.world_size
        rows = []
        for at, size in enumerate(self.sizes):
            seconds = self.time_s(at)
            rows.append(
                {
                    "bytes": size.bytes,
                    "buckets": size.buckets,
                    "wire_bytes_per_rank": size.bytes * factor,
                    "time_s": seconds,
                    "algbw_bytes_per_s": size.bytes / seconds,
                    "busbw_bytes_per_s": size.bytes * factor / seconds,
                    "times_s": self.times_s[at],
                }
            )
        return {"dtype": self.dtype, "sizes": rows, "dropped": self.dropped}


def message_sizes(buckets: Sequence[int], *, gradient_bytes: int, largest: int | None = None) -> list[Size]:
    """Return the sizes to try, ascending: powers of 4 from 4 KiB, and those of the model's buckets.

    Args:
        buckets: bytes of each bucket.
        gradient_bytes: of the whole model.
        largest: where the powers of 4 end; None for the gradients' size, within 16 and 64 MiB.
    """
    top = min(max(gradient_bytes, _LEAST_TOP), _MOST_TOP) if largest is None else largest
    counts = Counter(buckets)
    kinds = sorted(counts, key=lambda size: (-counts[size] * size, size))[:_MOST_BUCKETS]
    found = {size: counts[size] for size in kinds}
    power = _SMALLEST
    while power <= top:
        found.setdefault(power, 0)
        power *= 4
    return [Size(size, found[size]) for size in sorted(found)]


class AllReduceSweep:
    """Runs the sweep of one rank; every decision follows from figures that all ranks share."""

    def __init__(
        self, *, collectives: Collectives, clock: Clock, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._collectives = collectives
        self._clock = clock
        self._device = device
        self._dtype = dtype

    def run(self, sizes: Sequence[Size], *, budget_s: float, room_bytes: float, seed: int) -> Sweep:
        """Time every size, as far as time and memory go.

        Args:
            sizes: ascending.
            budget_s: about how long the sweep may take; the largest sizes are left out for it.
            room_bytes: the largest message that fits into every rank's memory.
            seed: of the order in which repeats of all sizes are mixed.
        """
        found = Sweep(self._collectives.world_size, str(self._dtype).removeprefix("torch."))
        fitting = [size for size in sizes if size.bytes <= room_bytes]
        largest = max((size.bytes for size in fitting), default=0)
        buffer = torch.empty(largest // self._dtype.itemsize, dtype=self._dtype, device=self._device)
        first_s = self._warm_up(buffer, fitting, budget_s, found)
        found.dropped += [{"bytes": s.bytes, "reason": "no room in memory"} for s in sizes[len(fitting) :]]
        repeats = self._repeats(first_s, budget_s)
        order = [place for place, count in enumerate(repeats) for _ in range(count)]
        random.Random(seed).shuffle(order)
        times = [self._time(self._payload(buffer, found.sizes[place])) for place in order]
        by_rank = self._collectives.rows(times) if times else []
        found.times_s = [
            [[row[at] for row in by_rank] for at, one in enumerate(order) if one == place]
            for place in range(len(found.sizes))
        ]
        return found

    def _warm_up(
        self, buffer: torch.Tensor, sizes: Sequence[Size], budget_s: float, found: Sweep
    ) -> list[float]:
        """Run each size, smallest first, until the next would not fit; return the times (s)."""
        first: list[float] = []
        for size in sizes:
            predicted = first[-1] * size.bytes / found.sizes[-1].bytes if first else 0.0
            if (sum(first) + predicted) * (1 + _FEWEST_REPEATS) > budget_s:
                reason = f"about {predicted:.3g} s each, which {budget_s:g} s in all do not allow"
                found.dropped.append({"bytes": size.bytes, "reason": reason})
                continue
            # Zeros: their sum stays what it is however often they are reduced. Written, so that the
            # memory is there. Small ones twice: the first opens what is opened on demand.
            payload = self._payload(buffer, size).zero_()
            own = [self._time(payload) for _ in range(2 if predicted < _SHARE_S else 1)]
            first.append(min(self._collectives.maxima(own)))
            found.sizes.append(size)
        return first

    @staticmethod
    def _repeats(first_s: Sequence[float], budget_s: float) -> list[int]:
        usual = [min(_MOST_REPEATS, max(_REPEATS, int(_SHARE_S / max(s, 1e-9)))) for s in first_s]
        costs = sum(count * seconds for count, seconds in zip(usual, first_s, strict=True))
        if costs + sum(first_s) <= budget_s:
            return usual
        return [_FEWEST_REPEATS if seconds > _SHARE_S else _REPEATS for seconds in first_s]

    def _payload(self, buffer: torch.Tensor, size: Size) -> torch.Tensor:
        return buffer[: size.bytes // self._dtype.itemsize]

    def _time(self, payload: torch.Tensor) -> float:
        """Return one all-reduce's seconds on this rank, after a barrier; large ones find no rested link."""
        burst = _BURST // self._dtype.itemsize
        if len(payload) > 2 * burst:
            dist.all_reduce(payload[:burst])
        self._collectives.barrier()
        begin = self._clock.stamp()
        dist.all_reduce(payload)
        end = self._clock.stamp()
        self._clock.settle()
        return self._clock.seconds(begin, end)
