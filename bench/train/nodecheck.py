"""Measure the nodes and links of a job: ``python -m ddp_scaling_bench.train.nodecheck FILE``.

Every rank of the job starts this program. Each rank measures its device: a matrix product, and a copy in
memory; all ranks of a node do this at once. Then neighbouring nodes exchange messages, in rounds of disjoint
pairs. Everything is done twice, because a node that is busy for a moment looks slow once. Rank 0 appends each
measurement to the CSV file FILE, so that earlier values are kept if the job is killed.

Each measurement is made by a child process, which the parent ends at a time limit: an exchange over NCCL
that hangs cannot be cancelled, and a CUDA error makes a process useless. The parents only use a store, so
a pair that hangs, or a device that fails, is a row with its reason, and the others are measured.

The program needs the standard library and torch only.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

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
#: Bytes of the first exchange, which gives the bytes for about _TIMED_S; one message is at most _MESSAGE.
_TRIAL = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_TIMED_S = 0.3
_MESSAGE = 256 * 2**20

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
    pairs: tuple[Pair, ...] = ()

    @property
    def limit_s(self) -> float:
        """Time limit of the measurement."""
        return EXCHANGE_S if self.check == "exchange" else MEASURE_S


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


def tasks(nodes: int) -> list[Task]:
    """Return all steps of the program, which every rank computes alike."""
    checks = [("compute", ()), ("memory", ()), *(("exchange", pairs) for pairs in rounds(nodes))]
    twice = itertools.product(range(1, PASSES + 1), checks)
    return [Task(number, which, check, pairs) for number, (which, (check, pairs)) in enumerate(twice)]


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

    def window() -> float:
        done, began = 0, time.perf_counter()
        while (now := time.perf_counter()) < began + WINDOW_S or not done:
            for _ in range(_CALLS[device.type]):
                work()
            _synchronize(device)
            done += _CALLS[device.type]
        return done * amount / (now - began)

    work()
    _synchronize(device)
    return median(window() for _ in range(WINDOWS))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Exchange:
    """Messages of two nodes in both directions at once; ``place`` is 0 or 1.

    A pair has a process group of its own, so that a pair that hangs stops no other pair.
    """

    def __init__(self, store: Store, place: int, device: torch.device) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        # The parent is faster than this time limit, and then knows the reason.
        limit = timedelta(seconds=2 * EXCHANGE_S)
        # With device_id, NCCL connects now. Otherwise it would also connect a ring for collectives.
        own = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=place, world_size=2, timeout=limit, device_id=own)
        self._place, self._device = place, device
        self._sent = torch.empty(_TRIAL[device.type], dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)

    def rate(self) -> float:
        """Return the bytes/s that this node receives.

        A first exchange lets connections reach their full speed, and uses up the credit of traffic shapers.
        """
        trial = self._timed(len(self._sent))
        count = torch.tensor([round(_TIMED_S * len(self._sent) / trial)], device=self._device)
        theirs = torch.empty_like(count)
        self._swap(count, theirs)
        most = max(2**20, int(torch.minimum(count, theirs).item()))
        self._sent = torch.empty(min(most, _MESSAGE), dtype=torch.uint8, device=self._device)
        self._received = torch.empty_like(self._sent)
        rate = most / self._timed(most)
        self._meet()  # both have received everything before one of them closes its connection
        dist.destroy_process_group()  # not after an error, because it can hang then
        return rate

    def _timed(self, count: int) -> float:
        """Exchange ``count`` bytes and return the seconds."""
        self._meet()  # a fast receiver waits for the slow one, so that both begin together
        began = time.perf_counter()
        while count:
            part = min(count, len(self._sent))
            self._swap(self._sent[:part], self._received[:part])
            count -= part
        _synchronize(self._device)
        return time.perf_counter() - began

    def _meet(self) -> None:
        self._swap(*(torch.zeros(8, dtype=torch.int64, device=self._device) for _ in range(2)))
        _synchronize(self._device)

    def _swap(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        partner = 1 - self._place
        operations = [dist.P2POp(dist.irecv, received, partner), dist.P2POp(dist.isend, sent, partner)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


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
        answers.send((None, _error_line(error)))
    os._exit(0)  # a process with a broken GPU or connection can hang at its end


def _error_line(error: Exception) -> str:
    """Return the first line of an error, and NCCL's own error if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    nccl = f"; {lines[-1]}" if "Last error:" in lines[:-1] else ""
    return f"{type(error).__name__}: {lines[0]}{nccl}"


