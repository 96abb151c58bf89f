"""The interface of a scheduler. It starts jobs and says how they are; it knows nothing of the ledger.

To add a scheduler, write one file here (a subclass of :class:`Scheduler` named ``SCHEDULER``), one template
in slurm_templates, and one entry in :mod:`bench.matrix.schedulers`. :mod:`bench.jobs.engine` does the rest
for all schedulers: lock, intents, submitting exactly once, finding jobs again, waiting, and the end of runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ddp_scaling_bench.errors import BenchError, UnavailableError
from ddp_scaling_bench.finding import Finding, messages
from ddp_scaling_bench.run_folder import JobFolder

from ..matrix.cell import Cell, Run
from ..study.conditions import Occupation
from ..study.ledger import FailureClass, RunState
from ..study.plan_json import PlannedStudy
from ..study.run_json import Attempt


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to be started: ``bash SCRIPT FOLDER``, with its output in job.out and job.err of the folder.

    Attributes:
        name: the unique name, which is the identity of the job.
        after: ids of jobs that must have ended before the job starts.
        options: words of the scheduler's own, for a pack.
    """

    name: str
    script: Path
    folder: JobFolder
    after: Sequence[str] = ()
    options: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a scheduler says of one job.

    Attributes:
        job_id: the scheduler's id of the job.
        state: queued, running, completed (exit code 0), failed or cancelled. Unknown and settled: the job is
            over, and only its folder says how. Unknown and not settled: the scheduler cannot tell, for
            example because it has forgotten the job and its accounting is away.
        failure_class: class of the cause if the job failed or was cancelled; None if the scheduler does not
            know.
        reasons: why the job failed or was cancelled, and remarks on its end.
        remark: explanation of the state of a job that has not ended, or ``""``.
        exit_code: exit code of the job, if the scheduler knows it.
        started, ended: UTC times.
        hosts: names of the hosts, such as ``n[1-4]``.
        restarts: number of times the scheduler itself started the job again.
        stuck: True if a queued job cannot start until a person acts.
        considered: False if the scheduler may still find that the job cannot start.
        settled: True if nothing more will become known about an ended job.
        owner: who can cancel the job, if the caller cannot: ``user alice`` or ``host n2``.
        accounting: why the accounting of the job is missing, or ``""``.
        steps: of a job that executes many runs, the status of each run's steps, by the run's name.
        summary: text for the file sacct_summary.txt, or ``""``.
    """

    job_id: str
    state: RunState
    failure_class: FailureClass | None = None
    reasons: tuple[Finding, ...] = ()
    remark: str = ""
    exit_code: int | None = None
    started: datetime | None = None
    ended: datetime | None = None
    hosts: str = ""
    restarts: int = 0
    stuck: bool = False
    considered: bool = True
    settled: bool = True
    owner: str = ""
    accounting: str = ""
    steps: Mapping[str, Status] = field(default_factory=dict)
    summary: str = ""

    @property
    def reason(self) -> str:
        """The explanation of the state in words, or ``""`` if there is nothing to explain."""
        return "; ".join(filter(None, (self.remark, messages(self.reasons))))


class RefusedError(BenchError):
    """The scheduler refused a job: it does not exist, and will not.

    ``queue_is_full`` is True if the reason is a limit on the number of jobs, so that a later attempt can
    succeed.
    """

    queue_is_full = False


class UncertainError(UnavailableError):
    """The answer to a submission was lost: the job may have been accepted, and can be found by its name."""


class Estimate(NamedTuple):
    """The expected wait in seconds (None: unknown), the source of the estimate, and a remark on it.

    ``refused`` is true if the job would never start.
    """

    wait_s: float | None
    source: str
    remark: str
    refused: bool = False


class Others(NamedTuple):
    """The jobs that were on some nodes, and the reason why some of them may be missing, or ``""``."""

    jobs: Sequence[Occupation]
    unknown: str


class Pack(Protocol):
    """A job that executes many runs, one after another; nothing is written before :meth:`write`.

    ``attempts`` are the attempts with the name of the job, each with the value of ``allocation`` in its
    run.json (``pack`` and ``place``).
    """

    @property
    def job(self) -> Job: ...  # noqa: D102
    @property
    def nodes(self) -> int: ...  # noqa: D102
    @property
    def limit_s(self) -> int: ...  # noqa: D102
    @property
    def cells(self) -> list[Cell]: ...  # noqa: D102
    @property
    def attempts(self) -> list[tuple[Attempt, dict[str, Any]]]: ...  # noqa: D102
    def nodes_of(self, attempt: Attempt) -> list[int]:
        """Return the numbers (from 1) of the job's nodes on which a run is executed."""

    def write(self) -> None:
        """Write what the script of the job reads."""


