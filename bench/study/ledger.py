"""The ledger of a study: the only place in which the state of a run is stored.

ledger.jsonl is an append-only file with one JSON object per line. A line says how an attempt of a run is,
and the last line of a run's latest attempt is the state of the run:

    ``queued`` without ``job_id``: the intent to submit a job with a unique name (``job_name``).
    ``queued`` with ``job_id``: the scheduler accepted the job.
    ``planned``: the attempt certainly never started (``remark`` says why).
    ``completed``, ``failed``, ``cancelled``: the attempt ended, with the values of :class:`End`.

A line without a run is an event of the study: ``halted`` (`bench cancel`: a `bench submit` that still runs
stops), or ``adopted`` (`--adopt`: real path and inode of the folder). Only :class:`bench.jobs.engine.Engine`
writes, under the study's lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

from pydantic import Field, PlainValidator, TypeAdapter
from pydantic_core import from_json

from ddp_scaling_bench.errors import BenchError, unwritable
from ddp_scaling_bench.files import bounded_file, regular_file
from ddp_scaling_bench.finding import Finding, with_remedies
from ddp_scaling_bench.units import now as now

from .findings import Disturbance
from .found import read_disturbances, read_findings
from .reasons import LogCause


class RunState(StrEnum):
    """State of a run, and of a job: each state of a scheduler is mapped to one of these."""

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

    @property
    def words(self) -> str:
        """The state of a run that has no result, after the number of such runs."""
        words = {
            RunState.PLANNED: "not started",
            RunState.COMPLETED: "completed without a throughput",
            RunState.UNKNOWN: "of unknown state",
        }
        return words.get(self, str(self))


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
    STARTED_TWICE = "started-twice"

    @property
    def words(self) -> str:
        """The failure of a run, after the number of such runs."""
        words = {
            FailureClass.TIME_LIMIT: "hit the time limit",
            FailureClass.OUT_OF_MEMORY: "ran out of memory",
            FailureClass.NODE_FAILURE: "lost a node",
            FailureClass.PREEMPTED: "stopped for another job",
            FailureClass.REQUEUED: "held after a requeue",
            FailureClass.BAD_EXIT: "exited with an error",
            FailureClass.NEVER_STARTED: "could not start",
            FailureClass.KILLED: "killed by a signal",
        }
        return words.get(self, str(self))


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


def final_class(by_end: FailureClass | None, cause: str | None) -> FailureClass | None:
    """Return the failure class, from the class by the end of the job and the first cause in the logs."""
    # A signal is the usual sign that memory ran out, but others send it, too.
    unsure = by_end is FailureClass.KILLED and cause == "oom-host"
    if by_end in _BY_EXIT_CODE and cause is not None and not unsure:
        return _CLASS_OF_CAUSE.get(cause, by_end)
    return by_end


#: Number of characters of the message of a cause; `bench doctor` shows all of it.
MOST_CHARACTERS = 300
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Code = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_Disturbances = Annotated[tuple[Disturbance, ...] | None, PlainValidator(read_disturbances)]


def _findings(entries: Any) -> tuple[Finding, ...]:
    return tuple(read_findings(entries))


def _warnings(entries: Any) -> tuple[LogCause, ...] | None:
    found = (one for one in read_findings(entries) if isinstance(one, LogCause))
    return None if entries is None else tuple(found)


def _cause(entry: Any) -> LogCause | None:
    return next(iter(_warnings([entry]) or ()), None)


#: A damaged finding is left out, or :class:`bench.study.found.Unknown`, so that the line still counts.
_Findings = Annotated[tuple[Finding, ...], PlainValidator(_findings)]


@dataclass(frozen=True, kw_only=True)
class End:
    """What became of an attempt.

    Attributes:
        state: completed, failed or cancelled; planned if the attempt certainly never started; unknown if its
            files do not say how it ended.
        reasons: why the attempt failed, was cancelled or never started, and remarks of its scheduler.
        cause: the first cause in the logs of a failed run.
        log_line: without a known cause, the first line of the logs' end that looks like an error: ``path,
            line, text``.
        warnings: the warnings in the logs of a completed run; None if the logs were not searched.
        started_at, ended_at: UTC times in ISO 8601.
        hosts: the allocation as the scheduler names it: ``n[1-4]``.
        disturbed: the disturbances (:mod:`bench.study.conditions`); None if they are not known.
        neighbours: the other jobs on the run's nodes, or why they are unknown.
        accounting: why the scheduler's accounting of the job is missing, or ``""``.
        settled: False if the scheduler is to be asked again.
    """

    state: RunState
    reasons: _Findings = ()
    failure_class: FailureClass | None = None
    exit_code: _Code | None = None
    cause: Annotated[LogCause | None, PlainValidator(_cause)] = None
    log_line: Mapping[str, Any] | None = None
    warnings: Annotated[tuple[LogCause, ...] | None, PlainValidator(_warnings)] = None
    started_at: str | None = None
    ended_at: str | None = None
    hosts: str = ""
    disturbed: _Disturbances = None
    neighbours: Sequence[Mapping[str, Any]] | str | None = None
    accounting: str = ""
    settled: bool = True


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of the ledger: how an attempt of a run is. ``attempt`` is 0 before the first attempt.

    Attributes:
        remark: why an attempt is in its state, or ``""``; for an attempt that has ended, ``end`` says this.
        job_name: the unique name of the job, which is its identity.
        job_id: the scheduler's id of the job, or ``""`` if it is not known.
        pack: number of the pack (a job that executes many runs), or None.
        place: position of the run in its pack, from 1.
        refused: True if the scheduler refused the attempt, whose number is then used again.
        by_bench: True if `bench cancel` cancelled the attempt.
        end: what became of the attempt, once it has ended.
        time: when the line was written.
        stuck: True if the job will not start until a person acts. Not written.
        ending: True if the job has ended, but its accounting is not complete yet. Not written.
    """

    run_id: str
    attempt: _Count = 0
    state: RunState = RunState.PLANNED
    remark: str = ""
    job_name: str = ""
    job_id: str = ""
    pack: _Count | None = None
    place: _Count | None = None
    refused: bool = False
    by_bench: bool = False
    end: End | None = None
    time: str = ""
    stuck: bool = False
    ending: bool = False

    def ended(self, end: End) -> Record:
        """Return the record of this attempt after its end."""
        return replace(self, state=end.state, remark="", end=end, stuck=False, ending=False)

    @property
    def reason(self) -> str:
        """Why the attempt is in its state, in words; ``""`` if there is nothing to explain."""
        return "; ".join(filter(None, (with_remedies(self.end.reasons if self.end else ()), self.remark)))

    @property
    def why(self) -> str:
        """The first cause of a failure with its own message, then the reasons that say more.

        Without a known cause, the reasons come first, then the line of the log that looks like an error.
        """
        cause, line = (self.end.cause, self.end.log_line) if self.end else (None, None)
        parts = [with_remedies(self.end.reasons if self.end else ())]
        if self.end and cause:
            message = shorten(cause.own_message, MOST_CHARACTERS, placeholder=" …")
            more = [one.message for one in self.end.reasons if one.message not in cause.own_message]
            parts = [": ".join(filter(None, (cause.cause, message))), *more]
        if line:
            text = shorten(str(line.get("text")), MOST_CHARACTERS, placeholder=" …")
            parts.append(f"{line.get('path')}:{line.get('line')}: {text}")
        return "; ".join(filter(None, (*parts, self.remark)))

    @property
    def failure_class(self) -> FailureClass | None:
        """Category of the failure, if the attempt failed or was cancelled."""
        return self.end.failure_class if self.end else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the attempt, if it is known."""
        return self.end.exit_code if self.end else None

    @property
    def cause(self) -> str | None:
        """Name of the first cause in the logs of a failed attempt."""
        return self.end.cause.cause if self.end and self.end.cause else None

    @property
    def is_disturbed(self) -> bool:
        """True if the attempt completed but was disturbed."""
        return self.state is RunState.COMPLETED and bool(self.end and self.end.disturbed)

    @property
    def settled(self) -> bool:
        """True if nothing more is to be found out about the attempt."""
        return not self.state.active and (self.end is None or self.end.settled)

    def as_json(self) -> dict[str, Any]:
        """Return the values of the ledger's line; values that are not set are left out."""
        content = {name: getattr(self, name) for name in _OWN}
        content |= vars(self.end) if self.end else {}
        kept = {name: _stored(value) for name, value in content.items() if value != _DEFAULTS.get(name)}
        return {"run_id": self.run_id, "attempt": self.attempt, "state": str(self.state)} | kept


