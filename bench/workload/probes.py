"""Run all probes after the last epoch, and write probes.json on rank 0 (see docs/measuring.md).

One probe, the sweep, times all-reduces of many sizes without training, to measure the network's speed. For S
bytes on N ranks in t seconds, nccl-tests (doc/PERFORMANCE.md) defines:

    algbw = S / t          busbw = algbw · 2(N − 1)/N

In a ring all-reduce, each rank sends 2(N − 1)/N · S bytes, so busbw is also the rate on each rank's link.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ..measure.environment import bucket_bytes
from ..measure.exchange import Collectives
from ..measure.step_parts import Clock, clock_for
from ..study.files import write_json
from .data import Feed
from .session import Session
from .step_probes import StepReadings, time_buckets
from .training import STATES_PER_WEIGHT, Trainer, parameters_of, wrap

_KIB, _MIB = 2**10, 2**20
_SMALLEST = 4 * _KIB
#: Limits of the sweep's largest size. Within these limits, the largest size is the size of the gradients.
_MIN_TOP, _MAX_TOP = 16 * _MIB, 64 * _MIB
#: Maximum number of distinct bucket sizes in the sweep; a network of equal blocks has few.
_MAX_BUCKET_SIZES = 16
#: Repeats of a size: at least _REPEATS, and up to _MAX_REPEATS if they fit into _TIME_PER_SIZE_S. If the time
#: budget is short, slow sizes are repeated _MIN_REPEATS times.
_REPEATS, _MAX_REPEATS, _MIN_REPEATS = 5, 20, 3
_TIME_PER_SIZE_S = 0.02
#: Bytes sent untimed before a large message. An idle link passes some bytes faster than its rate, because of
#: buffers or a traffic shaper's credit of some 100 KiB. The untimed bytes use up this credit.
_BURST = 512 * _KIB


@dataclass(frozen=True)
class Size:
    """One message size; ``buckets`` is the number of the model's buckets that have this size."""

    bytes: int
    buckets: int = 0


