"""Measure the nodes and links of a job: ``python -m ddp_scaling_bench.train.nodecheck FILE``.

Every rank of the job starts this program. Each rank measures its device: a matrix product, and a copy in
memory; all ranks of a node do this at once. Then neighbouring nodes exchange messages, in rounds of disjoint
pairs. Everything is done twice, because a node that is busy for a moment looks slow once. Rank 0 appends each
measurement to the CSV file FILE, so that earlier values are kept if the job is killed.

Each measurement is made by a child process, which the parent ends at a time limit: an exchange over NCCL
that hangs cannot be cancelled, and a CUDA error makes a process useless. The parents only use a store, so
a pair that hangs, or a device that fails, is a row with its reason, and the others are measured.

The program is started by the Python of the user's jobs, and needs the standard library and torch only.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import itertools
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ..measure.exchange import Collectives
from ..measure.launch import Launch, launch_from
from ..measure.peers import raised
from ..measure.step_parts import clock_for
from .failures import WorkloadError
from .probes import CollectiveSweep, Size
from .rendezvous import open_store

#: Columns of the CSV file. ``pass`` is 1 or 2, ``rank`` the number of the rank on its node. ``value`` is in
#: FLOP/s (compute) or bytes/s (memory, exchange); a row without a value has a ``reason``.
COLUMNS = ("pass", "check", "node", "rank", "partner", "value", "reason")
PASSES = 2

#: Duration of a window, and number of windows, whose median is the result. A CPU quota is enforced in
#: periods of 100 ms, so a window must contain several periods.
WINDOW_S, WINDOWS = 1.0, 5
#: Sizes of the square matrices, and of the memory that is copied: larger than caches.
_SIZE = {"cpu": 512, "cuda": 8192}
_MEMORY_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
#: Size of the part that one call copies. On a CPU with a quota, a long call would span several periods.
_COPY_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
#: Number of calls between two looks at the clock. On a GPU, each look waits for all queued calls.
_CALLS = {"cpu": 1, "cuda": 50}

#: Time for which rank 0 waits for ranks that have not joined. Importing torch can take minutes.
JOIN_S = 180.0
#: Time limits of a measurement, and the time for a rank to end its child and to post its result.
MEASURE_S, EXCHANGE_S, _ANSWER_S = 120.0, 30.0, 15.0
#: Each node exchanges messages with the nodes at these distances. With up to five nodes, these are all pairs.
_DISTANCES = (1, 2)
#: Sizes of an exchange, of which each node sends half, and the time in which the largest possible one is
#: repeated. The small one lets connections reach their full speed.
_EXCHANGED = (2**20, 8 * 2**20, 32 * 2**20, 128 * 2**20)
_EXCHANGING_S = 2.0

Pair = tuple[int, int]


class Outcome(NamedTuple):
    """A measured value, or None with a reason. ``hung`` is true if the time limit was exceeded."""

    value: float | None
    reason: str = ""
    hung: bool = False


class Task(NamedTuple):
    """One step of the program; ``pairs`` are the nodes that exchange messages."""

    number: int
    which_pass: int
    check: str
    pairs: Sequence[Sequence[str]] = ()


def rounds(nodes: int) -> list[tuple[Pair, ...]]:
    """Pair each node with its neighbours in a ring, in rounds in which a node has at most one partner."""
    ring = [(node, (node + distance) % nodes) for distance in _DISTANCES for node in range(nodes)]
    found: list[list[Pair]] = []
    for a, b in dict.fromkeys((min(pair), max(pair)) for pair in ring if pair[0] != pair[1]):
        free = (pairs for pairs in found if not any(a in pair or b in pair for pair in pairs))
        if (pairs := next(free, None)) is None:
            found.append(pairs := [])
        pairs.append((a, b))
    return [tuple(pairs) for pairs in found]


def tasks(nodes: Sequence[str]) -> list[Task]:
    """Return all steps of the program, which every rank computes alike."""
    exchanges = [[(nodes[a], nodes[b]) for a, b in pairs] for pairs in rounds(len(nodes))]
    checks = [("compute", []), ("memory", []), *(("exchange", pairs) for pairs in exchanges)]
    twice = itertools.product(range(1, PASSES + 1), checks)
    return [Task(number, which, *check) for number, (which, check) in enumerate(twice)]


def compute_rate(device: torch.device) -> float:
    """Return the FLOP/s of a matrix product: float32 on a CPU, bfloat16 on a GPU."""
    size, kind = _SIZE[device.type], torch.float32 if device.type == "cpu" else torch.bfloat16
    # A GPU draws less power for constant numbers, which would hide a low power limit or poor cooling.
    a, b, out = (torch.rand(size, size, dtype=kind, device=device) for _ in range(3))
    return _rate(lambda: torch.mm(a, b, out=out), 2.0 * size**3, device)


def memory_rate(device: torch.device) -> float:
    """Return the bytes/s that a copy within the device's memory reads and writes."""
    part = _COPY_BYTES[device.type]
    sources = torch.ones((_MEMORY_BYTES[device.type] // part, part), dtype=torch.uint8, device=device)
    targets = torch.zeros_like(sources)
    places = itertools.cycle(range(len(sources)))

    def copy_next() -> None:
        place = next(places)
        targets[place].copy_(sources[place])

    return _rate(copy_next, 2.0 * part, device)


def _rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Return ``amount`` per second of calls of ``work``."""
    calls, clock = _CALLS[device.type], clock_for(device)

    def window() -> float:
        done, began = 0, time.perf_counter()
        while (now := time.perf_counter()) < began + WINDOW_S or not done:
            for _ in range(calls):
                work()
            clock.synchronize()
            done += calls
        return done * amount / (now - began)

    work()
    clock.synchronize()
    return median(window() for _ in range(WINDOWS))


def exchange_rate(store: Store, place: int, device: torch.device) -> float:
    """Exchange messages with another node in both directions at once; return the bytes/s received.

    A pair has a process group of its own, so that a pair that hangs stops no other pair; ``place`` is the
    rank in it.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    # The parent is faster than this time limit, and then knows the reason.
    limit, own = timedelta(seconds=2 * EXCHANGE_S), device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=place, world_size=2, timeout=limit, device_id=own)
    ranks = Collectives(device, backend)
    sweep = CollectiveSweep(
        collectives=ranks,
        clock=clock_for(device),
        device=device,
        dtype=torch.uint8,
        queues=backend == "nccl",
        collective="exchange",
    )
    sizes = [Size(size) for size in _EXCHANGED]
    found = sweep.run(sizes, budget_s=_EXCHANGING_S, room_bytes=math.inf, seed=0)
    ranks.barrier()  # both have received everything before one of them closes its connection
    dist.destroy_process_group()  # not after an error, because it can hang then
    return found.sizes[-1].bytes / 2 / found.time_s(-1)


def in_child(work: Callable[[], float], *, limit_s: float) -> Outcome:
    """Call ``work`` in a child process, and kill it at the time limit.

    The parent must not use CUDA, because a process that was forked after that cannot use it.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return Outcome(None, f"no answer in {limit_s:g} s", hung=True)
        return Outcome(*ours.recv())
    except (EOFError, OSError):
        process.join(_ANSWER_S / 3)
        code = process.exitcode
        by_signal = f" by {signal.Signals(-code).name}" if code is not None and code < 0 else ""
        return Outcome(None, f"the process ended{by_signal}")
    finally:
        process.kill()
        process.join(_ANSWER_S / 3)  # a process that waits in a driver may stay for longer


def _work(work: Callable[[], float], answers: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no child outlives its parent
    if os.getppid() != parent:
        os._exit(1)
    try:
        answers.send((work(), ""))
    except Exception as error:  # whatever the device or the network raises is the result
        print(f"nodecheck: {error}", file=sys.stderr, flush=True)
        answers.send((None, raised(error).message))
    os._exit(0)  # a process with a broken GPU or connection can hang at its end


class Member(NamedTuple):
    """A rank that joined: its host, and its number on this host."""

    host: str
    local_rank: int


class Job:
    """The ranks of this job, which meet in a store; ``device`` is cpu or cuda."""

    def __init__(self, launch: Launch, host: str, device: str) -> None:
        self.launch, self._device = launch, device
        self.store = open_store(launch, JOIN_S)
        self.post("join", [host, launch.local_rank])
        if launch.rank == 0:
            self.store.set("joined", json.dumps(self.collect("join", range(launch.world_size), JOIN_S)))
        joined = self.read("joined", 2 * JOIN_S)
        self.members = {int(rank): Member(*facts) for rank, facts in joined.items()}
        self.nodes = list(dict.fromkeys(member.host for member in self.members.values()))

    def post(self, name: str, content: object) -> None:
        """Write this rank's content ``name``."""
        self.store.set(f"{name}/{self.launch.rank}", json.dumps(content))

    def read(self, key: str, timeout_s: float) -> Any:
        """Return the value of a key as soon as it is set."""
        self.store.wait([key], timedelta(seconds=timeout_s))
        return json.loads(self.store.get(key))

    def collect(self, name: str, ranks: Iterable[int], timeout_s: float) -> dict[int, Any]:
        """Return what the ranks posted as ``name``, by rank, without the ranks that posted nothing."""
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        try:
            self.store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items()}

    def sender_of(self, node: str) -> int:
        """Return the rank of a node that exchanges its messages."""
        return min(rank for rank, member in self.members.items() if member.host == node)

    def device(self) -> torch.device:
        """Return the device of this rank; only a child may call this."""
        if self._device == "cpu":
            return torch.device("cpu")
        # Some launchers show each rank only its own GPU.
        return torch.device("cuda", self.launch.local_rank % max(1, torch.cuda.device_count()))

    def perform(self, task: Task, idle: Sequence[str]) -> Outcome | None:
        """Make this rank's measurement; return None if it has none in this task."""
        rank, host = self.launch.rank, self.members[self.launch.rank].host
        if task.check != "exchange":
            rate = compute_rate if task.check == "compute" else memory_rate
            return None if host in idle else in_child(lambda: rate(self.device()), limit_s=MEASURE_S)
        pair = next((pair for pair in task.pairs if host in pair and not {*pair} & {*idle}), ())
        if not pair or rank != self.sender_of(host):
            return None

        def exchange() -> float:
            store = open_store(replace(self.launch, agent_store=True), JOIN_S)  # the parent may serve it
            store = PrefixStore(f"exchange/{task.number}/{'-'.join(pair)}", store)
            return exchange_rate(store, pair.index(host), self.device())

        return in_child(exchange, limit_s=EXCHANGE_S)


