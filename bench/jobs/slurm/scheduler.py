"""Submit runs as Slurm jobs, and determine how they are from squeue and sacct.

A job is found by its unique name, whoever owns it: squeue remembers it for some minutes after its end, and
sacct for months. The rows in sacct arrive one by one over some seconds after the end, and the last row can
contain the cause of a failure; until then, the status is not settled.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.units import count, human_duration, slurm_time

from ...matrix.cell import Run
from ...study.conditions import Occupation
from ...study.ledger import RunState
from ...study.plan_json import PlannedStudy
from ...study.reasons import SameName
from ...study.run_json import Attempt
from ..contract import Estimate, Job, Others, Scheduler, Status
from ..logs import joined
from .client import Slurm, SlurmRefusedError, SlurmUnavailableError, between, joined_lists
from .messages import NOT_NOW, search
from .pack import PACK_MARK, PLACEMENT, Pack, split
from .parsing import JobRow, NodeGroup, expand_hosts
from .states import PROVISIONAL_NAME, classify, classify_queue, read_state, rows_by_job, step_statuses

#: The time limit that is requested for a training, divided by its expected time.
_LIMIT_FACTOR = 1.1
_SHORTEST_LIMIT_S = 600
#: The clocks of this machine and of the cluster differ by less than this.
_CLOCK_ERROR = timedelta(days=1)
_PRIVATE = "job data of other users are private (PrivateData)"
_CORRECT = (
    "correct the matrix's cluster section and plan it again (`sinfo -s` lists partitions, "
    "`sacctmgr show assoc where user=$USER` accounts and QOS)"
)
#: States of nodes that run jobs or can start one.
_IN_SERVICE = {"idle", "mixed", "allocated", "completing", "planned"}
_PARTITION = re.compile(r"^#SBATCH --partition=(\S+)", re.M)


class SlurmScheduler(Scheduler):
    """Execute the runs of a study as Slurm jobs."""

    def __init__(self, study: PlannedStudy, *, slurm: Slurm | None = None) -> None:
        super().__init__(study)
        provides_python = study.plan.get("setup") or study.plan.get("container")
        samples = any(cell.is_unrecorded for cell in study.cells.values())
        #: Variables for sbatch. Without cluster.setup or a container, jobs use this Python interpreter. It
        #: also samples the conditions on the nodes for commands without the recorder, whose Python can lack
        #: bench.
        self.variables = {} if provides_python and not samples else {"BENCH_PYTHON": sys.executable}
        self.slurm = slurm or Slurm(environment={**os.environ, **self.variables})
        self._partitions = cache(self._find_partitions)

    def submit(self, job: Job) -> str:
        """Submit a job with sbatch, which inherits the study's lock; return its id."""
        return self.slurm.submit(self._command(job), pass_fds=self.held)

    def words(self, job: Job) -> str:
        """Return the sbatch command of a job, including environment variables."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self._command(job))])

    def _command(self, job: Job) -> list[str]:
        return [
            *("sbatch", "--parsable", f"--job-name={job.name}"),
            f"--output={literal_pattern(job.folder.out.absolute())}",
            f"--error={literal_pattern(job.folder.err.absolute())}",
            *job.options,
            # The site's default, or SBATCH_EXPORT, can keep variables from the job.
            *["--export=ALL"] * bool(self.study.plan.get("env_from")),
            # A dependency on the preceding job alone is not enough: if that job is cancelled while it waits,
            # Slurm would start its successor although an earlier job still executes.
            *[f"--dependency=afterany:{':'.join(job.after)}"] * bool(job.after),
            str(job.script.absolute()),
            str(job.folder.path.absolute()),
        ]

    def poll(self, jobs: Mapping[str, str]) -> dict[str, Status]:
        """Return the status of jobs, from squeue and, for those that have ended, sacct.

        The status of a pack's job contains the steps of its runs, even while the job runs.
        """
        if not jobs:
            return {}
        # Several jobs can have one name, for example after a wrong id or a lost ledger.
        found: dict[str, dict[str, Status]] = {name: {} for name in jobs}
        for row in self.slurm.queue(list(jobs)):
            found[row.name][row.job] = classify_queue(row)
        over = {
            name: list(dict.fromkeys(filter(None, (*own, jobs[name]))))
            for name, own in found.items()
            if _needs_accounting(name, own.values())
        }
        try:
            accounted = self._accounted(over, [name for name in over if not found[name]])
        except SlurmUnavailableError as error:
            for name in over:
                for job_id in [*found[name]] or [jobs[name]]:
                    found[name][job_id] = _unaccounted(found[name].get(job_id), name, job_id, error)
        else:
            for name, rows in accounted:
                job_id = rows[0].job
                found[name][job_id] = _accounted(found[name].get(job_id), rows, packed=PACK_MARK in name)
        return {name: _preferred(list(own.values()), jobs[name]) for name, own in found.items() if own}

    def _accounted(
        self, jobs: Mapping[str, Sequence[str]], unlisted: Sequence[str]
    ) -> list[tuple[str, list[JobRow]]]:
        """Return the rows of sacct of each job with its name, for jobs given by their names and ids.

        An id can belong to a job of another name, because a controller that lost its state counts from 1
        again. The jobs of the names ``unlisted`` whose id is wrong or unknown are searched for by name.
        """
        lists = joined_lists(job_id for own in jobs.values() for job_id in own)
        by_id = rows_by_job(row for ids in lists for row in self.slurm.accounting(f"--jobs={ids}"))
        found = [
            (name, rows)
            for name, own in jobs.items()
            for rows in (by_id.get(job_id, []) for job_id in own)
            if any(row.step is None and row.name in (name, PROVISIONAL_NAME) for row in rows)
        ]
        known = {name for name, _ in found}
        # Slurm 22.05 finds a job by its name about five seconds later than by its id. The clock of this
        # machine can be wrong, and sacct ignores jobs after its time.
        planned = datetime.fromtimestamp(self.study.folder.planned_s, UTC)
        times = between(planned - _CLOCK_ERROR, datetime.now(UTC) + _CLOCK_ERROR)
        lost = joined_lists(name for name in unlisted if name not in known)
        rows = [row for names in lost for row in self.slurm.accounting(*times, f"--name={names}")]
        for own in rows_by_job(rows).values():
            name = next((row.name for row in own if row.step is None), "")
            if name in jobs:
                found.append((name, own))
        return found

    def living(self, names: Sequence[str]) -> dict[str, str]:
        """Return the ids of queued or running jobs by their names, from squeue only."""
        rows = self.slurm.queue(names) if names else []
        return {row.name: row.job for row in rows if read_state(row.state).state.active}

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs with scancel; raise SlurmRefusedError if Slurm denies it."""
        self.slurm.cancel(ids)

    def check(self, runs: Sequence[Run]) -> list[str]:
        """Warn about environment variables that override directives of the scripts."""
        variables = self.slurm.sbatch_variables() if runs else {}
        listed = ", ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return [f"{listed} in the environment overrides the scripts' #SBATCH lines"] if listed else []

    def trial(self, job: Job, *, nodes: int) -> str:
        """Return ``""`` if Slurm would accept a job, or the words of ``sbatch --test-only`` if not now."""
        try:
            self.slurm.test_only(job.script, options=job.options)
        except SlurmRefusedError as refusal:
            if not refusal.queue_is_full and (why := self._permanent(refusal, job, nodes)):
                raise SlurmRefusedError("sbatch --test-only", why, remedy=_CORRECT) from None
            return f"sbatch --test-only says: {refusal.output}"
        return ""

    def _permanent(self, refusal: SlurmRefusedError, job: Job, nodes: int) -> str:
        """Return why Slurm can never start a job on ``nodes`` nodes, or ``""`` if the job can start later.

        Slurm's message is the same in two cases: no nodes suit the job, or such nodes are down or drained.
        """
        if not search(NOT_NOW, refusal.output):
            return refusal.output
        partitions = self._partitions(requested_partition(job.script, job.options))
        if reason := too_many_nodes(partitions, nodes):
            return f"{refusal.output} ({reason})"
        groups = [group for groups in partitions.values() for group in groups]
        all_in_service = bool(groups) and all(group.state in _IN_SERVICE for group in groups)
        return refusal.output if all_in_service else ""

    def _find_partitions(self, wanted: str | None) -> dict[str, list[NodeGroup]]:
        """Return the node groups of each partition that a job requests, or ``{}`` if any is unknown.

        Without ``wanted``, Slurm chooses the default partition.
        """
        try:
            groups = self.slurm.nodes()
        except SlurmUnavailableError:
            return {}
        names = wanted.split(",") if wanted else [group.partition for group in groups if group.default]
        found = {name: [group for group in groups if group.partition == name] for name in names}
        return found if all(found.values()) else {}

    def estimate(self, script: Path, *, nodes: int, size: int, training_s: float) -> Estimate:
        """Estimate a wait with a test submission of a script, with the time limit of the training.

        Long jobs wait longer than the short jobs of the benchmark.
        """
        wanted_s = max(_SHORTEST_LIMIT_S, math.ceil(_LIMIT_FACTOR * training_s))
        chosen = self.study.placement(size)
        of_size = [f"--{name}={chosen[name]}" for name in PLACEMENT if name in chosen]
        partitions = self._partitions(requested_partition(script, of_size))
        if reason := too_many_nodes(partitions, nodes):  # the test of Slurm 26.05 does not notice this
            return Estimate(None, "", f"Slurm would not start the job: {reason}", refused=True)
        limit_s = longest_limit_s(partitions) or wanted_s
        jobs, remark = math.ceil(wanted_s / limit_s), ""
        if jobs > 1:
            limit = human_duration(limit_s)
            remark = (
                f"{jobs} consecutive jobs: the partition's limit is {limit}; only the first wait is counted"
            )
        # A predicted size has no script. These options override the directives of a similar cell's script.
        options = [f"--nodes={nodes}", f"--time={slurm_time(min(wanted_s, limit_s))}", *of_size]
        try:
            starts = self.slurm.test_only(script, options=options)
        except SlurmRefusedError as refusal:
            return Estimate(None, "", f"Slurm would not start the job: {refusal.output}", refused=True)
        if starts is None:
            return Estimate(None, "", joined("Slurm cannot estimate the start", remark))
        answered_at = datetime.now(UTC)  # not before: a busy controller answers late, with its time then
        seconds = max(0.0, (starts - answered_at).total_seconds())
        # Slurm rounds to seconds, so that an immediate start can appear to be one second away.
        seconds = 0.0 if seconds < 2 else seconds
        source = f"Slurm's estimate at {answered_at:%Y-%m-%d %H:%M} UTC (sbatch --test-only)"
        return Estimate(seconds, source, remark)

    def others(self, nodes: Sequence[str], start: datetime, end: datetime) -> Others:
        """Return the jobs of all users on ``nodes`` between two times, from sacct."""
        # A single argument is long enough for the nodes of any cluster. Without --state, sacct also
        # lists jobs that were suspended or that lost a node; pending jobs have no nodes.
        nodelist = f"--nodelist={','.join(dict.fromkeys(nodes))}"
        try:
            rows = self.slurm.accounting("--allocations", nodelist, *between(start, end)) if nodes else []
        except SlurmUnavailableError as error:
            return Others((), error.message.partition("\n")[0])
        jobs = [
            Occupation(row.job, expand_hosts(row.hosts), row.started, row.ended)
            for row in rows
            if row.started is not None
        ]
        return Others(jobs, self._privacy() if nodes else "")

    def _privacy(self) -> str:
        """Return why jobs of other users are possibly missing, or ``""`` if all jobs are visible."""
        try:
            return _PRIVATE if self.slurm.jobs_are_private() else ""
        except SlurmUnavailableError as error:
            return f"job data of other users may be private ({error.message})".partition("\n")[0]

    def packs(self, attempts: Sequence[Attempt]) -> list[Pack]:
        """Return the next packs: jobs that execute ``attempts``, split by resources and by time limits.

        Raises:
            BenchError: a command starts its ranks on all nodes of its job, which are not those of a run.
        """
        if other := [a.cell.cell_id for a in attempts if a.cell.command_per == "job"]:
            what = f"--pack: {other[0]} has command_per: job, whose command needs a job of its own"
            raise BenchError(what, remedy="omit --pack, or choose other runs with --only")
        folder = self.study.folder.packs
        taken = [path.name.removeprefix("pack-") for path in folder.glob("pack-*")]
        number = 1 + max((int(number) for number in taken if number.isdigit()), default=0)
        own = split(attempts, lambda partition: longest_limit_s(self._partitions(partition)))
        return [Pack(self.study, number + i, members) for i, members in enumerate(own)]


