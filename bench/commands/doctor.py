"""`bench doctor`: find out why a job failed, or why a run is slow."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddp_scaling_bench.errors import BenchError, missing_file
from ddp_scaling_bench.files import is_binary
from ddp_scaling_bench.run_folder import RunFolder
from ddp_scaling_bench.text import one_line

from ..archive import is_archive
from ..extras import EXTRAS, install_line, missing_packages
from ..jobs.end import explain
from ..study.layout import StudyFolder
from ..study.ledger import End, Record, RunState
from ..study.plan_json import ATTEMPT, PlannedStudy, open_study
from ..terminal import print_json, read_stdin, say, show
from .options import (
    JsonOption,
    ResultsOption,
    find_attempts,
    find_study,
    refuse_part_of_run,
    require_report,
    results_folder,
    settle_study,
)

if TYPE_CHECKING:
    from analysis.causes.cells import CauseRow

    from ..doctor import Cause, Diagnosis
    from ..doctor.scan import Source

#: Maximum number of failed runs of a study whose logs are read; the causes of others are those of the ledger.
MAX_READ = 20
#: State of a study of which some runs completed and none failed.
INCOMPLETE = "incomplete"

#: The first bytes of compressed files, and the commands that print their content.
_COMPRESSED = {
    b"\x1f\x8b": "gunzip -c",
    b"\xfd7zXZ": "xz -dc",
    b"BZh": "bunzip2 -c",
    b"(\xb5/\xfd": "zstd -dc",
}

Log = Path | Literal["-"]


def doctor_command(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Logs, a study, a run's folder or name, a job id, or - for stdin; "
            "default: the study planned last."
        ),
    ] = None,
    results: ResultsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Find out why a job failed, or why a run is slow: print each cause with evidence and remedy.

    Several logs are read together. Without a known cause, the last lines that look like errors are printed.
    Example: bench doctor results/l40s
    """
    if not targets:
        return _print(_of_study(open_study(find_study(None, results))), json=as_json)
    logs: list[Log] = ["-" if target == "-" else Path(target) for target in targets]
    if others := [log for log in logs if len(logs) > 1 and log != "-" and not log.is_file()]:
        raise _error(f"{others[0]} is not a log", remedy="give several logs, or one run or one study")
    if len(logs) > 1 or logs[0] == "-" or (logs[0].is_file() and not is_archive(logs[0])):
        return run_doctor(logs, json=as_json)
    root, (target,) = results_folder(results), targets
    for study in (StudyFolder(Path(target)), StudyFolder(root / target)):
        if study.is_planned:
            return _print(_of_study(open_study(study)), json=as_json)
    if is_archive(target):
        return _print(_of_study(open_study(find_study(target, results))), json=as_json)
    attempt = _find_attempt(target, root)
    if attempt is not None:
        return _print(_of_attempt(*attempt), json=as_json)
    return run_doctor(_logs_in(Path(target)), json=as_json)


def run_doctor(logs: Sequence[Log], *, json: bool) -> int:
    """Diagnose the logs of one job (``-`` is standard input) and print text or JSON.

    Returns:
        1 if a cause of a failure is known, otherwise 3.
    """
    from ..doctor.report import as_text

    found = _diagnose(logs)
    text = as_text(found)
    if found.first_failure is None:
        other = "Give the job's other logs, too, such as the file of --error and those of all nodes."
        if len(logs) == 1 and logs[0] != "-" and re.search(rb"\A#!|^#SBATCH", _start(logs[0]), re.M):
            # Not refused: a log can begin with its script.
            other = f"If this is a script, not a log, check it: bench lint {shlex.quote(str(logs[0]))}"
        text += "\n" * bool(found.causes or found.last_lines) + f"{other}\n"
    return _print(Answer(found=found, text=text), json=json)


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
        folders = ((one.folder, one.folder.attempt_path(run, number)) for one, run, number in found)
        places = ", ".join(folder.shown(path) for folder, path in folders)
        raise _error(f"{name} is in {len(found)} studies: {places}", remedy="give one of these folders")
    if study:
        raise _error(f"{name} has not been started", remedy=f"start it: bench submit {study}")
    if not Path(name).is_dir():
        refuse_part_of_run(name, root)
        remedy = "give a log file, a study, a run's name or folder, or the id of a job of a study"
        raise _error(f"{name}: there is no such file, study, run or job", remedy=remedy)
    if not _logs_in(Path(name)):
        has_files = any(path.is_file() for path in Path(name).glob("*"))
        logs = f"the logs in it: bench doctor {shlex.quote(name)}/*" if has_files else "a folder with logs"
        raise _error(f"{name}: contains no job.out and no job.err", remedy=f"give {logs}")
    return None


