"""Record how runs ended and which commands they executed, and execute runs one after another.

During a submission, each script that commands execute is read once, and git is called once for each folder
with such scripts. Jobs never call git.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..errors import BenchError, UnwritableError
from ..matrix.cell import Cell, Run
from ..matrix.workload import INTERPRETER, command_values, filled_words, runs_python, uses_python
from ..measure.command_conditions import write_environment
from ..secret_values import mask_text, without_secrets
from ..study.conditions import Neighbours, assess, parse_moment, read_disturbances, summary
from ..study.consistency import metrics_digest
from ..study.files import file_sha256
from ..study.layout import RunFolder
from ..study.ledger import FailureClass, RunRecord, RunState, class_of_failure, now, submit_lock
from ..study.plan_json import PlannedStudy
from ..study.run_json import Attempt, new_attempt, read_run, update_run, write_run
from .neighbours import beside_in_study, nodes_of
from .outcome import EndNote, Outcome, disk_is_full, missing_results

if TYPE_CHECKING:
    from ..doctor import Cause


#: Larger files, such as container images, are not scripts.
_MAX_SCRIPT_BYTES = 16 * 2**20
#: Time limit of all calls of git for one folder.
GIT_S = 5.0
# No locks and no file system monitor: git only reads, and starts no other program.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C")


class SubmittedCommands:
    """Describe the commands of one submission; each file and repository is read once."""

    def __init__(self, study: PlannedStudy) -> None:
        self._name, self._interpreter = study.folder.name, _interpreter(study)
        self._has_container = bool(study.plan.get("container"))
        self._script_of_word = cache(_is_script)
        self._sha256 = cache(file_sha256)
        self._git = cache(_git_state)

    def describe(self, cell: Cell) -> dict[str, Any]:
        """Return ``command`` and ``interpreter`` for a cell's run.json, or ``{}`` for the built-in training.

        ``script`` is the first word that is a file, or ``""`` if no word is a file, as for ``python -m``.
        Unknown values are None. Secrets are masked. ``interpreter`` is the Python interpreter with which the
        command begins, in a form that the job can call.
        """
        if cell.command is None:
            return {}
        words = filled_words(cell.command, command_values(cell, self._name))
        script = self._script(words)
        commit, is_dirty = self._git(Path(script))
        return {
            "command": {
                "name": cell.workload.get("command_name"),
                "words": without_secrets(words),
                "script": script,
                "script_sha256": self._sha256(Path(script)) if script else None,
                "git_commit": commit,
                "git_dirty": is_dirty,
            },
            "interpreter": self._interpreter_of(words),
        }

    def _interpreter_of(self, words: Sequence[str]) -> str | None:
        if self._has_container or not runs_python(words[0]):
            return None
        return self._interpreter if uses_python(words) else words[0]

    def _script(self, words: Sequence[str]) -> str:
        for at, word in enumerate(words):
            if word == "-m" and any(map(_starts_modules, words[:at])):
                return ""
            if self._script_of_word(word):
                return word
        return ""


def _interpreter(study: PlannedStudy) -> str | None:
    """Return the Python interpreter that jobs of the study can call, or None if it is unknown."""
    if not study.plan.get("setup"):
        return sys.executable
    return None if study.executor == "local" else "python"


def _starts_modules(word: str) -> bool:
    return runs_python(word) or word.rpartition("/")[2] == "torchrun"


def _is_script(word: str) -> bool:
    if INTERPRETER.fullmatch(word.rpartition("/")[2]) or _starts_modules(word):
        return False
    try:
        path = Path(word)
        return path.is_file() and path.stat().st_size <= _MAX_SCRIPT_BYTES
    except (OSError, ValueError):
        return False


def _git_state(script: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the script's repository, and whether tracked files differ from this commit.

    Both values are None if the repository does not track the script. Without a script, the repository
    of the working folder is used.
    """
    deadline = time.monotonic() + GIT_S
    folder = script.parent
    if script.name and _git(folder, ["ls-files", "--error-unmatch", "--", script.name], deadline) is None:
        return None, None
    commit = _git(folder, ["rev-parse", "--verify", "HEAD"], deadline)
    changes = None if commit is None else _git(folder, ["status", "--porcelain", "-uno"], deadline)
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, words: Sequence[str], deadline: float) -> str | None:
    """Return the output of git, or None if it fails or does not end before ``deadline``."""
    try:
        done = subprocess.run(
            [*_GIT, str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline - time.monotonic()),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


class QueueFullError(BenchError):
    """Slurm's limit on the number of jobs is reached. ``left`` contains the runs that were not submitted."""

    def __init__(self, message: str, *, remedy: str, left: Sequence[Run]) -> None:
        super().__init__(message, remedy=remedy)
        self.left = list(left)


@dataclass
class Callbacks:
    """Functions that an executor calls during a submission.

    ``on_start`` is called before a run is started. If it raises an exception, the submission ends.
    """

    on_start: Callable[[Run], None] = lambda run: None
    on_end: Callable[[Run, RunRecord], None] = lambda run, record: None
    on_message: Callable[[str], None] = lambda message: None


def settle(study: PlannedStudy, record: RunRecord, outcome: Outcome, *, ended_at: str | None) -> None:
    """Record how an attempt of a run ended: in its run.json, then in the ledger."""
    neighbours = None if study.executor == "slurm" else beside_in_study(study, record, ended_at=ended_at)
    event = settle_run_json(study, record, outcome, ended_at=ended_at, neighbours=neighbours)
    study.ledger.append_all([event])


def settle_run_json(
    study: PlannedStudy,
    record: RunRecord,
    outcome: Outcome,
    *,
    ended_at: str | None,
    event: str = "ended",
    neighbours: Neighbours | None = None,
) -> dict[str, Any]:
    """Write how an attempt ended into ``record`` and run.json; return the event for the ledger.

    ``neighbours`` describes the other jobs on the run's nodes, or None if these jobs were not determined.
    """
    folder = study.run_folder(record)
    failure = _explain_failure(folder) if outcome.state is RunState.FAILED else {"cause": None}
    cause = failure["cause"]
    completed = outcome.state is RunState.COMPLETED
    warnings = {"warnings": _find_warnings(folder)} if completed else {}
    record.state, record.reason = outcome.state, mask_text(outcome.reason)
    record.cause = cause["cause"] if cause else None
    record.failure_class = class_of_failure(outcome.failure_class, record.cause)
    record.exit_code = outcome.exit_code
    end = {
        "state": str(outcome.state),
        "reason": outcome.reason,
        "failure_class": record.failure_class,
        "exit_code": outcome.exit_code,
    }
    identity = {"run_id": record.run_id, "attempt": record.attempt}
    conditions = assess(
        folder,
        start=parse_moment(outcome.details.get("started_at")),
        end=parse_moment(ended_at),
        neighbours=neighbours,
        cores=study.cores_per_node(record.run_id),
    )
    record.disturbed = summary(read_disturbances(conditions) or ())
    if folder.path.is_dir():
        ending = {**end, **failure, **warnings, "ended_at": ended_at}
        digest = metrics_digest(folder) if completed else {}
        changes = {**ending, **digest, **conditions, **outcome.details}
        update_run(folder, changes, fallback=identity)
        _complete_environment(study, record, outcome)
    disturbed = {"disturbed": record.disturbed} if record.disturbed else {}
    times = {"started_at": outcome.details.get("started_at") or _started_at(folder), "ended_at": ended_at}
    return {"event": event, **identity, **end, **times, "cause": record.cause, **disturbed}


def _started_at(folder: RunFolder) -> str | None:
    started_at = (read_run(folder.path)[0] or {}).get("started_at")
    return started_at if isinstance(started_at, str) else None


def _complete_environment(study: PlannedStudy, record: RunRecord, outcome: Outcome) -> None:
    """If a run started but left no env.json, write one that lacks the values that only ranks know."""
    folder = study.run_folder(record)
    started = outcome.state in (RunState.COMPLETED, RunState.FAILED)
    if not started or outcome.failure_class is FailureClass.NEVER_STARTED or folder.env.is_file():
        return
    named = [host for host in nodes_of(read_run(folder.path)[0] or {}) if host != "?"]
    hosts = [os.uname().nodename] if study.executor == "local" else named
    with contextlib.suppress(UnwritableError):
        write_environment(folder, hosts=hosts)
        if outcome.state is RunState.COMPLETED:
            missing_results(folder, study.cell_of(record.run_id))  # adds the facts about a command's values


def add_unsaved(record: RunRecord, error: UnwritableError) -> None:
    """Add to the reason of a run's state that the state could not be saved."""
    record.reason = "; ".join(filter(None, (record.reason, f"not saved: {error.message}")))


def may_start(record: RunRecord, seen: RunRecord) -> bool:
    """Return False if a run is active, completed undisturbed, or was started since ``seen`` was read."""
    if record.state.active or (record.state is RunState.COMPLETED and not record.is_disturbed):
        return False
    return record.attempt == seen.attempt or record.state is RunState.PLANNED


def save_states(study: PlannedStudy, records: Mapping[str, RunRecord]) -> None:
    """Write the states of queued and running attempts into run.json, which the analysis reads."""
    for record in records.values():
        if record.state.active:
            changes = {"state": str(record.state), "reason": record.reason}
            update_run(study.run_folder(record), changes)


def _explain_failure(folder: RunFolder) -> dict[str, Any]:
    """Return entries of a failed run's run.json: ``cause`` is the first cause in its logs, or None.

    If the disk is full, the run could not log that, so this is the cause that logs without one show.
    Without a known cause, ``log_line`` is the first of the last lines of the logs that look like errors.
    """
    from ..doctor import diagnose

    try:
        found = diagnose({log.name: log for log in folder.logs})
        if found.first_failure is None and disk_is_full(folder):
            found = diagnose({folder.err.name: f"{folder.err.name}: {os.strerror(errno.ENOSPC)}"})
    except OSError:
        return {"cause": None}
    if found.first_failure is not None:
        return {"cause": _as_json(found.first_failure)}
    return {"cause": None, **({"log_line": asdict(found.last_lines[0])} if found.last_lines else {})}


def _find_warnings(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the warnings in the logs of a run that succeeded; they can explain why the run is slow."""
    from ..doctor.diagnosis import find_warnings

    return [_as_json(warning) for warning in find_warnings(folder)]


def _as_json(cause: Cause) -> dict[str, Any]:
    """Return the entry of a cause in run.json."""
    names = ("cause", "path", "line", "evidence", "explanation", "remedy")
    return {name: getattr(cause, name) for name in names}


class HostBusyError(BenchError):
    """A host is still executing another run. The new run is not started and stays ``planned``."""


class SerialExecutor(ABC):
    """Base class of executors that execute runs one after another in this process."""

    def __init__(self, study: PlannedStudy) -> None:
        self.study = study
        self._commands = SubmittedCommands(study)

    @abstractmethod
    def command_line(self, run: Run) -> str:
        """Return the shell command that starts ``run``, for display."""

    @abstractmethod
    def _execute(self, attempt: Attempt) -> Outcome:
        """Execute one attempt of a run and wait until it has ended.

        Raises:
            HostBusyError: the attempt was not started, because a host is busy; try again later.
            BenchError: the attempt cannot be started.
        """

    def check_largest(self, runs: Sequence[Run]) -> None:  # noqa: B027 (nothing to check)
        """Test whether the scheduler accepts the largest run; without a scheduler, do nothing."""

    def stuck_runs(self, runs: Sequence[Run]) -> list[RunRecord]:
        """Return the ``runs`` that the scheduler will not start; without a scheduler, there are none."""
        return []

    def submit(
        self,
        runs: Sequence[Run],
        *,
        seen: Mapping[str, RunRecord],
        callbacks: Callbacks,
        max_queued: int | None = None,
    ) -> list[Run]:
        """Execute ``runs`` one after another; return an empty list, because no run is held back.

        ``seen`` are the records by which ``runs`` were chosen. A run that another process has started since
        then is left out. ``max_queued`` applies only to Slurm and is ignored here.
        """
        with submit_lock(self.study.folder.lock), _signals_interrupt():
            records = self.refresh()
            try:
                for run in runs:
                    if may_start(records[run.run_id], seen[run.run_id]) and self._has_hosts(run):
                        record = self._run(run, records[run.run_id], callbacks)
                        callbacks.on_end(run, record)
            finally:
                self._close()
        return []

    def refresh(self) -> dict[str, RunRecord]:
        """Update the runs whose `bench submit` was killed, and return the records of all runs."""
        records = self.study.records()
        for record in records.values():
            if not record.state.active:
                continue
            if not _has_process(record) and record.state is RunState.RUNNING:
                record.damages.append(f"{self.study.folder.ledger.name} does not name the run's process")
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
        if not folder.path.is_dir():
            ledger = self.study.folder.ledger.name
            record.damages.append(f"{ledger} names attempt {record.attempt}, which has no folder")
        run = read_run(folder.path)[0] or {}
        # `bench submit` died after it wrote run.json, or the ledger's last event was lost.
        if (
            run.get("state") in list(RunState)
            and RunState(run["state"]).ended
            and parse_moment(run.get("ended_at"))
        ):
            record.restore(run)
            outcome = Outcome(record.state, record.reason, _failure_class(record), record.exit_code)
            settle(self.study, record, outcome, ended_at=run["ended_at"])
            return
        settle(self.study, record, self._orphan_outcome(record), ended_at=EndNote.read(folder).written_at)

    def cancel(self, runs: Sequence[Run]) -> int:
        """Stop the `bench submit` process that executes ``runs``; return the number of active runs."""
        records = self.refresh()
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

    def _has_hosts(self, run: Run) -> bool:
        """Return whether the hosts of ``run`` can be used; an earlier failure can prevent it."""
        return True

    def _description(self, attempt: Attempt) -> dict[str, Any]:
        return {}

    def _start_failed(self, attempt: Attempt, error: BenchError) -> None:
        """Handle a run that could not be started and is recorded as failed; by default, raise ``error``."""
        raise error

    def _close(self) -> None:  # noqa: B027 (optional)
        """Release resources that are shared by several runs."""

    def _run(self, run: Run, record: RunRecord, callbacks: Callbacks) -> RunRecord:
        callbacks.on_start(run)  # can raise an error; no file of the run exists yet
        attempt = new_attempt(self.study, run, record)
        started = now()
        content = attempt.describe(
            self.study,
            state=str(RunState.RUNNING),
            submitted_at=started,
            started_at=started,
            pid=os.getpid(),
            **self._commands.describe(attempt.cell),
            **self._description(attempt),
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
            self._withdraw(record, attempt, str(error))
            raise
        except BenchError as error:
            outcome = Outcome(RunState.FAILED, str(error), FailureClass.NEVER_STARTED)
            settle(self.study, record, outcome, ended_at=now())
            self._start_failed(attempt, error)
            return record
        settle(self.study, record, outcome, ended_at=now())
        return record

    def _withdraw(self, record: RunRecord, attempt: Attempt, reason: str) -> None:
        """Record that an attempt was not started; the run's next attempt has the same number."""
        self.study.ledger.append(
            "withdrawn", run_id=record.run_id, attempt=record.attempt, reason=reason, refused=True
        )
        write_run(attempt.folder, attempt.describe(self.study, state=str(RunState.PLANNED), reason=reason))

    def _orphan_outcome(self, record: RunRecord) -> Outcome:
        folder = self.study.run_folder(record)
        exit_code = EndNote.read(folder).exit_code
        cell_id = next(run.cell_id for run in self.study.runs if run.run_id == record.run_id)
        missing = missing_results(folder, self.study.cells[cell_id]) if exit_code == 0 else ""
        if exit_code == 0 and not missing:
            return Outcome(RunState.COMPLETED, exit_code=0)
        reason = f"the `bench submit` process ({record.details.get('pid')}) was killed during this run"
        if exit_code is None:
            reason += ", which left no exit code in end.json"
        elif missing:
            reason += f"; {missing}"
        return Outcome(RunState.FAILED, reason, FailureClass.KILLED, exit_code)


def _failure_class(record: RunRecord) -> FailureClass | None:
    return FailureClass(record.failure_class) if record.failure_class else None


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