def literal_pattern(path: Path) -> str:
    """Escape a path for sbatch's --output and --error, which replace patterns such as ``%j``.

    Raises:
        BenchError: the path contains a backslash, which cannot be escaped.
    """
    text = str(path)
    if "\\" in text:
        raise BenchError(
            f"{text}: Slurm cannot write its output to a path with a backslash",
            remedy="choose another folder for results",
        )
    return text.replace("%", "%%")


def _needs_accounting(name: str, queued: Iterable[Status]) -> bool:
    """Return True if squeue lists no job of this name that has not ended, or one that executes many runs."""
    living = [status for status in queued if status.state.active]
    return not living or (PACK_MARK in name and any(one.state is RunState.RUNNING for one in living))


def _accounted(queued: Status | None, rows: Sequence[JobRow], *, packed: bool) -> Status:
    """Return the status of a job from squeue (None: it is not listed) and from its rows in sacct."""
    status, steps = classify(rows), step_statuses(rows) if packed else {}
    assert status is not None, "no row of the job itself"
    if status.state.ended and (queued is None or queued.state.ended):
        return replace(status, steps=steps)
    if queued is not None:  # it runs, or its end is not in sacct yet
        return replace(queued, steps=steps, restarts=status.restarts)
    reason = f"job {status.job_id} is not in the queue, but sacct says that it has not ended"
    return replace(status, state=RunState.UNKNOWN, reasons=(), remark=reason, settled=False, stuck=False)


