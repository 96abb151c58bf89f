"""Find the other jobs on the nodes of runs that have ended, and what disturbed the runs.

Without accounting, only the other runs of the study are known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from ddp_scaling_bench.errors import UnavailableError

from ..study.conditions import Occupation, assess, parse_moment, read_windows
from ..study.ledger import Record
from ..study.plan_json import PlannedStudy
from .contract import Scheduler, Status
from .slurm.parsing import expand_hosts


class Jobs:
    """Jobs by node, sorted by their start."""

    def __init__(self, jobs: Iterable[Occupation]) -> None:
        self._by_node: dict[str, list[Occupation]] = {}
        for job in sorted(set(jobs), key=lambda job: job.start):
            for node in job.nodes:
                self._by_node.setdefault(node, []).append(job)
        self._starts = {node: [job.start for job in own] for node, own in self._by_node.items()}
        # For each job, the latest end among this job and the jobs before it. These are sorted.
        self._ends = {node: list(_latest_ends(own)) for node, own in self._by_node.items()}

    def beside(self, run: Occupation) -> list[Occupation]:
        """Return the other jobs on nodes of ``run``, each with the shared nodes only, sorted by start."""
        if len(run.nodes) == 1:
            return [_only_on(job, run.nodes) for job in self._on(run.nodes[0], run)]
        found: dict[int, tuple[Occupation, list[str]]] = {}
        for node in run.nodes:
            for job in self._on(node, run):
                found.setdefault(id(job), (job, []))[1].append(node)
        return sorted((_only_on(job, nodes) for job, nodes in found.values()), key=lambda job: job.start)

    def _on(self, node: str, run: Occupation) -> list[Occupation]:
        """Return the other jobs that certainly ran on a node at the same time as ``run``."""
        jobs = self._by_node.get(node)
        if not jobs:
            return []
        start, until = run.start, run.end or datetime.max.replace(tzinfo=UTC)
        first, end = bisect_right(self._ends[node], start), bisect_left(self._starts[node], until)
        own = run.job_id
        return [job for job in jobs[first:end] if job.job_id != own and (job.end is None or job.end > start)]


def _only_on(job: Occupation, nodes: Sequence[str]) -> Occupation:
    """Return a job with only the nodes that are in ``nodes``."""
    return job if len(nodes) == len(job.nodes) else replace(job, nodes=tuple(nodes))


def _latest_ends(jobs: Sequence[Occupation]) -> Iterator[datetime]:
    latest = datetime.min.replace(tzinfo=UTC)
    for job in jobs:
        latest = max(latest, job.end or datetime.max.replace(tzinfo=UTC))
        yield latest


@dataclass(frozen=True)
class Neighbourhood:
    """The jobs on the nodes of runs. ``records`` are the present records of all runs of the study."""

    study: PlannedStudy
    scheduler: Scheduler
    records: Mapping[str, Record]
    statuses: Mapping[str, Status]

    def assess(self, ended: Mapping[str, Record]) -> dict[str, Record]:
        """Return ``ended`` with their neighbours and what disturbed them; the scheduler is asked once."""
        runs = {run_id: self._occupation(record) for run_id, record in ended.items() if record.end}
        known = [run for run in runs.values() if run is not None]
        jobs, unknown = self._jobs(known) if known else (Jobs(()), "")
        found = {}
        for run_id, run in runs.items():
            record = ended[run_id]
            assert record.end is not None
            conditions = assess(
                self.study.run_folder(record),
                start=parse_moment(record.end.started_at),
                end=parse_moment(record.end.ended_at),
                jobs=jobs.beside(run) if run else None,
                unknown=unknown,
                cores=self.study.cores_per_node(run_id),
            )
            found[run_id] = replace(record, end=replace(record.end, **conditions))
        return found

    def _jobs(self, runs: Sequence[Occupation]) -> tuple[Jobs, str]:
        nodes = sorted({node for run in runs for node in run.nodes})
        last = max((run.end or datetime.now(UTC) for run in runs), default=datetime.now(UTC))
        try:
            found = self.scheduler.others(nodes, min(run.start for run in runs), last + timedelta(seconds=1))
            unknown = found.unknown
        except UnavailableError as error:
            found, unknown = None, error.message.partition("\n")[0]
        if found is None or (unknown and not found.jobs):
            own = (self._occupation(record) for record in self.records.values() if record.attempt)
            return Jobs([run for run in own if run is not None]), unknown
        ours = {one.job_id for of_run in self.study.ledger.attempts().values() for one in of_run.values()}
        ours |= {record.job_id for record in self.records.values()}
        return Jobs(replace(job, of_study=job.job_id in ours) for job in found.jobs), unknown

    def _occupation(self, record: Record) -> Occupation | None:
        """Return the nodes and times of a run: from its end, its job's status, or its conditions.json."""
        end, status = record.end, self.statuses.get(record.job_name)
        if end is None and (status is None or not record.state.active):
            return None
        hosts = end.hosts if end else status.hosts if status else ""
        start = parse_moment(end.started_at) if end else status.started if status else None
        until = parse_moment(end.ended_at) if end else None
        nodes: tuple[str, ...] = expand_hosts(hosts)
        if start is None or not nodes:
            windows = read_windows(self.study.run_folder(record)) or []
            nodes = nodes or tuple(
                dict.fromkeys(str(node.get("node")) for one in windows for node in one.nodes)
            )
            start = start or min((window.start for window in windows), default=None)
        if start is None or not nodes:
            return None
        return Occupation(record.job_id or record.run_id, nodes, start, until, of_study=True)
