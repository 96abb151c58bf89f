"""Determine how a run ended from its exit code and its files."""

from __future__ import annotations

import errno
import os
import re
import signal
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..facts import facts_of_env
from ..matrix.cell import Cell
from ..measure.nccl_errors import logged_nccl_errors
from ..study.conditions import objects
from ..study.files import read_json, read_table, regular_file
from ..study.layout import RunFolder
from ..study.ledger import FailureClass, RunState
from ..study.processes import started_ranks
from ..words import sentence
from .readings import collect_metrics

_TAIL_BYTES = 20_000
#: The first error is at the start of a log: torch prints 5 kB for each rank that then loses its connection.
_HEAD_BYTES = 1_000_000
#: A disk with less free space is full: the files of a run no longer fit.
_LEAST_FREE_BYTES = 64 * 1024
_NOT_FINITE = ("nan", "inf", "-inf")

_TORCHRUN_RANK = re.compile(r"host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: -(\d+) ")
_TORCHRUN_EXIT = re.compile(
    r"Root Cause .*\n.*\n.*\n *host +: (\S+)\n *rank +: (\d+) .*\n *exitcode +: (\d+) "
)
_WORKLOAD_ERROR = "bench: error: "
#: Lines with "Error" that are never the cause. torchrun raises ChildFailedError after its ranks have printed
#: their own errors. torch's C++ stack contains ``c10::Error``. :mod:`bench.measure.nccl_errors` reads NCCL's
#: errors.
_NOT_A_CAUSE = re.compile(
    r"ChildFailedError|^frame #\d|^Exception raised from \w|NCCL error|\bnccl\w+Error: "
)


@dataclass
class Outcome:
    """Final state of one attempt of a run, with the reason. ``details`` has further values for run.json."""

    state: RunState
    reason: str = ""
    failure_class: FailureClass | None = None
    exit_code: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobStatus:
    """State of a job according to its scheduler.

    Attributes:
        failure_class: class of the cause if the run did not complete, else None.
        reason: explanation of the state, or ``""`` if there is nothing to explain.
        exit_code: highest exit code of the steps, else the script's, else 128 + ``signal``. sacct shows
            codes above 128 reduced by 128 (137 as 9), so prefer the code in end.json.
        started, ended: times in UTC.
        hosts: names of the hosts in Slurm's compressed form, such as ``n[1-4]``.
        restarts: number of times Slurm requeued the job; its output files then mix several attempts.
        stuck: whether a queued job cannot start until a person acts.
        settled: whether accounting of an ended job is complete. Rows arrive one by one over
            some seconds, and the last row may contain the cause of a failure.
    """

    state: RunState
    failure_class: FailureClass | None = None
    reason: str = ""
    exit_code: int | None = None
    started: datetime | None = None
    ended: datetime | None = None
    hosts: str = ""
    restarts: int = 0
    stuck: bool = False
    settled: bool = False


@dataclass(frozen=True)
class EndNote:
    """Content of end.json, in which the job itself records its exit code and end time."""

    exit_code: int | None = None
    written: str | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> EndNote:
        """Read end.json; missing or invalid values become None."""
        end = read_json(folder.end) or {}
        code, written = end.get("exit_code"), end.get("time")
        is_code = isinstance(code, int) and not isinstance(code, bool)
        return cls(code if is_code else None, written if isinstance(written, str) else None)

    @property
    def written_at(self) -> str | None:
        """End time of the job as in run.json (ISO 8601), or None if it is missing or invalid."""
        return self.written if self.time is not None else None

    @property
    def time(self) -> datetime | None:
        """End time of the job, or None if it is missing or invalid."""
        try:
            moment = datetime.fromisoformat(self.written or "")
        except ValueError:
            return None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def process_outcome(folder: RunFolder, cell: Cell, exit_code: int | None, *, host: str = "") -> Outcome:
    """Determine how a run without Slurm ended, from its exit code on ``host``, end.json, metrics and logs."""
    if exit_code == 0:
        missing = missing_results(folder, cell)
        if missing:
            return Outcome(RunState.FAILED, missing, FailureClass.BAD_EXIT, exit_code)
        return Outcome(RunState.COMPLETED, exit_code=0)
    failures = objects((read_json(folder.end) or {}).get("failures"))
    # A killed rank cannot report an error; the other ranks only report that they lost the connection to it.
    if failures and isinstance(failures[0].get("exit_code"), int) and failures[0]["exit_code"] < 0:
        reason = f"rank {failures[0].get('rank')} was killed by {signal_name(-failures[0]['exit_code'])}"
        return Outcome(RunState.FAILED, joined(reason, nccl_error(folder)), FailureClass.KILLED, exit_code)
    code = f"exit code {exit_code}" if exit_code is not None else "no exit code"
    reason = joined(wrong_ranks_of(folder, cell), error_line(folder))
    if not reason:  # on a full disk, the run cannot log its error
        full = f"the disk of {folder.path} is full ({os.strerror(errno.ENOSPC)})"
        reason = joined(full * disk_is_full(folder), f"{code} on {host}" if host else code)
    return Outcome(RunState.FAILED, reason, FailureClass.BAD_EXIT, exit_code)