def _logs_in(folder: Path) -> tuple[Path, ...]:
    """Return the logs in the folder of an attempt, or of a run's last attempt."""
    attempts = {int(name[1]): path for path in folder.glob("*") if (name := ATTEMPT(path.name))}
    return RunFolder(attempts[max(attempts)] if attempts else folder).logs


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found out about logs, a run or a study, as values and as text.

    ``ended`` are the keys of the JSON output that say what was read, and how it ended; none for logs.
    """

    found: Diagnosis
    text: str
    ended: dict[str, Any] = field(default_factory=dict)


def _of_attempt(planned: PlannedStudy, run_id: str, number: int) -> Answer:
    """Return the causes of the failure of an attempt, or of its slow steps, and how it ended."""
    from ..doctor import Diagnosis
    from ..doctor.diagnosis import OF_RUN, find_warnings
    from ..doctor.report import as_text

    record: Record | None = settle_study(planned.folder)[run_id]
    if record and record.attempt != number:
        record = planned.ledger.attempts().get(run_id, {}).get(number)
    folder, state = planned.folder.attempt(run_id, number), record.state if record else None
    if not folder.logs and state not in (RunState.COMPLETED, RunState.FAILED):
        what = f"the run is {state or RunState.UNKNOWN} and has no job.out or job.err"
        what = f"{planned.folder.shown(folder.path)}: {what}"
        raise _error(what, remedy=f"`bench status {planned.folder.name}` shows its state")
    if record and state is RunState.FAILED:
        found = _failure(planned, record)
    elif state is RunState.COMPLETED:
        found = Diagnosis(_slow(planned.folder, run_id, find_warnings(folder)), [])
    else:
        found = _diagnose(folder.logs, facts=frozenset({OF_RUN}))
    failure_class = record.failure_class if record else None
    end = f": {state}{f' ({failure_class})' if failure_class else ''}" if state else ""
    heading = one_line(f"Study {planned.folder.source}, run {run_id}, attempt {number}{end}")
    text = as_text(found, completed=state is RunState.COMPLETED, failed=state is RunState.FAILED)
    more = {"run_id": run_id, "attempt": number, "failure_class": failure_class}
    ended = _ended(planned, state=state and str(state), **more)
    return Answer(found=found, text=f"{heading}\n\n{text}", ended=ended)


def _of_study(planned: PlannedStudy) -> Answer:
    """Return the different first causes of failed runs, then the causes of slow steps, and the states."""
    from ..doctor import Diagnosis
    from ..doctor.report import study_as_text

    records = settle_study(planned.folder)
    failed = [one for one in records.values() if one.state is RunState.FAILED and one.attempt]
    groups: dict[Hashable, tuple[Diagnosis, list[str]]] = {}
    runs = []
    for place, record in enumerate(failed):
        found = _failure(planned, record, reads_logs=place < MAX_READ)
        first = found.first_failure
        name, message = (first.cause, first.evidence or first.explanation) if first else (None, record.why)
        # Runs whose explanations differ in numbers only have one cause.
        key = name, re.sub(r"\d+", "", first.explanation if first else message)
        failure_class = f" ({record.failure_class})" if record.failure_class else ""
        groups.setdefault(key, (found, []))[1].append(f"{record.run_id}{failure_class}")
        own = {"run_id": record.run_id, "attempt": record.attempt, "state": str(record.state)}
        runs.append({**own, "failure_class": record.failure_class, "cause": name, "message": message})
    slow: list[Cause] = []
    if failed and missing_packages(EXTRAS["report"]):
        say(f"causes of slow steps are not included; to find them: {install_line('report')}")
    else:
        slow = _slow(planned.folder, "", [])
    counted = Counter(record.state for record in records.values())
    counts = {one: counted[one] for one in RunState if counted[one]}
    completed = counts.get(RunState.COMPLETED, 0)
    has_failed = RunState.FAILED in counts
    state = "failed" if has_failed else INCOMPLETE if completed else None
    text = "No run of the study has completed or failed yet.\n"
    if state:
        text = study_as_text([*groups.values()], slow, completed=not has_failed)
    if completed == len(records):
        state = end = "completed"
    else:
        others = [(one, number) for one, number in counts.items() if one is not RunState.COMPLETED]
        words = [f"{number} {'not run' if one is RunState.PLANNED else one}" for one, number in others]
        end = ", ".join([f"{completed} of {len(records)} runs completed", *words])
    first_causes = [first for found, _ in groups.values() if (first := found.first_failure)]
    lines = [line for found, _ in groups.values() for line in found.last_lines[:2]]
    ended = _ended(planned, state=state, runs=runs, counts={str(one): n for one, n in counts.items()})
    heading = one_line(f"Study {planned.folder.source}: {end}")
    found = Diagnosis([*first_causes, *slow], lines[:5])
    return Answer(found=found, text=f"{heading}\n\n{text}", ended=ended)


def _ended(planned: PlannedStudy, **more: Any) -> dict[str, Any]:
    """Return what was read and how it ended, for the JSON output."""
    names = ("run_id", "attempt", "state", "failure_class")
    return {"study": str(planned.folder.source), **dict.fromkeys(names), **more}


def _diagnose(logs: Sequence[Log], *, facts: frozenset[str] = frozenset()) -> Diagnosis:
    from ..doctor import diagnose

    try:
        return diagnose(_open_logs(logs), facts=facts)
    except OSError as error:
        raise _unreadable(error) from error


def _open_logs(logs: Sequence[Log]) -> dict[str, Source]:
    """Open logs by their names; of several, those that are no text are left out with a warning."""
    sources: dict[str, Source] = {}
    for place, log in enumerate(logs, start=1):
        try:
            sources.update([_open_log(log)])
        except BenchError as error:
            if place == len(logs) and not sources:
                raise
            say(f"warning: {error.message}; it is left out")
    return sources


def _start(log: Path) -> bytes:
    with log.open("rb") as file:
        return file.read(8192)


def _open_log(log: Log) -> tuple[str, Source]:
    if log == "-":
        return "-", read_stdin()
    if not log.exists() or log.is_dir():
        error = missing_file(log, what="log", remedy="give a log file, such as slurm-<job>.out")
        raise _error(error.message, remedy=error.remedy)
    if log.suffix in (".yaml", ".yml"):
        check = f"to check a matrix: bench plan {shlex.quote(str(log))}"
        raise _error(f"{log} is a YAML file, not a log", remedy=check)
    start = _start(log)
    if reader := next((own for magic, own in _COMPRESSED.items() if start.startswith(magic)), ""):
        raise _error(f"{log} is compressed", remedy=f"{reader} {shlex.quote(str(log))} | bench doctor -")
    if is_binary(start):
        raise _error(f"{log} is a binary file, not a log", remedy="give a text, such as slurm-<job>.out")
    return str(log), log


def _failure(planned: PlannedStudy, record: Record, *, reads_logs: bool = True) -> Diagnosis:
    """Return the causes of a failed run; without any, the last lines below the reason in the ledger."""
    from ..doctor import Cause, Diagnosis, LogLine

    folder, end = planned.run_folder(record), record.end or End(state=record.state)
    try:
        found = explain(folder, end) if reads_logs else Diagnosis([], [])
    except OSError as error:
        raise _unreadable(error) from error
    if found.first_failure is None and end.cause:
        own = {
            name: getattr(end.cause, name) for name in ("cause", "path", "evidence", "explanation", "remedy")
        }
        found.causes.insert(0, Cause(severity="failure", line=end.cause.line, **own))
    shown = planned.folder.shown
    found.causes[:] = [replace(one, path=shown(folder.path / one.path)) for one in found.causes]
    found.last_lines[:] = [replace(one, path=shown(folder.path / one.path)) for one in found.last_lines]
    if found.first_failure is None:
        found = replace(found, has_folder=folder.path.exists())
        ledger, reason = planned.ledger, record.reason or "the ledger has no reason"
        found.last_lines.insert(0, LogLine(shown(ledger.path), ledger.line_number(record), reason))
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
        *(_cause(row, folder.shown(attempts.get(row.run_id) or "")) for row in found.values()),
        *(one for one in warnings if one.cause not in told),
    ]


def _cause(row: CauseRow, path: str) -> Cause:
    from analysis.text import one_line
    from ddp_scaling_bench.finding import messages

    from ..doctor import Cause

    share = None if row.share != row.share else round(row.share, 4)
    evidence = one_line(messages(row.evidence), limit=600)
    return Cause(row.cause, "slow", path, None, evidence, row.meaning, row.remedy, share, row.evidence)


def _print(answer: Answer, *, json: bool) -> int:
    """Print an answer and return the exit code."""
    if json:
        print_json(answer.found.as_json() | answer.ended)
    else:
        show(answer.text.removesuffix("\n"))
    state = answer.ended.get("state")
    if answer.found.first_failure is not None or state == RunState.FAILED:
        return 1
    return 0 if state == RunState.COMPLETED else 3


def _unreadable(error: OSError) -> BenchError:
    return _error(f"cannot read {error.filename or 'the log'}: {error.strerror}")


def _error(message: str, *, remedy: str = "") -> BenchError:
    """Return an error on one line, even if the name of a file or folder in it contains a line break."""
    return BenchError(one_line(message), remedy=one_line(remedy))