class Rows:
    """Rank 0's record: writes the rows, and knows which nodes are left out of further tasks."""

    def __init__(self, job: Job, path: Path) -> None:
        self._job = job
        self._file = path.open("w", encoding="utf-8", newline="")
        self._csv = csv.writer(self._file)
        self._csv.writerow(COLUMNS)
        self._silent: set[str] = set()
        #: By pass and node: whether its exchange with each partner succeeded.
        self._exchanged: dict[tuple[int, str], list[bool]] = {}
        hosts, size = job.launch.job_hosts, job.launch.world_size
        for rank in range(size):
            if member := job.members.get(rank):
                self._write(1, "answered", member, Outcome(1.0))
            else:
                is_known = hosts and not size % len(hosts)
                host = hosts[rank * len(hosts) // size] if is_known else f"the host of rank {rank}"
                self._write(1, "answered", Member(host, rank), Outcome(None, f"rank {rank} did not join"))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def present(self) -> list[int]:
        """The ranks of the nodes that answer."""
        return [rank for rank, member in self._job.members.items() if member.host not in self._silent]

    def idle(self, which_pass: int) -> list[str]:
        """Return the nodes that stopped answering, and those whose exchanges with two nodes failed.

        Their partners would only wait for the time limit.
        """
        of_pass = {node: done for (which, node), done in self._exchanged.items() if which == which_pass}
        return sorted(self._silent | {node for node, done in of_pass.items() if len(done) > 1 > sum(done)})

    def add(self, task: Task, outcomes: Mapping[int, Outcome | None]) -> None:
        """Write the outcomes of a task; a rank without an entry did not answer in time."""
        job = self._job
        for rank in [rank for rank in self.present if rank not in outcomes]:
            if rank in self.present:  # else another rank of its node was the first
                why = Outcome(None, f"rank {rank} stopped answering")
                self._write(task.which_pass, "answered", job.members[rank], why)
                self._silent.add(job.members[rank].host)
        for rank, outcome in outcomes.items():
            if outcome is not None and not task.pairs:
                self._write(task.which_pass, task.check, job.members[rank], outcome)
        for pair in task.pairs:
            found = {node: end for node in pair if (end := outcomes.get(job.sender_of(node)))}
            if len(found) == 2:  # else it was left out, or a node stopped answering, which blames no link
                self._add_exchange(task.which_pass, found)
        self._file.flush()

    def _add_exchange(self, which_pass: int, ends: Mapping[str, Outcome]) -> None:
        failed = {node: end for node, end in ends.items() if end.value is None}
        if failed:
            # A node that did not hang knows the reason: its partner only waited for it.
            known = "; ".join(f"{node}: {end.reason}" for node, end in failed.items() if not end.hung)
            outcome = Outcome(None, known or next(iter(failed.values())).reason)
        else:
            outcome = Outcome(min(end.value for end in ends.values() if end.value is not None))
        for node in ends:
            self._exchanged.setdefault((which_pass, node), []).append(not failed)
        node, partner = ends
        self._write(which_pass, "exchange", Member(node, 0), outcome, partner)

    def _write(self, which: int, check: str, member: Member, outcome: Outcome, partner: str = "") -> None:
        value = "" if outcome.value is None else f"{outcome.value:.6g}"
        self._csv.writerow((which, check, *member, partner, value, outcome.reason))


def measure(job: Job, path: Path) -> None:
    """Perform all tasks with the other ranks; rank 0 writes the rows."""
    rows = Rows(job, path) if job.launch.rank == 0 else None
    for task in tasks(job.nodes):
        name, begin = f"result/{task.number}", f"begin/{task.number}"
        if rows is not None:
            job.store.set(begin, json.dumps(rows.idle(task.which_pass)))
        # Rank 0 may have to wait for a rank that hangs, after its own measurement.
        job.post(name, job.perform(task, job.read(begin, 2 * (MEASURE_S + _ANSWER_S))))
        if rows is not None:
            limit_s = EXCHANGE_S if task.pairs else MEASURE_S
            found = job.collect(name, rows.present, limit_s + _ANSWER_S)
            rows.add(task, {rank: None if end is None else Outcome(*end) for rank, end in found.items()})
    job.post("end", None)
    if rows is not None:  # the store ends with this process: wait for the others
        job.collect("end", rows.present, _ANSWER_S)
        rows.close()


def main() -> None:
    """Measure with the other ranks of the job."""
    parser = argparse.ArgumentParser(description="Measure the nodes of a job, and the links between them.")
    parser.add_argument("file", type=Path, help="the CSV file that rank 0 writes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    launch = launch_from(os.environ)
    try:
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        measure(Job(launch, host, options.device), options.file)
    except (dist.DistError, RuntimeError, WorkloadError) as error:
        if launch.rank == 0:
            raise
        # With another exit code, the launcher would end the ranks that can still be measured.
        print(f"nodecheck: {raised(error).message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
