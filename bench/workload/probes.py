"""Run all probes after the last epoch, and write probes.json on rank 0 (see docs/measuring.md).

One probe, the sweep, times all-reduces of many sizes without training, to measure the network's speed. For S
bytes on N ranks in t seconds, nccl-tests (doc/PERFORMANCE.md) defines:

    algbw = S / t          busbw = algbw · 2(N − 1)/N

In a ring all-reduce, each rank sends 2(N − 1)/N · S bytes, so busbw is also the rate on each rank's link.

With NCCL, a single all-reduce between two events on an idle stream would measure the host, which needs 10 to
100 µs to launch it. The sweep therefore keeps the device busy until the host has queued an untimed
all-reduce, which aligns the ranks on their devices, then several timed ones, and divides.
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

from ..measure.exchange import Collectives
from ..measure.step_parts import Clock, clock_for
from ..measure.torch_internals import spin_device
from ..study.files import write_json
from .session import Session
from .step_probes import StepReadings, time_buckets
from .strategies.spec import WIRE_TYPES
from .training import STATES_PER_WEIGHT, Trainer, parameters_of, wrap

_KIB, _MIB = 2**10, 2**20
_SMALLEST = 4 * _KIB
#: Limits of the sweep's largest size. Within these limits, the largest size is the size of the gradients.
_MIN_TOP, _MAX_TOP = 16 * _MIB, 64 * _MIB
#: The largest size with NCCL: links such as NVLink reach their full rate only with hundreds of MiB.
_NCCL_TOP = 1024 * _MIB
#: Maximum number of distinct bucket sizes in the sweep; a network of equal blocks has few.
_MAX_BUCKET_SIZES = 16
#: Repeats of a size: at least _REPEATS, and up to _MAX_REPEATS if they fit into _TIME_PER_SIZE_S. If the time
#: budget is short, slow sizes are repeated _MIN_REPEATS times.
_REPEATS, _MAX_REPEATS, _MIN_REPEATS = 5, 20, 3
_TIME_PER_SIZE_S = 0.02
#: Bytes sent untimed before a large message. An idle link passes some bytes faster than its rate, because of
#: buffers or a traffic shaper's credit of some 100 KiB. The untimed bytes use up this credit.
_BURST = 512 * _KIB
#: Timed all-reduces of a repeat with NCCL: as many as take _QUEUED_S, but at most _MOST_QUEUED. A stream
#: holds about 1,000 commands, and an all-reduce is up to five of them.
_MOST_QUEUED, _QUEUED_S = 64, 2e-3
#: The device is kept busy for this multiple of the time that the host needed for launching before. The
#: multiple doubles whenever the device was faster than the host.
_LAUNCH_MARGIN = 3.0
#: Longest time for which the device is kept busy; a launch takes long if TORCH_NCCL_BLOCKING_WAIT is set.
_LONGEST_LOAD_S = 0.1
#: One spin of the device, in cycles of its clock: about a millisecond.
_SPIN_CYCLES = 1_000_000
_CALIBRATION_PIECES = 8


@dataclass(frozen=True)
class Size:
    """One message size; ``buckets`` is the number of the model's buckets that have this size."""

    bytes: int
    buckets: int = 0


