"""Read conditions.json, and find what disturbed a run from outside its job.

A run is disturbed by another job (or another run of the study) on its nodes, by the CPU time of foreign
processes (processes outside of the job), by a slowdown that a GPU's hardware or temperature causes, and by
errors of the network link. All other conditions are recorded and shown, but never count as disturbances: they
can be effects of the run itself. The run's step times are never used, because excluding slow runs would make
results look better than they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from ddp_scaling_bench.files import read_json
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.run_folder import RunFolder

from .findings import Disturbance, ForeignCpu, ForeignJob, GpuSlowdown, LinkErrors, StudyRun, by_reason
from .ledger import Record

#: Maximum CPU time of foreign processes, as a fraction of the time of the cores that the run uses on a node.
FOREIGN_CPU_LIMIT = 0.05
#: Maximum time in which a GPU's temperature lowers its clocks, as a fraction of the window.
THERMAL_LIMIT = 0.01
#: Less foreign CPU time than this is never counted: Linux rounds the times of ended processes to 0.01 s.
FOREIGN_CPU_LEAST_S = 0.02
#: Slurm rounds the start and the end of a job down to a whole second.
_SLURM_ROUNDING = timedelta(seconds=1)
#: Maximum number of neighbours in the ledger, and of job ids in one entry of ``disturbed``.
MAX_NEIGHBOURS = 10
#: NVML sets this reason together with a more specific one. Alone, it can mean that clocks are changing.
_UNSPECIFIC_SLOWDOWN = "hw_slowdown"
#: Counters of a link that count damaged packets.
_LINK_ERRORS = ("crc", "symbol")


def disturbance_text(record: Record) -> str:
    """Return what disturbed an attempt, in one line without times: ``another run of the study on n1``."""
    return messages(by_reason(record.end.disturbed or () if record.end else ()))


@dataclass(frozen=True)
class Occupation:
    """The nodes of a job, with its start and end. ``end`` is None if the job has not ended."""

    job_id: str
    nodes: tuple[str, ...]
    start: datetime
    end: datetime | None
    of_study: bool = False

    @cached_property
    def certain_end(self) -> datetime:
        """A time at which the job has certainly ended: Slurm's end plus 1 s, because Slurm rounds it down."""
        return datetime.max.replace(tzinfo=UTC) if self.end is None else self.end + _SLURM_ROUNDING

    @cached_property  # a job can be the neighbour of hundreds of runs
    def entry(self) -> dict[str, Any]:
        """The entry of ``End.neighbours``. It names no user, account or job."""
        times = {"start": _as_text(self.start), "end": _as_text(self.end)}
        return {"job_id": self.job_id, **times, "nodes": list(self.nodes)}


@dataclass(frozen=True)
class Window:
    """A window (measured steps) of conditions.json; ``nodes`` and ``ranks`` contain the file's objects."""

    start: datetime
    end: datetime
    nodes: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return (self.end - self.start).total_seconds()


def read_windows(folder: RunFolder) -> list[Window] | None:
    """Return the windows in conditions.json that have times, or None if the run has no such file."""
    content = read_json(folder.conditions)
    if content is None:
        return None
    windows = []
    for entry in objects(content.get("windows")):
        start, end = parse_moment(entry.get("start")), parse_moment(entry.get("end"))
        if start is not None and end is not None and start <= end:
            windows.append(Window(start, end, objects(entry.get("nodes")), objects(entry.get("ranks"))))
    return windows