_UNWRITTEN = ("end", "time", "stuck", "ending")
_OWN = tuple(one.name for one in fields(Record) if one.name not in _UNWRITTEN)
_DEFAULTS = {one.name: one.default for one in (*fields(Record), *fields(End))}
_RECORD = TypeAdapter(Record)


def _stored(value: Any) -> Any:
    """Return a value of a record as it is written: findings with their kinds."""
    if isinstance(value, Finding):
        return value.as_json()
    return list(map(_stored, value)) if isinstance(value, tuple) else value


def _record(line: bytes) -> Record | None:
    """Return the record in a line, or None if the line is broken, incomplete, or not about a run."""
    try:
        content = from_json(line)
        end = content if RunState(content["state"]).ended else None
        return _RECORD.validate_python({**content, "end": end})
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Ledger:
    """The ledger of a study."""

    path: Path

    def append(self, records: Sequence[Record]) -> None:
        """Append the lines of records and sync them to disk; if that fails, append none.

        Raises:
            UnwritableError: the disk is full or read-only.
        """
        self._append([record.as_json() for record in records])

    def note(self, event: str, **values: Any) -> None:
        """Append an event of the study (``halted`` or ``adopted``)."""
        self._append([{"event": event, **values}])

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines:
            return
        time_utc = now()
        dump = json.JSONEncoder(ensure_ascii=False, default=str).encode
        text = "".join(dump({"time": time_utc, **line}) + "\n" for line in lines)
        try:
            descriptor = regular_file(str(self.path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # `bench cancel` notes without the study's lock
                size = os.fstat(descriptor).st_size
                is_cut = size and os.pread(descriptor, 1, size - 1) != b"\n"
                _write_all(descriptor, ("\n" * bool(is_cut) + text).encode(), size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def _lines(self, start: int = 0) -> Iterator[bytes]:
        try:
            with open(self.path, "rb", opener=bounded_file) as file:
                file.seek(start)
                yield from file
        except FileNotFoundError:
            return

    def attempts(self) -> dict[str, dict[int, Record]]:
        """Return the last line of each attempt, by run and attempt."""
        found: dict[str, dict[int, Record]] = {}
        for record in filter(None, map(_record, self._lines())):
            found.setdefault(record.run_id, {})[record.attempt] = record
        return found

    def records(self, run_ids: Iterable[str]) -> dict[str, Record]:
        """Return the record of each run's latest attempt, in the order of ``run_ids``."""
        found = self.attempts()
        return {run_id: latest(found.get(run_id), run_id) for run_id in run_ids}

    def line_number(self, record: Record) -> int:
        """Return the number of the last line about an attempt, or 1 if there is none."""
        kept = {name: value for name, value in record.as_json().items() if name in ("run_id", "attempt")}
        start = json.dumps(kept | {"state": ""}, ensure_ascii=False)[1:-2].encode()
        return max((at for at, line in enumerate(self._lines(), start=1) if start in line), default=1)

    @property
    def size(self) -> int:
        """Size in bytes; with it, :meth:`events` finds later events."""
        return self.path.stat().st_size if self.path.exists() else 0

    def events(self, event: str, start: int = 0) -> list[dict[str, Any]]:
        """Return the events of the study with this name, after the first ``start`` bytes."""
        mark = f'"event": "{event}"'.encode()
        found = []
        for line in self._lines(start):
            if mark in line:
                with suppress(ValueError):
                    found.append(from_json(line))
        return [one for one in found if isinstance(one, dict) and one.get("event") == event]


def latest(attempts: Mapping[int, Record] | None, run_id: str) -> Record:
    """Return the record of the latest attempt, or one without an attempt."""
    return attempts[max(attempts)] if attempts else Record(run_id=run_id)


def _write_all(descriptor: int, content: bytes, size: int) -> None:
    """Append ``content`` to a file of ``size`` bytes; if that fails (disk full), restore the size."""
    left = memoryview(content)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class LockedError(BenchError):
    """Another command holds the lock of the study."""


@contextmanager
def study_lock(path: Path, *, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the lock file ``path`` of a study; yield its descriptor, which a child process may inherit.

    The lock is released when every process has closed the descriptor. A child that outlives its parent
    therefore still prevents other submissions.

    Raises:
        LockedError: the lock is not free within ``wait_s`` seconds.
        UnwritableError: the file cannot be opened.
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
                    raise LockedError(
                        f"{path.parent}: another command holds the lock of this study{who}",
                        remedy="wait until it ends, or stop it",
                    ) from None
                time.sleep(0.1)
        with suppress(OSError):  # if the disk is full, the lock is held nevertheless
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)
