"""The child process that performs a node's tasks: it answers, it is replaced, and it ends with its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from bench.preflight.worker import Perform, Task, Worker
from tests.workload.conftest import wait_for


def tasks() -> Perform:
    def perform(task: Task) -> int:
        if task["kind"] == "hang":
            time.sleep(600)
        if task["kind"] == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        if task["kind"] == "fail":
            raise RuntimeError("CUDA error: no kernel image\nmore")
        return os.getpid()

    return perform


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("hang", {"error": "the hang did not end in 0.1 s", "hung": True}),
        ("end", {"error": "the process ended by SIGKILL"}),
        ("fail", {"error": "RuntimeError: CUDA error: no kernel image"}),
    ],
)
def test_after_a_failure_the_next_task_has_a_new_process(capfd, kind, answer):
    worker = Worker(tasks)
    first = worker.perform({"kind": "work"}, limit_s=30)["values"]
    assert worker.perform({"kind": kind}, limit_s=0.1 if kind == "hang" else 30) == answer
    assert not psutil.pid_exists(first), "neither running nor a zombie"
    second = worker.perform({"kind": "work"}, limit_s=30)["values"]
    worker.close()
    assert first != second
    assert f"bench: error: {kind}: {answer['error']}" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_that_hangs_ends_with_its_parent(number):
    def parent(connection: Connection) -> None:
        worker = Worker(tasks)
        connection.send(worker.perform({"kind": "work"}, limit_s=30)["values"])
        worker.perform({"kind": "hang"}, limit_s=600)

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=parent, args=(theirs,))
    process.start()
    child = psutil.Process(ours.recv())
    os.kill(process.pid or 0, number)
    process.join()
    wait_for(lambda: not child.is_running() or child.status() == "zombie", "the end of the child")
