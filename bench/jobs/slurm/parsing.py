"""Parse the output of Slurm's commands (releases 20.11 to 26.05) into rows, and expand its host lists.

The client requests times in UTC. It requests the job's name as the last column, because only the name may
contain the separator.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from .messages import EXPECTED_START, search

_QUEUE_FIELDS = ("JobID", "State", "Reason", "Start", "NodeList", "User", "UID", "JobName")
#: Format of ``squeue -o``.
QUEUE_FORMAT = "%i|%T|%r|%S|%N|%u|%U|%j"
#: Columns of ``sacct -P -o``.
ACCOUNTING_FIELDS = (
    *("JobID", "State", "ExitCode", "DerivedExitCode", "Reason", "Start", "End", "Elapsed", "NodeList"),
    *("MaxRSS", "User", "UID", "JobName"),
)
_EMPTY_VALUES = {"", "unknown", "none", "n/a", "(null)", "none assigned", "invalid", "not_set"}
#: ``123``, ``123_4`` and ``123_[5-9%2]`` (array), ``123+1`` (component), ``123.batch`` (step).
_JOB_ID = re.compile(r"(\d+(?:_(?:\d+|\[[^\]]*\]))?)(?:\+\d+)?(?:\.(\S+))?")


class UnreadableOutputError(ValueError):
    """A Slurm command printed a line that cannot be parsed."""


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A row of squeue or sacct: a job or, in sacct only, one of its steps (``batch``, ``0``, ...).

    ``state``, ``reason``, ``elapsed`` and ``max_rss`` are as Slurm prints them. In squeue, ``started`` is the
    actual or the expected start. ``hosts`` is in Slurm's compressed form, empty while the job is pending.
    ``exit_code`` and ``signal`` are the two numbers of sacct's ExitCode (``1:0``); the signal 125 means out
    of memory. Steps have no ``user`` and no ``uid``. The last six values are those of sacct.
    """

    job: str
    step: str | None
    state: str
    name: str
    reason: str
    started: datetime | None
    hosts: str
    user: str
    uid: str
    ended: datetime | None = None
    exit_code: int | None = None
    signal: int | None = None
    derived_exit_code: int | None = None
    elapsed: str = ""
    max_rss: str = ""


def parse_queue(text: str) -> list[JobRow]:
    """Parse the output of ``squeue -h -o`` :data:`QUEUE_FORMAT`."""
    return _job_rows(text, _QUEUE_FIELDS)


def parse_accounting(text: str) -> list[JobRow]:
    """Parse the output of ``sacct -P -n -o`` :data:`ACCOUNTING_FIELDS`."""
    return _job_rows(text, ACCOUNTING_FIELDS)


def _job_rows(text: str, fields: Sequence[str]) -> list[JobRow]:
    return [_job_row(dict(zip(fields, cells, strict=True))) for cells in _rows(text, columns=len(fields))]


def _job_row(cells: Mapping[str, str]) -> JobRow:
    match = _JOB_ID.fullmatch(cells["JobID"].strip())
    if not match:
        raise UnreadableOutputError(f"{cells['JobID']!r} is not a job id")
    code, signal = parse_exit(cells.get("ExitCode", ""))
    return JobRow(
        job=match[1],
        step=match[2],
        state=cells["State"],
        name=cells["JobName"],
        reason=_value(cells["Reason"]),
        started=parse_time(cells["Start"]),
        hosts=_value(cells["NodeList"]),
        user=cells["User"],
        uid=cells["UID"],
        ended=parse_time(cells.get("End", "")),
        exit_code=code,
        signal=signal,
        derived_exit_code=parse_exit(cells.get("DerivedExitCode", ""))[0],
        elapsed=cells.get("Elapsed", ""),
        max_rss=cells.get("MaxRSS", ""),
    )


def _rows(text: str, *, columns: int) -> Iterator[list[str]]:
    """Yield the cells of each line; skip the line ``CLUSTER: name`` that the option -M adds."""
    for line in text.splitlines():
        if not line.strip() or line.startswith("CLUSTER: "):
            continue
        cells = line.split("|", columns - 1)
        if len(cells) != columns:
            raise UnreadableOutputError(f"expected {columns} columns, got {line!r}")
        yield cells


def _value(cell: str) -> str:
    """Return a cell, or an empty text for ``N/A``, ``(null)`` and similar."""
    return "" if cell.strip().lower() in _EMPTY_VALUES else cell.strip()


def parse_time(text: str) -> datetime | None:
    """Parse ``2026-11-20T17:13:29`` as UTC; return None for ``Unknown``, ``N/A`` and similar."""
    try:
        # Forty times as fast as strptime, which matters for thousands of ended jobs.
        return datetime.fromisoformat(text.strip()).replace(tzinfo=UTC)
    except ValueError:
        return None


