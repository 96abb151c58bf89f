"""The ledger of a study: an append-only file of events, one JSON object per line.

Each event except ``halted`` names a run and an attempt (a run that is started again gets a new attempt).
The state of a run follows from its events in order. Nothing is lost if a process dies between two
events: the next command finds an attempt without an ``ended`` event and determines how this attempt ended.

Events:
    ``intent``: the attempt is about to be submitted with a unique job name (``job_name``).
    ``submitted``: Slurm accepted the job (``job_id``).
    ``started``: the attempt was started.
    ``ended``: the attempt ended (``state``, ``reason``, ..., and ``disturbed`` if something disturbed it).
    ``started_at`` and ``ended_at`` are
    those of run.json. The event contains ``"accounted": false`` if sacct did not yet have the job's rows.
    ``accounted``: sacct now has the rows. The values of this event replace the values of ``ended``.
    ``withdrawn``: the attempt was not started; the run is ``planned`` again.
    ``halted``: the whole study was cancelled. A `bench submit` that is still running stops.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..errors import BenchError, unwritable
from .files import regular_file

_EVENTS = ("intent", "submitted", "started", "ended", "accounted", "withdrawn")
#: Values of events that are texts, if they are known.
_TEXTS = (
    *("run_id", "time", "job_id", "job_name", "reason", "cause", "disturbed", "host"),
    *("started_at", "ended_at"),
)
#: Values of events that are whole numbers, if they are known, with the smallest possible ones.
_LEAST = {"attempt": 0, "pid": 1, "exit_code": -(2**31)}


class RunState(StrEnum):
    """State of a run. Each state of a Slurm job is mapped to one of these states."""

    PLANNED = "planned"
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        """True if the run has completed, failed or been cancelled."""
        return self in (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)

    @property
    def active(self) -> bool:
        """True if the run is queued or running, or ``unknown`` (possibly still queued or running)."""
        return self in (RunState.QUEUED, RunState.RUNNING, RunState.UNKNOWN)


class FailureClass(StrEnum):
    """The category of the reason for which a run failed or was cancelled."""

    TIME_LIMIT = "time-limit"
    OUT_OF_MEMORY = "out-of-memory"
    NODE_FAILURE = "node-failure"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    BAD_EXIT = "bad-exit"
    NEVER_STARTED = "never-started"
    KILLED = "killed"


#: Classes that only describe the exit code or signal of a process, and the classes that a cause in the logs
#: (its name in `bench doctor`) gives instead.
_BY_EXIT_CODE = (FailureClass.BAD_EXIT, FailureClass.KILLED)
_CLASS_OF_CAUSE = {
    "oom-host": FailureClass.OUT_OF_MEMORY,
    "oom-gpu": FailureClass.OUT_OF_MEMORY,
    "time-limit": FailureClass.TIME_LIMIT,
    "node-fail": FailureClass.NODE_FAILURE,
    "preempted": FailureClass.PREEMPTED,
}


def final_failure_class(recorded: object, cause: object) -> str | None:
    """Return the failure class that every view shows.

    ``recorded`` is the class by the end of the job. ``cause`` is the name of the first cause in the logs, or
    None.
    """
    # A signal is the usual sign that memory ran out, but others send it, too.
    unsure = recorded == FailureClass.KILLED and cause == "oom-host"
    if recorded in _BY_EXIT_CODE and isinstance(cause, str) and not unsure:
        recorded = _CLASS_OF_CAUSE.get(cause, recorded)
    return None if recorded is None else str(recorded)


@dataclass
class RunRecord:
    """State of a run's latest attempt according to the ledger; ``attempt`` is 0 before the first attempt.

    ``disturbed`` names what disturbed the attempt from outside of its job, or is empty if nothing is known.
    """

    run_id: str
    attempt: int = 0
    state: RunState = RunState.PLANNED
    reason: str = ""
    failure_class: str | None = None
    exit_code: int | None = None
    cause: str | None = None
    disturbed: str = ""
    job_id: str | None = None
    job_name: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def restore(self, run: Mapping[str, Any]) -> None:
        """Set the state to that in the content of a run.json; an active attempt becomes ``unknown``."""
        state = RunState(run["state"])
        self.state = RunState.UNKNOWN if state.active else state
        for name in ("exit_code", "failure_class", "job_id", "job_name"):
            setattr(self, name, run.get(name) if _is_possible(name, run.get(name)) else None)
        self.reason, cause = str(run.get("reason") or ""), run.get("cause")
        self.cause = str(cause.get("cause")) if isinstance(cause, dict) else None

    @property
    def is_disturbed(self) -> bool:
        """True if the attempt completed but was disturbed."""
        return self.state is RunState.COMPLETED and bool(self.disturbed)


def now() -> str:
    """Return the current UTC time as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Ledger:
    """The ledger of a study: a file of events, and the states that follow from them."""

    path: Path

    def append(self, event: str, *, run_id: str, attempt: int, **details: Any) -> None:
        """Append one event and sync it to disk; if that fails, append nothing and raise UnwritableError."""
        self.append_all([{"event": event, "run_id": run_id, "attempt": attempt, **details}])

    def append_all(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Append events and sync them to disk; if that fails, append none and raise UnwritableError."""
        if not events:
            return
        time_utc = now()
        text = "".join(json.dumps({"time": time_utc, **event}) + "\n" for event in events)
        try:
            descriptor = regular_file(str(self.path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                _write_all(descriptor, (self._missing_line_break(descriptor) + text).encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def halt(self) -> None:
        """Record that the whole study is being cancelled; a :class:`HaltWatch` detects this event."""
        self.append_all([{"event": "halted"}])

    @staticmethod
    def _missing_line_break(descriptor: int) -> str:
        """Return a line break if the file ends with an incomplete line, else an empty string."""
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            return "\n"
        return ""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of runs in order, skipping incomplete and damaged lines."""
        try:
            with open(self.path, encoding="utf-8", errors="replace", opener=regular_file) as file:
                yield from filter(_is_of_run, map(_parsed, file))
        except FileNotFoundError:
            return

    def attempts_of_job(self, job_id: str) -> list[tuple[str, int]]:
        """Return (run id, attempt) pairs for all attempts that were submitted as job ``job_id``."""
        events = (event for event in self.events() if event.get("event") == "submitted")
        return sorted({(e["run_id"], e["attempt"]) for e in events if e.get("job_id") == job_id})

    def records(self, run_ids: Iterable[str]) -> dict[str, RunRecord]:
        """Return the record of each run's latest attempt, in the order of ``run_ids``."""
        records = {run_id: RunRecord(run_id) for run_id in run_ids}
        for event in self.events():
            record = records.get(event["run_id"])
            if record is None or event["attempt"] < record.attempt:
                continue
            if event["attempt"] > record.attempt:
                record = records[record.run_id] = RunRecord(record.run_id, attempt=event["attempt"])
            _apply(record, event)
        return records


class HaltWatch:
    """Detect, from new lines of the ledger, that a study was cancelled after this object was created."""

    def __init__(self, ledger: Ledger) -> None:
        self._path = ledger.path
        self._read_to = ledger.path.stat().st_size if ledger.path.exists() else 0
        self._halted = False

    def halted(self) -> bool:
        """Return True if the whole study has been cancelled."""
        if self._halted or not self._path.exists():
            return self._halted
        with open(self._path, "rb", opener=regular_file) as file:
            file.seek(self._read_to)
            whole, line_break, _ = file.read().rpartition(b"\n")
        self._read_to += len(whole) + len(line_break)
        self._halted = any(_parsed(line).get("event") == "halted" for line in whole.splitlines())
        return self._halted


def _parsed(line: str | bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # an incomplete line
        return {}
    return event if isinstance(event, dict) else {}


def _is_of_run(event: Mapping[str, Any]) -> bool:
    """Return whether a line of the ledger is an event of a run, with the values that :func:`_apply` needs."""
    kind = event.get("event")
    if kind not in _EVENTS or None in (event.get("run_id"), event.get("attempt")):
        return False
    if kind in ("ended", "accounted") and event.get("state") not in list(RunState):
        return False
    return all(map(_is_possible, event, event.values()))


def _is_possible(name: str, value: Any) -> bool:
    """Return whether a value of an event or of run.json can be used."""
    if value is None:
        return True
    if name in _LEAST:
        return type(value) is int and _LEAST[name] <= value < 2**31
    if name in _TEXTS:
        return isinstance(value, str)
    return value in list(FailureClass) if name == "failure_class" else True


def _write_all(descriptor: int, content: bytes) -> None:
    """Append ``content``; if that fails (disk full), remove what was written and raise OSError."""
    size = os.fstat(descriptor).st_size
    left = memoryview(content)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _apply(record: RunRecord, event: Mapping[str, Any]) -> None:
    kind = event.get("event")
    extra = {k: v for k, v in event.items() if k not in ("event", "run_id", "attempt", "state", "reason")}
    record.details.update(extra)
    record.job_id = event.get("job_id", record.job_id)
    record.job_name = event.get("job_name", record.job_name)
    if kind in ("intent", "submitted"):
        record.state = RunState.QUEUED
    elif kind == "started":
        record.state, record.reason = RunState.RUNNING, ""
    elif kind in ("ended", "accounted"):
        record.state = RunState(event["state"])
        record.reason = event.get("reason") or ""
        record.exit_code = 0 if record.state is RunState.COMPLETED else event.get("exit_code")
        record.cause, record.failure_class = event.get("cause"), event.get("failure_class")
        record.disturbed = event.get("disturbed") or ""
    elif kind == "withdrawn":
        record.state = RunState.PLANNED
        record.reason = event.get("reason", "")


@contextmanager
def submit_lock(path: Path, *, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the lock file ``path`` of a study; yield its descriptor, which a child process may inherit.

    The lock is released when every process has closed the descriptor. A child that outlives its parent
    therefore still prevents other submissions. Raises BenchError if the lock is not free within
    ``wait_s`` seconds.
    """
    try:
        descriptor = regular_file(str(path), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
                    who = f" ({holder})" if holder else ""
                    raise BenchError(
                        f"{path.parent}: another `bench submit` is running for this study{who}",
                        remedy="wait until it ends, or stop it",
                    ) from None
                time.sleep(0.1)
        with suppress(OSError):  # if the disk is full, the lock is held nevertheless
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)
