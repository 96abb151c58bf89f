"""What became of an attempt: one function makes an :class:`End` from its folder and its scheduler's status.

Sources, the most certain first: two starts in one folder; the scheduler, which knows signals, limits and
lost nodes; end.json, which the run's script writes (not after SIGKILL or on a lost node); messages of srun,
torchrun and slurmstepd in the logs; the results, without which no run has completed.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_scaling_bench.checksums import find_damage
from ddp_scaling_bench.files import read_json, read_table, regular_file
from ddp_scaling_bench.finding import Finding, messages
from ddp_scaling_bench.measure.failures import FAILURES, BrokenGroup, NoStep
from ddp_scaling_bench.measure.findings import NoWindow
from ddp_scaling_bench.run_folder import RunFolder

from ..matrix.cell import Cell
from ..study.conditions import parse_moment
from ..study.found import findings_of_env, read_findings
from ..study.ledger import End, FailureClass, RunState, final_class, now
from ..study.readings import readings_of
from ..study.reasons import (
    AfterMeasurement,
    DiskFull,
    EndedWithPack,
    ExitCode,
    JobSays,
    JobState,
    KilledRun,
    LogCause,
    LossDiverged,
    NoMetrics,
    NoOutput,
    NotWritable,
    Start,
    StartedTwice,
    Stopped,
    TimeLimit,
    TooFewEpochs,
    UnreadableMetrics,
)
from .contract import Status
from .heartbeats import stalled_ranks
from .logs import (
    exited_rank,
    first_failure,
    killed_rank,
    log_tail,
    logged_error,
    nccl_error,
    recorded_failures,
    reported_errors,
)
from .slurm.pack import run_status
from .slurm.states import EXIT_UNWRITABLE, state_from_notices

if TYPE_CHECKING:
    from ..doctor import Cause, Diagnosis

#: A disk with less free space is full: the files of a run no longer fit.
_LEAST_FREE_BYTES = 64 * 1024
_NOT_FINITE = ("nan", "inf", "-inf")
_MOST_STARTS = 4096
#: The causes of ends that the scheduler or the script reports, if no log shows another one.
_CAUSE_OF_CLASS = {
    FailureClass.TIME_LIMIT: "time-limit",
    FailureClass.NODE_FAILURE: "node-fail",
    FailureClass.OUT_OF_MEMORY: "oom-host",
    FailureClass.PREEMPTED: "preempted",
}


@dataclass(frozen=True)
class Note:
    """Content of end.json; values that are missing or of another type are empty.

    ``by`` says why the run ended: ``exit`` (on its own), ``limit`` (at its time limit), ``term`` or ``kill``
    (by a signal), ``measured`` (the script ended the program after its last window). ``stage`` is ``connect``
    if the ranks were never started, or ``lost`` if a host was lost, for these ``reasons``.
    """

    exit_code: int | None = None
    time: datetime | None = None
    by: str = ""
    stage: str = ""
    reasons: tuple[Finding, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Note:
        """Read the file, which may be missing."""
        content = read_json(path) or {}
        code = content.get("exit_code")
        return cls(
            exit_code=code if type(code) is int else None,
            time=parse_moment(content.get("time")),
            by=str(content.get("by") or ""),
            stage=str(content.get("stage") or ""),
            reasons=tuple(read_findings(content.get("reasons"))),
        )


def starts_of(folder: RunFolder) -> list[Start]:
    """Return the starts of an attempt's script, in order; ``bench`` stands for a withdrawn attempt."""
    try:
        with open(folder.start, "rb", opener=regular_file) as file:
            lines = file.read(_MOST_STARTS).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    return [
        Start(w[0], w[1], w[2], int(w[3]) if len(w) > 3 and w[3].isdigit() else 0)
        for w in words
        if len(w) > 2
    ]


def has_begun(folder: RunFolder) -> bool:
    """Return True if an attempt has left a trace of its start in its folder."""
    try:  # Unlike a test for one file, a listing is not answered from an outdated cache of NFS.
        names = {entry.name for entry in os.scandir(folder.path)}
    except OSError:
        return False
    starts = starts_of(folder)
    if starts and starts[0].job == "bench":
        return False
    return bool(starts) or bool(names & {folder.out.name, folder.err.name, folder.end.name})