@dataclass
class Sweep:
    """The times of all-reduces by size, repeat and rank; ``dropped`` lists omitted sizes with reasons.

    ``method`` is "queued" if the times are those of all-reduces queued on the device, and "single" if a host
    or an idle device timed each all-reduce on its own.
    """

    world_size: int
    dtype: str
    sizes: list[Size] = field(default_factory=list)
    times_s: list[list[list[float]]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    method: str = "single"

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
        return {"method": self.method, "dtype": self.dtype, "sizes": rows, "dropped": self.dropped}


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


class DeviceLoad:
    """Work on the current CUDA stream, during which the host can queue further work.

    The work is a spin, or without torch's private function for it, filling ``zeros`` with zeros.
    """

    def __init__(self, clock: Clock, zeros: torch.Tensor) -> None:
        self._zeros = zeros
        clock.synchronize()
        begin = clock.stamp()
        self._queue(_CALIBRATION_PIECES)
        end = clock.stamp()
        clock.synchronize()
        self._piece_s = max(clock.seconds(begin, end) / _CALIBRATION_PIECES, 1e-6)

    def queue(self, seconds: float) -> None:
        """Queue work that takes at least ``seconds``."""
        self._queue(math.ceil(seconds / self._piece_s))

    def _queue(self, pieces: int) -> None:
        for _ in range(pieces):
            if not spin_device(_SPIN_CYCLES):
                self._zeros.zero_()


class AllReduceSweep:
    """Time all-reduces of many sizes (the sweep) on one rank; all ranks choose the same sizes and order.

    Args:
        collectives: the reductions of numbers over the ranks.
        clock: the clock of ``device``.
        device: the device of the messages.
        dtype: the type of the messages.
        queues: True if an all-reduce returns before it is complete, as with NCCL: its time on the device is
            then measured.
    """

    def __init__(
        self,
        *,
        collectives: Collectives,
        clock: Clock,
        device: torch.device,
        dtype: torch.dtype,
        queues: bool = False,
    ) -> None:
        self._collectives = collectives
        self._clock = clock
        self._device = device
        self._dtype = dtype
        self._queues = queues
        self._load: DeviceLoad | None = None
        self._launch_s = math.inf  # host time of a launch
        self._margin = _LAUNCH_MARGIN

    def run(self, sizes: Sequence[Size], *, budget_s: float, room_bytes: float, seed: int) -> Sweep:
        """Time all sizes for which the time budget and the memory suffice.

        Args:
            sizes: the message sizes in ascending order.
            budget_s: the approximate duration of the sweep; sizes that would exceed it are omitted.
            room_bytes: the largest message that fits into the memory of every rank.
            seed: the seed for the random order of all repeats.
        """
        method = "queued" if self._queues else "single"
        found = Sweep(self._collectives.world_size, str(self._dtype).removeprefix("torch."), method=method)
        fitting = [size for size in sizes if size.bytes <= room_bytes]
        largest = max((size.bytes for size in fitting), default=0)
        buffer = torch.empty(largest // self._dtype.itemsize, dtype=self._dtype, device=self._device)
        if self._queues and fitting:
            dist.all_reduce(buffer[:1].zero_())  # opens connections
            self._load = DeviceLoad(self._clock, buffer.zero_())
        first_s = self._warm_up(buffer, fitting, budget_s, found)
        found.dropped += [{"bytes": s.bytes, "reason": "not enough memory"} for s in sizes[len(fitting) :]]
        counts = [self._count(seconds) for seconds in first_s]
        repeats = self._repeats(self._costs(first_s, counts), budget_s)
        order = [index for index, count in enumerate(repeats) for _ in range(count)]
        random.Random(seed).shuffle(order)
        times = [self._time(self._payload(buffer, found.sizes[index]), counts[index]) for index in order]
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

    def _count(self, seconds: float) -> int:
        """Return the number of timed all-reduces in a repeat, if one takes ``seconds``."""
        if not self._queues:
            return 1
        return min(_MOST_QUEUED, math.ceil(_QUEUED_S / max(seconds, 1e-9)))

    def _costs(self, first_s: Sequence[float], counts: Sequence[int]) -> list[float]:
        """Return the seconds of a repeat of each size, the same on all ranks."""
        if not self._queues or not first_s:
            return list(first_s)
        load_s = self._collectives.maxima([self._load_s(count) for count in counts])
        pairs = zip(load_s, first_s, counts, strict=True)
        return [load + count * seconds for load, seconds, count in pairs]

    @staticmethod
    def _repeats(first_s: Sequence[float], budget_s: float) -> list[int]:
        repeats = [min(_MAX_REPEATS, max(_REPEATS, int(_TIME_PER_SIZE_S / max(s, 1e-9)))) for s in first_s]
        costs = sum(count * seconds for count, seconds in zip(repeats, first_s, strict=True))
        if costs + sum(first_s) <= budget_s:
            return repeats
        return [_MIN_REPEATS if seconds > _TIME_PER_SIZE_S else _REPEATS for seconds in first_s]

    def _payload(self, buffer: torch.Tensor, size: Size) -> torch.Tensor:
        return buffer[: size.bytes // self._dtype.itemsize]

    def _time(self, payload: torch.Tensor, count: int = 1) -> float:
        """Return the seconds of one all-reduce on this rank, as the mean of ``count``."""
        burst = payload[: _BURST // self._dtype.itemsize]
        if self._queues:
            return self._time_queued(payload, burst, count)
        if len(payload) > 2 * len(burst):
            dist.all_reduce(burst)
        self._collectives.barrier()
        begin = self._clock.stamp()
        dist.all_reduce(payload)
        end = self._clock.stamp()
        self._clock.synchronize()
        return self._clock.seconds(begin, end)

    def _time_queued(self, payload: torch.Tensor, burst: torch.Tensor, count: int) -> float:
        """Return the mean time (s) of ``count`` all-reduces on the device, after an untimed one."""
        load_s = self._load_s(count)
        if self._load is not None:
            self._load.queue(load_s)
        began = time.perf_counter()
        dist.all_reduce(burst)
        begin = self._clock.stamp()
        for _ in range(count):
            dist.all_reduce(payload)
        end = self._clock.stamp()
        launched_s = time.perf_counter() - began
        if load_s and begin.query():  # the device reached the all-reduces before the host had launched them
            self._margin *= 2
        self._clock.synchronize()
        self._launch_s = min(self._launch_s, launched_s / (count + 1))
        return self._clock.seconds(begin, end) / count

    def _load_s(self, count: int) -> float:
        """Return the seconds for which the device must be busy while the host launches ``count``."""
        if not math.isfinite(self._launch_s):
            return 0.0
        return min(self._margin * self._launch_s * (count + 1), _LONGEST_LOAD_S)


#: The schema version of probes.json; files with an unknown version are rejected.
SCHEMA = 1
#: The fraction of the free memory that probes may use.
_SHARE_OF_FREE = 0.8


class Probes:
    """Run all probes on one rank, after the training."""

    def __init__(self, session: Session, collectives: Collectives, trainer: Trainer) -> None:
        self._session = session
        self._options = session.request.options
        self._collectives = collectives
        self._trainer = trainer

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
        buckets, available = self._bucket_bytes(), self._available_bytes()
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

    def _bucket_bytes(self) -> list[int]:
        """Return the sizes in bytes of the buckets as they are sent."""
        dtype = next(self._trainer.model.parameters()).dtype
        sent = WIRE_TYPES[self._options.wire_dtype]
        return [size * sent.itemsize // dtype.itemsize for size in self._trainer.parts.bucket_bytes()]

    def _steps(self, available_bytes: float) -> tuple[StepReadings | None, str | None]:
        options = self._options
        if not options.probe_steps:
            return None, "probe_steps is 0"
        if not self._trainer.parts.has_buckets:
            return None, f"strategy {options.strategy} has no buckets"
        model = self._trainer.parts.module
        _, weight_bytes = parameters_of(self._trainer.model)
        # The copy of the model needs its own weights, gradients and optimizer states.
        if weight_bytes * (2 + STATES_PER_WEIGHT[options.optimizer]) > available_bytes:
            return None, "not enough memory for a copy of the model"
        # DDP accepts one hook only: the hook that takes the times also converts the gradients.
        plain = options.model_copy(update={"comm_dtype": None, "comm_hook": "none"})
        hooked = Trainer(wrap(copy.deepcopy(model), plain), self._trainer.feed, plain)
        clock, dtype = clock_for(self._session.device), WIRE_TYPES[options.wire_dtype]
        readings = time_buckets(
            hooked, options.probe_steps, collectives=self._collectives, clock=clock, dtype=dtype
        )
        return readings, None

    def _sweep(self, buckets: list[int], available_bytes: float) -> tuple[Sweep | None, str | None]:
        options = self._options
        if not options.sweep_time:
            return None, "sweep_time is 0"
        if self._collectives.world_size == 1:
            return None, "a single rank does not communicate"
        _, gradient_bytes = parameters_of(self._trainer.model)
        queues = self._session.request.backend == "nccl"
        largest = _NCCL_TOP if queues else None
        if options.sweep_max_mb is not None:
            largest = int(options.sweep_max_mb * _MIB)
        parameter, dtype = next(self._trainer.model.parameters()), WIRE_TYPES[options.wire_dtype]
        sweep = AllReduceSweep(
            collectives=self._collectives,
            clock=clock_for(self._session.device),
            device=parameter.device,
            dtype=dtype,
            queues=queues,
        )
        sent_bytes = gradient_bytes * dtype.itemsize // parameter.dtype.itemsize
        sizes = message_sizes(buckets, gradient_bytes=sent_bytes, largest=largest)
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
