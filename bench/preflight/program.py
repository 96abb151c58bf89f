"""The program of a preflight job: one process per node measures the node and exchanges messages with others.

Rank 0 announces each task in the store, in which all nodes also post their results. If a node is lost,
only its own results are missing. Rank 0 writes all values after each task, so that earlier values are
kept if the job is killed.

The tasks themselves are performed by a child process of each node (see worker.py). If an exchange hangs, or
NCCL aborts its process, rank 0 still writes the result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..measure.node import host_name
from ..study.layout import PreflightFolder
from ..study.preflight import write_measured, write_result
from ..workload.failures import WorkloadError
from ..workload.rendezvous import Launch, launch_from
from . import checks
from .checks import devices, gpu_state, memory_rate, product_rate, product_size, use_all_cores
from .pairs import exchange_rate
from .verdict import (
    FAULTS,
    RATES,
    Measured,
    Pair,
    Step,
    assess,
    failing,
    judge,
    pairs_again,
    ring_steps,
    uneven_directions,
)
from .worker import Perform, Task, Worker

#: Number of windows per check, whose median is the result, and their number if a failed check is repeated.
WINDOWS, WINDOWS_AGAIN = 5, 9
#: Time for which rank 0 waits for nodes that have not joined.
JOIN_S = 60.0
#: Time of an exchange at the usual rate.
_EXCHANGE_S = 0.3
#: Time after which an exchange counts as hung. It includes the creation of the pair's process group, which
#: takes seconds with NCCL.
HUNG_S = 30.0
#: Bytes of the first exchanges, which show how many bytes later exchanges send.
FIRST_BYTES = {"gloo": 4 * 2**20, "nccl": 64 * 2**20}


class Meeting:
    """The nodes that joined: their ``ranks``, and their ``names`` by rank."""

    def __init__(self, launch: Launch, host: str) -> None:
        self.rank = launch.rank
        self._store = _open_store(launch, serve=launch.rank == 0)
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

    def announce(self, task: Task) -> None:
        """Let all nodes perform a task; called on rank 0."""
        self._store.set(f"task/{self._tasks + 1}", json.dumps(task))

    def next_task(self, *, timeout_s: float) -> dict[str, Any]:
        """Wait for the next task that rank 0 announces."""
        self._tasks += 1
        key = f"task/{self._tasks}"
        self._store.wait([key], timedelta(seconds=timeout_s))
        task: dict[str, Any] = json.loads(self._store.get(key))
        return task

    @property
    def task_name(self) -> str:
        """A name of the current task that is unique in this job."""
        return f"task/{self._tasks}"

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


def _open_store(launch: Launch, *, serve: bool) -> Store:
    if launch.world_size == 1:
        return HashStore()
    return TCPStore(
        launch.address,
        launch.port,
        launch.world_size,
        is_master=serve,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,
    )


#: Time after the start of the job at which no further task begins; the job's time limit is 180 s.
END_S = 165.0
#: Time of the repeated checks of a node.
_CHECKS_AGAIN_S = 2 * WINDOWS_AGAIN * checks.WINDOW_S
#: Time for a node to end a child that hangs and to post its result.
_ANSWER_S = 10.0


def child_of(launch: Launch) -> Perform:
    """Return the function that performs tasks in the child process of a node."""
    return NodeTasks(launch).perform


class NodeTasks:
    """What the child process of a node does; a task's ``kind`` is the name of a method."""

    def __init__(self, launch: Launch) -> None:
        use_all_cores()
        self._launch = launch
        self._devices = devices()
        self._store: Store | None = None

    def perform(self, task: Task) -> Any:
        """Perform a task and return its values."""
        return getattr(self, task["kind"])(task)

    def facts(self, task: Task) -> dict[str, int]:
        """Return the number of GPUs, and a size of matrices for :meth:`checks`."""
        return {"gpus": torch.cuda.device_count(), "size": product_size(self._devices[0])}

    def checks(self, task: Task) -> dict[str, float | None]:
        """Measure this node."""
        rates = {
            "matrix-product": product_rate(self._devices, task["size"], windows=task["windows"]),
            "memory": memory_rate(self._devices, windows=task["windows"]),
        }
        return {**rates, **gpu_state(self._devices, task["size"])}

    def exchange(self, task: Task) -> float:
        """Exchange messages with the partner; return the bytes/s received."""
        self._store = self._store or _open_store(self._launch, serve=False)
        return exchange_rate(
            PrefixStore(task["meeting"], self._store),
            task["place"],
            self._devices[0] if task["backend"] == "nccl" else torch.device("cpu"),
            backend=task["backend"],
            count=task["bytes"],
            timeout_s=2 * task["limit_s"],  # the parent is faster, and then knows why
        )


