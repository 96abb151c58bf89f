"""Find the other jobs on the nodes of runs that have ended.

Without accounting, only the other runs of the study are known, from run.json, conditions.json and the queue.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ..study.conditions import Neighbours, Occupation, parse_moment, read_windows
from ..study.ledger import RunRecord
from ..study.plan_json import PlannedStudy
from ..study.run_json import read_run
from .outcome import JobStatus
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


def beside_in_study(study: PlannedStudy, record: RunRecord, *, ended_at: str | None) -> Neighbours:
    """Return the other runs of the study that shared nodes with a run; other jobs are unknown."""
    unknown = f"executor {study.executor} has no accounting"
    ended = JobStatus(record.state, ended=parse_moment(ended_at))
    run = occupation(study, record, ended)
    if run is None:
        return Neighbours(unknown=unknown)
    return Neighbours(Jobs(occupations(study, since=run.start)).beside(run), unknown)


def occupations(
    study: PlannedStudy, *, queue: Mapping[str, JobStatus] | None = None, since: datetime | None = None
) -> Iterator[Occupation]:
    """Yield the nodes and times of each run's latest attempt, if they are known without sacct.

    ``queue`` is the status of jobs in squeue. Runs whose end was recorded before ``since`` are left out.
    """
    for record in study.records().values():
        recorded = parse_moment(record.details.get("time"))
        over = record.state.ended and since is not None and recorded is not None and recorded < since
        if record.attempt and not over:
            found = occupation(study, record, (queue or {}).get(str(record.job_id)))
            if found is not None and (found.end is not None or record.state.active):
                yield found


def occupation(study: PlannedStudy, record: RunRecord, status: JobStatus | None) -> Occupation | None:
    """Return the nodes and times of a run, from the ``status`` of its job or else from its files."""
    start, end = (status.started, status.ended) if status else (None, None)
    nodes = expand_hosts(status.hosts) if status else ()
    folder = study.run_folder(record)
    if start is None or not nodes:
        run = read_run(folder.path)[0] or {}
        start, nodes = start or parse_moment(run.get("started_at")), nodes or nodes_of(run)
        end = end or parse_moment(run.get("ended_at"))
    if start is None or not nodes:
        windows = read_windows(folder) or []
        nodes = nodes or tuple(dict.fromkeys(str(node.get("node")) for one in windows for node in one.nodes))
        start = start or min((window.start for window in windows), default=None)
        end = end or max((window.end for window in windows), default=None)
    if start is None or not nodes:
        return None
    return Occupation(record.job_id or record.run_id, nodes, start, end, of_study=True)


def nodes_of(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the nodes of a run according to its run.json, or ``()`` if run.json does not name them."""
    allocation = run.get("allocation")
    hosts = allocation.get("hosts") if isinstance(allocation, Mapping) else run.get("hosts")
    if isinstance(hosts, str):
        return expand_hosts(hosts)
    return tuple(map(str, hosts)) if isinstance(hosts, list) else ()
