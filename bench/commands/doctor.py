"""`bench doctor`: find out why a job failed, or why a run is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddp_scaling_bench.errors import BenchError, missing_file
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.text import one_line

from ..extras import EXTRAS, install_line, missing_packages
from ..jobs.logs import first_failure
from ..study.layout import StudyFolder
from ..study.ledger import Record, RunState
from ..study.plan_json import ATTEMPT, PlannedStudy, open_study
from ..terminal import read_stdin
from .console import print_json, say, show
from .options import JsonOption, ResultsOption, find_attempts, require_report, results_folder, settle_study

if TYPE_CHECKING:
    from analysis.causes.cells import CauseRow
    from ddp_scaling_bench.measure.failures import Failure

    from ..doctor import Cause, Diagnosis
    from ..doctor.scan import Source

#: Maximum number of failed runs of a study whose logs are read.
MAX_FAILED = 20
#: State of a study of which some runs completed and none failed.
INCOMPLETE = "incomplete"

Log = Path | Literal["-"]


def doctor_command(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Logs, a study, a run's folder or name, a job id, or - for stdin.", show_default=False
        ),
    ],
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Find out why a job failed, or why a run is slow: print each cause with evidence and remedy.

    Several logs are read together. Without a known cause, the last lines that look like errors are printed.
    Example: bench doctor results/l40s
    """
    logs: list[Log] = ["-" if target == "-" else Path(target) for target in targets]
    if len(logs) > 1 or logs[0] == "-" or logs[0].is_file():
        return run_doctor(logs, json=as_json)
    root, (target,) = results_folder(results), targets
    for study in (StudyFolder(Path(target)), StudyFolder(root / target)):
        if study.is_planned:
            return _print(*_of_study(open_study(study)), json=as_json)
    attempt = _find_attempt(target, root)
    if attempt is not None:
        return _print(*_of_attempt(*attempt), json=as_json)
    return run_doctor(_logs_in(Path(target)), json=as_json)


def run_doctor(logs: Sequence[Log], *, json: bool) -> int:
    """Diagnose the logs of one job (``-`` is standard input) and print text or JSON.

    Returns:
        1 if a cause of a failure is known, otherwise 3.
    """
    return _print(_diagnose(logs), json=json)


def _find_attempt(name: str, root: Path) -> tuple[PlannedStudy, str, int] | None:
    """Return the attempt that an argument names, a failed one if any; None for a folder of other logs."""
    found, study = [], ""
    try:
        matches = [*find_attempts(name, root)]
    except BenchError:
        if _logs_in(Path(name)):  # the plan of the study cannot be read, but these can
            return None
        raise
    for planned, attempts in matches:
        records, study = planned.records(), planned.folder.name
        begun = [(run_id, number) for run_id, number in attempts if number]
        begun.sort(key=lambda one: records[one[0]].state is not RunState.FAILED)
        found += [(planned, *one) for one in begun[:1]]
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join(str(one.folder.attempt(run, number).path) for one, run, number in found)
        raise _error(f"{name} is in {len(found)} studies: {places}", remedy="give one of these folders")
    if study:
        raise _error(f"{name} has not been started", remedy=f"start it: bench submit {study}")
    if not Path(name).is_dir():
        remedy = "give a log file, a study, a run's name or folder, or the id of a job of a study"
        raise _error(f"{name} is not a known log, study, run or job", remedy=remedy)
    if not _logs_in(Path(name)):
        raise _error(f"{name}: contains no job.out and no job.err", remedy="give a run's attempt-N folder")
    return None


