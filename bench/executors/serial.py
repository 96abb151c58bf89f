"""Runs that the harness itself carries out, one after another: what local and ssh share."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from bench.errors import BenchError
from bench.executors.base import Outcome, Watch, settle
from bench.executors.outcome import incomplete
from bench.matrix.cell import Cell, Run
from bench.study.files import read_json
from bench.study.ledger import RunRecord, RunState, now, submit_lock
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import Attempt, new_attempt, write_run


class NotNowError(BenchError):
    """A run cannot start as long as something else is at work; it stays planned."""


class SerialExecutor:
    """One run after another, as long as the harness lives; a subclass says how one is carried out."""

    def __init__(self, study: PlannedStudy) -> None:
        self.study = study

    def judge(self, runs: Sequence[Run]) -> None:
        """Let all pass: there is nobody to ask."""

    def submit(self, runs: Sequence[Run], *, watch: Watch, max_queued: int | None = None) -> list[Run]:
        """Run ``runs`` one after another; what was interrupted stays for the next call.

        Raises:
            BenchError: another harness is at work on the study, or runs cannot be started.
            KeyboardInterrupt: the run that was going on is ended and noted as cancelled.
        """
        with submit_lock(self.study.folder.lock), _stoppable():
            records = self.refresh()
            try:
                for run in runs:
                    if self._may_start(run):
                        record = self._run(run, records[run.run_id], watch)
                        watch.ended(run, record)
            finally:
                self._close()
        return []

    def refresh(self) -> dict[str, RunRecord]:
        """Settle the run that a harness left when it died; return every run's record."""
        records = self.study.records()
        for record in records.values():
            if record.state.active and _is_orphan(record):
                outcome = self._orphan_outcome(record)
                settle(self.study, record, outcome, ended_at=now())
        return records

    def cancel(self, runs: Sequence[Run]) -> int:
        """Stop the harness that is at work, as Ctrl-C would; return how many runs that ends.

        Raises:
            BenchError: it is at work on another machine.
        """
        records = self.refresh()
        going = [records[run.run_id] for run in runs if records[run.run_id].state.active]
        for record in going:
            pid, host = record.details.get("pid"), record.details.get("host")
            if host != os.uname().nodename or pid is None:
                what = f"{record.run_id}: the `bench submit` that runs it is process {pid} on {host}"
                raise BenchError(what, remedy="type `bench cancel` there")
            os.kill(int(pid), signal.SIGTERM)  # a shell lets what it starts with & ignore SIGINT
        return len(going)

    # -- what a subclass does ----------------------------------------------------------------

    def _may_start(self, run: Run) -> bool:
        """Whether a run can be tried, after what has happened to those before it."""
        return True

    def _carry_out(self, attempt: Attempt) -> Outcome:
        """Carry out one attempt and return how it ended.

        Raises:
            NotNowError: it was not begun, and can be tried later.
            BenchError: it cannot be begun.
        """
        raise AssertionError("a subclass carries out runs")

    def _described(self, attempt: Attempt) -> dict[str, Any]:
        """Return what run.json says beside the usual."""
        return {}

    def _failed_to_start(self, attempt: Attempt, error: BenchError) -> None:
        """Look at a run that could not be begun, which is settled: the study ends here."""
        raise error

    def _close(self) -> None:
        """Let go of what served several runs."""

    # -- one run ----------------------------------------------------------------------

    def _run(self, run: Run, record: RunRecord, watch: Watch) -> RunRecord:
        watch.started(run)  # it may stop us here, where nothing of the run has begun
        attempt = new_attempt(self.study, run, record)
        started = now()
        content = attempt.describe(
            self.study,
            state=str(RunState.RUNNING),
            submitted_at=started,
            started_at=started,
            pid=os.getpid(),
            **self._described(attempt),
        )
        record = RunRecord(run.run_id, attempt.number, RunState.RUNNING)
        me = {"pid": os.getpid(), "pid_started": _started(os.getpid()), "host": os.uname().nodename}
        self.study.ledger.append("started", run_id=run.run_id, attempt=attempt.number, **me)
        write_run(attempt.folder, content)
        try:
            outcome = self._carry_out(attempt)
        except KeyboardInterrupt:
            outcome = Outcome(RunState.CANCELLED, "stopped by the user", "cancelled")
            settle(self.study, record, outcome, ended_at=now())
            raise
        except NotNowError as error:
            self._withdraw(record, attempt, str(error))
            raise
        except BenchError as error:
            settle(self.study, record, Outcome(RunState.FAILED, str(error), "never-started"), ended_at=now())
            self._failed_to_start(attempt, error)
            return record
        settle(self.study, record, outcome, ended_at=now())
        return record

    def _withdraw(self, record: RunRecord, attempt: Attempt, reason: str) -> None:
        """Note that nothing came of an attempt; it is made again under its number."""
        self.study.ledger.append(
            "withdrawn", run_id=record.run_id, attempt=record.attempt, reason=reason, refused=True
        )
        content = attempt.describe(self.study, state=str(RunState.PLANNED), reason=reason)
        write_run(attempt.folder, content)

    # -- what a dead harness left -------------------------------------------------------

    def _orphan_outcome(self, record: RunRecord) -> Outcome:
        folder = self.study.folder.attempt(record.run_id, record.attempt)
        end = read_json(folder.end) or {}
        if end.get("exit_code") == 0 and not incomplete(folder, self._cell_of(record.run_id)):
            return Outcome(RunState.COMPLETED, exit_code=0)
        reason = f"the harness (process {record.details.get('pid')}) was killed while this run was going on"
        return Outcome(RunState.FAILED, reason, "killed", end.get("exit_code"))

    def _cell_of(self, run_id: str) -> Cell:
        cell_id = next(run.cell_id for run in self.study.runs if run.run_id == run_id)
        return self.study.cells[cell_id]


def _is_orphan(record: RunRecord) -> bool:
    """Whether the harness of a run is gone; one on another machine cannot be asked."""
    pid, host = record.details.get("pid"), record.details.get("host")
    if host != os.uname().nodename or pid is None:
        return False
    return _started(int(pid)) != record.details.get("pid_started")


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
