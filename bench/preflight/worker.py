"""A child process that performs tasks, so that its parent survives a task that hangs or ends the process.

An exchange over NCCL that hangs cannot be cancelled: a kernel waits on the GPU, and after a timeout NCCL's
watchdog aborts the process. A CUDA error leaves a process that cannot use the GPU any more. The parent kills
such a child, and the next task gets a new one.

The parent must not use CUDA, because a process that was forked after that cannot use it. It can then be
forked quickly, with torch imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from ..measure.exchange import error_line
from ..workload.fork_server import die_with_parent

#: Time for a killed process to disappear. A process that waits in a driver may stay for longer.
_KILL_S = 5.0

Task = Mapping[str, Any]
Perform = Callable[[Task], Any]


class Worker:
    """A child process, forked at once. ``prepare`` is called in each new child; it returns the function."""

    def __init__(self, prepare: Callable[[], Perform]) -> None:
        self._prepare = prepare
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._start()

    def perform(self, task: Task, *, limit_s: float) -> dict[str, Any]:
        """Perform a task in the child; return ``{"values": ...}``, or ``{"error": REASON}`` if it failed.

        ``hung`` is also in the answer if the child did not answer in time. After a failure, the child is
        killed.
        """
        connection = self._connection or self._start()
        answer: dict[str, Any] = {"error": f"the {task['kind']} did not end in {limit_s:.3g} s", "hung": True}
        try:
            connection.send(task)
            if connection.poll(limit_s):
                answer = connection.recv()
        except (EOFError, OSError):
            answer = {"error": f"the process ended{self._signal_words()}"}
        if "error" in answer:
            print(f"bench: error: {task['kind']}: {answer['error']}", file=sys.stderr, flush=True)
            self.close()
        return answer

    def close(self) -> None:
        """Kill the child, if there is one."""
        if self._process is None or self._connection is None:
            return
        self._connection.close()
        self._process.kill()
        self._process.join(_KILL_S)
        self._process = self._connection = None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        arguments = (self._prepare, theirs, ours, os.getpid())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._connection = ours
        return ours

    def _signal_words(self) -> str:
        assert self._process is not None
        self._process.join(_KILL_S)
        code = self._process.exitcode
        return f" by {signal.Signals(-code).name}" if code is not None and code < 0 else ""


def _serve(prepare: Callable[[], Perform], connection: Connection, parents: Connection, parent: int) -> None:
    """Perform tasks until the parent closes its end of the pipe, or ends."""
    die_with_parent(parent)  # also if this process hangs
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    perform = prepare()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            os._exit(0)  # a lost node must not delay the end
        try:
            answer = {"values": perform(task)}
        except (RuntimeError, OSError, MemoryError, ValueError) as error:
            answer = {"error": error_line(error)}
        connection.send(answer)
