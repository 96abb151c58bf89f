"""The same work for each of many runs: one after another, or many at once where their files answer slowly."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench import __version__
from bench.errors import BenchError, unwritable
from bench.matrix.cell import Cell, Run
from bench.study.files import read_json, rewrite_json
from bench.study.layout import RunFolder, StudyFolder
from bench.study.ledger import Ledger, RunRecord, RunState

#: After so many it is known how the files answer.
FIRST = 32
#: A shared file system lets a thread wait at nearly every operation, a local disk seldom.
WAITS_EACH = 2
AT_ONCE = 8


def each(work: Callable[..., None], todo: Sequence[tuple[Any, ...]]) -> None:
    """Call ``work`` with each tuple of arguments, in order; where it waits often, from several threads.

    On a shared file system a run's dozen operations take milliseconds, and many at once take hardly
    longer than one. On a local disk threads would only get into each other's way.

    Raises:
        Exception: the first that ``work`` raised; what is not begun then is left out.
    """
    before = _waits()
    for arguments in todo[:FIRST]:
        work(*arguments)
    rest = todo[FIRST:]
    if _waits() - before > WAITS_EACH * FIRST:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda arguments: work(*arguments), rest))
        return
    for arguments in rest:
        work(*arguments)


def _waits() -> int:
    """Return how often this thread has given up the processor by itself: it waited for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


# What an executor is: the one shape that local and Slurm runs share.


@dataclass(frozen=True)
class PlannedStudy:
    """A study as its plan.json says, with the ledger of what has happened to it."""

    folder: StudyFolder
    plan: dict[str, Any]
    cells: dict[str, Cell]
    runs: list[Run]

    @property
    def ledger(self) -> Ledger:
        """The study's ledger."""
        return Ledger(self.folder.ledger)

    @property
    def executor(self) -> str:
        """The executor that the matrix names."""
        return str(self.plan["executor"])

    def records(self) -> dict[str, RunRecord]:
        """Return the latest attempt of every planned run, in the planned order."""
        return self.ledger.records(run.run_id for run in self.runs)

    def script(self, cell_id: str) -> Path:
        """Return a cell's script."""
        suffix = ".sbatch" if self.executor == "slurm" else ".sh"
        return self.folder.scripts / f"{cell_id}{suffix}"


def open_study(folder: StudyFolder) -> PlannedStudy:
    """Return the study planned in ``folder``.

    Raises:
        BenchError: no plan.json there, or one that this version cannot read.
    """
    plan = read_json(folder.plan)
    if plan is None:
        what = "does not exist" if not folder.plan.exists() else "is not readable JSON"
        raise BenchError(f"{folder.plan}: {what}", remedy="plan the study again: bench plan MATRIX")
    try:
        cells = {cell["cell_id"]: Cell.from_json(cell) for cell in plan["cells"]}
        runs = [Run(r["run_id"], r["cell_id"], r["repeat"], r["order"]) for r in plan["runs"]]
    except (KeyError, TypeError) as error:
        what = f"{folder.plan}: is not a plan of this version ({error!r} is wrong or missing)"
        raise BenchError(what, remedy="plan the study again: bench plan MATRIX") from None
    return PlannedStudy(folder, plan, cells, runs)


@dataclass(frozen=True)
class Attempt:
    """One run about to be started, or started: a job of its own."""

    run: Run
    cell: Cell
    number: int
    folder: RunFolder
    job_name: str

    def describe(self, study: PlannedStudy, **more: Any) -> dict[str, Any]:
        """Return what the attempt's run.json says before it starts."""
        return {
            "schema": 1,
            "bench_version": __version__,
            "study": study.folder.name,
            "run_id": self.run.run_id,
            "cell_id": self.cell.cell_id,
            "repeat": self.run.repeat,
            "attempt": self.number,
            "order": self.run.order,
            "executor": study.executor,
            "job_name": self.job_name,
            "job_id": None,
            "cell": self.cell.as_json(),
            "state": str(RunState.QUEUED),
            "reason": "",
            "failure_class": None,
            "exit_code": None,
            "submitted_at": None,
            "started_at": None,
            "ended_at": None,
            **more,
        }


def next_attempt(study: PlannedStudy, run: Run, record: RunRecord) -> Attempt:
    """Return the next attempt of a run; its job's name belongs to no other attempt anywhere.

    An attempt that was refused left nothing, and is made again under its number.
    """
    refused = record.state is RunState.PLANNED and bool(record.details.get("refused"))
    number = record.attempt if refused else record.attempt + 1
    name = f"{study.folder.name}.{run.run_id}.a{number}.{study.plan.get('key', '')}"
    return Attempt(run, study.cells[run.cell_id], number, study.folder.attempt(run.run_id, number), name)


