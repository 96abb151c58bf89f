"""Runs on this machine, one after another, through a fork server that has torch loaded.

The server (``bench.workload.server``) runs each cell as torchrun would; see there. One
server lives per environment of cells, because libraries read variables when they load.
A command of the matrix is no program that the server could fork: its script is started.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from bench.executors.base import Attempt, Outcome, PlannedStudy
from bench.executors.evidence import ended_from_outside, outcome_of
from bench.executors.fork_server import ForkServer
from bench.executors.script import run_script
from bench.executors.serial import SerialExecutor
from bench.ledger import RunState
from bench.matrix.arguments import to_arguments
from bench.matrix.cell import Cell, Run
from bench.units import human_duration

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
