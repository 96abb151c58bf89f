"""What Slurm's commands print, read into rows: pure functions of text, for releases 20.11 to 25.x.

The client asks for times in UTC (``TZ=UTC``) and for formats whose last column is the job's name,
the only column that may hold the separator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

#: squeue -o: id as shown, state, reason, submitted, start, limit, nodes, hosts, user, partition, name.
QUEUE_FORMAT = "%i|%T|%r|%V|%S|%l|%D|%N|%u|%P|%j"

#: sacct -P -o.
ACCOUNTING_FIELDS = (
    "JobID",
    "State",
    "ExitCode",
    "DerivedExitCode",
    "Reason",
    "Submit",
    "Start",
    "End",
    "Elapsed",
    "NNodes",
    "NodeList",
    "MaxRSS",
    "JobName",
)

_NOTHING = {"", "unknown", "none", "n/a", "(null)", "none assigned", "invalid", "not_set"}
_JOB_ID = re.compile(r"(\d+)(?:_(\d+|\[[^\]]*\]))?(?:\+(\d+))?(?:\.(\S+))?")


class UnreadableOutputError(ValueError):
    """A line that a command of Slurm should not have printed."""


@dataclass(frozen=True)
class JobKey:
    """A job id taken apart: ``123``, ``123_4`` (array), ``123+1`` (heterogeneous), ``123.batch`` (step)."""

    number: str
    task: str | None = None
    component: int | None = None
    step: str | None = None

    @property
    def job(self) -> str:
        """The id that belongs to one submission: 123 or 123_4, without component and step."""
        return self.number if self.task is None else f"{self.number}_{self.task}"


def parse_job_id(text: str) -> JobKey:
    """Read ``123``, ``123_4``, ``123_[5-9%2]``, ``123+1``, ``123.0``, ``123+1.batch``.

    Raises:
        UnreadableOutputError: not a job id.
    """
    match = _JOB_ID.fullmatch(text.strip())
    if not match:
        raise UnreadableOutputError(f"{text!r} is not a job id")
    number, task, component, step = match.groups()
    return JobKey(number, task, None if component is None else int(component), step)


@dataclass(frozen=True)
class QueueRow:
    """One row of squeue: a job, or one component of a heterogeneous one.

    ``state`` and ``reason`` are Slurm's words. ``starts`` is the start, or the expected one;
    ``time_limit_s`` is None for no limit; ``hosts`` is Slurm's short form, empty while pending.
    """

    key: JobKey
    state: str
    reason: str
    submitted: datetime | None
    starts: datetime | None
    time_limit_s: int | None
    nodes: int | None
    hosts: str
    user: str
    partition: str
    name: str


def parse_queue(text: str) -> list[QueueRow]:
    """Read ``squeue -h -o`` :data:`QUEUE_FORMAT`."""
    return [
        QueueRow(
            parse_job_id(shown),
            state,
            _word(reason),
            parse_time(submitted),
            parse_time(starts),
            parse_limit_s(limit),
            int(nodes) if nodes.isdigit() else None,
            _word(hosts),
            user,
            partition,
            name,
        )
        for shown, state, reason, submitted, starts, limit, nodes, hosts, user, partition, name in _rows(
            text, columns=11
        )
    ]


@dataclass(frozen=True)
class AccountingRow:
    """One row of sacct: a job (``key.step`` is None) or a step of it (``batch``, ``extern``, ``0``, ...).

    ``exit_code`` and ``signal`` are the two halves of Slurm's ``1:0``; the signal 125 is not a
    signal but Slurm's mark for out of memory. ``elapsed`` and ``max_rss`` stay as printed.
    """

    key: JobKey
    state: str
    exit_code: int | None
    signal: int | None
    derived_exit_code: int | None
    reason: str
    submitted: datetime | None
    started: datetime | None
    ended: datetime | None
    elapsed: str
    nodes: int | None
    hosts: str
    max_rss: str
    name: str


def parse_accounting(text: str) -> list[AccountingRow]:
    """Read ``sacct -P -n -o`` :data:`ACCOUNTING_FIELDS`."""
    rows = []
    for cells in _rows(text, columns=len(ACCOUNTING_FIELDS)):
        job, state, exits, derived, reason, submitted, started, ended, elapsed, nodes, hosts, rss, name = (
            cells
        )
        code, signal = parse_exit(exits)
        rows.append(
            AccountingRow(
                key=parse_job_id(job),
                state=state,
                exit_code=code,
                signal=signal,
                derived_exit_code=parse_exit(derived)[0],
                reason=_word(reason),
                submitted=parse_time(submitted),
                started=parse_time(started),
                ended=parse_time(ended),
                elapsed=elapsed,
                nodes=int(nodes) if nodes.isdigit() else None,
                hosts=_word(hosts),
                max_rss=rss,
                name=name,
            )
        )
    return rows


def _rows(text: str, *, columns: int) -> Iterator[list[str]]:
    """Yield the cells of each line; with -M, Slurm puts ``CLUSTER: name`` above the rows."""
    for line in text.splitlines():
        if not line.strip() or line.startswith("CLUSTER: "):
            continue
        cells = line.split("|", columns - 1)
        if len(cells) != columns:
            raise UnreadableOutputError(f"expected {columns} columns, got {line!r}")
        yield cells


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def _word(cell: str) -> str:
    """Return a cell, empty where Slurm writes one of its words for nothing."""
    return "" if cell.strip().lower() in _NOTHING else cell.strip()


def parse_time(text: str) -> datetime | None:
    """Read ``2026-11-20T17:13:29`` as UTC; None for ``Unknown``, ``N/A`` and their like."""
    written = text.strip()
    if not _TIME.fullmatch(written):
        return None
    try:
        # Forty times as fast as strptime, where thousands of jobs have ended.
        return datetime.fromisoformat(written).replace(tzinfo=UTC)
    except ValueError:
        return None


def parse_limit_s(text: str) -> int | None:
    """Read a time limit (``1-02:00:00``, ``20:00``, ``30``: minutes); None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, first, second, third = match.groups()
    if days is not None:
        return int(days) * 86400 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0)
    if third is not None:
        return int(first) * 3600 + int(second) * 60 + int(third)
    return int(first) * 60 + int(second or 0)