class Node:
    """The process of one node, whose child performs the tasks that rank 0 announces."""

    def __init__(self, launch: Launch) -> None:
        self._worker = Worker(partial(child_of, launch))
        self.has_ended = False

    def perform(self, task: dict[str, Any], meeting: Meeting) -> None:
        """Perform a task and post its result."""
        if task["kind"] == "end":
            self.has_ended = True
            meeting.post({"values": {}})
            self._worker.close()
        elif task["kind"] == "exchange":
            self._exchange(task, meeting)
        else:
            meeting.post(self._worker.perform(task, limit_s=task["limit_s"]))

    def _exchange(self, task: dict[str, Any], meeting: Meeting) -> None:
        """Perform the exchange of this node's pair, if it has one in this step."""
        me = meeting.ranks.index(meeting.rank)
        pair = next((pair for pair in task["step"] if me in pair), None)
        if pair is None:
            meeting.post({"values": None})
            return
        mine = {"place": pair.index(me), "meeting": f"{meeting.task_name}/{pair[0]}-{pair[1]}"}
        meeting.post(self._worker.perform({**task, **mine}, limit_s=task["limit_s"]))


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
        # All nodes multiply matrices of the same size.
        size = next((found["size"] for found in self._add("facts", {}) if found), None)
        if size is not None:
            self._add("checks", {"size": size, "windows": WINDOWS})
            self._exchanges()
        if self._failing_checks() and self._left_s > _CHECKS_AGAIN_S:
            self._add("checks", {"size": size, "windows": WINDOWS_AGAIN})
        write_result(self._folder, self.result())
        self._perform("end", {}, limit_s=0.0)  # the store ends with this process: wait for the others

    def result(self) -> dict[str, Any]:
        """Return the content of result.json."""
        moment = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        verdict = assess(self.measured, threshold=self._threshold)
        return {"schema": 1, "job_id": os.environ.get("SLURM_JOB_ID"), "time": moment, **verdict}

    def _perform(self, kind: str, task: Task, *, limit_s: float) -> list[dict[str, Any] | None]:
        """Let all nodes perform a task; return their results, with None for nodes that did not answer."""
        self._meeting.announce({"kind": kind, "limit_s": limit_s, **task})
        self._node.perform(self._meeting.next_task(timeout_s=1), self._meeting)
        found = self._meeting.results(timeout_s=limit_s + _ANSWER_S)
        for host, result in zip(self.measured.hosts, found, strict=True):
            if result is None and host not in self.measured.silent:
                self.measured.silent.append(host)
        return found

    def _add(self, kind: str, task: Task) -> list[dict[str, Any] | None]:
        """Perform a task that measures checks, add its values to earlier values, and write all values."""
        results = self._perform(kind, task, limit_s=max(5.0, min(90.0, self._left_s)))
        found = [None if result is None else result.get("values") for result in results]
        for host, result in zip(self.measured.hosts, results, strict=True):
            self.measured.errors.pop(host, None)
            if result is not None and "error" in result:
                self.measured.errors[host] = result["error"]
        for check in (*RATES, *FAULTS):
            values = [None if one is None else one.get(check) for one in found]
            if any(value is not None for value in values):
                self.measured.passes.setdefault(check, []).append(values)
        write_measured(self._folder, self.measured.as_json())
        return found

    def _failing_checks(self) -> bool:
        return bool(self.measured.errors) or any(
            failing(passes, check=check, threshold=self._threshold)
            for check, passes in self.measured.passes.items()
        )

    def _exchanges(self) -> None:
        """Exchange messages in the ring, then again between suspects."""
        nodes = len(self.measured.hosts)
        if nodes < 2:
            return
        backend = "nccl" if all(self.measured.passes.get("gpus", [[0]])[0]) else "gloo"
        ring = ring_steps(nodes)
        first = FIRST_BYTES[backend]
        rates: dict[Pair, float] = {}
        self._exchange(ring[:1], first, backend, rates)
        count = max(first, round(median(rates.values()) * _EXCHANGE_S)) if rates else first
        # A pair that hung would do so again, and is only measured again at the end.
        untried = [[pair for pair in step if pair not in self.measured.failures] for step in ring]
        self._exchange(untried, count, backend, self.measured.exchange)
        self._exchange(self._again(), count, backend, self.measured.again)

    def _again(self) -> list[Step]:
        if len(self.measured.hosts) == 2:
            uneven = uneven_directions(self.measured.exchange, threshold=self._threshold)
            return [[(0, 1)]] if uneven or self.measured.failures else []
        rates = self.measured.rates
        return pairs_again(rates, judge(rates, threshold=self._threshold))

    def _exchange(self, steps: Sequence[Step], count: int, backend: str, rates: dict[Pair, float]) -> None:
        """Exchange ``count`` bytes in each pair; add the bytes/s to ``rates``, by (receiver, sender).

        Record the pairs that failed. All pairs of a step have ended before the next step begins.
        """
        for step in steps:
            present = [pair for pair in step if not self._has_silent(pair)]
            if not present or self._left_s < HUNG_S + _ANSWER_S:
                continue  # the others remain unmeasured
            task = {"step": present, "bytes": count, "backend": backend}
            results = self._perform("exchange", task, limit_s=HUNG_S)
            for a, b in present:
                rates |= self._of_pair((a, b), results[a], results[b])
            write_measured(self._folder, self.measured.as_json())

    def _of_pair(
        self, pair: Pair, first: dict[str, Any] | None, second: dict[str, Any] | None
    ) -> dict[Pair, float]:
        """Return the rates of a pair that exchanged messages, else record why it did not."""
        if first is None or second is None:
            return {}  # a node stopped answering, which says nothing about the link
        a, b = pair
        failed = {node: result for node, result in ((a, first), (b, second)) if "error" in result}
        if not failed:
            self.measured.failures.pop(pair, None)
            return {(a, b): first["values"], (b, a): second["values"]}
        # A node that did not hang knows the reason: its partner only waited for it.
        known = {node: result for node, result in failed.items() if not result.get("hung")}
        words = [f"{self.measured.hosts[node]}: {result['error']}" for node, result in known.items()]
        self.measured.failures[pair] = "; ".join(words) or next(iter(failed.values()))["error"]
        return {}

    def _has_silent(self, pair: Pair) -> bool:
        return any(self.measured.hosts[node] in self.measured.silent for node in pair)


