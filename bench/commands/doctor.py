"""`bench doctor`: find out why a job failed, or why a run is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import BenchError, missing_file
from ..extras import install_line, missing_packages
from ..study.layout import RunFolder, StudyFolder
from ..study.ledger import Ledger, Record, RunState
from ..study.plan_json import ATTEMPT, open_study
from ..terminal import one_line, read_stdin
from .console import print_json, say, show
from .options import (
    JsonOption,
    ResultsOption,
    find_attempts,
    require_report,
    results_folder,
    settle_study,
)

if TYPE_CHECKING:
    from analysis.causes.cells import CauseRow

    from ..doctor import Cause, Diagnosis
    from ..doctor.scan import Source

#: Maximum number of failed runs of a study whose logs are read.
MAX_FAILED = 20
#: State of a study of which some runs completed and none failed.
INCOMPLETE = "incomplete"


@dataclass(frozen=True)
class Ends:
    """How a run, or the runs of a study, ended; None if that is unknown.

    ``runs`` are the failed runs of a study: ``run_id, attempt, state, failure_class`` and ``cause``, the
    first cause in the logs of the run. ``counts`` are the runs of a study by their states. A study is
    "completed" if all planned runs completed.
    """

    state: str | None = None
    failure_class: str | None = None
    runs: tuple[dict[str, Any], ...] | None = None
    counts: Mapping[str, int] | None = None

    @property
    def completed(self) -> bool:
        """True if the run, or runs of the study, completed and none failed."""
        return self.state in (RunState.COMPLETED, INCOMPLETE)

    def as_json(self) -> dict[str, Any]:
        """Return the keys of the JSON output that say how the runs ended."""
        runs = {} if self.runs is None else {"runs": list(self.runs), "counts": dict(self.counts or {})}
        return {"state": self.state, "failure_class": self.failure_class, **runs}

    def __str__(self) -> str:
        if self.counts and self.state != RunState.COMPLETED:
            done = f"{self.counts.get('completed', 0)} of {sum(self.counts.values())} runs completed"
            others = [(name, n) for name, n in self.counts.items() if name != RunState.COMPLETED]
            return ", ".join([done, *(f"{n} {'not run' if x == 'planned' else x}" for x, n in others)])
        name = f" ({self.failure_class})" if self.failure_class else ""
        return f"{self.state or ''}{name}"


@dataclass(frozen=True)
class Target:
    """The logs, the attempt or the study that an argument names.

    ``study`` is None for logs of other jobs, and ``record`` without a readable plan.
    """

    logs: tuple[Path | Literal["-"], ...] = ()
    study: StudyFolder | None = None
    run_id: str = ""
    attempt: int = 0
    record: Record | None = None

    @property
    def folder(self) -> RunFolder | None:
        """The folder of the attempt, or None if the target is not a run of a study."""
        return self.study.attempt(self.run_id, self.attempt) if self.study and self.run_id else None

    @property
    def end(self) -> Ends:
        """The state of the attempt, unknown if the target is not a run of a study."""
        return Ends(str(self.record.state), self.record.failure_class) if self.record else Ends()

    @property
    def state(self) -> str | None:
        """The state in :attr:`end`."""
        return self.end.state

    def as_json(self) -> dict[str, Any]:
        """Return the keys of the JSON output that say what was read."""
        study = str(self.study.path) if self.study else None
        return {"study": study, "run_id": self.run_id or None, "attempt": self.attempt or None}

    def __str__(self) -> str:
        if self.study is None:
            return ""
        run = f", run {self.run_id}, attempt {self.attempt}" if self.run_id else ""
        return f"Study {self.study.path}{run}"


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
    found = [_target(target, results_folder(results)) for target in targets]
    runs = {(target.study, target.run_id, target.attempt) for target in found if target.study}
    if len(found) > 1 and len(runs) > 1:
        raise _error(
            "several runs, whose failures have their own causes", remedy="give one run, or the study"
        )
    if len(found) > 1 and any(not target.logs for target in found):
        raise _error(
            "several targets, of which one is a study", remedy="give one study, or only logs and runs"
        )
    if len(found) == 1 and found[0].study is not None:
        diagnosis, end = _of_target(found[0])
        return _print(diagnosis, json=as_json, target=found[0], end=end)
    return run_doctor([log for target in found for log in target.logs], json=as_json)


# -- targets --------------------------------------------------------------------------


def _target(name: str, root: Path) -> Target:
    """Return what an argument names: standard input, a file, a folder, or a study, run or job by its name."""
    if name == "-":
        return Target(("-",))
    path = Path(name)
    if path.is_file():
        return Target((path,))
    if StudyFolder(path).is_planned:
        return Target(study=StudyFolder(path))
    if path.is_dir():
        return _of_folder(path)
    if StudyFolder(root / name).is_planned:
        return Target(study=StudyFolder(root / name))
    # A line of `bench submit` or `bench status` separates the study and its run by a tab.
    study, _, run = name.replace("\t", "/").rpartition("/")
    for found in (StudyFolder(Path(study)), StudyFolder(root / study)):
        if study and run and found.is_planned and (found.runs / run).is_dir():
            return _of_folder(found.runs / run)
    return _with_logs(_of_name(name, root))


def _of_folder(path: Path) -> Target:
    """Return the attempt in the folder ``path``; in a run's folder, this is the last attempt."""
    attempts = {int(match[1]): entry for entry in path.iterdir() if (match := ATTEMPT(entry.name))}
    folder = attempts[max(attempts)] if attempts else path
    number, run = ATTEMPT(folder.resolve().name), folder.resolve().parent
    study = StudyFolder(path.parent.parent if attempts else path.parent.parent.parent)
    if number and run.parent.name == "runs" and study.is_planned:
        return _with_logs(Target(study=study, run_id=run.name, attempt=int(number[1])))
    logs = RunFolder(folder).logs
    if not logs:
        what = f"{folder}: contains no job.out and no job.err"
        raise _error(what, remedy="give a run's attempt-N folder")
    return Target(logs)