def _logs_in(folder: Path) -> tuple[Path, ...]:
    """Return the logs in the folder of an attempt, or of a run's last attempt."""
    attempts = {int(name[1]): path for path in folder.glob("*") if (name := ATTEMPT(path.name))}
    return RunFolder(attempts[max(attempts)] if attempts else folder).logs


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt of a run, or the runs of a study, ended.

    ``runs`` are the failed runs of a study: ``run_id, attempt, state, failure_class`` and ``cause``, the
    first cause in the logs of the run. ``counts`` are the runs of a study by their states. A study is
    "completed" if all planned runs completed; its state is None if none has completed or failed.
    """

    study: StudyFolder
    run_id: str | None = None
    attempt: int | None = None
    state: str | None
    failure_class: str | None = None
    runs: Sequence[dict[str, Any]] | None = None
    counts: Mapping[str, int] | None = None

    @property
    def completed(self) -> bool:
        """True if the run, or runs of the study, completed and none failed."""
        return self.state in (RunState.COMPLETED, INCOMPLETE)

    def as_json(self) -> dict[str, Any]:
        """Return the keys of the JSON output that say what was read, and how it ended."""
        content = {name: value for name, value in vars(self).items() if self.counts or name not in _OF_STUDY}
        return content | {"study": str(self.study.path)}

    def __str__(self) -> str:
        run = f", run {self.run_id}, attempt {self.attempt}" if self.run_id else ""
        end = f"{self.state} ({self.failure_class})" if self.failure_class else self.state or ""
        if self.counts and self.state != RunState.COMPLETED:
            done = f"{self.counts.get('completed', 0)} of {sum(self.counts.values())} runs completed"
            others = [(RunState(name), n) for name, n in self.counts.items() if name != RunState.COMPLETED]
            end = ", ".join([done, *(f"{n} {'not run' if s == 'planned' else s}" for s, n in others)])
        return f"Study {self.study.path}{run}" + (f": {end}" if end else "")


_OF_STUDY = ("runs", "counts")


def _of_attempt(planned: PlannedStudy, run_id: str, number: int) -> tuple[Diagnosis, Outcome]:
    """Return the causes of the failure of an attempt, or of its slow steps, and how it ended."""
    from ..doctor import Diagnosis

    record: Record | None = _settle(planned)[run_id]
    if record and record.attempt != number:
        record = planned.ledger.attempts().get(run_id, {}).get(number)
    folder, state = planned.folder.attempt(run_id, number), record.state if record else None
    if not folder.logs and state not in (RunState.COMPLETED, RunState.FAILED):
        what = f"{folder.path}: the run is {state or RunState.UNKNOWN} and has no job.out or job.err"
        raise _error(what, remedy=f"`bench status {planned.folder.name}` shows its state")
    if record and state is RunState.FAILED:
        found = _failure(planned, record)
    else:
        of_run = state is RunState.COMPLETED
        found = _diagnose(folder.logs, of_run=of_run) if folder.logs else Diagnosis([], [])
    if state is RunState.COMPLETED:
        warnings = [cause for cause in found.causes if cause.severity != "failure"]
        found = Diagnosis(_slow(planned.folder, run_id, warnings), [])
    end = {"state": state and str(state), "failure_class": record and record.failure_class}
    return found, Outcome(study=planned.folder, run_id=run_id, attempt=number, **end)  # type: ignore[arg-type]


def _of_study(planned: PlannedStudy) -> tuple[Diagnosis, Outcome]:
    """Return the first causes of failed runs, each once, then the causes of slow steps, and the states."""
    from ..doctor import Diagnosis

    records = _settle(planned)
    failed = [one for one in records.values() if one.state is RunState.FAILED and one.attempt]
    failures = [(record, _failure(planned, record)) for record in failed[:MAX_FAILED]]
    causes: dict[str, Cause] = {}
    runs = []
    for record, found in failures:
        first = found.first_failure
        if first:
            causes.setdefault(first.cause, first)
        own = {"run_id": record.run_id, "attempt": record.attempt, "state": str(record.state)}
        runs.append({**own, "failure_class": record.failure_class, "cause": first and first.cause})
    slow: list[Cause] = []
    if failures and missing_packages(EXTRAS["report"]):
        say(f"causes of slow steps are not included; to find them: {install_line('report')}")
    else:
        slow = _slow(planned.folder, "", [])
    counted = Counter(record.state for record in records.values())
    counts = {str(state): counted[state] for state in RunState if counted[state]}
    state = None
    if counted[RunState.FAILED]:
        state = "failed"
    elif counted[RunState.COMPLETED]:
        state = "completed" if counted[RunState.COMPLETED] == len(records) else INCOMPLETE
    lines = [line for _, found in failures for line in found.last_lines[:2]]
    diagnosis = Diagnosis([*causes.values(), *slow], lines[:5])
    return diagnosis, Outcome(study=planned.folder, state=state, runs=runs, counts=counts)


def _settle(planned: PlannedStudy) -> dict[str, Record]:
    """Record how runs have ended since the last command, as `bench status` does; return the records."""
    records = planned.records()
    return records if all(record.settled for record in records.values()) else settle_study(planned.folder)


def _diagnose(logs: Sequence[Log], *, of_run: bool = False, failure: Failure | None = None) -> Diagnosis:
    """Diagnose logs; those of a run, with the ``failure`` that is known of it."""
    from ..doctor.diagnosis import OF_RUN, diagnose

    try:
        opened = dict(_open_log(log) for log in logs)
        return diagnose(opened, facts=frozenset({OF_RUN} if of_run else ()), failure=failure)
    except OSError as error:
        raise _error(f"cannot read {error.filename or 'the log'}: {error.strerror}") from error


def _open_log(log: Log) -> tuple[str, Source]:
    if log == "-":
        return "-", read_stdin()
    if not log.exists() or log.is_dir():
        error = missing_file(log, what="log", remedy="give a log file, such as slurm-<job>.out")
        raise _error(error.message, remedy=error.remedy)
    return str(log), log


def _failure(planned: PlannedStudy, record: Record) -> Diagnosis:
    """Diagnose a failed run from its logs. If these show no cause, report the ledger's cause or reason."""
    from ..doctor import Cause, LogLine

    folder, reasons = planned.run_folder(record), record.end.reasons if record.end else ()
    found = _diagnose(folder.logs, of_run=True, failure=first_failure(folder, reasons))
    found.causes[:] = [replace(one, path=one.path or str(folder.path)) for one in found.causes]
    recorded = record.end.cause if record.end else None
    if found.first_failure is None and recorded:
        found.causes.insert(
            0,
            Cause(
                recorded.cause,
                "failure",
                str(folder.path / recorded.path),
                None,
                recorded.evidence,
                recorded.explanation,
                recorded.remedy,
            ),
        )
    if found.first_failure is None:
        ledger = planned.ledger
        number, reason = ledger.line_number(record), record.reason or "the ledger has no reason"
        found.last_lines.insert(0, LogLine(str(ledger.path), number, reason))
    return found