class Scheduler(ABC):
    """Start, watch and cancel jobs of one study.

    All methods raise :class:`ddp_scaling_bench.errors.UnavailableError` if the scheduler does not answer.

    Attributes:
        slots: how many jobs may be started at once; `bench submit` starts the next when one has ended. None:
            the scheduler has a queue of its own.
        poll_s: pause between two polls while `bench submit` waits.
        held: descriptors of the study's lock, which each program that :meth:`submit` starts must inherit (but
            not the job itself): while it can still start the job, nobody else submits.
    """

    slots: int | None = None
    poll_s: float = 3.0
    held: tuple[int, ...] = ()

    def __init__(self, study: PlannedStudy) -> None:
        self.study = study

    @abstractmethod
    def submit(self, job: Job) -> str:
        """Start a job, or put it into the queue; return its id.

        Raises:
            RefusedError: the job was refused.
            UncertainError: the answer was lost.
            UnavailableError: nothing was submitted.
        """

    @abstractmethod
    def poll(self, jobs: Mapping[str, str]) -> dict[str, Status]:
        """Return the status of jobs by their names.

        The values of ``jobs`` are ids, ``""`` if they are unknown. Jobs are found by name and id, whoever
        owns them. A job has no entry only if the scheduler answers that it knows no job of this name.
        """

    def living(self, names: Sequence[str]) -> dict[str, str]:
        """Return the ids of queued or running jobs by their names; ended jobs are not searched for."""
        found = self.poll(dict.fromkeys(names, ""))
        alive = (RunState.QUEUED, RunState.RUNNING)
        return {name: status.job_id for name, status in found.items() if status.state in alive}

    @abstractmethod
    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs; those that have ended are ignored."""

    @abstractmethod
    def words(self, job: Job) -> str:
        """Return the shell command that starts ``job``, for display."""

    def check(self, runs: Sequence[Run]) -> list[str]:
        """Return remarks on a submission of ``runs``; raise BenchError if it cannot succeed."""
        return []

    def trial(self, job: Job, *, nodes: int) -> str:
        """Return why the scheduler would not start a job on ``nodes`` nodes now, or ``""``.

        Raises:
            RefusedError: the scheduler would never start the job.
        """
        return ""

    def packs(self, attempts: Sequence[Attempt]) -> Sequence[Pack]:
        """Return the next packs, jobs that together execute ``attempts``; nothing is written.

        A pack contains as many of the attempts as one job can execute, in this order.
        """
        what = (
            f"--pack submits many runs as one Slurm job, but the matrix's executor is {self.study.executor}"
        )
        raise BenchError(what, remedy="omit --pack: runs are always executed one after another")

    def estimate(self, script: Path, *, nodes: int, size: int, training_s: float) -> Estimate:
        """Estimate the wait of a training of ``training_s`` seconds on ``nodes`` nodes, like ``script``.

        ``size`` is the number of requested GPUs, or of nodes on device cpu, of which resources can depend.
        """
        return Estimate(None, "", f"executor {self.study.executor} estimates no wait")

    def others(self, nodes: Sequence[str], start: datetime, end: datetime) -> Others:
        """Return the jobs of all users on ``nodes`` between two times."""
        return Others((), f"executor {self.study.executor} has no accounting")
