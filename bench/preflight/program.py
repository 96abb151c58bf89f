"""The program of a preflight job: one process per node measures the node and exchanges messages with others.

Rank 0 announces each task in the store, in which all nodes also post their results. If a node is lost,
only its own results are missing. Rank 0 writes all values after each task, so that earlier values are
kept if the job is killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..measure.node import cpu_groups, cpu_quota, host_name
from ..measure.nvml import clocks, gpu_facts
from ..study.layout import PreflightFolder
from ..study.preflight import write_measured, write_result
from ..workload.failures import WorkloadError
from ..workload.rendezvous import Launch, launch_from
from .pairs import exchange_steps
from .verdict import (
    FAULTS,
    RATES,
    Measured,
    Step,
    assess,
    failing,
    judge,
    pairs_again,
    ring_steps,
    uneven_directions,
)

#: Number of windows per check, whose median is the result, and their number if a failed check is repeated.
WINDOWS, WINDOWS_AGAIN = 5, 9
#: Duration of a window. A CPU quota is enforced in periods of 100 ms, so a window must contain many periods.
WINDOW_S = 2.0
#: A single matrix product takes at least this time, so that the time to start the product is negligible.
_PRODUCT_S = 0.004
_MIN_SIZE, _MAX_SIZE = 256, 8192
#: Size of the memory that is copied (larger than caches), and size of the part that one call copies.
_MEMORY_BYTES = 256 * 2**20
_CPU_PART_BYTES = 8 * 2**20
#: Time for which GPUs work before their clocks are read, and number of products that are then still queued.
_LOADED_S = 1.0
_QUEUED = 50


def devices() -> list[torch.device]:
    """Return all GPUs that this process sees, or the CPU if there is none."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return gpus or [torch.device("cpu")]


def product_size(device: torch.device) -> int:
    """Return the size of square matrices whose product takes some milliseconds on ``device``."""
    size = _MIN_SIZE
    while size < _MAX_SIZE:
        multiply, _ = _product(device, size)
        multiply()
        if min(_timed(multiply, [device]) for _ in range(3)) >= _PRODUCT_S:
            break
        size *= 2
    return size


def product_rate(on: Sequence[torch.device], size: int, *, windows: int) -> float:
    """Return the FLOP/s of a matrix product: float32 on the CPU, bfloat16 on GPUs.

    All devices work at the same time, as in training. The result is the rate of the slowest device.
    """
    return _slowest_rate(on, lambda device: _product(device, size), windows)


Work = Callable[[], object]


