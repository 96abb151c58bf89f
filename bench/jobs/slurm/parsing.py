"""Parse the output of Slurm's commands (releases 20.11 to 26.05) into rows, and expand its host lists.

The client requests times in UTC. It requests the job's name as the last column, because only the name may
contain the separator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from .messages import EXPECTED_START, search

#: Format of ``squeue -o``: id, state, reason, submission, start, limit, nodes, hosts, partition, name.
QUEUE_FORMAT = "%i|%T|%r|%V|%S|%l|%D|%N|%P|%j"

#: Columns of ``sacct -P -o``.
ACCOUNTING_FIELDS = (
    *("JobID", "State", "ExitCode", "DerivedExitCode", "Reason", "Submit", "Start", "End", "Elapsed"),
    *("NNodes", "NodeList", "MaxRSS", "JobName"),
)

_EMPTY_VALUES = {"", "unknown", "none", "n/a", "(null)", "none assigned", "invalid", "not_set"}
_JOB_ID = re.compile(r"(\d+)(?:_(\d+|\[[^\]]*\]))?(?:\+(\d+))?(?:\.(\S+))?")


class UnreadableOutputError(ValueError):
    """A Slurm command printed a line that cannot be parsed."""


@dataclass(frozen=True)
class JobKey:
    """A parsed job id.

    Examples: ``123``, ``123_4`` (array task), ``123+1`` (component of a heterogeneous job) and
    ``123.batch`` (step).
    """

    number: str
    task: str | None = None
    component: int | None = None
    step: str | None = None

    @property
    def job(self) -> str:
        """The id of the job or array task, without component and step."""
        return self.number if self.task is None else f"{self.number}_{self.task}"


def parse_job_id(text: str) -> JobKey:
    """Parse ``123``, ``123_4``, ``123_[5-9%2]``, ``123+1``, ``123.0`` or ``123+1.batch``.

    Raises:
        UnreadableOutputError: the text is not a job id.
    """
    match = _JOB_ID.fullmatch(text.strip())
    if not match:
        raise UnreadableOutputError(f"{text!r} is not a job id")
    number, task, component, step = match.groups()
    return JobKey(number, task, None if component is None else int(component), step)


@dataclass(frozen=True)
class QueueRow:
    """A row of squeue: a job, or a component of a heterogeneous job.

    ``state`` and ``reason`` are as Slurm prints them. ``starts`` is the actual or expected start.
    ``time_limit_s`` is None if there is no limit. ``hosts`` is in Slurm's compressed form,
    empty while the job is pending.
    """

    key: JobKey
    state: str
    reason: str
    submitted: datetime | None
    starts: datetime | None
    time_limit_s: int | None
    nodes: int | None
    hosts: str
    partition: str
    name: str


def parse_queue(text: str) -> list[QueueRow]:
    """Parse the output of ``squeue -h -o`` :data:`QUEUE_FORMAT`."""
    return [
        QueueRow(
            parse_job_id(shown),
            state,
            _value(reason),
            parse_time(submitted),
            parse_time(starts),
            parse_limit_s(limit),
            int(nodes) if nodes.isdigit() else None,
            _value(hosts),
            partition,
            name,
        )
        for shown, state, reason, submitted, starts, limit, nodes, hosts, partition, name in _rows(
            text, columns=10
        )
    ]


@dataclass(frozen=True)
class AccountingRow:
    """A row of sacct: a job (``key.step`` is None) or one of its steps (``batch``, ``extern``, ``0``, ...).

    ``exit_code`` and ``signal`` are the two numbers of sacct's ExitCode (``1:0``); the signal number
    125 means out of memory. ``elapsed`` and ``max_rss`` are as Slurm prints them.
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
    """Parse the output of ``sacct -P -n -o`` :data:`ACCOUNTING_FIELDS`."""
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
                reason=_value(reason),
                submitted=parse_time(submitted),
                started=parse_time(started),
                ended=parse_time(ended),
                elapsed=elapsed,
                nodes=int(nodes) if nodes.isdigit() else None,
                hosts=_value(hosts),
                max_rss=rss,
                name=name,
            )
        )
    return rows


def _rows(text: str, *, columns: int) -> Iterator[list[str]]:
    """Yield the cells of each line; skip the line ``CLUSTER: name`` that the option -M adds."""
    for line in text.splitlines():
        if not line.strip() or line.startswith("CLUSTER: "):
            continue
        cells = line.split("|", columns - 1)
        if len(cells) != columns:
            raise UnreadableOutputError(f"expected {columns} columns, got {line!r}")
        yield cells


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def _value(cell: str) -> str:
    """Return a cell, or an empty text for ``N/A``, ``(null)`` and similar."""
    return "" if cell.strip().lower() in _EMPTY_VALUES else cell.strip()


def parse_time(text: str) -> datetime | None:
    """Parse ``2026-11-20T17:13:29`` as UTC; return None for ``Unknown``, ``N/A`` and similar."""
    stripped = text.strip()
    if not _TIME.fullmatch(stripped):
        return None
    try:
        # Forty times as fast as strptime, which matters for thousands of ended jobs.
        return datetime.fromisoformat(stripped).replace(tzinfo=UTC)
    except ValueError:
        return None