def end_of(folder: RunFolder, cell: Cell, status: Status | None, *, packed: bool = False) -> End:
    """Return what became of an attempt.

    The state is ``planned`` if the attempt certainly never started, and ``unknown`` if neither the scheduler
    nor the folder says how it ended.

    Args:
        folder: the attempt's folder, which is only read.
        cell: the configuration of the run.
        status: what the scheduler says of its job; None if the scheduler knows no such job.
        packed: True if the job executes other runs, too.
    """
    note = _note_of_last_start(folder, status)
    if packed:
        job = status or Status(job_id="", state=RunState.UNKNOWN, settled=False)
        status = run_status(job, folder.path.parent.name, folder)
        end = _end_in_pack(folder, cell, job, status, note)
    elif status is None or status.state is RunState.UNKNOWN:
        end = _end_by_folder(folder, cell, note, status)
    else:
        end = _end_by_scheduler(folder, cell, note, status)
    if twice := started_twice(folder):
        end = End(state=RunState.FAILED, reasons=(twice,), failure_class=FailureClass.STARTED_TWICE)
    elif end.state.ended:
        end = _with_heartbeats(folder, cell, note, status, _after_measurement(folder, cell, note, end))
    if not end.state.ended:
        return end
    started, ended = (status.started, status.ended) if status else (None, None)
    return replace(
        end,
        **_findings(folder, end),
        started_at=as_iso(started) or next((one.time for one in starts_of(folder)), None),
        ended_at=as_iso(ended or note.time) or now(),
        hosts=status.hosts if status else "",
        accounting=status.accounting if status else "",
        settled=_is_settled(status),
    )


def _is_settled(status: Status | None) -> bool:
    """Return True if the scheduler will not know more about the end of a job."""
    forgotten = status is not None and status.state is RunState.UNKNOWN and not status.accounting
    return status is None or status.settled or forgotten


def as_iso(moment: datetime | None) -> str | None:
    """Format a UTC time in ISO 8601 with ``Z``."""
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


def started_twice(folder: RunFolder) -> StartedTwice | None:
    """Return which two starts wrote into a folder, or None; a requeued job moves its results aside."""
    starts = starts_of(folder)
    for first, second in itertools.pairwise(starts):
        if second.restarts <= first.restarts:
            return StartedTwice(first=first, second=second)
    return None


def _note_of_last_start(folder: RunFolder, status: Status | None) -> Note:
    """Return the content of end.json, or an empty note if it is from before a requeue of the job."""
    note = Note.read(folder.end)
    if status and status.restarts and status.started and note.time and note.time <= status.started:
        return Note()
    return note


# -- the scheduler knows how the job ended --------------------------------------------


def _end_by_scheduler(folder: RunFolder, cell: Cell, note: Note, status: Status) -> End:
    if status.state is RunState.COMPLETED:
        if missing := missing_results(folder, cell):
            reasons = (missing, JobSays(state="COMPLETED"), *status.reasons)
            failed = FailureClass.BAD_EXIT
            return End(state=RunState.FAILED, reasons=reasons, failure_class=failed, exit_code=0)
        return End(state=RunState.COMPLETED, reasons=status.reasons, exit_code=0)
    status = _with_notices(folder, status)
    state, failure_class = status.state, status.failure_class
    # sacct subtracts 128 from codes above 128; end.json contains the exact code.
    exit_code = note.exit_code or status.exit_code
    if failure_class not in (FailureClass.BAD_EXIT, FailureClass.KILLED, None):
        reasons = (*status.reasons, *reported_errors(folder))
        return End(state=state, reasons=reasons, failure_class=failure_class, exit_code=exit_code)
    if failure_class is FailureClass.BAD_EXIT and _lacks_output(folder, status, note):
        reasons = (NoOutput(), *status.reasons)
        return End(state=state, reasons=reasons, failure_class=FailureClass.NEVER_STARTED)
    killed = killed_rank(folder, cell.launcher)
    exited = None if killed else exited_rank(folder, cell.launcher)
    if killed or exited:  # the exit code of the first rank is the cause; srun ended the others with signals
        failure_class = FailureClass.KILLED if killed else FailureClass.BAD_EXIT
    why = (killed, *nccl_error(folder)) if killed else logged_error(folder) or _known(exited)
    if not why and note.exit_code is None and status.exit_code == EXIT_UNWRITABLE:
        why = (NotWritable(),)
    shown = (_with_code(one, exit_code) for one in status.reasons)
    return End(state=state, reasons=(*why, *shown), failure_class=failure_class, exit_code=exit_code)


