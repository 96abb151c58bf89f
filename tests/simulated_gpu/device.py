"""Simulated GPUs in virtual time: hosts that launch work, FIFO streams, events and collectives.

Each rank is a thread with a host clock of its own. Calls of torch advance this clock, and nothing sleeps.
A launch costs host time and adds an operation to a stream. The end of an operation is

    max(time of its launch, end of the previous operation of its stream, events it waits for) + duration

A collective begins when all ranks have reached it. Operations are resolved only when a host waits for a
device, and depend on no order in which the threads run: the same seed always gives the same times.
The fixture in conftest.py puts this in place of the functions of torch that the measurement calls.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

_local = threading.local()
#: The wall clock at virtual time 0, in nanoseconds.
_EPOCH_NS = 1_700_000_000 * 10**9
#: Longest time for which a thread waits for the others; only a defect of a test reaches it.
_DEADLOCK_S = 20.0


def here() -> Rank:
    """Return the rank of the current thread."""
    rank: Rank = _local.rank
    return rank


@dataclass(frozen=True)
class Link:
    """The network: an all-reduce of S bytes takes ``latency_s + S * s_per_byte``."""

    latency_s: float = 20e-6
    s_per_byte: float = 1 / 100e9

    def all_reduce_s(self, size: int) -> float:
        """Return the time of an all-reduce of ``size`` bytes, without any wait for late ranks."""
        return self.latency_s + size * self.s_per_byte


@dataclass(frozen=True)
class Costs:
    """Costs of the host: a launch takes ``launch_s``, and on each rank and in each launch more at random.

    ``jitter`` is the largest share by which a rank is slower, and that by which one of its launches is.
    About one launch in 3,000 takes ``pause_s`` longer, because the processor runs another process. ``queue``
    is the number of operations that a stream holds; the host then waits for the oldest one.
    """

    launch_s: float = 5e-6
    jitter: float = 0.0
    event_s: float = 1e-6
    pause_s: float = 0.0
    queue: int = 1000


class World:
    """All ranks, their network, and the clock rate (Hz) of the devices."""

    def __init__(self, ranks: int, *, link: Link = Link(), costs: Costs = Costs(), seed: int = 1) -> None:
        self.link = link
        self.clock_hz = 1.5e9
        self.changed = threading.Condition(threading.RLock())
        self.collectives: dict[int, list[tuple[Stream, int]]] = {}
        self.exchanges: dict[int, dict[int, Any]] = {}
        self.failure: BaseException | None = None
        self.ranks = [Rank(self, rank, costs, random.Random(f"{seed}/{rank}")) for rank in range(ranks)]

    def run(self, program: Callable[[Rank], Any]) -> list[Any]:
        """Run ``program`` on every rank, and return the results in the order of the ranks."""
        results: list[Any] = [None] * len(self.ranks)

        def body(rank: Rank) -> None:
            _local.rank = rank
            try:
                results[rank.number] = program(rank)
            except BaseException as error:
                with self.changed:
                    self.failure = self.failure or error
                    self.changed.notify_all()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return results

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait for another thread; ``changed`` must be held."""
        self.changed.wait_for(lambda: is_ready() or self.failure is not None, timeout=_DEADLOCK_S)
        if not is_ready():
            raise RuntimeError("another rank failed, or the ranks called different collectives")


@dataclass
class Operation:
    """One entry of a stream; ``end`` is None until it is resolved."""

    launched: float
    duration: float = 0.0
    after: list[tuple[Stream, int]] = field(default_factory=list)
    collective: int | None = None
    end: float | None = None