class Member(NamedTuple):
    """A rank that joined: its host, and its number on this host."""

    host: str
    local_rank: int


class Job:
    """The ranks of this job, which meet in a store."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.rank, self.size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        self.local_rank = int(env.get("LOCAL_RANK", "0"))
        self._env = env
        self._prefix = f"nodecheck/{env.get('TORCHELASTIC_RUN_ID', '')}"
        self.store = self.open_store(serve=self.rank == 0)
        host = env.get("SLURMD_NODENAME") or socket.gethostname()
        self.store.set(f"join/{self.rank}", json.dumps([host, self.local_rank]))
        if self.rank == 0:
            joined = self.collect("join", range(self.size), timeout_s=JOIN_S)
            self.store.set("joined", json.dumps(joined))
        found = json.loads(self.wait("joined", timeout_s=2 * JOIN_S))
        self.members = {int(rank): Member(*facts) for rank, facts in found.items()}
        self.nodes = list(dict.fromkeys(member.host for member in self.members.values()))
        #: The rank of each node that exchanges its messages.
        self.senders = [
            min(rank for rank, member in self.members.items() if member.host == node) for node in self.nodes
        ]

    def open_store(self, *, serve: bool = False) -> Store:
        """Connect to the store, which rank 0 or torchrun's agent serves."""
        if self.size == 1:
            return HashStore()
        of_agent = self._env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        limit = timedelta(seconds=JOIN_S)
        address, port = self._env["MASTER_ADDR"], int(self._env["MASTER_PORT"])
        store = TCPStore(
            address, port, None, is_master=serve and not of_agent, timeout=limit, wait_for_workers=False
        )
        return PrefixStore(self._prefix, store)

    def wait(self, key: str, *, timeout_s: float) -> bytes:
        """Return the value of a key as soon as it is set."""
        self.store.wait([key], timedelta(seconds=timeout_s))
        return self.store.get(key)

    def collect(self, name: str, ranks: Sequence[int], *, timeout_s: float) -> dict[int, Any]:
        """Return what the ranks posted as ``name``, by rank, without the ranks that posted nothing."""
        keys = {rank: f"{name}/{rank}" for rank in ranks}
        try:
            self.store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items()}

    def missing(self) -> dict[int, str]:
        """Return the ranks that did not join, with the names of their hosts if the launcher names them."""
        hosts = [host for host in self._env.get("BENCH_HOSTS", "").split(",") if host]
        per_node = int(self._env.get("LOCAL_WORLD_SIZE", "1"))
        absent = [rank for rank in range(self.size) if rank not in self.members]
        known = len(hosts) * per_node == self.size
        return {rank: hosts[rank // per_node] if known else f"the host of rank {rank}" for rank in absent}

    def perform(self, task: Task, device: str, idle: Sequence[str]) -> Outcome | None:
        """Make this rank's measurement; return None if it has none in this task."""
        node = self.nodes.index(self.members[self.rank].host)
        if self.nodes[node] in idle:
            return None
        if task.check != "exchange":
            work = compute_rate if task.check == "compute" else memory_rate
            return in_child(lambda: work(self._device(device)), limit_s=task.limit_s)
        pair = next((pair for pair in task.pairs if node in pair), None)
        if pair is None or self.senders[node] != self.rank or any(self.nodes[one] in idle for one in pair):
            return None
        return in_child(partial(self._exchange, task, pair, node, device), limit_s=task.limit_s)

    def _exchange(self, task: Task, pair: Pair, node: int, device: str) -> float:
        store = PrefixStore(f"exchange/{task.number}/{pair[0]}-{pair[1]}", self.open_store())
        return Exchange(store, pair.index(node), self._device(device)).rate()

    def _device(self, kind: str) -> torch.device:
        if kind == "cpu":
            return torch.device("cpu")
        # Some launchers show each rank only its own GPU.
        return torch.device("cuda", self.local_rank % max(1, torch.cuda.device_count()))


class Rows:
    """Rank 0's record: writes the rows, and knows which nodes are left out of further tasks."""

    def __init__(self, job: Job, path: Path) -> None:
        self._job = job
        self._file = path.open("w", encoding="utf-8", newline="")
        self._csv = csv.writer(self._file)
        self._csv.writerow(COLUMNS)
        self.silent: set[str] = set()
        #: By pass and node: the partners with which an exchange failed or succeeded.
        self._partners: dict[tuple[int, str], dict[str, bool]] = {}
        for rank, host in job.missing().items():
            self._write(1, "answered", host, rank, "", Outcome(None, f"rank {rank} did not join"))
        for member in job.members.values():
            self._write(1, "answered", member.host, member.local_rank, "", Outcome(1.0))
        self._file.flush()

    def idle(self, which_pass: int) -> list[str]:
        """Return the nodes that stopped answering, and those whose exchanges with two nodes failed.

        Their partners would only wait for the time limit.
        """
        lonely = {
            node
            for (of_pass, node), partners in self._partners.items()
            if of_pass == which_pass and len(partners) > 1 and not any(partners.values())
        }
        return sorted(self.silent | lonely)

    def add(self, task: Task, outcomes: Mapping[int, Outcome | None]) -> None:
        """Write the outcomes of a task; a rank without an entry did not answer in time."""
        job = self._job
        for rank, member in job.members.items():
            if rank not in outcomes and member.host not in self.silent:
                why = Outcome(None, f"rank {rank} stopped answering")
                self._write(task.which_pass, "answered", member.host, member.local_rank, "", why)
                self.silent.add(member.host)
        if task.check == "exchange":
            for a, b in task.pairs:
                self._add_pair(
                    task, job.nodes[a], job.nodes[b], [outcomes.get(job.senders[n]) for n in (a, b)]
                )
        else:
            for rank, outcome in outcomes.items():
                member = job.members[rank]
                if outcome is not None:
                    self._write(task.which_pass, task.check, member.host, member.local_rank, "", outcome)
        self._file.flush()

    def _add_pair(self, task: Task, a: str, b: str, both: Sequence[Outcome | None]) -> None:
        ends = [outcome for outcome in both if outcome is not None]
        if len(ends) < 2:
            return  # the pair was left out, or a node stopped answering, which says nothing about the link
        rates = [outcome.value for outcome in ends if outcome.value is not None]
        if len(rates) == 2:
            outcome = Outcome(min(rates))
        else:
            # A node that did not hang knows the reason: its partner only waited for it.
            failed = [(node, end) for node, end in zip((a, b), ends, strict=True) if end.value is None]
            known = "; ".join(f"{node}: {end.reason}" for node, end in failed if not end.hung)
            outcome = Outcome(None, known or failed[0][1].reason)
        for node, partner in ((a, b), (b, a)):
            self._partners.setdefault((task.which_pass, node), {})[partner] = outcome.value is not None
        self._write(task.which_pass, "exchange", a, 0, b, outcome)

    def _write(self, which: int, check: str, node: str, rank: int, partner: str, outcome: Outcome) -> None:
        value = "" if outcome.value is None else f"{outcome.value:.6g}"
        self._csv.writerow((which, check, node, rank, partner, value, outcome.reason))


def measure(job: Job, device: str, path: Path) -> None:
    """Perform all tasks with the other ranks; rank 0 writes the rows."""
    rows = Rows(job, path) if job.rank == 0 else None
    for task in tasks(len(job.nodes)):
        name = f"result/{task.number}"
        if rows is not None:
            job.store.set(f"begin/{task.number}", json.dumps(rows.idle(task.which_pass)))
        # Rank 0 may have to wait for a rank that hangs, after its own measurement.
        idle = json.loads(job.wait(f"begin/{task.number}", timeout_s=2 * (MEASURE_S + _ANSWER_S)))
        job.store.set(f"{name}/{job.rank}", json.dumps(job.perform(task, device, idle)))
        if rows is not None:
            present = [rank for rank, member in job.members.items() if member.host not in rows.silent]
            found = job.collect(name, present, timeout_s=task.limit_s + _ANSWER_S)
            rows.add(task, {rank: None if end is None else Outcome(*end) for rank, end in found.items()})
    job.store.set(f"end/{job.rank}", "0")
    if rows is not None:  # the store ends with this process: wait for the others
        present = [rank for rank, member in job.members.items() if member.host not in rows.silent]
        job.collect("end", present, timeout_s=_ANSWER_S)


def main() -> None:
    """Measure with the other ranks of the job."""
    parser = argparse.ArgumentParser(description="Measure the nodes of a job, and the links between them.")
    parser.add_argument("file", type=Path, help="the CSV file that rank 0 writes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    try:
        measure(Job(os.environ), options.device, options.file)
    except (dist.DistError, RuntimeError) as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        # With another exit code, the launcher would end the ranks that can still be measured.
        print(f"nodecheck: {_error_line(error)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
