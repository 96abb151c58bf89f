"""Run all probes after the last epoch, and write probes.json on rank 0 (see docs/measuring.md).

One probe, the sweep, times collectives of many sizes without training, to measure the network's speed. For S
bytes on N ranks in t seconds, nccl-tests (doc/PERFORMANCE.md) defines:

    algbw = S / t          busbw = algbw · k(N − 1)/N

k is 2 for an all-reduce, and 1 for an all-gather and a reduce-scatter, of which S is the whole tensor. In a
ring, each rank sends k(N − 1)/N · S bytes, so busbw is also the rate on each rank's link.

With NCCL, a single collective between two events on an idle stream would measure the host, which needs 10 to
100 µs to launch it. The sweep therefore keeps the device busy until the host has queued an untimed
collective, which aligns the ranks on their devices, then several timed ones, and divides.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ..measure.exchange import Collectives
from ..measure.step_parts import Clock, clock_for
from ..measure.torch_internals import spin_device
from ..measure.wire import ROUNDS, Messages
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
#: Timed collectives of a repeat with NCCL: as many as take _QUEUED_S, but at most _MOST_QUEUED. A stream
#: holds about 1,000 commands, and a collective is up to five of them.
_MOST_QUEUED, _QUEUED_S = 64, 2e-3
#: The device is kept busy for this multiple of the time that the host needed for launching before. The
#: multiple doubles whenever the device was faster than the host.
_LAUNCH_MARGIN = 3.0
#: Longest time for which the device is kept busy; a launch takes long if TORCH_NCCL_BLOCKING_WAIT is set.
_LONGEST_LOAD_S = 0.1
#: One spin of the device, in cycles of its clock: about a millisecond.
_SPIN_CYCLES = 1_000_000
_CALIBRATION_PIECES = 8


def _bind(collective: str, group: dist.ProcessGroup | None) -> Callable[[torch.Tensor], object]:
    """Return a function that runs a collective on a tensor.

    An all-gather reads this rank's part of the tensor, and a reduce-scatter writes to it. For both, the
    number of ranks divides the length of the tensor.
    """
    if collective == "all_reduce":
        return lambda whole: dist.all_reduce(whole, group=group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def own(whole: torch.Tensor) -> torch.Tensor:
        return whole[rank * len(whole) // ranks : (rank + 1) * len(whole) // ranks]

    # torch 2.13 renames both functions and deprecates the old names.
    if collective == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda whole: gather(whole, own(whole), group=group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda whole: scatter(own(whole), whole, group=group)


@dataclass(frozen=True)
class Size:
    """One message size; ``buckets`` is the number of messages of this size in a step of the model."""

    bytes: int
    buckets: int = 0


@dataclass
class Sweep:
    """The times of a collective by size, repeat and rank; ``dropped`` lists omitted sizes with reasons.

    ``ranks`` is the number of ranks of a group. If there are several groups, they communicate at the same
    time, and the times are those of all ranks. ``method`` is "queued" if the times are those of collectives
    queued on the device, and "single" if a host or an idle device timed each one on its own.
    """

    ranks: int
    dtype: str
    sizes: list[Size] = field(default_factory=list)
    times_s: list[list[list[float]]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    method: str = "single"
    collective: str = "all_reduce"

    def time_s(self, index: int) -> float:
        """Return the median over the repeats of the slowest rank's time (s) for the size at ``index``."""
        return median(max(ranks) for ranks in self.times_s[index])

    def standalone_s(self, buckets: Sequence[int]) -> float | None:
        """Return the total time of messages (s), or None if the size of a message was not measured."""
        times = {size.bytes: self.time_s(index) for index, size in enumerate(self.sizes)}
        found = [times.get(size) for size in buckets]
        return None if None in found or not found else math.fsum(time for time in found if time is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the value of the collective's name in probes.json."""
        factor = ROUNDS[self.collective] * (self.ranks - 1) / self.ranks
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
        found = {"method": self.method, "ranks": self.ranks, "dtype": self.dtype}
        return {**found, "sizes": rows, "dropped": self.dropped}


def message_sizes(
    buckets: Sequence[int], *, gradient_bytes: int, largest: int | None = None, multiple: int = 1
) -> list[Size]:
    """Return the sizes of the sweep in ascending order: powers of 4 from 4 KiB, and the buckets' sizes.

    Args:
        buckets: the bytes of each bucket, or of each other message of the strategy.
        gradient_bytes: the bytes of all gradients.
        largest: the upper limit of the powers of 4; None means the size of the gradients, limited to the
            range from 16 to 64 MiB.
        multiple: the powers of 4 are rounded up to a multiple of these bytes.
    """
    top = min(max(gradient_bytes, _MIN_TOP), _MAX_TOP) if largest is None else largest
    counts = Counter(buckets)
    kinds = sorted(counts, key=lambda size: (-counts[size] * size, size))[:_MAX_BUCKET_SIZES]
    found = {size: counts[size] for size in kinds}
    power = _SMALLEST
    while power <= top:
        found.setdefault(math.ceil(power / multiple) * multiple, 0)
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


class CollectiveSweep:
    """Time a collective of many sizes (the sweep) on one rank; all ranks choose the same sizes and order.

    Args:
        collectives: the reductions of numbers over the ranks.
        clock: the clock of ``device``.
        device: the device of the messages.
        dtype: the type of the messages.
        queues: True if a collective returns before it is complete, as with NCCL: its time on the device is
            then measured.
        collective: the name of the collective, other than ``broadcast``.
        group: the ranks of this rank's group; None means all ranks.
    """

    def __init__(
        self,
        *,
        collectives: Collectives,
        clock: Clock,
        device: torch.device,
        dtype: torch.dtype,
        queues: bool = False,
        collective: str = "all_reduce",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._collectives = collectives
        self._collective = collective
        self._ranks = collectives.world_size if group is None else dist.get_world_size(group)
        self._parts = 1 if collective == "all_reduce" else self._ranks
        self._call = _bind(collective, group)
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
        method, dtype = "queued" if self._queues else "single", str(self._dtype).removeprefix("torch.")
        found = Sweep(self._ranks, dtype, method=method, collective=self._collective)
        fitting = [size for size in sizes if size.bytes <= room_bytes]
        largest = max((size.bytes for size in fitting), default=0)
        buffer = torch.empty(largest // self._dtype.itemsize, dtype=self._dtype, device=self._device)
        if self._queues and fitting:
            self._call(buffer[: self._ranks].zero_())  # opens connections
            self._load = DeviceLoad(self._clock, buffer.zero_())
        first_s = self._warm_up(buffer, fitting, budget_s, found)
        found.dropped += [{"bytes": s.bytes, "reason": "not enough memory"} for s in sizes[len(fitting) :]]
        counts = [self._count(seconds) for seconds in first_s]
        repeats = self._repeats(self._costs(first_s, counts), budget_s)
        order = [index for index, count in enumerate(repeats) for _ in range(count)]
        random.Random(seed).shuffle(order)
        times = [self._time(self._whole(buffer, found.sizes[index].bytes), counts[index]) for index in order]
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
            # Small sizes run twice, because the first collective opens connections.
            payload = self._whole(buffer, size.bytes).zero_()
            own = [self._time(payload) for _ in range(2 if predicted < _TIME_PER_SIZE_S else 1)]
            first.append(min(self._collectives.maxima(own)))
            found.sizes.append(size)
        return first

    def _count(self, seconds: float) -> int:
        """Return the number of timed collectives in a repeat, if one takes ``seconds``."""
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

    def _whole(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Return the first ``size`` bytes, fewer if the ranks cannot share them equally."""
        length = size // self._dtype.itemsize
        return tensor[: length - length % self._parts]

    def _time(self, payload: torch.Tensor, count: int = 1) -> float:
        """Return the seconds of one collective on this rank, as the mean of ``count``."""
        burst = self._whole(payload, _BURST)
        if self._queues:
            return self._time_queued(payload, burst, count)
        if len(payload) > 2 * len(burst):
            self._call(burst)
        self._collectives.barrier()
        begin = self._clock.stamp()
        self._call(payload)
        end = self._clock.stamp()
        self._clock.synchronize()
        return self._clock.seconds(begin, end)

    def _time_queued(self, payload: torch.Tensor, burst: torch.Tensor, count: int) -> float:
        """Return the mean time (s) of ``count`` collectives on the device, after an untimed one."""
        load_s = self._load_s(count)
        if self._load is not None:
            self._load.queue(load_s)
        began = time.perf_counter()
        self._call(burst)
        begin = self._clock.stamp()
        for _ in range(count):
            self._call(payload)
        end = self._clock.stamp()
        launched_s = time.perf_counter() - began
        if load_s and begin.query():  # the device reached the collectives before the host had launched them
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


@dataclass(frozen=True)
class Swept:
    """The messages of a step, and the times of their collective, or the reason why there are none."""

    sent: Messages
    sweep: Sweep | None
    reason: str | None = None


class Probes:
    """Run all probes on one rank, after the training."""

    def __init__(self, session: Session, collectives: Collectives, trainer: Trainer) -> None:
        self._session = session
        self._options = session.options
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
        began = time.perf_counter()
        available = self._available_bytes()
        steps, no_steps_reason = self._steps(available)
        swept = self._sweeps(available)
        all_s = time.perf_counter() - began
        content = {
            "schema": SCHEMA,
            "world_size": self._collectives.world_size,
            "backend": self._session.cell.backend,
            "seconds": {"all": all_s},
            "bucket_bytes": self._trainer.parts.bucket_bytes(),
            "steps": None if steps is None else steps.as_json(),
            **{one.sent.collective: one.sweep and one.sweep.as_json() for one in swept},
            "reasons": {"steps": no_steps_reason, **{one.sent.collective: one.reason for one in swept}},
            **hidden_fraction(swept, transfer_s),
        }
        if self._session.is_first:
            write_json(self._session.folder.probes, content)
        self._session.say(f"bench: probes took {all_s:.3f} s")
        return None if steps is None else fmean(steps.comm_time_s)

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
        plain = replace(options, comm_dtype=None, comm_hook="none")
        hooked = Trainer(wrap(copy.deepcopy(model), plain), self._trainer.feed, plain)
        clock, dtype = clock_for(self._session.device), WIRE_TYPES[options.wire_dtype]
        readings = time_buckets(
            hooked, options.probe_steps, collectives=self._collectives, clock=clock, dtype=dtype
        )
        return readings, None

    def _sweeps(self, available_bytes: float) -> list[Swept]:
        """Time each collective of the strategy; all of them share the time for the sweep."""
        found, sent = [], self._trainer.parts.messages() or [Messages("all_reduce", [])]
        for one in sent:
            if one.in_each_micro_batch:
                one = replace(one, bytes=[*one.bytes] * self._options.grad_accum)
            budget_s = self._options.sweep_time / sum(other.collective != "broadcast" for other in sent)
            found.append(Swept(one, *self._sweep(one, available_bytes, budget_s=budget_s)))
        return found

    def _sweep(
        self, sent: Messages, available_bytes: float, *, budget_s: float
    ) -> tuple[Sweep | None, str | None]:
        options, all_ranks = self._options, self._collectives.world_size
        if not options.sweep_time:
            return None, "sweep_time is 0"
        ranks = all_ranks if sent.group is None else dist.get_world_size(sent.group)
        if ranks == 1:
            return None, "a single rank does not communicate"
        if sent.collective == "broadcast":
            return None, "the sweep does not time broadcasts"
        _, gradient_bytes = parameters_of(self._trainer.model)
        queues = self._session.cell.backend == "nccl"
        largest = _NCCL_TOP if queues else None
        if options.sweep_max_mb is not None:
            largest = int(options.sweep_max_mb * _MIB)
        parameter, dtype = next(self._trainer.model.parameters()), WIRE_TYPES[options.wire_dtype]
        sweep = CollectiveSweep(
            collectives=self._collectives,
            clock=clock_for(self._session.device),
            device=parameter.device,
            dtype=dtype,
            queues=queues,
            collective=sent.collective,
            group=sent.group,
        )
        multiple = 1 if sent.collective == "all_reduce" else ranks * dtype.itemsize
        sent_bytes = gradient_bytes * dtype.itemsize // parameter.dtype.itemsize
        sizes = message_sizes(sent.bytes, gradient_bytes=sent_bytes, largest=largest, multiple=multiple)
        room = available_bytes / 2
        return sweep.run(sizes, budget_s=budget_s, room_bytes=room, seed=options.seed), None

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


def hidden_fraction(swept: Sequence[Swept], transfer_s: float | None) -> dict[str, float | None]:
    """Return ``standalone_s`` and ``hidden_fraction`` of probes.json.

    The standalone time is the time of all messages of a step without computation. The hidden fraction is the
    share of the standalone time that computation hid: 1 − ``transfer_s`` / standalone time. The fraction is
    negative if communication takes longer during computation than on its own.
    """
    used = [(one.sweep, one.sent.bytes) for one in swept if one.sent.bytes]
    times = [None if sweep is None else sweep.standalone_s(sizes) for sweep, sizes in used]
    known = [time for time in times if time is not None]
    standalone = math.fsum(known) if known and len(known) == len(times) else None
    hidden = None if standalone is None or transfer_s is None else 1 - transfer_s / standalone
    return {"standalone_s": standalone, "hidden_fraction": hidden}