def parse_exit(text: str) -> tuple[int | None, int | None]:
    """Read ``1:0`` as exit code and signal; (None, None) where there is none yet."""
    code, _, signal = text.strip().partition(":")
    return (int(code) if code.isdigit() else None, int(signal) if signal.isdigit() else None)


@dataclass(frozen=True)
class Submission:
    """What sbatch answered: the job's id, its cluster where Slurm has several, and any remarks."""

    job_id: str
    cluster: str | None = None
    remarks: str = ""


def parse_submission(text: str) -> Submission | None:
    """Read ``sbatch --parsable``: ``123`` or ``123;cluster``; None where no id was printed.

    Wrappers of sites print lines around it, or drop the option and say it in words.
    """
    for line in reversed(text.splitlines()):
        if match := re.fullmatch(r"(\d+)(?:;(\S+))?", line.strip()):
            return Submission(match.group(1), match.group(2))
        if match := re.search(r"Submitted batch job (\d+)(?: on cluster (\S+))?", line):
            return Submission(match.group(1), match.group(2))
    return None


@dataclass(frozen=True)
class StartEstimate:
    """What ``sbatch --test-only`` expects.

    ``starts`` is None where Slurm names a date far away, its way to say that it cannot tell.
    """

    starts: datetime | None
    processors: int
    hosts: str
    partition: str | None


_ESTIMATE = re.compile(
    r"Job \d+ to start at (\S+) using (\d+) processors on (?:nodes )?(\S+)(?: in partition (\S+))?"
)


def parse_estimate(text: str, *, now: datetime) -> StartEstimate | None:
    """Read the line that ``sbatch --test-only`` writes to its standard error; None where it is not there."""
    match = _ESTIMATE.search(text)
    if not match:
        return None
    starts, processors, hosts, partition = match.groups()
    time = parse_time(starts)
    if time is not None and time - now > timedelta(days=366):
        time = None
    return StartEstimate(time, int(processors), hosts, partition)


# What a cluster has, read from sinfo: partitions, nodes, GPUs.

#: sinfo -h -o: partition (* marks the default), availability, limit, nodes, state, CPUs, MB, GRES,
#: features, hosts. One row per group of equal nodes in one state.
NODES_FORMAT = "%P|%a|%l|%D|%T|%c|%m|%G|%f|%N"

#: Suffixes of sinfo's states: * not responding, ~ # ! % powered down or changing, $ maintenance,
#: @ ^ reboot, - planned for a larger job, + more (a mixed group).
_STATE_MARKS = "*~#!%$@^-+"
_IN_SERVICE = {
    *("idle", "mixed", "allocated", "completing", "planned", "reserved", "maint"),
    # Shut down to save power, and started for a job (21.08 and later write words for the marks).
    *("powered_down", "powering_down", "powering_up", "power_up"),
    "blocked",  # another job's exclusive topology block, 23.11 and later
}