@dataclass
class Sweep:
    """The times of all-reduces by size, repeat and rank; ``dropped`` lists omitted sizes with reasons."""

    world_size: int
    dtype: str
    sizes: list[Size] = field(default_factory=list)
    times_s: list[list[list[float]]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)

    def time_s(self, index: int) -> float:
        """Return the median over the repeats of the slowest rank's time (s) for the size at ``index``."""
        return median(max(ranks) for ranks in self.times_s[index])

    def standalone_s(self, buckets: Sequence[int]) -> float | None:
        """Return the total time of the model's buckets (s), or None if a bucket's size was not measured."""
        times = {size.bytes: self.time_s(index) for index, size in enumerate(self.sizes)}
        found = [times.get(size) for size in buckets]
        return None if None in found or not found else math.fsum(time for time in found if time is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the value of ``all_reduce`` in probes.json."""
        factor = 2 * (self.world_size - 1) / self.world_size
        rows = []
        for index, size in enumerate(self.sizes):
            seconds = self.time_s(index)
            rows.append(
                {
                    "bytes": size.bytes,
                    "buckets": size.buckets,
                    "wire_bytes_per_rank": size.bytes * factor,
                    "time_s": seconds,
                    "algbw_bytes_per_s": size.bytes / seconds,
                    "busbw_bytes_per_s": size.bytes * factor / seconds,
                    "times_s": self.times_s[index],
                }
            )
        return {"dtype": self.dtype, "sizes": rows, "dropped": self.dropped}


def message_sizes(buckets: Sequence[int], *, gradient_bytes: int, largest: int | None = None) -> list[Size]:
    """Return the sizes of the sweep in ascending order: powers of 4 from 4 KiB, and the buckets' sizes.

    Args:
        buckets: the bytes of each bucket.
        gradient_bytes: the bytes of all gradients.
        largest: the upper limit of the powers of 4; None means the size of the gradients, limited to the
            range from 16 to 64 MiB.
    """
    top = min(max(gradient_bytes, _MIN_TOP), _MAX_TOP) if largest is None else largest
    counts = Counter(buckets)
    kinds = sorted(counts, key=lambda size: (-counts[size] * size, size))[:_MAX_BUCKET_SIZES]
    found = {size: counts[size] for size in kinds}
    power = _SMALLEST
    while power <= top:
        found.setdefault(power, 0)
        power *= 4
    return [Size(size, found[size]) for size in sorted(found)]


class AllReduceSweep:
    """Time all-reduces of many sizes (the sweep) on one rank; all ranks choose the same sizes and order."""

    def __init__(
        self, *, collectives: Collectives, clock: Clock, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._collectives = collectives
        self._clock = clock
        self._device = device
        self._dtype = dtype

    def run(self, sizes: Sequence[Size], *, budget_s: float, room_bytes: float, seed: int) -> Sweep:
        """Time all sizes for which the time budget and the memory suffice.

        Args:
            sizes: the message sizes in ascending order.
            budget_s: the approximate duration of the sweep; sizes that would exceed it are omitted.
            room_bytes: the largest message that fits into the memory of every rank.
            seed: the seed for the random order of all repeats.
        """
        found = Sweep(self._collectives.world_size, str(self._dtype).removeprefix("torch."))
        fitting = [size for size in sizes if size.bytes <= room_bytes]
        largest = max((size.bytes for size in fitting), default=0)
        buffer = torch.empty(largest // self._dtype.itemsize, dtype=self._dtype, device=self._device)
        first_s = self._warm_up(buffer, fitting, budget_s, found)
        found.dropped += [{"bytes": s.bytes, "reason": "not enough memory"} for s in sizes[len(fitting) :]]
        repeats = self._repeats(first_s, budget_s)
        order = [index for index, count in enumerate(repeats) for _ in range(count)]
        random.Random(seed).shuffle(order)
        times = [self._time(self._payload(buffer, found.sizes[index])) for index in order]
        by_rank = self._collectives.rows(times) if times else []
        found.times_s = [
            [[row[at] for row in by_rank] for at, timed in enumerate(order) if timed == index]
            for index in range(len(found.sizes))
        ]
        return found

    def _warm_up(
        self, buffer: torch.Tensor, sizes: Sequence[Size], budget_s: float, found: Sweep
    ) -> list[float]:
        """Run each size that fits the budget once, in ascending order, and return the times (s)."""
        first: list[float] = []
        for size in sizes:
            predicted = first[-1] * size.bytes / found.sizes[-1].bytes if first else 0.0
            if (sum(first) + predicted) * (1 + _MIN_REPEATS) > budget_s:
                reason = f"about {predicted:.3g} s per repeat is too long for a sweep of {budget_s:g} s"
                found.dropped.append({"bytes": size.bytes, "reason": reason})
                continue
            # A sum of zeros is zero, so the buffer can be reused. Writing the zeros allocates the memory.
            # Small sizes run twice, because the first all-reduce opens connections.
            payload = self._payload(buffer, size).zero_()
            own = [self._time(payload) for _ in range(2 if predicted < _TIME_PER_SIZE_S else 1)]
            first.append(min(self._collectives.maxima(own)))
            found.sizes.append(size)
        return first

    @staticmethod
    def _repeats(first_s: Sequence[float], budget_s: float) -> list[int]:
        repeats = [min(_MAX_REPEATS, max(_REPEATS, int(_TIME_PER_SIZE_S / max(s, 1e-9)))) for s in first_s]
        costs = sum(count * seconds for count, seconds in zip(repeats, first_s, strict=True))
        if costs + sum(first_s) <= budget_s:
            return repeats
        return [_MIN_REPEATS if seconds > _TIME_PER_SIZE_S else _REPEATS for seconds in first_s]

    def _payload(self, buffer: torch.Tensor, size: Size) -> torch.Tensor:
        return buffer[: size.bytes // self._dtype.itemsize]

    def _time(self, payload: torch.Tensor) -> float:
        """Return the seconds of one all-reduce on this rank; before a large one, run a small one untimed."""
        burst = _BURST // self._dtype.itemsize
        if len(payload) > 2 * burst:
            dist.all_reduce(payload[:burst])
        self._collectives.barrier()
        begin = self._clock.stamp()
        dist.all_reduce(payload)
        end = self._clock.stamp()
        self._clock.synchronize()
        return self._clock.seconds(begin, end)


#: The schema version of probes.json; files with an unknown version are rejected.
SCHEMA = 1
#: The fraction of the free memory that probes may use.
_SHARE_OF_FREE = 0.8


class Probes:
    """Run all probes on one rank, after the training."""

    def __init__(self, session: Session, collectives: Collectives, trainer: Trainer, feed: Feed) -> None:
        self._session = session
        self._options = session.request.options
        self._collectives = collectives
        self._trainer = trainer
        self._feed = feed

    def run(self, transfer_s: float | None) -> float | None:
        """Run the probes that the options enable; rank 0 writes probes.json.

        Args:
            transfer_s: exposed communication minus wait, in seconds per step of the last attribution window,
                averaged over ranks. It is needed for the hidden fraction.

        Returns:
            The time per step (s) during which at least one bucket was being reduced: the median over timed
            steps, averaged over ranks. The result is None if it was not measured.
        """
        if not self._options.probe_steps and not self._options.sweep_time:
            return None
        times = [time.perf_counter()]
        buckets, available = bucket_bytes(self._trainer.model), self._available_bytes()
        steps, no_steps_reason = self._steps(available)
        times.append(time.perf_counter())
        sweep, no_sweep_reason = self._sweep(buckets, available)
        times.append(time.perf_counter())
        names = ("steps", "all_reduce")
        seconds = {name: end - begin for name, (begin, end) in zip(names, pairwise(times), strict=True)}
        all_s = times[-1] - times[0]
        content = {
            "schema": SCHEMA,
            "world_size": self._collectives.world_size,
            "backend": self._session.request.backend,
            "seconds": {**seconds, "all": all_s},
            "bucket_bytes": buckets,
            "steps": None if steps is None else steps.as_json(),
            "all_reduce": None if sweep is None else sweep.as_json(),
            "reasons": dict(zip(names, (no_steps_reason, no_sweep_reason), strict=True)),
            **hidden_fraction(sweep, buckets, transfer_s),
        }
        if self._session.is_first:
            write_json(self._session.folder.probes, content)
        self._session.say(f"bench: probes took {all_s:.3f} s")
        return None if steps is None else fmean(steps.comm_time_s)

    def _steps(self, available_bytes: float) -> tuple[StepReadings | None, str | None]:
        options = self._options
        if not options.probe_steps:
            return None, "probe_steps is 0"
        model = self._trainer.model.module
        _, weight_bytes = parameters_of(self._trainer.model)
        # The copy of the model needs its own weights, gradients and optimizer states.
        if weight_bytes * (2 + STATES_PER_WEIGHT[options.optimizer]) > available_bytes:
            return None, "not enough memory for a copy of the model"
        hooked = Trainer(wrap(copy.deepcopy(model), options), self._feed, options)
        clock = clock_for(self._session.device)
        return time_buckets(hooked, options.probe_steps, collectives=self._collectives, clock=clock), None

    def _sweep(self, buckets: list[int], available_bytes: float) -> tuple[Sweep | None, str | None]:
        options = self._options
        if not options.sweep_time:
            return None, "sweep_time is 0"
        if self._collectives.world_size == 1:
            return None, "a single rank does not communicate"
        _, gradient_bytes = parameters_of(self._trainer.model)
        largest = None if options.sweep_max_mb is None else int(options.sweep_max_mb * _MIB)
        parameter = next(self._trainer.model.parameters())
        sweep = AllReduceSweep(
            collectives=self._collectives,
            clock=clock_for(self._session.device),
            device=parameter.device,
            dtype=parameter.dtype,
        )
        sizes = message_sizes(buckets, gradient_bytes=gradient_bytes, largest=largest)
        room = available_bytes / 2
        return sweep.run(sizes, budget_s=options.sweep_time, room_bytes=room, seed=options.seed), None

    def _available_bytes(self) -> float:
        """Return the memory that probes may use on the rank with the least free memory."""
        device = self._session.device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        else:
            host = next(one for one in self._session.joined.hosts if one.host == self._session.me.host)
            free = psutil.virtual_memory().available // len(host.ranks)
        return self._collectives.minima([_SHARE_OF_FREE * free])[0]


def hidden_fraction(
    sweep: Sweep | None, buckets: list[int], transfer_s: float | None
) -> dict[str, float | None]:
    """Return ``standalone_s`` and ``hidden_fraction`` of probes.json.

    The standalone time is the time to reduce all buckets without computation. The hidden fraction is the
    share of the standalone time that computation hid: 1 − ``transfer_s`` / standalone time. The fraction is
    negative if communication takes longer during computation than on its own.
    """
    standalone = None if sweep is None else sweep.standalone_s(buckets)
    hidden = None if standalone is None or transfer_s is None else 1 - transfer_s / standalone
    return {"standalone_s": standalone, "hidden_fraction": hidden}
