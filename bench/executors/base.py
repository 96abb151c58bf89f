"""The same work for each of many runs: one after another, or many at once where their files answer slowly."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.errors import BenchError
from bench.matrix.cell import Run
from bench.study.layout import RunFolder
from bench.study.ledger import RunRecord, RunState
from bench.study.plan_json import PlannedStudy
from bench.study.run_json import update_run

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
    if folder.path.is_dir():
        changes = {**end, "cause": cause, "ended_at": ended_at, **outcome.details}
        update_run(folder, changes, fallback={"run_id": record.run_id, "attempt": record.attempt})
    return {"event": event, "run_id": record.run_id, "attempt": record.attempt, **end, "cause": record.cause}


def note_standing(study: PlannedStudy, records: Mapping[str, RunRecord]) -> None:
    """Write into the run.json of attempts that wait or run where they stand: the analysis reads no more."""
    for record in records.values():
        if record.state.active:
            folder = study.folder.attempt(record.run_id, record.attempt)
            update_run(folder, {"state": str(record.state), "reason": record.reason})


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