def objects(entries: Any) -> list[dict[str, Any]]:
    """Return the dicts of a list, or ``[]`` if ``entries`` is not a list."""
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def parse_moment(value: Any) -> datetime | None:
    """Return a time that is given as ISO 8601 or in seconds since 1970, or None for any other value."""
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError, OverflowError, OSError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _as_text(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    whole = "seconds" if not moment.microsecond else "milliseconds"
    return moment.astimezone(UTC).isoformat(timespec=whole).replace("+00:00", "Z")


def assess(
    folder: RunFolder,
    *,
    start: datetime | None,
    end: datetime | None,
    jobs: Sequence[Occupation] | None = None,
    unknown: str = "",
    cores: int = 1,
) -> dict[str, Any]:
    """Return ``disturbed`` and ``neighbours`` of an end; unknown values are left out.

    Args:
        folder: the run's folder with conditions.json and env.json.
        start: start of the run. If conditions.json has no windows, every other job that ran between
            start and end disturbs the run.
        end: end of the run.
        jobs: the other jobs on the run's nodes, or None if they were not determined.
        unknown: the reason if some of these jobs may be missing.
        cores: number of cores that the run uses on each node, if env.json does not contain this number.
    """
    windows = read_windows(folder)
    content: dict[str, Any] = {}
    if jobs is not None:
        listed = [job.entry for job in jobs[:MAX_NEIGHBOURS]]
        content["neighbours"] = f"unknown: {unknown}" if unknown else listed
    spans = [(window.start, window.end) for window in windows or ()]
    if not spans and start is not None and end is not None:
        spans = [(start, end)]
    found = [*_by_jobs(jobs or (), spans)]
    if windows:
        found += _by_conditions(windows, folder, cores)
    if not found and windows is None and (jobs is None or unknown):
        return content
    return {"disturbed": tuple(found), **content}


def _by_jobs(jobs: Iterable[Occupation], spans: Sequence[tuple[datetime, datetime]]) -> Iterator[Disturbance]:
    """Yield one disturbance per kind of job and node, for the jobs that ran during one of ``spans``."""
    found: dict[tuple[type[StudyRun | ForeignJob], str], list[tuple[datetime, datetime, str]]] = {}
    for job in jobs:
        last = job.certain_end
        common = [span for span in spans if job.start < span[1] and span[0] < last]
        if common:
            entry = (max(job.start, common[0][0]), min(last, common[-1][1]), job.job_id)
            kind = StudyRun if job.of_study else ForeignJob
            for node in job.nodes:
                found.setdefault((kind, node), []).append(entry)
    for (kind, node), entries in found.items():
        starts, ends, ids = zip(*entries, strict=True)
        job_ids = tuple(dict.fromkeys(ids))
        yield kind(
            subject=(node,),
            start=_as_text(min(starts)),
            end=_as_text(max(ends)),
            jobs=job_ids[:MAX_NEIGHBOURS],
            more_jobs=max(len(job_ids) - MAX_NEIGHBOURS, 0),
        )


def _by_conditions(windows: Sequence[Window], folder: RunFolder, cores: int) -> Iterator[Disturbance]:
    """Yield one disturbance per reason and node, from the windows that exceed a limit."""
    if not any(True for window in windows for _ in _by_window(window, {}, {}, 1)):
        return  # more cores only raise the limits, so env.json need not be read
    env = read_json(folder.env) or {}
    used, hosts = cores_in_use(env), host_of_rank(env)
    found: dict[tuple[str, tuple[str, ...]], Disturbance] = {}
    for window in windows:
        for one in _by_window(window, used, hosts, cores):
            key = (one.kind, one.subject)
            found[key] = _extended(found[key], one) if key in found else one
    yield from found.values()


def _by_window(
    window: Window, cores: Mapping[str, int], hosts: Mapping[int, str], default_cores: int
) -> Iterator[Disturbance]:
    start, end = _as_text(window.start), _as_text(window.end)
    for node in window.nodes:
        name = str(node.get("node"))
        share = _foreign_share(node.get("foreign_cpu_s"), window.seconds, cores.get(name, default_cores))
        if share is not None and share > FOREIGN_CPU_LIMIT:
            share = round(share, 4)
            yield ForeignCpu(subject=(name,), start=start, end=end, share=share, limit=FOREIGN_CPU_LIMIT)
        errors = _link_errors(node.get("net"))
        if errors > 0:
            yield LinkErrors(subject=(name,), start=start, end=end, errors=errors)
    for rank in window.ranks:
        reasons = sorted(set(_slowdowns(rank.get("clocks"))) - {_UNSPECIFIC_SLOWDOWN})
        # The reasons were sampled at the start and end of the window. The counter also includes the time
        # between.
        if not reasons and _thermal_s(rank.get("clocks")) > THERMAL_LIMIT * window.seconds:
            reasons = ["thermal_slowdown"]
        if reasons:
            host = hosts.get(rank.get("rank", -1))
            subject = (host,) if host else ()
            yield GpuSlowdown(subject=subject, start=start, end=end, slowdowns=tuple(reasons))


def _extended(earlier: Disturbance, later: Disturbance) -> Disturbance:
    """Return a disturbance from the start of ``earlier`` to the end of ``later``, with the values of both."""
    match earlier, later:
        case ForeignCpu(share=float(first)), ForeignCpu(share=float(second)):
            earlier = replace(earlier, share=max(first, second))
        case LinkErrors(errors=int() | float() as first), LinkErrors(errors=int() | float() as second):
            earlier = replace(earlier, errors=first + second)
        case GpuSlowdown(), GpuSlowdown():
            earlier = replace(earlier, slowdowns=tuple(dict.fromkeys(earlier.slowdowns + later.slowdowns)))
    return replace(earlier, end=later.end)


def _foreign_share(foreign_s: Any, seconds: float, cores: int) -> float | None:
    """Return the CPU time of foreign processes as a fraction of the time of the cores in use."""
    if not isinstance(foreign_s, int | float) or seconds <= 0 or foreign_s < FOREIGN_CPU_LEAST_S:
        return None
    return foreign_s / (cores * seconds)


def _leaves(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the entries of a dict at any depth."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value


def _link_errors(counters: Any) -> float:
    """Return the number of damaged packets."""
    counts = ((name, value) for name, value in _leaves(counters) if isinstance(value, int | float))
    return sum(value for name, value in counts if any(word in name for word in _LINK_ERRORS))


def _slowdowns(clocks: Any) -> Iterator[str]:
    """Yield NVML's names of the hardware and thermal reasons for lower clocks."""
    for name, value in _leaves(clocks):
        if name in ("hardware", "thermal") and isinstance(value, list):
            yield from map(str, value)


def _thermal_s(clocks: Any) -> float:
    """Return the seconds of the window in which the GPU's temperature lowered its clocks, or 0 if unknown."""
    samples = clocks if isinstance(clocks, dict) else {}
    before, after = ((samples.get(name) or {}).get("thermal_s") for name in ("before", "after"))
    return after - before if isinstance(before, int | float) and isinstance(after, int | float) else 0.0


def host_of_rank(env: Mapping[str, Any]) -> dict[int, str]:
    """Return the host of each rank from the content of env.json."""
    return {
        rank: str(host.get("host"))
        for host in objects(env.get("hosts"))
        for rank in _integers(host.get("ranks"))
    }


def cores_in_use(env: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of cores that the ranks use on each node, at least 1.

    This is the number of the ranks' threads, but at most the number of cores that the ranks may use.
    """
    threads = {
        str(node.get("node")): _sum(node.get("threads_per_rank")) for node in objects(env.get("cores"))
    }
    used = {}
    for host in objects(env.get("hosts")):
        allowed, wanted = host.get("cores"), threads.get(str(host.get("host")))
        known = [number for number in (allowed, wanted) if isinstance(number, int)]
        used[str(host.get("host"))] = max(1, min(known, default=1))
    return used


def idle_cores(folder: RunFolder) -> str:
    """Describe a node with enough idle cores for one more thread per rank, or return ``""``."""
    windows, env = read_windows(folder), read_json(folder.env) or {}
    ranks = windows[-1].ranks if windows else []
    threads = {rank.get("rank"): rank.get("threads") for rank in ranks}
    for host in objects(env.get("hosts")):
        here = [threads.get(rank) for rank in _integers(host.get("ranks"))]
        used, cores = _sum(here), host.get("cores")
        if used and None not in here and isinstance(cores, int) and cores - used >= len(here):
            return f"{cores - used} of {cores} cores are idle on {host.get('host')}"
    return ""


def _sum(numbers: Any) -> int | None:
    return sum(_integers(numbers)) or None


def _integers(numbers: Any) -> list[int]:
    return [one for one in numbers if isinstance(one, int)] if isinstance(numbers, list) else []