def parse_limit_s(text: str) -> int | None:
    """Parse a time limit (``1-02:00:00``, ``20:00`` or minutes); return None for UNLIMITED and similar."""
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


#: Format of ``sinfo -o``: partition (* marks the default), availability, limit, nodes, state, CPUs, MB, GRES,
#: nodes per job (``1-infinite``), hosts. One row per group of identical nodes in one state.
NODES_FORMAT = "%P|%a|%l|%D|%T|%c|%m|%G|%s|%N"

#: Suffixes of sinfo's states: * not responding, ~ # ! % power saving, $ maintenance, @ ^ reboot,
#: - planned for a larger job, + mixed group.
_STATE_MARKS = "*~#!%$@^-+"
_IN_SERVICE = {
    *("idle", "mixed", "allocated", "completing", "planned", "reserved", "maint"),
    # Power saving: Slurm starts the nodes for a job. 21.08 and later print words instead of suffixes.
    *("powered_down", "powering_down", "powering_up", "power_up"),
    "blocked",  # another job's exclusive topology block, 23.11 and later
}


@dataclass(frozen=True)
class Gres:
    """A generic resource of a node, such as ``gpu:l40s:4``: name gpu, kind l40s, count 4."""

    name: str
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
    gres: tuple[Gres, ...]
    hosts: str
    max_nodes: int | None = None

    @property
    def in_service(self) -> bool:
        """True if the nodes can run jobs now or later: they are neither down nor drained."""
        return self.state.rstrip(_STATE_MARKS) in _IN_SERVICE and not self.state.endswith("*")

    @property
    def gpus(self) -> tuple[Gres, ...]:
        """The GPUs of each node."""
        return tuple(gres for gres in self.gres if gres.name == "gpu" and gres.count)


def parse_nodes(text: str) -> list[NodeGroup]:
    """Parse the output of ``sinfo -h -o`` :data:`NODES_FORMAT`.

    Raises:
        UnreadableOutputError: a line has an unexpected number of columns.
    """
    return [_node_group(line) for line in text.splitlines() if line and not line.startswith("CLUSTER: ")]


def _node_group(line: str) -> NodeGroup:
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) != 10:
        raise UnreadableOutputError(f"expected 10 columns, got {line!r}")
    partition, available, limit, nodes, state, cpus, _memory, gres, per_job, hosts = cells
    return NodeGroup(
        partition=partition.removesuffix("*"),
        default=partition.endswith("*"),
        available=available == "up",
        time_limit_s=parse_limit_s(limit),
        nodes=_number(nodes),
        state=state.lower(),
        cpus=_number(cpus),
        gres=parse_gres(gres),
        hosts=hosts,
        max_nodes=_number(most) if (most := per_job.rpartition("-")[2])[:1].isdigit() else None,
    )


def _number(cell: str) -> int:
    """Parse a count: ``16`` or ``2K`` (2,000); a final ``+`` (as in ``16+``, 16 or more) is ignored."""
    match = re.fullmatch(r"(\d+)([KkMm]?)\+?", cell)
    if not match:
        raise UnreadableOutputError(f"{cell!r} in the output of sinfo is not a number")
    return int(match.group(1)) * {"": 1, "k": 1000, "m": 10**6}[match.group(2).lower()]


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Parse ``gpu:l40s:4(S:0-1),shard:8``, ``gpu:4``, ``gpu:a100_1g.5gb:7(IDX:0-6)`` or ``(null)``."""
    found = []
    without_parentheses = re.sub(r"\([^)]*\)", "", text)
    for item in filter(None, without_parentheses.split(",")):
        name, *rest = [part for part in item.split(":") if part != "no_consume"]
        count = rest.pop() if rest and re.fullmatch(r"\d+[KMGkmg]?", rest[-1]) else "1"
        found.append(Gres(name, rest[0] if rest else None, _gres_count(count)))
    return tuple(found)


def _gres_count(text: str) -> int:
    factor = {"k": 2**10, "m": 2**20, "g": 2**30}.get(text[-1].lower(), 1)
    return int(text.rstrip("KMGkmg")) * factor


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
    """Format accounting rows as the aligned table of ``sacct_summary.txt``."""
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


#: Longer lists are not expanded: they are mistakes in a script rather than clusters.
_MAX_HOSTS = 20_000


@lru_cache(maxsize=256)
def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts in a Slurm host list such as ``n[01-04,7],login``, or no hosts if it is invalid."""
    hosts: list[str] = []
    if text.count("[") != text.count("]"):
        return ()
    for item in re.findall(r"(?:[^,\[]++|\[[^\]]*+\])++", text[:10_000]):
        expanded = [""]
        for piece in re.split(r"(\[[^\]]*\])", item):
            choices = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            if not choices or len(expanded) * len(choices) > _MAX_HOSTS:
                return ()
            expanded = [start + choice for start in expanded for choice in choices]
        hosts.extend(expanded)
        if len(hosts) > _MAX_HOSTS or "$" in item or "<" in item or "{" in item:
            return ()
    return tuple(host for host in hosts if host)


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item.strip())
        if not match:
            return []
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(high) - int(low) >= _MAX_HOSTS:
            return []
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