def _of_name(name: str, root: Path) -> Target:
    """Return the last attempt of the run ``name``, or an attempt in the job ``name``: a failed one if any."""
    found, study = [], ""
    for planned, attempts in find_attempts(name, root):
        records, study = planned.records(), planned.folder.name
        begun = [(run_id, attempt) for run_id, attempt in attempts if attempt]
        begun.sort(key=lambda one: records[one[0]].state is not RunState.FAILED)
        found += [Target(study=planned.folder, run_id=run_id, attempt=number) for run_id, number in begun[:1]]
    if not found and study:
        raise _error(f"{name} has not been started", remedy=f"start it: bench submit {study}")
    if not found:
        remedy = "give a log file, a study, a run's name or folder, or the id of a job of a study"
        raise _error(f"{name} is not a known log, study, run or job", remedy=remedy)
    if len(found) > 1:
        places = [str(target.folder.path) for target in found if target.folder]
        what = f"{name} is in {len(found)} studies: {', '.join(places)}"
        raise _error(what, remedy="give one of these folders")
    return found[0]


def _with_logs(target: Target) -> Target:
    """Return ``target`` with its logs; raise BenchError if a run that has not ended has no logs."""
    folder, study = target.folder, target.study
    assert folder is not None
    assert study is not None
    with suppress(BenchError):  # the logs of a run can be read without a readable plan
        target = replace(target, record=_record_of(target, _settle(study)))
    logs, state = folder.logs, target.state
    if not logs and state not in (RunState.COMPLETED, RunState.FAILED):
        what = f"{folder.path}: the run is {state or RunState.UNKNOWN} and has no job.out or job.err"
        raise _error(what, remedy=f"`bench status {study.name}` shows its state")
    return replace(target, logs=logs)


def _record_of(target: Target, records: Mapping[str, Record]) -> Record | None:
    """Return the record of an attempt."""
    assert target.study is not None
    record = records.get(target.run_id)
    if record is None or record.attempt == target.attempt:
        return record
    return Ledger(target.study.ledger).attempts().get(target.run_id, {}).get(target.attempt)