def _unaccounted(queued: Status | None, name: str, job_id: str, error: SlurmUnavailableError) -> Status:
    """Return the status of a job from squeue (None: it is not listed) while sacct is unavailable."""
    absence = error.output.partition("\n")[0]
    if queued is not None:
        return replace(queued, accounting=absence, settled=error.permanent)
    job = f"job {job_id}" if job_id else f"a job named {name}"
    reason = f"squeue does not list {job}; sacct is unavailable ({error.output})"
    return Status(job_id=job_id, state=RunState.UNKNOWN, remark=reason, settled=False, accounting=absence)


def _preferred(jobs: Sequence[Status], job_id: str) -> Status:
    """Return the status of the first job that has not ended, else of job ``job_id``, else of the last job.

    The reason names the other jobs.
    """
    if len(jobs) == 1:
        return jobs[0]
    jobs = sorted(jobs, key=lambda job: int(job.job_id.partition("_")[0] or 0))
    known = next((job for job in jobs if job.job_id == job_id), jobs[-1])
    chosen = next((job for job in jobs if job.state.active), known)
    others = tuple((job.job_id, str(job.state)) for job in jobs if job is not chosen)
    return replace(chosen, reasons=(*chosen.reasons, SameName(jobs=others)))


def requested_partition(script: Path, options: Sequence[str] = ()) -> str | None:
    """Return the partition in sbatch's options, else in the directives of a script, else None."""
    try:
        text = "\n".join([*(f"#SBATCH {one}" for one in options), script.read_text(encoding="utf-8")])
    except OSError:
        return None
    named = _PARTITION.search(text)
    return named[1] if named else None


def longest_limit_s(partitions: Mapping[str, Sequence[NodeGroup]]) -> int | None:
    """Return the longest time limit of ``partitions`` in seconds, or None if any is unlimited or unknown."""
    limits = {group.time_limit_s for groups in partitions.values() for group in groups}
    known = [limit for limit in limits if limit is not None]
    return max(known) if known and len(known) == len(limits) else None


def too_many_nodes(partitions: Mapping[str, Sequence[NodeGroup]], nodes: int) -> str:
    """Return why no partition can run a job on ``nodes`` nodes, or ``""`` if there is no such reason."""
    reasons = []
    for name, groups in partitions.items():
        size, limit = sum(group.nodes for group in groups), groups[0].max_nodes
        if nodes > size:
            reasons.append(f"partition {name} has {count(size, 'node')}")
        elif limit is not None and nodes > limit:
            reasons.append(f"partition {name} allows {count(limit, 'node')} per job")
        else:
            return ""
    return f"{' and '.join(reasons)}, and the job needs {nodes}" if reasons else ""


SCHEDULER = SlurmScheduler
