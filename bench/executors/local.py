"""Runs on this machine, one after another, through a fork server that has torch loaded.

The server (``bench.workload.server``) runs each cell as torchrun would; see there. One
server lives per environment of cells, because libraries read variables when they load.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from bench.errors import BenchError
from bench.executors.base import Attempt, Outcome, PlannedStudy, Watch, new_attempt, settle
from bench.executors.evidence import incomplete, outcome_of
from bench.executors.fork_server import ForkServer
from bench.layout import read_json, write_json
from bench.ledger import RunRecord, RunState, now, submit_lock
from bench.matrix.arguments import to_arguments
from bench.matrix.cell import Cell, Run
from bench.units import human_duration

MAX_SERVERS = 2


class LocalExecutor:
    """Runs of one study on this machine."""

    def __init__(self, study: PlannedStudy) -> None:
        self.study = study
        self._servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}

    def submit(self, runs: Sequence[Run], *, watch: Watch, max_queued: int | None = None) -> list[Run]:
        """Run ``runs`` one after another; what was interrupted stays for the next call.

        Raises:
            BenchError: another harness is at work on the study, or the server cannot start.
            KeyboardInterrupt: the run that was going on is ended and noted as cancelled.
        """
        with submit_lock(self.study.folder.lock), _stoppable():
            records = self.refresh()
            try:
                for run in runs:
                    record = self._run(run, records[run.run_id], watch)
                    watch.ended(run, record)
            finally:
                for server in self._servers.values():
                    server.close()
        return []

    def command_line(self, run: Run) -> str:
        """Return the command that does by hand what the fork server does for ``run``."""
        return shlex.join(["bash", str(self.study.script(run.cell_id))])

    def refresh(self) -> dict[str, RunRecord]:
        """Settle the run that a harness left when it died; return every run's record."""
        records = self.study.records()
        for record in records.values():
            if record.state.active and self._is_orphan(record):
                outcome = self._orphan_outcome(record)
                settle(self.study, record, outcome, ended_at=now())
        return records

    def cancel(self, runs: Sequence[Run]) -> int:
        """Stop the harness that is at work, as Ctrl-C would; return how many runs that ends."""
        records = self.refresh()
        going = [records[run.run_id] for run in runs if records[run.run_id].state.active]
        for record in going:
            if record.details.get("host") == os.uname().nodename:
                os.kill(int(record.details["pid"]), signal.SIGINT)
        return len(going)

    # -- one run ----------------------------------------------------------------------

    def _run(self, run: Run, record: RunRecord, watch: Watch) -> RunRecord:
        attempt = new_attempt(self.study, run, record)
        started = now()
        content = attempt.describe(
            self.study, state=str(RunState.RUNNING), submitted_at=started, started_at=started, pid=os.getpid()
        )
        record = RunRecord(run.run_id, attempt.number, RunState.RUNNING)
        me = {"pid": os.getpid(), "pid_started": _started(os.getpid()), "host": os.uname().nodename}
        self.study.ledger.append("started", run_id=run.run_id, attempt=attempt.number, **me)
        write_json(attempt.folder.run_json, content)
        watch.started(run)
        try:
            outcome = self._carry_out(attempt)
        except KeyboardInterrupt:
            settle(
                self.study,
                record,
                Outcome(RunState.CANCELLED, "stopped by the user", "cancelled"),
                ended_at=now(),
            )
            raise
        except BenchError as error:
            settle(self.study, record, Outcome(RunState.FAILED, str(error), "never-started"), ended_at=now())
            raise
        settle(self.study, record, outcome, ended_at=now())
        return record

    def _carry_out(self, attempt: Attempt) -> Outcome:
        server = self._server(attempt.cell)
        limit_s = int(self.study.plan["time_limit_s"])
        request = {
            "run_dir": str(attempt.folder.path.resolve()),
            "arguments": launch_arguments(attempt.cell, attempt.folder.path.resolve()),
            "ranks": attempt.cell.world_size,
            "env": {"BENCH_EXPECTED_WORLD_SIZE": str(attempt.cell.world_size)},
        }
        code = server.run(request, limit_s=limit_s)
        if code is None:
            reason = f"the time limit of {human_duration(limit_s)} was reached"
            return Outcome(RunState.FAILED, reason, "time-limit")
        return outcome_of(attempt.folder, attempt.cell, code)

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

    # -- what a dead harness left -------------------------------------------------------

    @staticmethod
    def _is_orphan(record: RunRecord) -> bool:
        pid, host = record.details.get("pid"), record.details.get("host")
        if host != os.uname().nodename or pid is None:
            return False
        return _started(int(pid)) != record.details.get("pid_started")

    def _orphan_outcome(self, record: RunRecord) -> Outcome:
        folder = self.study.folder.attempt(record.run_id, record.attempt)
        cell = self.study.cells[_cell_of(self.study, record.run_id)]
        end = read_json(folder.end) or {}
        if end.get("exit_code") == 0 and not incomplete(folder, cell):
            return Outcome(RunState.COMPLETED, exit_code=0)
        reason = f"the harness (process {record.details.get('pid')}) was killed while this run was going on"
        return Outcome(RunState.FAILED, reason, "killed", end.get("exit_code"))


def launch_arguments(cell: Cell, run_dir: Path) -> list[str]:
    """Return the workload's command line for a cell, as the cell's script has it."""
    head = ["--run-dir", str(run_dir), "--launcher", cell.launcher, "--backend", cell.backend]
    return [*head, "--per-gpu-batch", str(cell.per_gpu_batch), *to_arguments(cell.workload)]


def _cell_of(study: PlannedStudy, run_id: str) -> str:
    return next(run.cell_id for run in study.runs if run.run_id == run_id)


def _started(pid: int) -> float | None:
    """Return when a process started; None where it is gone. Tells a reused id apart."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Make a request to end (kill, a closed terminal) end things in order, as Ctrl-C does."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
