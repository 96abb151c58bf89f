"""Execute runs on this machine, one after another.

The built-in training runs in a fork server (``bench.workload.fork_server``), a process that has loaded torch
and starts ranks as torchrun would. Runs with different environment variables use different servers, because
libraries read the variables at import. A command that the matrix defines is executed by its script, without
the server.
"""

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

from ...errors import BenchError
from ...extras import install_line, missing_packages
from ...matrix.cell import Cell, Run
from ...matrix.workload import to_arguments
from ...measure.command_conditions import sampled_node
from ...study.layout import RunFolder
from ...study.ledger import FailureClass, RunState
from ...study.plan_json import PlannedStudy
from ...study.run_json import Attempt
from ...units import human_duration
from ..outcome import Outcome, process_outcome, with_workload_error
from ..serial import SerialScheduler

#: Maximum time in which the ranks of the built-in training must end after a signal.
RANKS_END_S = 7.0
#: Maximum time in which a command must end after SIGTERM. torchrun spends most of it waiting for ranks.
COMMAND_END_S = 10.0
MAX_SERVERS = 2
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class LocalScheduler(SerialScheduler):
    """Execute runs of one study on this machine."""

    def __init__(self, study: PlannedStudy) -> None:
        super().__init__(study)
        self._servers: dict[tuple[Sequence[str], ...], ForkServer] = {}

    def command_line(self, run: Run) -> str:
        """Return a shell command that executes ``run`` like :meth:`submit`, but without the fork server."""
        return shlex.join(["bash", str(self.study.script(run.cell_id))])

    def _check(self, runs: Sequence[Run]) -> None:
        """Raise BenchError if the built-in training cannot be imported here."""
        trains = any(self.study.cells[run.cell_id].command is None for run in runs)
        # Set-up lines can activate another Python; the fork server then reports what it lacks.
        if trains and not self.study.plan.get("setup") and (missing := missing_packages("train")):
            raise _cannot_train(sys.executable, missing)

    def _execute(self, attempt: Attempt) -> Outcome:
        limit_s = int(self.study.plan["time_limit_s"])
        if attempt.cell.command is None:
            code = self._run_in_server(attempt, limit_s)
        else:
            script = self.study.script(attempt.cell.cell_id)
            env = {**os.environ, **self._environment(attempt.cell)}
            unrecorded = attempt.cell.is_unrecorded
            with sampled_node(attempt.folder, env) if unrecorded else contextlib.nullcontext():
                code = run_script(script, attempt.folder, limit_s=limit_s)
        if code is None:
            reason = f"the time limit of {human_duration(limit_s)} was reached"
            reason = with_workload_error(attempt.folder, reason)
            return Outcome(RunState.FAILED, reason, FailureClass.TIME_LIMIT)
        return process_outcome(attempt.folder, attempt.cell, code)

    def _run_in_server(self, attempt: Attempt, limit_s: int) -> int | None:
        """Execute the built-in training; return its exit code, or None if the time limit was reached."""
        request = {
            "run_dir": str(attempt.folder.path.resolve()),
            "arguments": _workload_arguments(attempt.cell, attempt.folder.path.resolve()),
            "ranks": attempt.cell.world_size,
            "env": {"BENCH_EXPECTED_WORLD_SIZE": str(attempt.cell.world_size)},
        }
        return self._server(attempt.cell).run(request, limit_s=limit_s)

    def _environment(self, cell: Cell) -> dict[str, str]:
        """Return the variables that the harness sets for all runs of a cell."""
        threads = str(self.study.plan.get("cpus_per_task") or 1)
        return {**cell.env, "OMP_NUM_THREADS": threads, "BENCH_THREADS_PER_RANK": threads}

    def _server(self, cell: Cell) -> ForkServer:
        env, setup = self._environment(cell), self.study.plan.get("setup") or []
        key = (*sorted(env.items()), *setup)
        server = self._servers.pop(key, None)
        if server is None or not server.alive:
            while len(self._servers) >= MAX_SERVERS:
                self._servers.pop(next(iter(self._servers))).close()
            server = ForkServer(env, setup=setup)
        self._servers[key] = server  # the first key is the server that has been unused for the longest time
        return server

    def _close(self) -> None:
        for server in self._servers.values():
            server.close()


def _workload_arguments(cell: Cell, run_dir: Path) -> list[str]:
    arguments = ["--run-dir", str(run_dir), "--launcher", cell.launcher, "--backend", cell.backend]
    return [*arguments, "--per-gpu-batch", str(cell.per_gpu_batch), *to_arguments(cell.workload)]