def _known(reason: Finding | None) -> tuple[Finding, ...]:
    return () if reason is None else (reason,)


def _with_code(reason: Finding, code: int | None) -> Finding:
    """Return the reason of an exit code without doubt about it, if ``code`` is one of its two codes."""
    if isinstance(reason, ExitCode) and reason.or_more and code == 128 + (reason.exit_code or 0):
        return replace(reason, exit_code=code, or_more=False)
    return reason


def earlier_end(folder: RunFolder, status: Status) -> str:
    """Return why a job that waits again was stopped, according to its job.err, or ``""``."""
    found = state_from_notices("\n".join(log_tail(folder.err)), job_id=status.job_id)
    return f"{found.word}: {found.meaning}" if found else ""


def _with_notices(folder: RunFolder, status: Status) -> Status:
    """Correct a status without accounting if job.err shows that the job ran out of memory."""
    if not status.accounting or status.failure_class not in (FailureClass.BAD_EXIT, FailureClass.KILLED):
        return status
    found = state_from_notices("\n".join(log_tail(folder.err)), job_id=status.job_id)
    if found is None or found.failure_class is not FailureClass.OUT_OF_MEMORY:
        return status
    reasons = (JobState(state=found.word, meaning=found.meaning, by_notice=True), *status.reasons)
    return replace(status, failure_class=found.failure_class, reasons=reasons)


def _lacks_output(folder: RunFolder, status: Status, note: Note) -> bool:
    """Return True if a failed job has no output files, which Slurm creates before it starts the script.

    The exit code is then 1 (sacct of Slurm 20.11) or unknown (squeue).
    """
    return note.exit_code is None and status.exit_code in (1, None) and not has_begun(folder)


# -- only the folder knows how the job ended -------------------------------------------


def _end_by_folder(folder: RunFolder, cell: Cell, note: Note, status: Status | None) -> End:
    if note.exit_code == 0:
        return _end_of_process(folder, cell, 0)
    job_id = status.job_id if status else ""
    found = state_from_notices("\n".join(log_tail(folder.err)), job_id=job_id) if job_id else None
    if found is not None:
        state = RunState.FAILED if found.state.active else found.state  # requeued, and no longer in the queue
        return End(
            state=state,
            reasons=(JobState(state=found.word, meaning=found.meaning, by_notice=True, forgotten=True),),
            failure_class=found.failure_class,
            exit_code=note.exit_code,
        )
    if note.stage == "connect":
        return _failed(FailureClass.NEVER_STARTED, *(note.reasons or logged_error(folder)))
    if note.stage == "lost":
        return _failed(FailureClass.NODE_FAILURE, *note.reasons)
    if note.by == "limit":
        return _failed(FailureClass.TIME_LIMIT, TimeLimit(), *reported_errors(folder))
    if note.by == "kill":
        return _failed(FailureClass.KILLED, KilledRun(), *logged_error(folder), exit_code=note.exit_code)
    if note.by == "term":
        reasons = (Stopped(signal="SIGTERM"),)
        return End(state=RunState.CANCELLED, reasons=reasons, failure_class=FailureClass.CANCELLED)
    if note.exit_code is not None:
        return _end_of_process(folder, cell, note.exit_code, note.reasons)
    if status is not None and status.settled:
        return _failed(FailureClass.KILLED, KilledRun(wrote_end=False), *status.reasons)
    return End(state=RunState.UNKNOWN)


