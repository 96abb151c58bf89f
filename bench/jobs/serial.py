"""Execute runs one after another in the process of `bench submit`, on this machine or from it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import psutil

from ..errors import BenchError, UnwritableError
from ..matrix.cell import Run
from ..study.conditions import parse_moment
from ..study.ledger import FailureClass, RunRecord, RunState, now, submit_lock
from ..study.run_json import Attempt, new_attempt, read_run, write_run
from .outcome import EndNote, Outcome, missing_results
from .scheduler import Callbacks, Records, Scheduler, add_unsaved, may_start, settle


class HostBusyError(BenchError):
    """A host is still executing another run. The new run is not started and stays ``planned``."""


class SerialScheduler(Scheduler):
    """Base class of schedulers that execute runs one after another in this process."""

    @abstractmethod
    def _execute(self, attempt: Attempt) -> Outcome:
        """Execute one attempt of a run and wait until it has ended.

        Raises:
            HostBusyError: the attempt was not started, because a host is busy; try again later.
            BenchError: the attempt cannot be started.
        """

    def submit(
        self, runs: Sequence[Run], *, seen: Records, callbacks: Callbacks, max_queued: int | None = None
    ) -> list[Run]:
        """Execute ``runs`` one after another; return an empty list: ``max_queued`` is ignored."""
        self._check(runs)
        with submit_lock(self.study.folder.lock), _signals_interrupt():
            records = self.poll()
            try:
                for run in runs:
                    if may_start(records[run.run_id], seen[run.run_id]) and self._has_hosts(run):
                        record = self._run(run, records[run.run_id], callbacks)
                        callbacks.on_end(run, record)
            finally:
                self._close()
        self._conclude()
        return []

    def poll(self) -> dict[str, RunRecord]:
        """Update the runs whose `bench submit` was killed, and return the records of all runs."""
        records = self.study.records()
        for record in records.values():
            if not record.state.active:
                continue
            if _is_orphan(record) or (
                not _has_process(record) and EndNote.read(self.study.run_folder(record)).exit_code is not None
            ):
                try:
                    self._settle_orphan(record)
                except UnwritableError as error:
                    add_unsaved(record, error)
        return records

    def _settle_orphan(self, record: RunRecord) -> None:
        """Record the end of a run whose `bench submit` no longer runs.

        The end time is that of run.json if it describes the end, else that of end.json, else unknown.
        """
        folder = self.study.run_folder(record)
        run = read_run(folder.path)[0] or {}
        # `bench submit` died after it wrote run.json, or the ledger's last event was lost.
        ended = run.get("state") in list(RunState) and RunState(run["state"]).ended
        if ended and parse_moment(run.get("ended_at")):
            record.restore(run)
            failure_class = FailureClass(record.failure_class) if record.failure_class else None
            outcome = Outcome(record.state, record.reason, failure_class, record.exit_code)
            settle(self.study, record, outcome, ended_at=run["ended_at"])
            return
        settle(self.study, record, self._orphan_outcome(record), ended_at=EndNote.read(folder).written_at)

    def cancel(self, runs: Sequence[Run]) -> int:
        """Stop the `bench submit` process that executes ``runs``; return the number of active runs."""
        records = self.poll()
        active = [records[run.run_id] for run in runs if records[run.run_id].state.active]
        for record in active:
            pid, host = record.details.get("pid"), record.details.get("host")
            if not _has_process(record):
                what = f"{self.study.folder.ledger}: no event names the process that executes {record.run_id}"
                raise BenchError(what, remedy="end this process, if it still runs")
            if host != os.uname().nodename:
                what = (
                    f"{record.run_id}: the `bench submit` that executes this run is process {pid} on {host}"
                )
                raise BenchError(what, remedy=f"run `bench cancel` on {host}")
            if pid and pid > 1 and _process_start(pid) == record.details["pid_started"]:  # ids are reused
                os.kill(pid, signal.SIGTERM)  # background processes of a shell often ignore SIGINT
        return len(active)

    def _check(self, runs: Sequence[Run]) -> None:
        """Raise BenchError if ``runs`` cannot be executed here; none has been started."""

    def _conclude(self) -> None:
        """Raise BenchError if some runs could not be started."""

    def _has_hosts(self, run: Run) -> bool:
        """Return whether the hosts of ``run`` can be used; an earlier failure can prevent it."""
        return True

    def _start_failed(self, attempt: Attempt, error: BenchError) -> None:
        """Handle a run that could not be started and is recorded as failed; by default, raise ``error``."""
        raise error

    def _close(self) -> None:
        """Release resources that are shared by several runs."""

    def _run(self, run: Run, record: RunRecord, callbacks: Callbacks) -> RunRecord:
        callbacks.on_start(run)  # can raise an error; no file of the run exists yet
        attempt = new_attempt(self.study, run, record)
        started = now()
        content = self._describe(
            attempt,
            state=str(RunState.RUNNING),
            submitted_at=started,
            started_at=started,
            pid=os.getpid(),
        )
        record = RunRecord(run.run_id, attempt.number, RunState.RUNNING)
        process = {
            "pid": os.getpid(),
            "pid_started": _process_start(os.getpid()),
            "host": os.uname().nodename,
        }
        self.study.ledger.append("started", run_id=run.run_id, attempt=attempt.number, **process)
        write_run(attempt.folder, content)
        try:
            outcome = self._execute(attempt)
        except KeyboardInterrupt:
            outcome = Outcome(RunState.CANCELLED, "stopped by the user", FailureClass.CANCELLED)
            settle(self.study, record, outcome, ended_at=now())
            raise
        except HostBusyError as error:
            self._withdraw(record, str(error), refused=True)
            raise
        except BenchError as error:
            outcome = Outcome(RunState.FAILED, str(error), FailureClass.NEVER_STARTED)
            settle(self.study, record, outcome, ended_at=now())
            self._start_failed(attempt, error)
            return record
        settle(self.study, record, outcome, ended_at=now())
        return record

    def _orphan_outcome(self, record: RunRecord) -> Outcome:
        folder = self.study.run_folder(record)
        exit_code = EndNote.read(folder).exit_code
        missing = missing_results(folder, self.study.cell_of(record.run_id)) if exit_code == 0 else ""
        if exit_code == 0 and not missing:
            return Outcome(RunState.COMPLETED, exit_code=0)
        reason = f"the `bench submit` process ({record.details.get('pid')}) was killed during this run"
        if exit_code is None:
            reason += ", which left no exit code in end.json"
        elif missing:
            reason += f"; {missing}"
        return Outcome(RunState.FAILED, reason, FailureClass.KILLED, exit_code)


def _has_process(record: RunRecord) -> bool:
    """Return whether the ledger names the `bench submit` process of a run."""
    return all(record.details.get(name) is not None for name in ("pid", "pid_started", "host"))


def _is_orphan(record: RunRecord) -> bool:
    """Return True if the `bench submit` process of a run was on this machine and no longer exists."""
    pid, host = record.details.get("pid"), record.details.get("host")
    if host != os.uname().nodename or pid is None:
        return False
    start, recorded = _process_start(pid), record.details.get("pid_started")
    return start is None or (recorded is not None and start != recorded)


def _process_start(pid: int) -> float | None:
    """Return the start time of a process (ids may be reused), or None if it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that the active run is shut down cleanly."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