class ForkServer:
    """Start a fork server and send it one request per run.

    Raises:
        BenchError: the server died (raised by :meth:`run`, too). The message contains the server's output.
    """

    def __init__(self, env: Mapping[str, str], *, setup: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile(prefix="bench-server-")  # noqa: SIM115 (closed in close)
        self._pending = b""
        self._process = subprocess.Popen(
            _server_command(env, setup),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_launch_environment(env),
            start_new_session=True,  # Ctrl-C reaches only this process, which shuts the run down cleanly
        )
        answer = self._answer(deadline=None)
        if "missing" in answer:
            self.close()
            raise _cannot_train(answer["python"], [answer["missing"]])
        if answer.get("ready") is None:
            raise self._failed("did not start")

    @property
    def alive(self) -> bool:
        """True if the server process is running and can execute another request."""
        return self._process.poll() is None

    def run(self, request: Mapping[str, Any], *, limit_s: float) -> int | None:
        """Execute a run; return its exit code, or None if it was stopped at the time limit."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + limit_s
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("no longer runs") from None
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
        """Stop the server and its ranks."""
        assert self._process.stdin is not None
        if self._errors.closed:  # already closed after a failure
            return
        try:
            self._process.stdin.close()
            self._process.wait(timeout=2 * RANKS_END_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def _stop(self, leader: int) -> None:
        """Send SIGTERM to the run's processes, and SIGKILL if they do not end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, number)
            if "ended" in self._answer(deadline=time.monotonic() + RANKS_END_S):
                return
        self._process.kill()

    def _answer(self, *, deadline: float | None) -> dict[str, Any]:
        """Return the server's next answer, or an empty dict if none arrives before the deadline."""
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
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._process.kill()
            raise self._failed(f"printed {line[:200].decode('utf-8', 'replace')!r} instead of an answer,")
        return answer

    def _failed(self, what: str) -> BenchError:
        """Close the pipes of a server that has died; return an error with the server's output."""
        code = self._process.wait()
        self._errors.seek(0)
        output = self._errors.read()[-3000:].decode("utf-8", "replace").strip() or "it printed nothing"
        self._release()
        return BenchError(
            f"the fork server, which starts the ranks, {what} (exit code {code}):\n{output}",
            remedy="check that `python -P -m ddp_scaling_bench.start workload --help` works here after the "
            "lines of cluster.setup",
        )


def _cannot_train(python: str, missing: Sequence[str]) -> BenchError:
    names = " and ".join(missing)
    remedy = f"run {install_line('train')}, or activate an environment with PyTorch in cluster.setup"
    return BenchError(f"the built-in training needs {names}, which {python} does not find", remedy=remedy)


def _server_command(env: Mapping[str, str], setup: Sequence[str]) -> list[str]:
    module = ["-P", "-m", "ddp_scaling_bench.start", "workload.fork_server"]
    if not setup:
        return [sys.executable, *module]
    # As in the cell's script, the cell's variables override variables that cluster.setup exports.
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    # Set-up lines may print: only the server writes to standard output, through which it answers.
    start = f"{shlex.join(['exec', 'python', *module])} >&3 3>&-"
    lines = ["exec 3>&1 >&2", "set -e", *setup, "set +e", *exports, start]
    return ["bash", "-c", "\n".join(lines)]


def _launch_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment plus ``env``, without launcher variables such as RANK."""
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    # Ranks on one machine communicate over the loopback, even if the host name resolves to another address.
    return {
        **inherited,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONUNBUFFERED": "1",
        **env,
    }


def run_script(script: Path, folder: RunFolder, *, limit_s: float) -> int | None:
    """Execute ``bash SCRIPT RUN_FOLDER``; return its exit code, or None if the time limit was reached."""
    # The command runs with this Python interpreter, unless cluster.setup provides another.
    environment = _launch_environment({"BENCH_PYTHON": sys.executable})
    words = ["bash", str(script), str(folder.path.resolve())]
    with folder.out.open("ab") as out, folder.err.open("ab") as err:
        return _wait(words, out=out, err=err, env=environment, limit_s=limit_s)


def _wait(
    words: Sequence[str], *, out: IO[bytes], err: IO[bytes], env: Mapping[str, str], limit_s: float
) -> int | None:
    """Execute a command and end all its processes; return its exit code, or None at the time limit."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=env,
        start_new_session=True,  # Ctrl-C reaches only this process, which shuts the run down cleanly
        preexec_fn=_end_with_parent,
    )
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_processes(process)


def _end_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_processes(process: subprocess.Popen[bytes]) -> None:
    """End a script and all its descendants, including those in other sessions."""
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        descendants = []
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=COMMAND_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for descendant in descendants:
        with contextlib.suppress(psutil.Error):  # it has ended
            for one in [*descendant.children(recursive=True), descendant]:  # some began in the meantime
                one.kill()


SCHEDULER = LocalScheduler