def _settle(study: StudyFolder) -> dict[str, Record]:
    """Record how runs have ended since the last command, as `bench status` does; return the records.

    They can contain ends that cannot be saved.
    """
    records = open_study(study).records()
    if any(not record.settled for record in records.values()):
        return settle_study(study) or records
    return records


# -- diagnoses ------------------------------------------------------------------------


def run_doctor(targets: Sequence[Path | Literal["-"]], *, json: bool) -> int:
    """Diagnose the logs of one job (``-`` is standard input) and print text or JSON.

    Returns:
        1 if a cause of a failure is known, otherwise 3.
    """
    if not targets:
        raise _error("no log to read", remedy="give the job's logs, or - for standard input")
    return _print(_diagnose(targets), json=json)


def _diagnose(targets: Sequence[Path | Literal["-"]]) -> Diagnosis:
    from ..doctor import diagnose

    try:
        return diagnose(dict(_open_log(target) for target in targets))
    except OSError as error:
        raise _error(f"cannot read {error.filename or 'the log'}: {error.strerror}") from error


def _of_target(target: Target) -> tuple[Diagnosis, Ends]:
    """Return the causes of the failures, followed by the causes of slow steps, and how the runs ended."""
    from ..doctor import Diagnosis

    if target.folder is None:
        return _of_study(target)
    if target.record and target.record.state is RunState.FAILED:
        return _failure(target.folder, target.record, target.study), target.end
    found = _diagnose(target.logs) if target.logs else Diagnosis([], [])
    if target.state == RunState.COMPLETED:
        warnings = [cause for cause in found.causes if cause.severity == "slow"]
        found = Diagnosis(_slow(target, warnings), [])
    return found, target.end


def _of_study(target: Target) -> tuple[Diagnosis, Ends]:
    """Return the first cause of each failed run, each cause once, and the causes of slow steps.

    The state is "failed", "completed", "incomplete", or None if no run has completed or failed.
    """
    from ..doctor import Diagnosis

    assert target.study is not None
    records = _settle(target.study)
    failed = [one for one in records.items() if one[1].state is RunState.FAILED and one[1].attempt]
    failures = [
        _failure(target.study.attempt(name, one.attempt), one, target.study)
        for name, one in failed[:MAX_FAILED]
    ]
    firsts = [one.first_failure for one in failures]
    causes: dict[str, Cause] = {}
    for cause in filter(None, firsts):
        causes.setdefault(cause.cause, cause)
    lines = [line for one in failures for line in one.last_lines[:2]]
    runs = tuple(_failed_run(record, cause) for (_, record), cause in zip(failed, firsts, strict=False))
    if failures and missing_packages("report"):
        say(f"causes of slow steps are not included; to find them: {install_line('report')}")
        slow = []
    else:
        slow = _slow(target, [])
    counted = Counter(str(record.state) for record in records.values())
    state = None
    if counted["failed"]:
        state = "failed"
    elif counted["completed"]:
        state = "completed" if counted["completed"] == len(records) else INCOMPLETE
    counts = {str(name): counted[name] for name in RunState if counted[name]}
    return Diagnosis([*causes.values(), *slow], lines[:5]), Ends(state, runs=runs, counts=counts)


def _failed_run(record: Record, cause: Cause | None) -> dict[str, Any]:
    return {
        "run_id": record.run_id,
        "attempt": record.attempt,
        "state": str(record.state),
        "failure_class": record.failure_class,
        "cause": cause.cause if cause else None,
    }