def check_this_machine(folder: PreflightFolder, *, threshold: float) -> None:
    """Measure this machine alone and write the result."""
    launch = Launch("single", 0, 0, 1)
    node, end = Node(launch), time.time() + END_S
    meeting = Meeting(launch, host_name(os.environ))
    Coordinator(node, meeting, folder, threshold=threshold, end=end).measure([])


def main() -> int:
    """Measure this node and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the preflight")
    parser.add_argument("--threshold", type=float, required=True)
    options = parser.parse_args()
    began = float(os.environ.get("BENCH_PREFLIGHT_BEGAN") or time.time())
    try:
        launch = launch_from(os.environ)
        node = Node(launch)
        meeting = Meeting(launch, host_name(os.environ))
    except (WorkloadError, dist.DistError, RuntimeError) as error:
        print(f"bench: error: {error}", file=sys.stderr, flush=True)
        return 1
    if launch.rank == 0:
        folder, end = PreflightFolder(options.folder), began + END_S
        coordinator = Coordinator(node, meeting, folder, threshold=options.threshold, end=end)
        coordinator.measure(_missing(launch, meeting))
        return 0
    while not node.has_ended:
        node.perform(meeting.next_task(timeout_s=END_S), meeting)
    return 0


def _missing(launch: Launch, meeting: Meeting) -> list[str]:
    """Return the hosts of the ranks that did not join."""
    absent = [rank for rank in range(launch.world_size) if rank not in meeting.names]
    hosts = launch.expected_hosts
    return [hosts[rank] if rank < len(hosts) else f"rank {rank}" for rank in absent]