def parse_limit_s(text: str) -> int | None:
    """Parse a time limit (``1-02:00:00``, ``20:00`` or minutes); return None for UNLIMITED and similar."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] or match[4]:  # the first number is hours
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 60 + second


def parse_exit(text: str) -> tuple[int | None, int | None]:
    """Parse ``1:0`` as exit code and signal; return (None, None) if there is no code yet."""
    code, _, signal = text.strip().partition(":")
    return (int(code) if code.isdigit() else None, int(signal) if signal.isdigit() else None)


def parse_submission(text: str) -> str | None:
    """Return the job id in the output of ``sbatch --parsable``, or None if there is none.

    Site wrappers of sbatch may print further lines, or a sentence instead of the bare id.
    """
    for line in reversed(text.splitlines()):
        match = re.fullmatch(r"(\d+)(?:;\S+)?", line.strip())
        if match := match or re.search(r"Submitted batch job (\d+)", line):
            return match.group(1)
    return None


def parse_expected_start(text: str, *, now: datetime) -> datetime | None:
    """Return the start in the output of ``sbatch --test-only``, or None if Slurm cannot estimate it.

    A date more than a year ahead counts as no estimate, because Slurm prints a date centuries ahead if the
    job depends on a job that can never start.
    """
    match = search(EXPECTED_START, text)
    start = parse_time(match["start"]) if match else None
    return None if start is None or start - now > timedelta(days=366) else start


#: Format of ``sinfo -o``: partition (* marks the default), availability, limit, nodes, state, CPUs, GRES,
#: nodes per job (``1-infinite``). One row per group of identical nodes in one state.
NODES_FORMAT = "%P|%a|%l|%D|%T|%c|%G|%s"
#: Suffixes of sinfo's states: * not responding, ~ # ! % power saving, $ maintenance, @ ^ reboot,
#: - planned for a larger job, + mixed group.
_STATE_MARKS = "*~#!%$@^-+"
_IN_SERVICE = {
    *("idle", "mixed", "allocated", "completing", "planned", "reserved", "maint"),
    # Power saving: Slurm starts the nodes for a job. 21.08 and later print words instead of suffixes.
    *("powered_down", "powering_down", "powering_up", "power_up"),
    "blocked",  # another job's exclusive topology block, 23.11 and later
}
_GPU = re.compile(r"(?:^|,)gpu(?::(?!no_consume|\d+\b)([^:,(]+))?(?::no_consume)?(?::(\d+))?")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one kind of a node, such as ``gpu:l40s:4``; ``kind`` is None if it has no name."""

    kind: str | None
    count: int


@dataclass(frozen=True)
class NodeGroup:
    """Identical nodes of a partition in one state.

    ``time_limit_s`` and ``max_nodes`` limit one job of the partition; None means no limit.
    """

    partition: str
    default: bool
    available: bool
    time_limit_s: int | None
    nodes: int
    state: str
    cpus: int
    gpus: tuple[Gpus, ...]
    max_nodes: int | None = None

    @property
    def in_service(self) -> bool:
        """True if the nodes can run jobs now or later: they are neither down nor drained."""
        return self.state.rstrip(_STATE_MARKS) in _IN_SERVICE and not self.state.endswith("*")


def parse_nodes(text: str) -> list[NodeGroup]:
    """Parse the output of ``sinfo -h -o`` :data:`NODES_FORMAT`."""
    return [_node_group(*map(str.strip, cells)) for cells in _rows(text, columns=8)]


def _node_group(
    partition: str, available: str, limit: str, nodes: str, state: str, cpus: str, gres: str, per_job: str
) -> NodeGroup:
    most = per_job.rpartition("-")[2]
    return NodeGroup(
        partition=partition.removesuffix("*"),
        default=partition.endswith("*"),
        available=available == "up",
        time_limit_s=parse_limit_s(limit),
        nodes=_number(nodes),
        state=state.lower(),
        cpus=_number(cpus),
        gpus=tuple(Gpus(kind or None, int(count or 1)) for kind, count in _GPU.findall(gres) if count != "0"),
        max_nodes=_number(most) if most[:1].isdigit() else None,
    )


def _number(cell: str) -> int:
    """Parse a count: ``16`` or ``2K`` (2,000); a final ``+`` (as in ``16+``, 16 or more) is ignored."""
    match = re.fullmatch(r"(\d+)([KkMm]?)\+?", cell)
    if not match:
        raise UnreadableOutputError(f"{cell!r} in the output of sinfo is not a number")
    return int(match.group(1)) * {"": 1, "k": 1000, "m": 10**6}[match.group(2).lower()]


_HEADINGS = "JobID", "State", "ExitCode", "Start (UTC)", "End (UTC)", "Elapsed", "MaxRSS", "NodeList", "Name"


def accounting_table(rows: Sequence[JobRow]) -> str:
    """Format accounting rows as the aligned table of ``sacct_summary.txt``."""
    table = [_HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)) for line in table)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _cells(row: JobRow) -> tuple[str, ...]:
    shown = row.job if row.step is None else f"{row.job}.{row.step}"
    exits = "" if row.exit_code is None else f"{row.exit_code}:{row.signal or 0}"
    times = (f"{time:%Y-%m-%d %H:%M:%S}" if time else "-" for time in (row.started, row.ended))
    return (shown, row.state, exits, *times, row.elapsed, row.max_rss, row.hosts, row.name)


#: Longer lists are not expanded: they are mistakes in a script rather than clusters.
_MAX_HOSTS = 20_000


@lru_cache(maxsize=256)
def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts in a Slurm host list such as ``n[01-04,7],login``, or no hosts if it is invalid."""
    if text.count("[") != text.count("]") or re.search(r"[$<{]", text):
        return ()
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]++|\[[^\]]*+\])++", text[:10_000]):
        pieces = [_choices(piece) for piece in re.split(r"(\[[^\]]*\])", item)]
        if not 0 < math.prod(map(len, pieces)) <= _MAX_HOSTS - len(hosts):
            return ()
        hosts += map("".join, itertools.product(*pieces))
    return tuple(hosts)


def _choices(piece: str) -> list[str]:
    """Return the numbers in ``[01-04,7]``, or a piece of a name without brackets."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for item in piece[1:-1].split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item.strip())
        low, high = (match[1], match[2] or match[1]) if match else ("0", str(_MAX_HOSTS))
        if int(high) - int(low) >= _MAX_HOSTS:
            return []
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