@dataclass(frozen=True)
class Gres:
    """A generic resource of a node: ``gpu:l40s:4`` is name gpu, kind l40s, count 4."""

    name: str
    kind: str | None
    count: int


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one partition in one state. ``time_limit_s`` is None for no limit."""

    partition: str
    default: bool
    available: bool
    time_limit_s: int | None
    nodes: int
    state: str
    cpus: int
    memory_mb: int
    gres: tuple[Gres, ...]
    features: tuple[str, ...]
    hosts: str

    @property
    def in_service(self) -> bool:
        """Whether jobs run on these nodes, now or when others have ended (not down, not drained)."""
        return self.state.rstrip(_STATE_MARKS) in _IN_SERVICE and not self.state.endswith("*")

    @property
    def gpus(self) -> tuple[Gres, ...]:
        """The nodes' GPUs."""
        return tuple(gres for gres in self.gres if gres.name == "gpu" and gres.count)


def parse_nodes(text: str) -> list[NodeGroup]:
    """Read ``sinfo -h -o`` :data:`NODES_FORMAT`.

    Raises:
        UnreadableOutputError: a line with other columns.
    """
    return [_node_group(line) for line in text.splitlines() if line and not line.startswith("CLUSTER: ")]


def _node_group(line: str) -> NodeGroup:
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) != 10:
        raise UnreadableOutputError(f"expected 10 columns, got {line!r}")
    partition, available, limit, nodes, state, cpus, memory, gres, features, hosts = cells
    return NodeGroup(
        partition=partition.removesuffix("*"),
        default=partition.endswith("*"),
        available=available == "up",
        time_limit_s=parse_limit_s(limit),
        nodes=_number(nodes),
        state=state.lower(),
        cpus=_number(cpus),
        memory_mb=_number(memory),
        gres=parse_gres(gres),
        features=() if features == "(null)" else tuple(re.split(r"[,&|]", features)),
        hosts=hosts,
    )


def _number(cell: str) -> int:
    """Read a count; ``+`` marks the least of a mixed group, ``K`` a thousand."""
    match = re.fullmatch(r"(\d+)([KkMm]?)\+?", cell)
    if not match:
        raise UnreadableOutputError(f"{cell!r} is not a number of sinfo")
    return int(match.group(1)) * {"": 1, "k": 1000, "m": 10**6}[match.group(2).lower()]


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Read ``gpu:l40s:4(S:0-1),shard:8``, ``gpu:4``, ``gpu:a100_1g.5gb:7(IDX:0-6)``, ``(null)``."""
    found = []
    bare = re.sub(r"\([^)]*\)", "", text)  # sockets and indices, and (null)
    for item in filter(None, bare.split(",")):
        name, *rest = [part for part in item.split(":") if part != "no_consume"]
        count = rest.pop() if rest and re.fullmatch(r"\d+[KMGkmg]?", rest[-1]) else "1"
        found.append(Gres(name, rest[0] if rest else None, _gres_count(count)))
    return tuple(found)


def _gres_count(text: str) -> int:
    factor = {"k": 2**10, "m": 2**20, "g": 2**30}.get(text[-1].lower(), 1)
    return int(text.rstrip("KMGkmg")) * factor


# Slurm's accounting of a job as a table that people read: what sacct_summary.txt holds.

_HEADINGS = (
    "JobID",
    "State",
    "ExitCode",
    "Start (UTC)",
    "End (UTC)",
    "Elapsed",
    "MaxRSS",
    "NodeList",
    "Name",
)


def accounting_table(rows: Sequence[AccountingRow]) -> str:
    """Return one line per job and step, in aligned columns under a heading."""
    table = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADINGS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _cells(row: AccountingRow) -> tuple[str, ...]:
    key = row.key
    component = "" if key.component is None else f"+{key.component}"
    step = "" if key.step is None else f".{key.step}"
    exits = "" if row.exit_code is None else f"{row.exit_code}:{row.signal or 0}"
    times = (_clock(row.started), _clock(row.ended))
    shown = f"{key.job}{component}{step}"
    return (shown, row.state, exits, *times, row.elapsed, row.max_rss, row.hosts, row.name)


def _clock(time: datetime | None) -> str:
    return "-" if time is None else time.replace(tzinfo=None).isoformat(" ", "seconds")