def disk_is_full(folder: RunFolder) -> bool:
    """Return whether the disk of a run's folder is full; False if that is unknown."""
    try:
        disk = os.statvfs(folder.path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_FREE_BYTES


def wrong_ranks_of(folder: RunFolder, cell: Cell) -> str:
    """Return why a command did not start the planned ranks, or ``""``."""
    return started_ranks(folder.path, cell.world_size).error if cell.command is not None else ""


def missing_results(folder: RunFolder, cell: Cell) -> str:
    """Name the results that a run with exit code 0 did not produce; return "" if none is missing.

    For a command without the recorder, this function also writes metrics.csv from the command's values.
    """
    if cell.command is not None:
        return _missing_of_command(folder, cell)
    if not folder.metrics_csv.exists():
        return "ended without metrics.csv"
    rows, expected = read_table(folder.metrics_csv)[1], int(cell.workload["epochs"])
    return f"metrics.csv contains {len(rows)} of {expected} epochs" if len(rows) < expected else ""


def _missing_of_command(folder: RunFolder, cell: Cell) -> str:
    if wrong_ranks := wrong_ranks_of(folder, cell):
        return wrong_ranks
    source = cell.metrics.get("source")
    if source == "none":
        return ""
    if source != "recorder":
        return collect_metrics(folder, cell)
    if rows := read_table(folder.metrics_csv)[1]:
        losses = ((row.get("epoch"), row.get("train_loss")) for row in rows)
        wrong = (f"the loss became {loss} in epoch {epoch}" for epoch, loss in losses if loss in _NOT_FINITE)
        return next(wrong, "")
    for fact in facts_of_env(read_json(folder.env)):
        if fact.kind == "no-window":
            return sentence(fact)
    what = "the command recorded no metrics: call bench.record in its training loop"
    return f"{what}, or set workload.metrics to the file or output that contains them"


def error_line(folder: RunFolder) -> str:
    """Return the workload's first error message, else the last error in the logs, and NCCL's error.

    NCCL's error replaces the last error, unless it is probably an effect. Without any error, return
    torchrun's report.
    """
    last, of_torchrun = "", ""
    for path in (folder.err, folder.out):
        lines = log_tail(path)
        for line in map(str.strip, lines):
            if line and line[0] not in "=-[" and "Error" in line and not _NOT_A_CAUSE.search(line):
                last = line
        if found := _TORCHRUN_EXIT.search("\n".join(lines)):
            host, rank, code = found.groups()
            of_torchrun = of_torchrun or f"rank {rank} on {host} ended with exit code {code}"
    reported, of_nccl = _workload_error(folder), logged_nccl_errors(_log_lines(folder))
    if not of_nccl or any(str(one) in reported for one in of_nccl):
        return reported or last or of_torchrun
    return joined(reported or (last if of_nccl[0].is_effect else ""), str(of_nccl[0]))


def nccl_error(folder: RunFolder, reported: str = "") -> str:
    """Return the error that NCCL or torch's watchdog logged, or ``""`` if ``reported`` contains one.

    The watchdog aborts its process, whose end is then that of a process killed by SIGABRT.
    """
    found = [str(one) for one in logged_nccl_errors(_log_lines(folder))]
    return "" if any(one in reported for one in found) else next(iter(found), "")


def _log_lines(folder: RunFolder) -> list[str]:
    return [line for path in (folder.err, folder.out) for line in log_tail(path, head=_HEAD_BYTES)]


def _workload_error(folder: RunFolder) -> str:
    """Return the first error that the workload or the recorder logged, or ``""`` if there is none."""
    lines = _log_lines(folder)
    found = (line.partition(_WORKLOAD_ERROR)[2].strip() for line in lines if _WORKLOAD_ERROR in line)
    return next(found, "")


def with_workload_error(folder: RunFolder, reason: str) -> str:
    """Append the workload's error, which can name the missing rank after a time-out, and NCCL's error."""
    reported = _workload_error(folder)
    return joined(reason, reported, nccl_error(folder, reported))


def killed_by_torchrun(text: str) -> str:
    """Describe the rank that a signal killed, from torchrun's report; return ``""`` if there is none."""
    for host, rank, number in _TORCHRUN_RANK.findall(text):
        if int(number) != signal.SIGTERM:  # torchrun ends the other ranks with SIGTERM
            return f"rank {rank} on {host} was killed by {signal_name(int(number))}"
    return ""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGTERM``, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_tail(path: Path, *, head: int = 0) -> list[str]:
    """Return the lines in the first ``head`` bytes and at the end of a log, or ``[]`` without a log."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            begin = file.read(head)
            file.seek(max(len(begin), file.seek(0, 2) - _TAIL_BYTES))
            return (begin + file.read()).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def joined(*reasons: str) -> str:
    """Join the reasons that are not empty."""
    return "; ".join(filter(None, reasons))