def _failed(failure_class: FailureClass, *reasons: Finding, exit_code: int | None = None) -> End:
    return End(state=RunState.FAILED, reasons=reasons, failure_class=failure_class, exit_code=exit_code)


def _end_of_process(folder: RunFolder, cell: Cell, exit_code: int, noted: tuple[Finding, ...] = ()) -> End:
    """Return the end of an attempt whose script ended with ``exit_code``, or for the reasons in end.json."""
    if exit_code == 0:
        missing = missing_results(folder, cell)
        return (
            _failed(FailureClass.BAD_EXIT, missing, exit_code=0)
            if missing
            else End(state=RunState.COMPLETED, exit_code=0)
        )
    if killed := killed_rank(folder, cell.launcher):
        return _failed(FailureClass.KILLED, killed, *nccl_error(folder), exit_code=exit_code)
    reasons = logged_error(folder)
    if not reasons:  # on a full disk, the run cannot log its error
        full = DiskFull(path=str(folder.path), error=os.strerror(errno.ENOSPC))
        reasons = _known(full if disk_is_full(folder) else None)
        reasons += noted or (ExitCode(exit_code=exit_code),)
    return _failed(FailureClass.BAD_EXIT, *reasons, exit_code=exit_code)


# -- the job executes many runs ---------------------------------------------------------


def _end_in_pack(folder: RunFolder, cell: Cell, job: Status, own: Status | None, note: Note) -> End:
    """Return the end of a run of a pack: its own end, or else that of the whole job."""
    if not has_begun(folder):
        if not (job.state.ended or job.settled):
            return End(state=RunState.UNKNOWN)
        reason = EndedWithPack(job=job.job_id, started=False)
        return End(state=RunState.PLANNED, reasons=(reason, *job.reasons))
    return _end_by_scheduler(folder, cell, note, own) if own else _end_by_folder(folder, cell, note, job)


# -- the measurement and the ranks -----------------------------------------------------


def _after_measurement(folder: RunFolder, cell: Cell, note: Note, end: End) -> End:
    """Return that the run has completed if it ended after its last window, however it then ended."""
    stopped = note.by == "measured"
    ends = (RunState.FAILED, RunState.COMPLETED) if stopped else (RunState.FAILED,)
    if end.state not in ends or not _is_measured(folder, cell):
        return end
    remarks = tuple(one for one in end.reasons if one.severity == "info")
    if stopped:
        return End(state=RunState.COMPLETED, reasons=remarks, exit_code=0)
    said = AfterMeasurement(said=messages(one for one in end.reasons if one not in remarks))
    return End(state=RunState.COMPLETED, reasons=(said, *remarks), exit_code=end.exit_code)


def _is_measured(folder: RunFolder, cell: Cell) -> bool:
    """Return whether the recorder of a command has written all planned windows; they count from then on.

    The built-in training measures more after its last window, and ends by itself.
    """
    if cell.is_unrecorded or cell.follows_plan or not folder.sums.exists():
        return False
    planned = [str(cell.workload.get("steps_per_epoch"))] * int(cell.workload.get("epochs") or 0)
    counts = [row.get("steps") for row in read_table(folder.metrics_csv)[1]]
    is_whole = bool(planned) and counts == planned and not find_damage(folder.path)
    return is_whole and missing_results(folder, cell) is None


def _with_heartbeats(folder: RunFolder, cell: Cell, note: Note, status: Status | None, end: End) -> End:
    """Add where the ranks hung, if they did until a time limit, or until they lost each other."""
    is_late = end.failure_class is FailureClass.TIME_LIMIT
    moments = [moment for moment in (note.time, status.ended if status else None) if moment]
    if end.state is not RunState.FAILED or (is_late and not moments):
        return end
    found = stalled_ranks(folder, cell.world_size, limited=min(moments) if is_late else None)
    if found is None or not (is_late or _is_lost(folder, end)) or _is_explained(folder):
        return end
    return replace(end, reasons=(found, *end.reasons))


def _is_lost(folder: RunFolder, end: End) -> bool:
    """Return whether ranks lost each other, or waited for each other until a time-out."""
    return any(isinstance(one, BrokenGroup) for one in end.reasons) or bool(nccl_error(folder))