def new_attempt(study: PlannedStudy, run: Run, record: RunRecord) -> Attempt:
    """Return the next attempt of a run with its folder made; an older attempt's is kept.

    Raises:
        BenchError: the folder cannot be made.
    """
    attempt = next_attempt(study, run, record)
    try:
        attempt.folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(attempt.folder.path, error) from None
    return attempt


@dataclass
class Outcome:
    """How an attempt ended, or stands."""

    state: RunState
    reason: str = ""
    failure_class: str | None = None
    exit_code: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


def settle(study: PlannedStudy, record: RunRecord, outcome: Outcome, *, ended_at: str) -> None:
    """Write how an attempt ended: first into its run.json, then into the ledger."""
    study.ledger.append_all([settled(study, record, outcome, ended_at=ended_at)])


def settled(
    study: PlannedStudy, record: RunRecord, outcome: Outcome, *, ended_at: str, event: str = "ended"
) -> dict[str, Any]:
    """Bring a record up to date, write how its attempt ended into its run.json; return the ledger's event.

    Raises:
        UnwritableError: run.json cannot be written; the record itself is up to date.
    """
    folder = study.folder.attempt(record.run_id, record.attempt)
    cause = None if outcome.state is not RunState.FAILED else _cause_of(folder)
    record.state, record.reason = outcome.state, outcome.reason
    record.failure_class, record.exit_code = outcome.failure_class, outcome.exit_code
    record.cause = cause["cause"] if cause else None
    end = {
        "state": str(outcome.state),
        "reason": outcome.reason,
        "failure_class": outcome.failure_class,
        "exit_code": outcome.exit_code,
    }
    content = read_json(folder.run_json) or {"run_id": record.run_id, "attempt": record.attempt}
    content |= {**end, "cause": cause, "ended_at": ended_at, **outcome.details}
    if folder.path.is_dir():
        rewrite_json(folder.run_json, content)
    return {"event": event, "run_id": record.run_id, "attempt": record.attempt, **end, "cause": record.cause}


def note_standing(study: PlannedStudy, records: Mapping[str, RunRecord]) -> None:
    """Write into the run.json of attempts that wait or run where they stand: the analysis reads no more."""
    for record in records.values():
        run_json = study.folder.attempt(record.run_id, record.attempt).run_json
        if not record.state.active or not isinstance(content := read_json(run_json), dict):
            continue
        stands = {"state": str(record.state), "reason": record.reason}
        if stands != {name: content.get(name) for name in stands}:
            rewrite_json(run_json, {**content, **stands})


def _cause_of(folder: RunFolder) -> dict[str, Any] | None:
    """Return what the doctor finds in a failed run's output: its first cause, if it knows one."""
    from bench.doctor import diagnose

    logs = {str(log.name): log for log in (folder.err, folder.out) if log.is_file()}
    try:
        causes = diagnose(logs).causes if logs else []
    except OSError:
        return None
    if not causes:
        return None
    first = causes[0]
    return {
        "cause": first.cause,
        "path": first.path,
        "line": first.line,
        "evidence": first.evidence,
        "explanation": first.explanation,
        "remedy": first.remedy,
    }


class QueueFullError(BenchError):
    """The queue takes no more jobs for now; ``left`` are the runs that wait for room."""

    def __init__(self, message: str, *, remedy: str, left: Sequence[Run]) -> None:
        super().__init__(message, remedy=remedy)
        self.left = list(left)


@dataclass
class Watch:
    """What an executor tells while it works; each call is optional.

    ``started`` is called before anything of a run has begun: what it raises ends the submission.
    """

    started: Callable[[Run], None] = lambda run: None
    ended: Callable[[Run, RunRecord], None] = lambda run, record: None
    said: Callable[[str], None] = lambda words: None


class Executor(Protocol):
    """Starts runs, and finds out what became of them."""

    def judge(self, runs: Sequence[Run]) -> None:
        """Find out whether the largest of ``runs`` could be started; start none.

        Raises:
            BenchError: it could not; the message says why.
        """

    def submit(self, runs: Sequence[Run], *, watch: Watch, max_queued: int | None = None) -> list[Run]:
        """Start ``runs`` in order; local ones are run to their end.

        With ``max_queued``, no more than that many of the study's runs wait or run at once.

        Returns:
            the runs that ``max_queued`` holds back.

        Raises:
            QueueFullError: the queue takes no more jobs for now.
        """

    def command_line(self, run: Run) -> str:
        """Return, for a person, the command that would start ``run``."""

    def refresh(self) -> dict[str, RunRecord]:
        """Settle what ended since; return every run's record."""

    def cancel(self, runs: Sequence[Run]) -> int:
        """End what is queued or running of ``runs``; return how many that were."""
