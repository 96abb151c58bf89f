"""Nodes of a preflight, each a process on this machine, with planted faults."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from bench.preflight import program, worker
from bench.preflight.pairs import Exchange


def run(
    argv: list[str],
    fault: Callable[[set[int]], None],
    is_hung: Callable[[set[int]], bool],
    hung_s: float = 1.5,
) -> int:
    """Run a node; ``fault`` is called in the child process in the middle of an exchange of two nodes.

    The parent waits ``hung_s`` for a pair that hangs, and the usual time for other pairs.
    """
    greet, perform_exchange, perform = Exchange._greet, program.NodeTasks.exchange, worker.Worker.perform
    pair: set[int] = set()

    def exchange(tasks: program.NodeTasks, task: worker.Task) -> float:
        pair.clear()
        pair.update(pair_of(task))
        return perform_exchange(tasks, task)

    def faulty(messages: Exchange) -> None:
        greet(messages)
        fault(pair)

    def patient(one: worker.Worker, task: worker.Task, *, limit_s: float) -> dict:
        hangs = task["kind"] == "exchange" and is_hung(pair_of(task))
        return perform(one, task, limit_s=hung_s if hangs else limit_s)

    Exchange._greet, program.NodeTasks.exchange, worker.Worker.perform = faulty, exchange, patient
    program.FIRST_BYTES = {"gloo": 2**16, "nccl": 2**20}
    program.product_size = lambda device: 64
    program.NodeTasks.checks = lambda tasks, task: {"memory": 1e9}
    sys.argv = ["preflight", argv[argv.index("--run-dir") + 1], "--threshold", "0"]
    return program.main()


def pair_of(task: worker.Task) -> set[int]:
    return {int(node) for node in task["meeting"].rpartition("/")[2].split("-")}


def hang() -> None:
    time.sleep(600)


def two_broken_links(argv: list[str]) -> int:
    """Nodes 0 and 1 hang in their exchange, and so do 2 and 3, where NCCL's watchdog aborts node 3."""

    def fault(pair: set[int]) -> None:
        if pair == {2, 3} and os.environ["SLURM_PROCID"] == "3":
            os.abort()
        if pair in ({0, 1}, {2, 3}):
            hang()

    return run(argv, fault, lambda pair: pair in ({0, 1}, {2, 3}))


def first_node_is_isolated(argv: list[str]) -> int:
    """Every exchange with node 0 hangs, which is the node that writes the result."""
    return run(argv, lambda pair: hang() if 0 in pair else None, lambda pair: 0 in pair)


def hangs_over_nccl(argv: list[str]) -> int:
    """Node 1 leaves its exchange with node 0 after the first message, so node 0 waits on its GPU."""

    def fault(pair: set[int]) -> None:
        if pair == {0, 1} and os.environ["SLURM_PROCID"] == "1":
            hang()

    return run(argv, fault, lambda pair: pair == {0, 1}, hung_s=12.0)