class Stream:
    """A FIFO of operations on one device."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        rank.streams.append(self)
        self.operations: list[Operation] = []
        self.resolved = 0

    def add(self, operation: Operation) -> tuple[Stream, int]:
        """Add an operation and return its place."""
        self.operations.append(operation)
        return self.last()

    def last(self) -> tuple[Stream, int]:
        """Return the place of the last operation: the stream, and the position in it."""
        return self, len(self.operations) - 1

    def wait_stream(self, other: Stream) -> None:
        """Let later work wait for the work that is in ``other`` now."""
        self.add(Operation(self.rank.now, after=[other.last()]))

    def end_of(self, position: int) -> float:
        """Return the time at which the operation at ``position`` ends, or 0 for position -1."""
        while self.resolved <= position:
            at = self.resolved
            end = self._end(self.operations[at], self.operations[at - 1].end or 0.0 if at else 0.0)
            if self.resolved == at:  # another thread may have resolved it meanwhile
                self.operations[at].end = end
                self.resolved += 1
        return self.operations[position].end or 0.0 if position >= 0 else 0.0

    def _end(self, operation: Operation, previous: float) -> float:
        begins = [operation.launched, previous, *(stream.end_of(at) for stream, at in operation.after)]
        if operation.collective is None:
            return max(begins) + operation.duration
        world = self.rank.world
        members = world.collectives.setdefault(operation.collective, [])
        world.wait(lambda: len(members) == len(world.ranks))
        return max(max(begins), *(_reached(stream, at) for stream, at in members)) + operation.duration


def _reached(stream: Stream, position: int) -> float:
    """Return the time at which a stream reaches the operation at ``position``."""
    operation = stream.operations[position]
    earlier = [other.end_of(at) for other, at in operation.after]
    return max(operation.launched, stream.end_of(position - 1), *earlier)


class Rank:
    """One host thread and its device. ``now`` is the host's clock in virtual seconds."""

    def __init__(self, world: World, number: int, costs: Costs, rng: random.Random) -> None:
        self.world = world
        self.number = number
        self.costs = costs
        self.rng = rng
        self.launch_s = costs.launch_s * (1 + costs.jitter * rng.random())
        self.now = 0.0
        self.streams: list[Stream] = []
        #: Whether the current stream captures a CUDA graph: launches run later, and waits are errors.
        self.is_capturing = False
        self.compute, self.network = Stream(self), Stream(self)
        self.current = self.compute
        self._collectives = self._exchanges = 0

    def spend(self, seconds: float) -> None:
        """Let the host compute."""
        self.now += seconds

    def launch(self, operation_s: float) -> None:
        """Launch a kernel that takes ``operation_s``."""
        with self.world.changed:
            self._pay()
            if not self.is_capturing:
                self.current.add(Operation(self.now, operation_s))

    def all_reduce(self, size: int) -> Work:
        """Launch an all-reduce on the stream of the network, after the work of the current stream."""
        with self.world.changed:
            self._pay()
            number, self._collectives = self._collectives, self._collectives + 1
            seconds = self.world.link.all_reduce_s(size)
            place = self.network.add(Operation(self.now, seconds, [self.current.last()], number))
            self.world.collectives.setdefault(number, []).append(place)
            self.world.changed.notify_all()
            return Work(self, place)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the current one."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def end(self) -> float:
        """Return the time at which all streams have ended."""
        with self.world.changed:
            return max(stream.end_of(len(stream.operations) - 1) for stream in self.streams)

    def item(self) -> None:
        """Wait for the current stream, as ``tensor.item()`` does."""
        if CUDA.mode:
            WARNINGS.warn("called a synchronizing CUDA operation")
        with self.world.changed:
            self.now = max(self.now, self.current.end_of(len(self.current.operations) - 1))

    def synchronize(self) -> None:
        """Wait for all streams."""
        assert not self.is_capturing, "operation not permitted when stream is capturing"
        self.now = max(self.now, self.end())

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which wait for each other."""
        self.synchronize()
        with self.world.changed:
            number, self._exchanges = self._exchanges, self._exchanges + 1
            given = self.world.exchanges.setdefault(number, {})
            given[self.number] = (self.now, value)
            self.world.changed.notify_all()
            self.world.wait(lambda: len(given) == len(self.world.ranks))
            self.now = max(now for now, _ in given.values())
            return [given[rank][1] for rank in range(len(given))]

    def _pay(self) -> None:
        costs = self.costs
        self.now += self.launch_s * (1 + costs.jitter * self.rng.random())
        if costs.pause_s and self.rng.random() < 1 / 3000:
            self.now += costs.pause_s
        at = len(self.current.operations) - costs.queue
        if at >= 0:
            self.now = max(self.now, self.current.end_of(at))


class Work:
    """An all-reduce that was launched, as torch returns it for NCCL."""

    def __init__(self, rank: Rank, place: tuple[Stream, int]) -> None:
        self._rank = rank
        self._place = place

    def wait(self) -> None:
        """Let the current stream wait, not the host."""
        with self._rank.world.changed:
            self._rank.current.add(Operation(self._rank.now, after=[self._place]))

    def get_future(self) -> Work:
        """Return a future that is complete in the order of its stream."""
        return self

    def then(self, callback: Callable[[Any], Any]) -> Work:
        """Call back at once, with a stream of its own that waits for the all-reduce."""
        with self._rank.on(Stream(self._rank)):
            self.wait()
            callback(SimpleNamespace(value=lambda: [torch.zeros(0)]))
        return self


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._place: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the time at which the stream reaches this event."""
        rank = here()
        assert not rank.is_capturing, "an event of a graph has no time"
        with rank.world.changed:
            rank.now += rank.costs.event_s
            self._place = (stream or rank.current).add(Operation(rank.now))

    @property
    def time(self) -> float:
        """The virtual time of the event in seconds."""
        assert self._place is not None
        stream, place = self._place
        with stream.rank.world.changed:
            return stream.end_of(place)

    def query(self) -> bool:
        """Return whether the device has passed the event."""
        return self.time <= here().now

    def synchronize(self) -> None:
        """Wait for the event."""
        rank = here()
        assert not rank.is_capturing, "operation not permitted when stream is capturing"
        rank.now = max(rank.now, self.time)

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds, with CUDA's resolution of half a microsecond; both must be complete."""
        assert max(self.time, end.time) <= here().now, "elapsed_time needs complete events"
        return round((end.time - self.time) * 2e6) / 2e3