def _failure(folder: RunFolder, record: Record, study: StudyFolder | None) -> Diagnosis:
    """Diagnose a failed run from its logs. If these show no cause, report the ledger's cause or reason."""
    from ..doctor import Cause, Diagnosis, LogLine

    found = _diagnose(folder.logs) if folder.logs else Diagnosis([], [])
    recorded = record.end.cause if record.end else None
    if found.first_failure is None and recorded:
        names = ("cause", "path", "evidence", "explanation", "remedy")
        texts: dict[str, Any] = {name: str(recorded.get(name) or "") for name in names}
        texts["path"] = str(folder.path / texts["path"])
        found.causes.insert(0, Cause(severity="failure", line=None, share=None, **texts))
    if found.first_failure is None and study:
        ledger = Ledger(study.ledger)
        number, reason = ledger.line_number(record), record.reason or "the ledger has no reason"
        found.last_lines.insert(0, LogLine(str(ledger.path), number, reason))
    return found


def _slow(target: Target, warnings: Sequence[Cause]) -> list[Cause]:
    """Return the causes of slow steps, largest share first, including the ``warnings`` from the logs."""
    require_report("bench doctor, to find causes of slow steps,")
    from analysis.causes.catalogue import NOT_EXPLAINED, OF_WARNINGS, OTHER
    from analysis.causes.table import run_causes, study_causes
    from analysis.data.load import load_study

    assert target.study is not None
    study = load_study(target.study.path)
    rows = run_causes(study, target.run_id) if target.run_id else study_causes(study)
    attempts = dict(zip(study.runs["run_id"], study.attempts, strict=True))
    found: dict[Hashable, CauseRow] = {}
    for row in sorted(rows, key=lambda row: -row.share if row.share == row.share else 1.0):
        if row.cause not in (OTHER, NOT_EXPLAINED):
            found.setdefault((row.causes, row.node, row.rank), row)
    known = {cause for row in found.values() for cause in row.causes}
    return [
        *(_cause(row, str(attempts.get(row.run_id) or "")) for row in found.values()),
        *(one for one in warnings if OF_WARNINGS.get(one.cause) not in known),
    ]


def _cause(row: CauseRow, path: str) -> Cause:
    from analysis.text import one_line

    from ..doctor import Cause
    from ..words import about, sentences

    return Cause(
        row.name,
        "slow",
        path,
        None,
        one_line(sentences(row.evidence), limit=600),
        about(row.causes, "meaning"),
        about(row.causes, "remedy"),
        None if row.share != row.share else round(row.share, 4),
        row.evidence,
    )


def _print(diagnosis: Diagnosis, *, json: bool, target: Target | None = None, end: Ends | None = None) -> int:
    """Print a diagnosis and return the exit code; ``end`` says how the target's runs ended."""
    if json:
        print_json(diagnosis.as_json() | (target.as_json() | end.as_json() if target and end else {}))
    else:
        if target:
            show(one_line(": ".join(filter(None, (str(target), str(end or ""))))) + "\n")
        show(_text_of(diagnosis, target, end or Ends()).removesuffix("\n"))
    state = end.state if end else None
    if diagnosis.first_failure is not None or state == RunState.FAILED:
        return 1
    return 0 if state == RunState.COMPLETED else 3


def _text_of(diagnosis: Diagnosis, target: Target | None, end: Ends) -> str:
    from ..doctor.report import as_text

    if target is not None and target.folder is None and end.state is None:
        return "No run of the study has completed or failed yet.\n"
    runs: dict[str | None, list[str]] | None = None if end.runs is None else {}
    for run in end.runs or ():
        assert runs is not None
        name = f"{run['run_id']} ({run['failure_class']})" if run["failure_class"] else run["run_id"]
        runs.setdefault(run["cause"], []).append(name)
    return as_text(diagnosis, completed=end.completed, runs=runs)


def _error(message: str, *, remedy: str = "") -> BenchError:
    """Return an error on one line, even if the name of a file or folder in it contains a line break."""
    return BenchError(one_line(message), remedy=one_line(remedy))


def _open_log(target: Path | Literal["-"]) -> tuple[str, Source]:
    if not isinstance(target, Path):
        return "-", read_stdin()
    if not target.exists() or target.is_dir():
        error = missing_file(target, what="log", remedy="give a log file, such as slurm-<job>.out")
        raise _error(error.message, remedy=error.remedy)
    return str(target), target