def _is_explained(folder: RunFolder) -> bool:
    """Return whether a rank has recorded why it failed, or that another one had left the loop."""
    failures = recorded_failures(folder)
    return any(one.left if isinstance(one, BrokenGroup) else not one.effect for one in failures)


# -- results and causes -----------------------------------------------------------------


def disk_is_full(folder: RunFolder) -> bool:
    """Return whether the disk of a run's folder is full; False if that is unknown."""
    try:
        disk = os.statvfs(folder.path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_FREE_BYTES


def missing_results(folder: RunFolder, cell: Cell) -> Finding | None:
    """Return the results that a run with exit code 0 did not produce; None if none is missing."""
    if not cell.measures:
        return None
    if cell.reads_values:
        problem = readings_of(folder, cell).problem
        return UnreadableMetrics(problem=problem) if problem else None
    return _missing_rows(folder, cell.planned_epochs)


def _missing_rows(folder: RunFolder, planned: int | None) -> Finding | None:
    """Return what metrics.csv lacks; ``planned`` is the number of epochs unless the command chooses it."""
    rows = read_table(folder.metrics_csv)[1]
    if planned:
        if not folder.metrics_csv.exists():
            return NoMetrics()
        return TooFewEpochs(epochs=len(rows), planned=planned) if len(rows) < planned else None
    if rows:
        losses = ((str(row.get("epoch")), row.get("train_loss")) for row in rows)
        diverged = (LossDiverged(loss=loss, epoch=epoch) for epoch, loss in losses if loss in _NOT_FINITE)
        return next(diverged, None)
    failure = read_json(folder.path / FAILURES.format(0)) or {}
    found = [*read_findings(failure.get("findings")), *findings_of_env(read_json(folder.env))]
    return next((one for one in found if isinstance(one, NoStep | NoWindow)), NoMetrics(of_command=True))


def explain(folder: RunFolder, end: End) -> Diagnosis:
    """Return why an attempt failed: what its logs show and its ranks recorded, else what its end shows.

    The paths of logs are their names.

    Raises:
        OSError: a log cannot be read.
    """
    from ..doctor.diagnosis import OF_RUN, ONE_NODE, cause_of_end, diagnose

    logs, failure = {log.name: log for log in folder.logs}, first_failure(folder, end.reasons)
    cell = read_json(folder.cell) or {}
    on_one_node = "world_size" in cell and cell["world_size"] == cell.get("tasks_per_node")
    facts = {OF_RUN, *([ONE_NODE] if on_one_node else ())}
    found = diagnose(logs, facts=frozenset(facts), failure=failure)
    if found.first_failure is None and disk_is_full(folder):  # the run could not log that
        found = diagnose({folder.err.name: f"{folder.err.name}: {os.strerror(errno.ENOSPC)}"})
    if found.first_failure is None and (
        name := _CAUSE_OF_CLASS.get(end.failure_class or FailureClass.BAD_EXIT)
    ):
        found.causes.insert(0, cause_of_end(name, messages(end.reasons)))
        found.last_lines.clear()
    return found


def _findings(folder: RunFolder, end: End) -> Mapping[str, Any]:
    """Return what the logs explain: the cause of a failure, or the warnings of a run that completed."""
    from ..doctor.diagnosis import find_warnings

    if end.state is RunState.COMPLETED:  # warnings can explain why it is slow
        return {"warnings": tuple(map(_log_cause, find_warnings(folder)))}
    if end.state is not RunState.FAILED:
        return {}
    try:
        found = explain(folder, end)
    except OSError:
        return {}
    if found.first_failure is None:
        return {"log_line": asdict(found.last_lines[0])} if found.last_lines else {}
    cause = _log_cause(found.first_failure)
    return {"cause": cause, "failure_class": final_class(end.failure_class, cause.cause)}


def _log_cause(cause: Cause) -> LogCause:
    names = ("cause", "path", "line", "evidence", "explanation", "remedy")
    is_failure = cause.severity == "failure"
    return LogCause(
        severity="error" if is_failure else "warning", **{name: getattr(cause, name) for name in names}
    )