def _product(device: torch.device, size: int) -> tuple[Work, float]:
    """Return a function that computes a matrix product, and its number of floating-point operations."""
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    # A GPU draws less power for constant numbers, which would hide a low power limit or poor cooling.
    a, b, out = (torch.rand(size, size, dtype=kind, device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


def _copy(device: torch.device) -> tuple[Work, float]:
    """Return a function that copies the next part of a large buffer, and the bytes it reads and writes."""
    total, part = _MEMORY_BYTES, _MEMORY_BYTES
    if device.type == "cpu":
        # Small parts: under a CPU quota, a long call would span several periods.
        part = _CPU_PART_BYTES
        total = max(part, min(total, psutil.virtual_memory().available // 16 // part * part))
    shape = (total // part, part)
    sources = torch.ones(shape, dtype=torch.uint8, device=device)
    targets = torch.zeros_like(sources)
    places = itertools.cycle(range(shape[0]))

    def copy_next() -> None:
        place = next(places)
        targets[place].copy_(sources[place])

    return copy_next, 2.0 * part


def _slowest_rate(
    on: Sequence[torch.device], prepare: Callable[[torch.device], tuple[Work, float]], windows: int
) -> float:
    prepared = [prepare(device) for device in on]
    works, amount = [work for work, _ in prepared], prepared[0][1]
    for work in works:
        work()
    if on[0].type == "cpu":
        return float(median([_cpu_rate(works[0], amount) for _ in range(windows)]))
    by_window = [_gpu_rates(works, amount, on) for _ in range(windows)]
    return min(float(median(rates)) for rates in zip(*by_window, strict=True))


def _cpu_rate(work: Work, amount: float) -> float:
    began, done = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + WINDOW_S:
        work()
        done += 1
    return done * amount / (now - began)


def _gpu_rates(works: Sequence[Work], amount: float, on: Sequence[torch.device]) -> list[float]:
    """Return the rate of each GPU in a window in which all GPUs work."""
    once = _timed(works[0], on)
    repeats = max(1, math.ceil(WINDOW_S / max(once, 1e-6) / 2))
    events = []
    for device, work in zip(on, works, strict=True):
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(repeats):
                work()
            end.record()
            events.append((begin, end))
    for device in on:
        torch.cuda.synchronize(device)
    return [repeats * amount / (begin.elapsed_time(end) / 1e3) for begin, end in events]


def _timed(work: Work, on: Sequence[torch.device]) -> float:
    _synchronize(on)
    began = time.perf_counter()
    work()
    _synchronize(on)
    return time.perf_counter() - began


def _synchronize(on: Sequence[torch.device]) -> None:
    for device in on:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def use_all_cores() -> int:
    """Let torch use all cores of this process, at most its CPU quota rounded up; return their number."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(cpu_groups())
    if quota is not None:
        cores = min(cores, math.ceil(quota))  # further threads would only use up the quota while they wait
    torch.set_num_threads(cores)
    return cores


def gpu_state(on: Sequence[torch.device], size: int) -> dict[str, float | None]:
    """Return the worst value of each kind that NVML reports about this node's GPUs while they work.

    ``gpu-clock`` is in Hz. ``gpu-slowdown`` counts GPUs whose clocks are lowered because of their
    temperature or hardware. ``gpu-errors`` counts uncorrected memory errors and failed repairs of
    memory rows. The result is empty without GPUs.
    """
    indices = [device.index for device in on if device.type == "cuda"]
    if not indices:
        return {}
    works = [_product(device, size)[0] for device in on]
    until = time.perf_counter() + _LOADED_S
    while time.perf_counter() < until:
        for work in works:
            work()
        _synchronize(on)
    for work in works * _QUEUED:
        work()
    states = [clocks(index) for index in indices]
    facts = gpu_facts()
    _synchronize(on)
    mhz = _lowest(state["sm_mhz"] for state in states)
    return {
        "gpu-clock": None if mhz is None else mhz * 1e6,
        "gpu-slowdown": _total(_is_slowed(state["reasons"]) for state in states),
        "gpu-errors": _total(map(_errors, states, facts)),
        "pcie-width": _lowest(one["pcie_width"] for one in facts),
    }


def _is_slowed(reasons: dict[str, list[str]] | None) -> bool | None:
    if reasons is None:
        return None
    # Alone, hw_slowdown can also mean that the clocks are changing.
    return bool(reasons["thermal"] or set(reasons["hardware"]) - {"hw_slowdown"})


def _errors(state: dict[str, Any], facts: dict[str, Any]) -> int | None:
    errors, rows = state["ecc_uncorrected"], facts["remapped_rows"]
    if errors is None and rows is None:
        return None
    return (errors or 0) + (rows["pending"] + rows["failure"] if rows else 0)


def _lowest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


#: Time for which rank 0 waits for nodes that have not joined.
JOIN_S = 60.0
#: Time of an exchange, and maximum time of all exchanges.
_EXCHANGE_S, _EXCHANGES_S = 0.3, 60.0
#: The first exchanges, which show how much to send in later exchanges.
FIRST_BYTES = 4 * 2**20
MAX_BYTES = 256 * 2**20


class Meeting:
    """The nodes that joined: their ``ranks``, and their ``names`` by rank."""

    def __init__(self, launch: Launch, host: str) -> None:
        self.rank = launch.rank
        self._store = _open_store(launch)
        self._tasks = 0
        self._store.set(f"host/{self.rank}", host)
        if self.rank == 0:
            names = self._joined(launch.world_size)
            self._store.set("joined", json.dumps(names))
        self._store.wait(["joined"], timedelta(seconds=2 * JOIN_S))
        found = json.loads(self._store.get("joined"))
        self.names: dict[int, str] = {int(rank): name for rank, name in found.items()}
        self.ranks = sorted(self.names)

    def _joined(self, world_size: int) -> dict[int, str]:
        keys = {rank: f"host/{rank}" for rank in range(world_size)}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=JOIN_S))
        except (dist.DistError, RuntimeError):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: self._store.get(key).decode() for rank, key in keys.items()}

    @property
    def place(self) -> int:
        """The number of this node among those that joined, from 0."""
        return self.ranks.index(self.rank)

    def connect(self, backend: str) -> None:
        """Create the process group of the nodes that joined."""
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self._store),
            rank=self.place,
            world_size=len(self.ranks),
            timeout=timedelta(seconds=60),
        )

    def announce(self, task: Mapping[str, Any]) -> None:
        """Let all nodes perform a task; called on rank 0."""
        self._store.set(f"task/{self._tasks + 1}", json.dumps(task))

    def next_task(self, *, timeout_s: float) -> dict[str, Any]:
        """Wait for the next task that rank 0 announces."""
        self._tasks += 1
        key = f"task/{self._tasks}"
        self._store.wait([key], timedelta(seconds=timeout_s))
        task: dict[str, Any] = json.loads(self._store.get(key))
        return task

    def post(self, result: Any) -> None:
        """Post this node's result of the current task."""
        self._store.set(f"result/{self._tasks}/{self.rank}", json.dumps(result))

    def results(self, *, timeout_s: float) -> list[Any | None]:
        """Return each node's result of the current task, or None if it is missing; called on rank 0."""
        keys = [f"result/{self._tasks}/{rank}" for rank in self.ranks]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return [json.loads(value) for value in self._store.multi_get(keys)]
        except (dist.DistError, RuntimeError):
            return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]


def _open_store(launch: Launch) -> Store:
    if launch.world_size == 1:
        return HashStore()
    return TCPStore(
        launch.address,
        launch.port,
        launch.world_size,
        is_master=launch.rank == 0,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,
    )


#: Time after the start of the job at which no further task begins; the job's time limit is 180 s.
END_S = 165.0
#: Time of the repeated checks of a node.
_CHECKS_AGAIN_S = 2 * WINDOWS_AGAIN * WINDOW_S


class Node:
    """The process of one node, which performs the tasks that rank 0 announces."""

    def __init__(self, meeting: Meeting) -> None:
        use_all_cores()
        self._meeting = meeting
        self._devices = devices()
        self._is_connected = False
        self.has_ended = False

    def end(self, task: dict[str, Any]) -> None:
        """Record that there are no further tasks."""
        self.has_ended = True

    def facts(self, task: dict[str, Any]) -> dict[str, float]:
        """Return the number of GPUs."""
        return {"gpus": torch.cuda.device_count()}

    def checks(self, task: dict[str, Any]) -> dict[str, float | None]:
        """Measure this node."""
        rates = {
            "matrix-product": product_rate(self._devices, task["size"], windows=task["windows"]),
            "memory": _slowest_rate(self._devices, _copy, task["windows"]),
        }
        return {**rates, **gpu_state(self._devices, task["size"])}

    def exchange(self, task: dict[str, Any]) -> dict[int, float]:
        """Exchange messages with other nodes."""
        device = self._devices[0] if task["backend"] == "nccl" else torch.device("cpu")
        if not self._is_connected:
            self._meeting.connect(task["backend"])
            dist.all_reduce(torch.zeros(1, device=device))
            self._is_connected = True
        steps = [[(a, b) for a, b in step] for step in task["steps"]]
        deadline = time.monotonic() + task["limit_s"]
        return exchange_steps(steps, self._meeting.place, device, count=task["bytes"], deadline=deadline)

    def perform(self, task: dict[str, Any]) -> None:
        """Perform a task and post its result; print the error of a task that fails."""
        try:
            result = {"values": getattr(self, task["kind"])(task)}
        except (RuntimeError, OSError, MemoryError) as error:
            words = str(error).strip().splitlines() or [type(error).__name__]
            print(f"bench: error: {task['kind']}: {words[0]}", file=sys.stderr, flush=True)
            result = {"error": words[0]}
        self._meeting.post(result)


class Coordinator:
    """Decide on rank 0 what is measured, and write the results."""

    def __init__(
        self, node: Node, meeting: Meeting, folder: PreflightFolder, *, threshold: float, end: float
    ) -> None:
        self._node = node
        self._meeting = meeting
        self._folder = folder
        self._threshold = threshold
        self._end = end
        self.measured = Measured([meeting.names[rank] for rank in meeting.ranks])

    @property
    def _left_s(self) -> float:
        return self._end - time.time()

    def measure(self, missing: Sequence[str]) -> None:
        """Measure all nodes and write the result; ``missing`` are the nodes that did not join."""
        self.measured.silent += missing
        self._add("facts", {})
        size = product_size(devices()[0])
        self._add("checks", {"size": size, "windows": WINDOWS})
        self._exchanges()
        if self._failing_checks() and self._left_s > _CHECKS_AGAIN_S:
            self._add("checks", {"size": size, "windows": WINDOWS_AGAIN})
        write_result(self._folder, self.result())
        self._perform("end", {})  # the store ends with this process: wait for the other processes

    def result(self) -> dict[str, Any]:
        """Return the content of result.json."""
        moment = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        verdict = assess(self.measured, threshold=self._threshold)
        return {"schema": 1, "job_id": os.environ.get("SLURM_JOB_ID"), "time": moment, **verdict}

    def _perform(self, kind: str, task: dict[str, Any]) -> list[Any | None]:
        """Let all nodes perform a task; return their values, with None for nodes that failed."""
        self._meeting.announce({"kind": kind, **task})
        self._node.perform(self._meeting.next_task(timeout_s=1))
        found = self._meeting.results(timeout_s=max(5.0, min(90.0, self._left_s)))
        for host, result in zip(self.measured.hosts, found, strict=True):
            if result is None and host not in self.measured.silent:
                self.measured.silent.append(host)
        return [None if result is None else result.get("values") for result in found]

    def _add(self, kind: str, task: dict[str, Any]) -> None:
        """Perform a task that measures checks, add its values to earlier values, and write all values."""
        found = self._perform(kind, task)
        for check in (*RATES, *FAULTS):
            values = [None if one is None else one.get(check) for one in found]
            if any(value is not None for value in values):
                self.measured.passes.setdefault(check, []).append(values)
        write_measured(self._folder, self.measured.as_json())

    def _failing_checks(self) -> bool:
        return any(
            failing(passes, check=check, threshold=self._threshold)
            for check, passes in self.measured.passes.items()
        )

    def _exchanges(self) -> None:
        nodes = len(self.measured.hosts)
        if nodes < 2 or not set(self.measured.hosts).isdisjoint(self.measured.silent):
            return  # the process group would wait for a node that has stopped answering
        gpus = self.measured.passes["gpus"][0]
        backend = "nccl" if all(gpus) else "gloo"
        ring = ring_steps(nodes)
        rates = self._exchanged(ring[:1], FIRST_BYTES, backend).values()
        wanted = round(median(rates) * _EXCHANGE_S) if rates else FIRST_BYTES
        count = max(FIRST_BYTES, min(MAX_BYTES, wanted))
        self.measured.exchange = self._exchanged(ring, count, backend)
        if again := self._again():
            self.measured.again = self._exchanged(again, count, backend)
        write_measured(self._folder, self.measured.as_json())

    def _again(self) -> list[Step]:
        if len(self.measured.hosts) == 2:
            uneven = uneven_directions(self.measured.exchange, threshold=self._threshold)
            return [[(0, 1)]] if uneven else []
        rates = self.measured.rates
        return pairs_again(rates, judge(rates, threshold=self._threshold))

    def _exchanged(self, steps: Sequence[Step], count: int, backend: str) -> dict[tuple[int, int], float]:
        limit_s = max(1.0, min(_EXCHANGES_S, self._left_s - 20))
        task = {"steps": steps, "bytes": count, "backend": backend, "limit_s": limit_s}
        found = self._perform("exchange", task)
        return {
            (node, int(partner)): rate
            for node, received in enumerate(found)
            for partner, rate in (received or {}).items()
        }


def check_this_machine(folder: PreflightFolder, *, threshold: float) -> None:
    """Measure this machine alone and write the result."""
    meeting = Meeting(Launch("single", 0, 0, 1), host_name(os.environ))
    end = time.time() + END_S
    Coordinator(Node(meeting), meeting, folder, threshold=threshold, end=end).measure([])


def main() -> int:
    """Measure this node and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the preflight")
    parser.add_argument("--threshold", type=float, required=True)
    options = parser.parse_args()
    began = float(os.environ.get("BENCH_PREFLIGHT_BEGAN") or time.time())
    try:
        launch = launch_from(os.environ)
        meeting = Meeting(launch, host_name(os.environ))
    except (WorkloadError, dist.DistError, RuntimeError) as error:
        print(f"bench: error: {error}", file=sys.stderr, flush=True)
        return 1
    node = Node(meeting)
    if launch.rank == 0:
        folder, end = PreflightFolder(options.folder), began + END_S
        coordinator = Coordinator(node, meeting, folder, threshold=options.threshold, end=end)
        coordinator.measure(_missing(launch, meeting))
        return 0
    while not node.has_ended:
        node.perform(meeting.next_task(timeout_s=END_S))
    return 0


def _missing(launch: Launch, meeting: Meeting) -> list[str]:
    """Return the hosts of the ranks that did not join."""
    absent = [rank for rank in range(launch.world_size) if rank not in meeting.names]
    hosts = launch.expected_hosts
    return [hosts[rank] if rank < len(hosts) else f"rank {rank}" for rank in absent]
