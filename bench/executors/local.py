"""The harness's end of the fork server that starts ranks on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from bench.errors import BenchError
from bench.executors.base import Outcome
from bench.executors.outcome import ended_from_outside, outcome_of
from bench.executors.serial import SerialExecutor
from bench.matrix.cell import Cell, Run
from bench.matrix.workload import to_arguments
from bench.study.layout import RunFolder
from bench.study.ledger import RunState
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import Attempt
from bench.units import human_duration

GRACE_S = 7.0
_ANOTHER_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ForkServer:
    """A server process with torch loaded, which runs one request after another.

    Raises:
        BenchError: on construction and in :meth:`run`, where the process is gone, with its words.
    """

    def __init__(self, env: Mapping[str, str], *, setup: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile(prefix="bench-server-")  # noqa: SIM115 (closed in close)
        self._pending = b""
        self._process = subprocess.Popen(
            _command(env, setup),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=launch_environment(env),
            start_new_session=True,  # Ctrl-C reaches the harness, which ends things in order
        )
        if self._answer(deadline=None).get("ready") is None:
            raise self._failed("did not start")

    @property
    def alive(self) -> bool:
        """Whether the server can take another request."""
        return self._process.poll() is None

    def run(self, request: Mapping[str, Any], *, limit_s: float) -> int | None:
        """Return the exit code of a run, or None when its time limit ended it."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + limit_s
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("is gone") from None
        leader = self._answer(deadline=None)["started"]
        try:
            answer = self._answer(deadline=deadline)
        except BaseException:
            self._stop(leader)
            raise
        if "ended" in answer:
            return int(answer["ended"])
        self._stop(leader)
        return None

    def close(self) -> None:
        """Let the server leave; what it still runs is ended by it."""
        assert self._process.stdin is not None
        if self._errors.closed:  # it failed before, and was let go of then
            return
        try:
            self._process.stdin.close()
            self._process.wait(timeout=2 * GRACE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def _stop(self, leader: int) -> None:
        """End the run's processes: ask them, then insist."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, number)
            if "ended" in self._answer(deadline=time.monotonic() + GRACE_S):
                return
        self._process.kill()

    def _answer(self, *, deadline: float | None) -> dict[str, Any]:
        """Return the next answer; an empty one at the deadline."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], wait_s)[0]:
                return {}
            block = os.read(pipe, 65536)
            if not block:
                raise self._failed("ended")
            self._pending += block
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> BenchError:
        """Let go of the server and return the error that says why it is gone."""
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read()[-3000:].decode("utf-8", "replace").strip() or "it said nothing"
        self._let_go()
        return BenchError(
            f"the process that starts ranks {what} (exit code {code}):\n{words}",
            remedy="does `python -m bench.workload --help` work here, after the set-up lines?",
        )


def _command(env: Mapping[str, str], setup: Sequence[str]) -> list[str]:
    module = ["-m", "bench.workload.fork_server"]
    if not setup:
        return [sys.executable, *module]
    # As in the cell's script: what a set-up line loads must not change what is measured.
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    lines = ["set -e", *setup, "set +e", *exports, "exec python -m bench.workload.fork_server"]
    return ["bash", "-c", "\n".join(lines)]


def launch_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without another launcher's words, plus the cell's."""
    own = {name: value for name, value in os.environ.items() if name not in _ANOTHER_LAUNCHERS}
    # Ranks of one machine meet on the loopback, whatever its host name resolves to.
    return {
        **own,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONUNBUFFERED": "1",
        **env,
    }


# A run as one process of this machine: a cell's script, started as a person would start it.
#
# For commands of the matrix, which are programs of their own: nothing can be forked for them.

#: How long processes may take to leave when asked to; torchrun gives its ranks most of it.
GRACE_S_SCRIPT = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def run_script(script: Path, folder: RunFolder, *, env: Mapping[str, str], limit_s: float) -> int | None:
    """Run ``bash script RUN_FOLDER`` to its end; its output goes to job.out and job.err.

    Returns:
        the exit code; None where the time limit ended it.
    """
    # The python that submits runs the command, unless a set-up line provides another.
    environment = launch_environment({"BENCH_PYTHON": sys.executable, **env})
    with folder.out.open("ab") as out, folder.err.open("ab") as err:
        process = subprocess.Popen(
            ["bash", str(script), str(folder.path.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the harness, which ends things in order
            preexec_fn=_end_with_parent,
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end_with_parent() -> None:
    """Have the kernel ask this process to end when the harness dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a run: ask its leader, then insist, its ranks (sessions of their own) included."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=GRACE_S_SCRIPT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for left in family:
        if left.is_running():
            left.kill()


# Runs on this machine, one after another, through a fork server that has torch loaded.
#
# The server (``bench.workload.fork_server``) runs each cell as torchrun would; see there. One
# server lives per environment of cells, because libraries read variables when they load.
# A command of the matrix is no program that the server could fork: its script is started.

MAX_SERVERS = 2


class LocalExecutor(SerialExecutor):
    """Runs of one study on this machine."""

    def __init__(self, study: PlannedStudy) -> None:
        super().__init__(study)
        self._servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}

    def command_line(self, run: Run) -> str:
        """Return the command that does by hand what the fork server does for ``run``."""
        return shlex.join(["bash", str(self.study.script(run.cell_id))])

    def _carry_out(self, attempt: Attempt) -> Outcome:
        limit_s = int(self.study.plan["time_limit_s"])
        if attempt.cell.command is None:
            code = self._by_server(attempt, limit_s)
        else:
            script = self.study.script(attempt.cell.cell_id)
            code = run_script(script, attempt.folder, env={}, limit_s=limit_s)
        if code is None:
            reason = f"the time limit of {human_duration(limit_s)} was reached"
            return Outcome(RunState.FAILED, ended_from_outside(attempt.folder, reason), "time-limit")
        return outcome_of(attempt.folder, attempt.cell, code)

    def _by_server(self, attempt: Attempt, limit_s: int) -> int | None:
        """Return the exit code of the built-in training; None at the time limit."""
        request = {
            "run_dir": str(attempt.folder.path.resolve()),
            "arguments": launch_arguments(attempt.cell, attempt.folder.path.resolve()),
            "ranks": attempt.cell.world_size,
            "env": {"BENCH_EXPECTED_WORLD_SIZE": str(attempt.cell.world_size)},
        }
        return self._server(attempt.cell).run(request, limit_s=limit_s)

    def _server(self, cell: Cell) -> ForkServer:
        threads = self.study.plan.get("cpus_per_task") or 1
        env = {**cell.env, "OMP_NUM_THREADS": str(threads), "BENCH_THREADS_PER_RANK": str(threads)}
        key = tuple(sorted(env.items()))
        server = self._servers.pop(key, None)
        if server is None or not server.alive:
            while len(self._servers) >= MAX_SERVERS:
                self._servers.pop(next(iter(self._servers))).close()
            server = ForkServer(env, setup=self.study.plan.get("setup") or [])
        self._servers[key] = server  # the last used is the last to go
        return server

    def _close(self) -> None:
        for server in self._servers.values():
            server.close()


def launch_arguments(cell: Cell, run_dir: Path) -> list[str]:
    """Return the workload's command line for a cell, as the cell's script has it."""
    head = ["--run-dir", str(run_dir), "--launcher", cell.launcher, "--backend", cell.backend]
    return [*head, "--per-gpu-batch", str(cell.per_gpu_batch), *to_arguments(cell.workload)]
