"""The interface of all schedulers; which commands runs execute, and the record of how runs ended.

During a submission, each script that commands execute is read once, and git is called once for each folder
with such scripts. Jobs never call git.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BenchError, UnwritableError
from ..matrix.cell import Cell, Run
from ..matrix.workload import INTERPRETER, command_values, filled_words, runs_python, uses_python
from ..measure.command_conditions import write_environment
from ..study.conditions import Neighbours, assess, parse_moment, read_disturbances, summary
from ..study.files import file_sha256
from ..study.layout import RunFolder
from ..study.ledger import FailureClass, RunRecord, RunState, final_failure_class
from ..study.plan_json import PlannedStudy
from ..study.run_json import Attempt, read_run, update_run
from ..units import join_names
from ..variables import shown_variables
from .neighbours import beside_in_study, nodes_of
from .outcome import Outcome, disk_is_full, missing_results

if TYPE_CHECKING:
    from ..doctor import Cause


Records = Mapping[str, RunRecord]

#: Larger files, such as container images, are not scripts.
_MAX_SCRIPT_BYTES = 16 * 2**20
#: Time limit of git for one folder.
GIT_S = 5.0
# No locks and no file system monitor: git only reads, and starts no other program.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
_DESCRIBE = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


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
        Unknown values are None. Placeholders of variables that are not shown are kept. ``interpreter`` is
        the Python interpreter with which the command begins, in a form that the job can call.
        """
        if cell.command is None:
            return {}
        values = command_values(cell, self._name)
        words = filled_words(cell.command, values)
        unknown = [f"env.{name}" for name, own in shown_variables(cell.as_json()).items() if own is None]
        hidden = {name: f"{{{name}}}" for name in unknown}
        script = self._script(words)
        commit, is_dirty = self._git(Path(script).parent)
        return {
            "command": {
                "name": cell.workload.get("command_name"),
                "words": filled_words(cell.command, values | hidden),
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
    return None if study.scheduler.one_node else "python"


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


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of a folder's repository, and whether tracked files differ from this commit.

    Both values are None if there is no commit, or git does not answer in time.
    """
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(folder), *_DESCRIBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    if done.returncode:
        return None, None
    commit, _, dirty = done.stdout.strip().partition("-")
    return commit, bool(dirty)


class QueueFullError(BenchError):
    """The limit on the number of jobs is reached. ``left`` contains the runs that were not submitted."""

    def __init__(self, message: str, *, remedy: str, left: Sequence[Run]) -> None:
        super().__init__(message, remedy=remedy)
        self.left = list(left)


@dataclass
class Callbacks:
    """Functions that a scheduler calls during a submission.

    ``on_start`` is called before a run is started. If it raises an exception, the submission ends.
    """

    on_start: Callable[[Run], None] = lambda run: None
    on_end: Callable[[Run, RunRecord], None] = lambda run, record: None
    on_message: Callable[[str], None] = lambda message: None


def settle(study: PlannedStudy, record: RunRecord, outcome: Outcome, *, ended_at: str | None) -> None:
    """Record how an attempt ended, without accounting: in its run.json, then in the ledger."""
    neighbours = beside_in_study(study, record, ended_at=ended_at)
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
    from ..doctor.diagnosis import find_warnings

    folder = study.run_folder(record)
    failure = _explain_failure(folder) if outcome.state is RunState.FAILED else {"cause": None}
    end = _record_end(record, outcome, failure["cause"])
    completed = outcome.state is RunState.COMPLETED
    # Warnings in the logs of a run that succeeded can explain why it is slow.
    warnings = {"warnings": list(map(_as_json, find_warnings(folder)))} if completed else {}
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
        changes = {**ending, **conditions, **outcome.details}
        update_run(folder, changes, fallback=identity)
        _complete_environment(study, record, outcome)
    disturbed = {"disturbed": record.disturbed} if record.disturbed else {}
    started_at = outcome.details.get("started_at") or (read_run(folder.path)[0] or {}).get("started_at")
    times = {"started_at": started_at if isinstance(started_at, str) else None, "ended_at": ended_at}
    return {"event": event, **identity, **end, **times, "cause": record.cause, **disturbed}


def _record_end(record: RunRecord, outcome: Outcome, cause: Mapping[str, Any] | None) -> dict[str, Any]:
    """Write the end of an attempt into ``record``; return it as run.json and the ledger contain it."""
    record.state, record.reason = outcome.state, outcome.reason
    record.cause = cause["cause"] if cause else None
    record.failure_class = final_failure_class(outcome.failure_class, record.cause)
    record.exit_code = outcome.exit_code
    return {
        "state": str(outcome.state),
        "reason": outcome.reason,
        "failure_class": record.failure_class,
        "exit_code": outcome.exit_code,
    }


def _complete_environment(study: PlannedStudy, record: RunRecord, outcome: Outcome) -> None:
    """If a run started but left no env.json, write one that lacks the values that only ranks know."""
    folder = study.run_folder(record)
    started = outcome.state in (RunState.COMPLETED, RunState.FAILED)
    if not started or outcome.failure_class is FailureClass.NEVER_STARTED or folder.env.is_file():
        return
    named = [host for host in nodes_of(read_run(folder.path)[0] or {}) if host != "?"]
    hosts = [os.uname().nodename] if study.scheduler.one_node else named
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


def _as_json(cause: Cause) -> dict[str, Any]:
    """Return the entry of a cause in run.json."""
    names = ("cause", "path", "line", "evidence", "explanation", "remedy")
    return {name: getattr(cause, name) for name in names}


def passed_variables(study: PlannedStudy) -> dict[str, str]:
    """Return the variables of ``cluster.env_from`` with their values; raise BenchError if one is not set."""
    names = study.plan.get("env_from") or []
    if missing := [name for name in names if name not in os.environ]:
        what = f"{join_names(missing, most=5)} of cluster.env_from: not set in this shell"
        remedy = (
            f"set {missing[0]} (read -rs {missing[0]}; export {missing[0]}), then run `bench submit` again"
        )
        raise BenchError(what, remedy=remedy)
    return {name: os.environ[name] for name in names}


class Scheduler(ABC):
    """Run the jobs of one study. Every event of a run is in the study's ledger before anything depends on it.

    To add a scheduler, see :mod:`bench.matrix.schedulers`.
    """

    def __init__(self, study: PlannedStudy) -> None:
        self.study = study
        self._commands = SubmittedCommands(study)

    @abstractmethod
    def command_line(self, run: Run) -> str:
        """Return the shell command that starts ``run``, for display."""

    @abstractmethod
    def submit(
        self, runs: Sequence[Run], *, seen: Records, callbacks: Callbacks, max_queued: int | None = None
    ) -> list[Run]:
        """Start ``runs`` in order while fewer than ``max_queued`` jobs are active; return the other runs.

        ``seen`` are the records by which ``runs`` were chosen. A run that another process has started since
        then is left out (:func:`may_start`).

        Raises:
            QueueFullError: the scheduler's limit on the number of jobs is reached.
            UnavailableError: the scheduler cannot be reached.
            BenchError: a run was rejected. Earlier runs stay submitted.
        """

    @abstractmethod
    def poll(self) -> dict[str, RunRecord]:
        """Find out how runs are, record the end of those that have ended, and return all runs' records."""

    @abstractmethod
    def cancel(self, runs: Sequence[Run]) -> int:
        """Cancel the active ones of ``runs``; return their number."""

    def stuck_runs(self, runs: Sequence[Run]) -> list[RunRecord]:
        """Return the submitted ``runs`` that the scheduler will not start unless somebody acts."""
        return []

    def queue_wait(self, cell_id: str, *, nodes: int, training_s: float) -> tuple[float | None, str, str]:
        """Estimate the wait of a training of ``training_s`` seconds on ``nodes`` nodes, similar to a cell.

        Return the wait in seconds or None, the source of the estimate, and a remark on it.
        """
        return None, "", f"executor {self.study.executor} estimates no wait"

    def _describe(self, attempt: Attempt, **values: Any) -> dict[str, Any]:
        """Return the initial content of an attempt's run.json; ``values`` are added."""
        return attempt.describe(self.study, **self._commands.describe(attempt.cell), **values)

    def _withdraw(self, record: RunRecord, reason: str, *, refused: bool = False) -> None:
        """Record that an attempt was not started; if ``refused``, the next attempt has the same number."""
        self.study.ledger.append(
            "withdrawn", run_id=record.run_id, attempt=record.attempt, reason=reason, refused=refused
        )
        record.state, record.reason = RunState.PLANNED, reason
        changes = {"state": str(record.state), "reason": reason, "started_at": None}
        update_run(self.study.run_folder(record), changes)


def scheduler_for(study: PlannedStudy, *, pack: bool = False) -> Scheduler:
    """Return the scheduler of the study's matrix; with ``pack``, one that submits one job for all runs."""
    spec = study.scheduler
    if pack and not spec.packs:
        what = f"--pack submits many runs as one Slurm job, but the matrix's executor is {study.executor}"
        raise BenchError(
            what, remedy="omit --pack: without Slurm, runs are always executed one after another"
        )
    module = import_module(f".{study.executor}.{'pack_submission' if pack else 'scheduler'}", __package__)
    scheduler: Scheduler = module.SCHEDULER(study)
    return scheduler
