"""The program of a preflight job: one process per node measures the node, and exchanges messages with others.

Rank 0 announces each task and collects the results. It writes all values after each task, so that earlier
values are kept if the job is killed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.measure.node import host_name
from bench.measure.pairs import exchange_steps
from bench.preflight import checks
from bench.preflight.exchange import FIRST_BYTES, MAX_BYTES, Meeting
from bench.preflight.verdict import (
    EXCHANGES_S,
    FAULTS,
    RATES,
    Measured,
    Step,
    assess,
    exchange_s,
    failing,
    halving_rounds,
    judge,
    most_steps,
    pairs_again,
    uneven_directions,
)
from bench.study.layout import PreflightFolder
from bench.study.preflight import write_measured, write_result
from bench.workload.failures import WorkloadError
from bench.workload.launch import Launch, launch_from

#: Time after the start of the job at which no further task begins; the job's time limit is 180 s.
END_S = 165.0
#: Time of the checks of a node that are made again.
_CHECKS_AGAIN_S = 2 * checks.WINDOWS_AGAIN * checks.WINDOW_S


class Node:
    """The process of one node: performs tasks."""

    def __init__(self, meeting: Meeting) -> None:
        checks.use_all_cores()
        self._meeting = meeting
        self._devices = checks.devices()
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
            "matrix-product": checks.product_rate(self._devices, task["size"], windows=task["windows"]),
            "memory": checks.memory_rate(self._devices, windows=task["windows"]),
        }
        return {**rates, **checks.gpu_state(self._devices, task["size"])}

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
    """Rank 0: decides what is measured, and writes the results."""

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
        size = checks.product_size(checks.devices()[0])
        self._add("checks", {"size": size, "windows": checks.WINDOWS})
        self._exchanges()
        if self._failing_checks() and self._left_s > _CHECKS_AGAIN_S:
            self._add("checks", {"size": size, "windows": checks.WINDOWS_AGAIN})
        write_result(self._folder, self.result())
        self._perform("end", {})  # the store ends with this process: wait until the others need it no longer

    def result(self) -> dict[str, Any]:
        """Return the content of result.json."""
        moment = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        verdict = assess(self.measured, threshold=self._threshold)
        return {"schema": 1, "job_id": os.environ.get("SLURM_JOB_ID"), "time": moment, **verdict}

    def _perform(self, kind: str, task: dict[str, Any]) -> list[Any | None]:
        """Let all nodes perform a task; return their values, None for those that failed."""
        self._meeting.announce({"kind": kind, **task})
        self._node.perform(self._meeting.next_task(timeout_s=1))
        found = self._meeting.results(timeout_s=max(5.0, min(90.0, self._left_s)))
        for host, result in zip(self.measured.hosts, found, strict=True):
            if result is None and host not in self.measured.silent:
                self.measured.silent.append(host)
        return [None if result is None else result.get("values") for result in found]

    def _add(self, kind: str, task: dict[str, Any]) -> None:
        """Perform a task that measures checks; add its values to the measured ones, and write the file."""
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
        first = halving_rounds(nodes, max_steps=1)[0]
        count = self._message_bytes(self._exchanged(first, FIRST_BYTES, backend).values(), nodes)
        rounds = halving_rounds(nodes, max_steps=most_steps(nodes))
        self.measured.exchange = self._exchanged([step for one in rounds for step in one], count, backend)
        self.measured.rounds = len(rounds)
        if again := self._again():
            self.measured.again = self._exchanged(again, count, backend)
            self.measured.rounds += 1
        write_measured(self._folder, self.measured.as_json())

    def _again(self) -> list[Step]:
        if len(self.measured.hosts) == 2:
            uneven = uneven_directions(self.measured.exchange, threshold=self._threshold)
            return [[(0, 1)]] if uneven else []
        return pairs_again(judge(self.measured.rates, threshold=self._threshold))

    def _exchanged(self, steps: Sequence[Step], count: int, backend: str) -> dict[tuple[int, int], float]:
        limit_s = max(1.0, min(EXCHANGES_S, self._left_s - 20))
        task = {"steps": steps, "bytes": count, "backend": backend, "limit_s": limit_s}
        found = self._perform("exchange", task)
        return {
            (node, int(partner)): rate
            for node, received in enumerate(found)
            for partner, rate in (received or {}).items()
        }

    @staticmethod
    def _message_bytes(rates: Any, nodes: int) -> int:
        """Return the size of messages that take :func:`exchange_s`."""
        wanted = round(median(rates) * exchange_s(nodes)) if rates else FIRST_BYTES
        return max(FIRST_BYTES, min(MAX_BYTES, wanted))


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