class Collectives:
    """``measure.exchange.Collectives`` with NCCL: each method waits for the device and all ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.rank, self.world_size = rank.number, len(rank.world.ranks)

    def barrier(self) -> None:
        """Wait for all ranks; then each host continues at a moment of its own."""
        self._rank.all_reduce(8).wait()
        self._rank.synchronize()
        self._rank.spend(self._rank.rng.random() * 50e-6)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maxima."""
        return [max(column) for column in zip(*self.rows(values), strict=True)]

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all ranks."""
        return self._rank.exchange(list(values))


def all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Work | None:
    """``torch.distributed.all_reduce``."""
    work = here().all_reduce(tensor.numel() * tensor.element_size())
    return work if async_op else work.wait()


class Cuda(threading.local):
    """What :class:`HostWaits` uses of ``torch.cuda``; each rank has its own."""

    def __init__(self) -> None:
        self.mode: int | str = 0
        self.get_sync_debug_mode = lambda: self.mode
        self.set_sync_debug_mode = lambda mode: setattr(self, "mode", mode)
        self.synchronize = self.barrier = lambda device=None: here().synchronize()
        self.Event = SimpleNamespace(synchronize=lambda event: event.synchronize())
        self.Stream = SimpleNamespace(synchronize=lambda stream: here().synchronize())


class Warnings(threading.local):
    """Python's module ``warnings``, whose functions would serve all threads."""

    def __init__(self) -> None:
        self._log: list[Any] | None = None
        self.shown: list[str] = []
        self.filterwarnings = lambda *words, **named: None
        self.showwarning = lambda message, *details: self.shown.append(str(message))

    @contextmanager
    def catch_warnings(self, *, record: bool) -> Iterator[list[Any]]:
        """Keep warnings instead of showing them."""
        self._log = []
        yield self._log
        self._log = None

    def warn(self, text: str) -> None:
        """Show or keep a warning."""
        if self._log is None:
            self.shown.append(text)
        else:
            self._log.append(SimpleNamespace(message=text, category=UserWarning, filename="", lineno=1))


CUDA, WARNINGS = Cuda(), Warnings()


#: Python's module ``time``, in virtual time.
TIME = SimpleNamespace(
    perf_counter=lambda: here().now,
    perf_counter_ns=lambda: round(here().now * 1e9),
    time_ns=lambda: _EPOCH_NS + round(here().now * 1e9),
)
