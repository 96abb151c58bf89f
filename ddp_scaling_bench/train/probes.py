"""Run all probes after the last epoch, and write probes.json on rank 0 (see docs/measuring.md).

One probe takes steps on a copy of the model, in which a communication hook times the all-reduce of every
bucket of gradients. The other probe, the sweep, times collectives of many sizes without training, to measure
the network's speed. For S bytes on N ranks in t seconds, nccl-tests (doc/PERFORMANCE.md) defines:

    algbw = S / t          busbw = algbw · k(N − 1)/N

k is 2 for an all-reduce, and 1 for an all-gather and a reduce-scatter, of which S is the whole tensor. In a
ring, each rank sends k(N − 1)/N · S bytes, so busbw is also the rate on each rank's link.

With NCCL, a single collective between two events on an idle stream would measure the host, which needs 10 to
100 µs to launch it. The sweep therefore keeps the device busy until the host has queued an untimed
collective, which aligns the ranks on their devices, then several timed ones, and divides.
"""

# `from __future__ import annotations` must not be used: DDP compares the annotations of a hook with types,
# not with strings.

import copy
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..checksums import write_sums
from ..errors import UnwritableError
from ..files import write_json
from ..measure.exchange import Collectives
from ..measure.findings import MeasurementsLost
from ..measure.step_parts import DDP_ALWAYS_SAMPLED, Clock, clock_for
from ..measure.torch_internals import spin_device
from ..measure.wire import ROUNDS, Messages
from ..record import Recorder
from .memory import free_bytes, kept_bytes, passing_bytes
from .options import TrainOptions
from .probe_guard import reason_of, run_guarded
from .session import Session
from .strategies import strategy_of
from .strategies.spec import WIRE_TYPES
from .training import Trainer, parameters_of, wrap

#: The schema version of probes.json; files with an unknown version are rejected.
SCHEMA = 1
#: The fraction of the free memory that probes may use.
_SHARE_OF_FREE = 0.8
#: Number of warm-up steps of the copy; DDP rebuilds its buckets in the second step.
_WARM_UP_STEPS = 3
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
_CALIBRATION_SPINS = 8


class BucketSpan(NamedTuple):
    """Begin and end of one bucket's all-reduce, in seconds after the step's start."""

    bucket: int
    bytes: int
    begin_s: float
    end_s: float