def _slow(folder: StudyFolder, run_id: str, warnings: Sequence[Cause]) -> list[Cause]:
    """Return the causes of slow steps, largest share first, including the ``warnings`` from the logs."""
    require_report("bench doctor, to find causes of slow steps,")
    from analysis.causes.divide import NOT_EXPLAINED
    from analysis.causes.evidence import WarningLine
    from analysis.causes.table import run_causes, study_causes
    from analysis.data.load import load_study

    study = load_study(folder.path)
    rows = run_causes(study, run_id) if run_id else study_causes(study)
    attempts = {run.run_id: run.folder for run in study.runs}
    found: dict[Hashable, CauseRow] = {}
    for row in sorted(rows, key=lambda row: -row.share if row.share == row.share else 1.0):
        if row.cause != NOT_EXPLAINED:
            found.setdefault((row.cause, row.node, row.rank), row)
    facts = [one for row in found.values() for one in row.evidence]
    told = {one.warning for one in facts if isinstance(one, WarningLine)}
    return [
        *(_cause(row, str(attempts.get(row.run_id) or "")) for row in found.values()),
        *(one for one in warnings if one.cause not in told),
    ]


def _cause(row: CauseRow, path: str) -> Cause:
    from analysis.text import one_line
    from ddp_scaling_bench.finding import messages

    from ..doctor import Cause

    return Cause(
        row.cause,
        "slow",
        path,
        None,
        one_line(messages(row.evidence), limit=600),
        row.meaning,
        row.remedy,
        None if row.share != row.share else round(row.share, 4),
        row.evidence,
    )


def _print(diagnosis: Diagnosis, outcome: Outcome | None = None, *, json: bool) -> int:
    """Print a diagnosis and return the exit code."""
    state = outcome and outcome.state
    if json:
        print_json(diagnosis.as_json() | (outcome.as_json() if outcome else {}))
    else:
        if outcome:
            show(one_line(str(outcome)) + "\n")
        show(_text_of(diagnosis, outcome).removesuffix("\n"))
    if diagnosis.first_failure is not None or state == RunState.FAILED:
        return 1
    return 0 if state == RunState.COMPLETED else 3


def _text_of(diagnosis: Diagnosis, outcome: Outcome | None) -> str:
    from ..doctor.report import as_text

    if outcome is None or outcome.runs is None:
        return as_text(diagnosis, completed=outcome is not None and outcome.completed)
    if outcome.state is None:
        return "No run of the study has completed or failed yet.\n"
    runs: dict[str | None, list[str]] = {}
    for run in outcome.runs:
        name = f"{run['run_id']} ({run['failure_class']})" if run["failure_class"] else run["run_id"]
        runs.setdefault(run["cause"], []).append(name)
    return as_text(diagnosis, completed=outcome.completed, runs=runs)


def _error(message: str, *, remedy: str = "") -> BenchError:
    """Return an error on one line, even if the name of a file or folder in it contains a line break."""
    return BenchError(one_line(message), remedy=one_line(remedy))