def union_s(spans: Sequence[BucketSpan]) -> float:
    """Return the time in seconds during which at least one bucket was being reduced."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, reached))
        reached = max(reached, span.end_s)
    return total


def time_buckets(
    trainer: Trainer, steps: int, *, collectives: Collectives, clock: Clock, dtype: torch.dtype
) -> tuple[list[list[float]], list[list[BucketSpan]]]:
    """Train ``steps`` steps on one rank, and time the all-reduces of their buckets.

    Gradients are sent as ``dtype``, in the same way as by DDP without a hook or by torch's fp16 hook.

    Returns:
        The result of :func:`union_s` for each step, one list per rank; and this rank's buckets of each step,
        sorted by their begin.
    """
    stamps: list[tuple[int, int, Any, Any]] = []

    def reduce(
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        gradients: torch.Tensor = bucket.buffer()
        sent = gradients.to(dtype)  # the same tensor if the type is the same
        index, size = bucket.index(), sent.numel() * sent.element_size()
        sent.div_(dist.get_world_size())
        begin = clock.stamp()
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None

        def ended(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            # gloo calls this function from its own thread after the reduction. NCCL calls it at once, but the
            # current stream then waits for the reduction, so the event is recorded after the reduction.
            stamps.append((index, size, begin, clock.stamp()))
            if sent is not gradients:
                gradients.copy_(sent)
            return gradients

        carried: torch.futures.Future[torch.Tensor] = work.get_future().then(ended)
        return carried

    trainer.parts.hook_buckets(None, reduce)
    trainer.parts.stop()
    for _ in range(_WARM_UP_STEPS if clock.is_host else DDP_ALWAYS_SAMPLED + 1):
        trainer.step()
    clock.synchronize()
    collectives.barrier()
    taken = []
    for _ in range(steps):
        stamps.clear()
        origin = clock.stamp()
        trainer.step()
        taken.append((origin, stamps.copy()))
    clock.synchronize()
    spans = []
    for origin, of_step in taken:
        times = (BucketSpan(*one[:2], *(clock.seconds(origin, at) for at in one[2:])) for one in of_step)
        spans.append(sorted(times, key=lambda span: span.begin_s))
    return collectives.rows([*map(union_s, spans)]), spans


def _bind(collective: str, group: dist.ProcessGroup | None) -> Callable[[torch.Tensor], object]:
    """Return a function that runs a collective on a tensor.

    An all-gather reads this rank's part of the tensor, and a reduce-scatter writes to it. For both, the
    number of ranks divides the length of the tensor. In an exchange, two ranks send their part to each other.
    """
    if collective == "all_reduce":
        return lambda whole: dist.all_reduce(whole, group=group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def own(whole: torch.Tensor, rank: int = rank) -> torch.Tensor:
        return whole[rank * len(whole) // ranks : (rank + 1) * len(whole) // ranks]

    def exchange(whole: torch.Tensor) -> None:
        received = dist.P2POp(dist.irecv, own(whole, 1 - rank), 1 - rank)
        for work in dist.batch_isend_irecv([received, dist.P2POp(dist.isend, own(whole), 1 - rank)]):
            work.wait()

    if collective == "exchange":
        return exchange
    # torch 2.13 renames both functions and deprecates the old names.
    if collective == "all_gather":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda whole: gather(whole, own(whole), group=group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda whole: scatter(own(whole), whole, group=group)


class Size(NamedTuple):
    """One message size; ``buckets`` is the number of messages of this size in a step of the model."""

    bytes: int
    buckets: int = 0


@dataclass
class Sweep:
    """The times of a collective by size, repeat and rank; ``dropped`` lists omitted sizes with reasons.

    ``ranks`` is the number of ranks of a group; several groups communicate at the same time. ``method`` is
    "queued" if the times are those of collectives queued on the device, and "single" if a host or an idle
    device timed each one on its own.
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
        return math.fsum(times[size] for size in buckets) if buckets and times.keys() >= {*buckets} else None

    def as_json(self) -> dict[str, Any]:
        """Return the value of the collective's name in probes.json."""
        factor = ROUNDS[self.collective] * (self.ranks - 1) / self.ranks
        rows = [
            {
                "bytes": size.bytes,
                "buckets": size.buckets,
                "wire_bytes_per_rank": size.bytes * factor,
                "time_s": (seconds := self.time_s(index)),
                "algbw_bytes_per_s": size.bytes / seconds,
                "busbw_bytes_per_s": size.bytes * factor / seconds,
                "times_s": self.times_s[index],
            }
            for index, size in enumerate(self.sizes)
        ]
        found = {"method": self.method, "ranks": self.ranks, "dtype": self.dtype}
        return {**found, "sizes": rows, "dropped": self.dropped}


def message_sizes(
    buckets: Sequence[int], *, gradient_bytes: int, largest: int | None = None, multiple: int = 1
) -> list[Size]:
    """Return the sizes of the sweep in ascending order: powers of 4 from 4 KiB, and the buckets' sizes.

    ``buckets`` has the bytes of each bucket or other message of the strategy. The powers of 4 go up to
    ``largest`` (by default, the size of the gradients, limited to the range from 16 to 64 MiB), and are
    rounded up to a ``multiple`` of bytes.
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


class CollectiveSweep:
    """Time a collective of many sizes (the sweep) on one rank; all ranks choose the same sizes and order.

    ``collective`` is all_reduce, all_gather, reduce_scatter or exchange, of tensors of ``dtype`` on
    ``device``, in this rank's ``group`` (None means all ranks). If it ``queues``, it returns before it is
    complete, as with NCCL: its time on the device is then measured.
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
        self._collectives, self._clock, self._queues = collectives, clock, queues
        self._collective, self._call = collective, _bind(collective, group)
        self._ranks = collectives.world_size if group is None else dist.get_world_size(group)
        self._parts = 1 if collective == "all_reduce" else self._ranks
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        self._spin_s = math.inf  # device time of a spin
        self._launch_s = math.inf  # host time of a launch
        self._margin = _LAUNCH_MARGIN

    def run(self, sizes: Sequence[Size], *, budget_s: float, room_bytes: float, seed: int) -> Sweep:
        """Time all sizes for which the time budget and the memory suffice.

        ``sizes`` ascend. ``budget_s`` is the approximate duration of the sweep, ``room_bytes`` the largest
        message that fits into the memory of every rank, and ``seed`` that of the order of all repeats.
        """
        method, dtype = "queued" if self._queues else "single", str(self._buffer.dtype).removeprefix("torch.")
        found = Sweep(self._ranks, dtype, method=method, collective=self._collective)
        fitting = [size for size in sizes if size.bytes <= room_bytes]
        if fitting:
            self._buffer = self._buffer.new_empty(fitting[-1].bytes // self._buffer.itemsize)
            if self._queues:
                self._calibrate()
        first_s = self._warm_up(fitting, budget_s, found)
        found.times_s = [[] for _ in first_s]
        found.dropped += [{"bytes": s.bytes, "reason": "not enough memory"} for s in sizes[len(fitting) :]]
        if not first_s:
            return found
        counts = [1] * len(first_s)
        if self._queues:
            counts = [min(_MOST_QUEUED, math.ceil(_QUEUED_S / max(seconds, 1e-9))) for seconds in first_s]
        loads_s = self._collectives.maxima([self._load_s(count) for count in counts])
        known = zip(loads_s, counts, first_s, strict=True)
        repeats = self._repeats([load_s + count * one_s for load_s, count, one_s in known], budget_s)
        order = [index for index, count in enumerate(repeats) for _ in range(count)]
        random.Random(seed).shuffle(order)
        times = [self._time(self._whole(found.sizes[index].bytes), counts[index]) for index in order]
        for index, *ranks in zip(order, *self._collectives.rows(times), strict=True):
            found.times_s[index].append(ranks)
        return found

    def _warm_up(self, sizes: Sequence[Size], budget_s: float, found: Sweep) -> list[float]:
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
            payload = self._whole(size.bytes).zero_()
            own = [self._time(payload) for _ in range(2 if predicted < _TIME_PER_SIZE_S else 1)]
            first.append(min(self._collectives.maxima(own)))
            found.sizes.append(size)
        return first

    @staticmethod
    def _repeats(costs_s: Sequence[float], budget_s: float) -> list[int]:
        repeats = [min(_MAX_REPEATS, max(_REPEATS, int(_TIME_PER_SIZE_S / max(s, 1e-9)))) for s in costs_s]
        if sum((1 + count) * s for count, s in zip(repeats, costs_s, strict=True)) <= budget_s:
            return repeats
        return [_MIN_REPEATS if seconds > _TIME_PER_SIZE_S else _REPEATS for seconds in costs_s]

    def _whole(self, size: int) -> torch.Tensor:
        """Return the first ``size`` bytes of the buffer, fewer if the ranks cannot share them equally."""
        length = size // self._buffer.itemsize
        return self._buffer[: length - length % self._parts]

    def _time(self, payload: torch.Tensor, count: int = 1) -> float:
        """Return the seconds of one collective on this rank, as the mean of ``count``.

        With NCCL, the device is busy while the host queues all of them.
        """
        burst, load_s, began = self._whole(min(_BURST, payload.nbytes)), self._load_s(count), 0.0
        if self._queues:
            self._spin(math.ceil(load_s / self._spin_s))
            began = time.perf_counter()
            self._call(burst)
        else:
            if len(payload) > 2 * len(burst):
                self._call(burst)
            self._collectives.barrier()
        begin = self._clock.stamp()
        for _ in range(count):
            self._call(payload)
        end = self._clock.stamp()
        if self._queues:
            self._launch_s = min(self._launch_s, (time.perf_counter() - began) / (count + 1))
            if load_s and begin.event.query():  # the device was faster than the host
                self._margin *= 2
        self._clock.synchronize()
        return self._clock.seconds(begin, end) / count

    def _load_s(self, count: int) -> float:
        """Return the seconds for which the device must be busy while the host launches ``count``."""
        if not math.isfinite(self._launch_s):
            return 0.0
        return min(self._margin * self._launch_s * (count + 1), _LONGEST_LOAD_S)

    def _calibrate(self) -> None:
        self._call(self._buffer[: self._ranks].zero_())  # opens connections
        self._buffer.zero_()
        self._clock.synchronize()
        begin = self._clock.stamp()
        self._spin(_CALIBRATION_SPINS)
        end = self._clock.stamp()
        self._clock.synchronize()
        self._spin_s = max(self._clock.seconds(begin, end) / _CALIBRATION_SPINS, 1e-6)

    def _spin(self, count: int) -> None:
        """Queue work on the device: spins, or without torch's private function, zeros for the buffer."""
        for _ in range(count):
            if not spin_device(_SPIN_CYCLES):
                self._buffer.zero_()


def run_probes(session: Session, collectives: Collectives, trainer: Trainer, recorder: Recorder) -> None:
    """Run the probes that the options enable, after the ``recorder`` was closed; rank 0 writes probes.json.

    The column ``comm_time_sec`` gets the time per step (s) during which at least one bucket was being
    reduced: the median over timed steps, averaged over ranks. An error in a probe is the reason why there are
    no values. If it can have left other ranks in a collective, this process ends here.
    """
    options, parts, row = session.options, trainer.parts, recorder.last_row
    if not options.probe_steps and not options.sweep_time:
        return
    began, buckets = time.perf_counter(), parts.bucket_bytes()
    sent = [
        replace(one, bytes=[*one.bytes] * (options.grad_accum if one.in_each_micro_batch else 1))
        for one in parts.messages() or [Messages("all_reduce", [])]
    ]
    found: dict[str, Any] = {}
    # Exposed communication minus wait, per step of the last attribution window, averaged over ranks.
    transfer_s = row.comm_exposed_time_sec - row.comm_wait_time_sec if row else math.nan

    def probe() -> None:
        found["steps"] = _timed_steps(session, collectives, trainer)
        # All collectives share the time for the sweep.
        budget_s = options.sweep_time / sum(one.collective != "broadcast" for one in sent)
        for one in sent:
            found[one.collective] = _sweep(session, collectives, trainer, one, budget_s=budget_s)
        collectives.barrier()

    def keep(reason: str) -> None:
        all_s = time.perf_counter() - began
        for name in ("steps", *(one.collective for one in sent)):
            found.setdefault(name, reason)
        steps, *sweeps = found.values()
        values = {name: one.as_json() if isinstance(one, Sweep) else one for name, one in found.items()}
        content = {
            "schema": SCHEMA,
            "world_size": collectives.world_size,
            "backend": session.cell.backend,
            "seconds": {"all": all_s},
            "bucket_bytes": buckets,
            **{name: None if isinstance(one, str) else one for name, one in values.items()},
            "reasons": {name: one if isinstance(one, str) else None for name, one in values.items()},
            **hidden_fraction([one.bytes for one in sent], sweeps, transfer_s),
        }
        session.say(f"bench: probes took {all_s:.3f} s")
        if reason:
            session.say(f"bench: warning: a probe failed, {reason}")
        if session.is_first:
            _write(session, recorder, content)
        if isinstance(steps, dict):
            recorder.set_columns(comm_time_sec=fmean(steps["comm_time_s"]))

    run_guarded(session, probe, keep=keep, end=trainer.feed.close)


def _write(session: Session, recorder: Recorder, content: dict[str, Any]) -> None:
    try:
        write_json(session.folder.probes, content)
        write_sums(session.folder)
    except UnwritableError as error:
        recorder.add(MeasurementsLost(reason=str(error)))


def _timed_steps(session: Session, collectives: Collectives, trainer: Trainer) -> dict[str, Any] | str:
    """Return the times of steps of a copy of the model (``steps`` of probes.json), or why there are none."""
    options, parts, device = session.options, trainer.parts, session.device
    if not options.probe_steps:
        return "probe_steps is 0"
    if not parts.has_buckets:
        return f"strategy {options.strategy} has no buckets"
    # DDP rebuilds its buckets of gradients while the first ones exist, and sends a copy in another type.
    _, gradient_bytes = parameters_of(trainer.model)
    needed = kept_bytes(options, trainer.model, session.joined.hosts) + passing_bytes(device)
    needed += (2 + (options.wire_dtype != "fp32")) * gradient_bytes
    if collectives.minima([_available_bytes(session) - needed])[0] < 0:
        return "not enough memory for a copy of the model"
    # DDP accepts one hook only: the hook that takes the times also converts the gradients.
    plain = replace(options, comm_dtype=None, comm_hook="none")
    copied, why = _copy_that_trained(session, trainer, plain)
    if reason := next(filter(None, collectives.objects(why)), ""):
        return reason
    assert copied is not None
    unions, spans = time_buckets(
        Trainer(wrap(copied, plain), trainer.feed, plain),
        options.probe_steps,
        collectives=collectives,
        clock=clock_for(device),
        dtype=WIRE_TYPES[options.wire_dtype],
    )
    return {
        "comm_time_s": [median(rank) for rank in unions],
        "timed_union_s": unions,
        "timed_buckets_rank_0": spans,
    }


def _copy_that_trained(
    session: Session, trainer: Trainer, options: TrainOptions
) -> tuple[nn.Module | None, str]:
    """Return a copy of the model that has taken a step without an exchange, or why it could not."""
    try:
        copied = copy.deepcopy(trainer.parts.module)
        if not options.compile:  # without compilation, a step would need more memory
            alone = Trainer(copied, trainer.feed, replace(options, strategy="none"))
            alone.backward(trainer.feed.next(), syncs=True)
            if "states" not in strategy_of(options.strategy).sharded:
                alone.update()
            copied.zero_grad(set_to_none=True)
            clock_for(session.device).synchronize()
        return copied, ""
    except Exception as error:
        return None, reason_of(error, session)


def _sweep(
    session: Session, collectives: Collectives, trainer: Trainer, sent: Messages, *, budget_s: float
) -> Sweep | str:
    """Return the times of the collective of some messages, or the reason why there are none."""
    options, queues = session.options, session.cell.backend == "nccl"
    if not options.sweep_time:
        return "sweep_time is 0"
    ranks = collectives.world_size if sent.group is None else dist.get_world_size(sent.group)
    if ranks == 1:
        return "a single rank does not communicate"
    if sent.collective == "broadcast":
        return "the sweep does not time broadcasts"
    largest = _NCCL_TOP if queues else None
    if options.sweep_max_mb is not None:
        largest = int(options.sweep_max_mb * _MIB)
    parameter = next(trainer.model.parameters())
    sends = options.gathered_dtype if sent.collective == "all_gather" else options.wire_dtype
    dtype = WIRE_TYPES[sends]
    sweep = CollectiveSweep(
        collectives=collectives,
        clock=clock_for(session.device),
        device=parameter.device,
        dtype=dtype,
        queues=queues,
        collective=sent.collective,
        group=sent.group,
    )
    multiple = 1 if sent.collective == "all_reduce" else ranks * dtype.itemsize
    _, gradient_bytes = parameters_of(trainer.model)
    sent_bytes = gradient_bytes * dtype.itemsize // parameter.dtype.itemsize
    sizes = message_sizes(sent.bytes, gradient_bytes=sent_bytes, largest=largest, multiple=multiple)
    room_bytes = collectives.minima([_available_bytes(session)])[0] / 2
    return sweep.run(sizes, budget_s=budget_s, room_bytes=room_bytes, seed=options.seed)


def _available_bytes(session: Session) -> float:
    """Return the memory that probes may use on this rank."""
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    return _SHARE_OF_FREE * free_bytes(session.device, len(session.host.ranks))


def hidden_fraction(
    messages: Sequence[Sequence[int]], sweeps: Sequence[Sweep | str], transfer_s: float
) -> dict[str, float | None]:
    """Return ``standalone_s`` and ``hidden_fraction`` of probes.json.

    The standalone time is the time of all messages of a step without computation. The hidden fraction is the
    share of the standalone time that computation hid: 1 − ``transfer_s`` / standalone time. The fraction is
    negative if communication takes longer during computation than on its own.

    ``messages`` has the sizes of each collective's messages in a step, and ``sweeps`` the sweep of each
    collective, or the reason why there is none. ``transfer_s`` is exposed communication minus wait, NaN if it
    is unknown.
    """
    used = [(sweep, sizes) for sweep, sizes in zip(sweeps, messages, strict=True) if sizes]
    times = [None if isinstance(sweep, str) else sweep.standalone_s(sizes) for sweep, sizes in used]
    known = [time for time in times if time is not None]
    standalone = math.fsum(known) if known and len(known) == len(times) else None
    hidden = None if standalone is None or math.isnan(transfer_s) else 1 - transfer_s / standalone
    return {"standalone_s": standalone, "hidden_fraction": hidden}
