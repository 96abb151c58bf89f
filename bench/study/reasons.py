"""The reasons of ends: why a run failed, was cancelled or never started, as the ledger stores them.

Whoever finds out a reason makes one of these: the scheduler, :mod:`bench.jobs.end`, or a rank that fails.
What others say, in their own words, is :class:`Said`. Nothing is concluded from the texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddp_scaling_bench.finding import Recorded, Severity
from ddp_scaling_bench.measure.failures import LEAVE_TOGETHER, Failure
from ddp_scaling_bench.measure.heartbeat import CLOSED, DATA, LOOP, PAUSED, STEP
from ddp_scaling_bench.units import count, join_names


class Reason(Recorded):
    """The base of all reasons."""

    severity: Severity = "error"


class Said(Reason, kind="said"):
    """What another program says, in its own words; ``source`` is its name or that of a file."""

    text: str
    source: str = ""

    def _message(self) -> str:
        return self.text


class LogCause(Recorded, kind="log-cause"):
    """A cause that `bench doctor` knows, with the line of a log that shows it.

    ``path`` is relative to the run's folder. ``line`` is None if no line shows the cause.
    """

    severity: Severity = "error"

    cause: str
    path: str = ""
    line: int | None = None
    evidence: str = ""
    explanation: str = ""
    remedy: str = ""

    @property
    def heading(self) -> str:  # type: ignore[override]
        """The name of the cause."""
        return self.cause

    def _message(self) -> str:
        return self.explanation

    @property
    def own_message(self) -> str:
        """The line of the log that shows the cause, or what a rank or the scheduler said."""
        return self.evidence or self.explanation

    @property
    def place(self) -> str:
        """Path and line, as far as they are known."""
        return ":".join(str(part) for part in (self.path, self.line) if part)

    def __str__(self) -> str:
        return f"{self.cause} ({self.place}): {self.remedy}"


# -- signals and exit codes -------------------------------------------------------------


class _OfRanks(Reason):
    """``ranks`` are numbers such as ``3`` or ``1-2,5``; empty if only the process ``of`` a node is known."""

    host: str
    ranks: str = ""
    of: str = "torchrun agent"

    @property
    def _who(self) -> str:
        if not self.ranks:
            return f"the {self.of} on {self.host}"
        return f"rank{'s' * self._are_several} {self.ranks} on {self.host}"

    @property
    def _are_several(self) -> bool:
        return not self.ranks.isdigit() and bool(self.ranks)


class KilledRank(_OfRanks, kind="killed-rank"):
    """A signal killed ranks."""

    signal: str

    def _message(self) -> str:
        return f"{self._who} {'were' if self._are_several else 'was'} killed by {self.signal}"


class ExitedRank(_OfRanks, kind="exited-rank"):
    """Ranks ended with an exit code before all others, according to srun or torchrun."""

    exit_code: int
    by_torchrun: bool = False

    def _message(self) -> str:
        verb = "ended with exit code" if self.by_torchrun else "exited with code"
        return f"{self._who} {verb} {self.exit_code}"


class ExitCode(Reason, kind="exit-code"):
    """The exit code of a run.

    ``state`` is the state of the job that Slurm shows. sacct shows codes above 128 reduced by 128:
    ``or_more`` is true if the code may be such a code.
    """

    exit_code: int | None
    or_more: bool = False
    state: str = ""
    host: str = ""

    def _message(self) -> str:
        more = f" or {128 + self.exit_code}" if self.or_more and self.exit_code else ""
        where = f" on {self.host}" if self.host else ""
        return f"{_prefix(self.state)}exit code {self.exit_code}{more}{where}"


class EndedBySignal(Reason, kind="ended-by-signal"):
    """A signal ended the script of a job, or one of its steps."""

    signal: str
    step: str = ""
    state: str = ""

    def _message(self) -> str:
        what = f"step {self.step}" if self.step else "the script"
        return f"{_prefix(self.state)}{what} was ended by {self.signal}"


class KilledRun(Reason, kind="killed-run"):
    """The run was killed by SIGKILL, or ended without an exit code, which has no other cause."""

    wrote_end: bool = True

    def _message(self) -> str:
        no_code = "the run left no exit code in end.json: it was killed"
        return "the run was killed by SIGKILL" if self.wrote_end else no_code


class Stopped(Reason, kind="stopped"):
    """A signal asked the run to end."""

    signal: str

    def _message(self) -> str:
        return f"stopped by a signal ({self.signal})"


class TimeLimit(Reason, kind="time-limit"):
    """The run reached its time limit."""

    message = "the time limit was reached"


class AfterMeasurement(Recorded, kind="after-measurement"):
    """The run ended in another way than on its own, after its last window; ``said`` is how, in words."""

    severity: Severity = "info"

    said: str

    def _message(self) -> str:
        return f"all windows are complete; afterwards: {self.said}"


#: The places of a rank, and of several, by their stage (:mod:`ddp_scaling_bench.measure.heartbeat`).
_PLACES = {
    LOOP: ("has ended step {}", "have ended step {}"),
    DATA: ("waits for data after step {}", "wait for data after step {}"),
    PAUSED: ("has stopped its clock after step {}", "have stopped their clocks after step {}"),
    CLOSED: ("closed its recorder after {} steps", "closed their recorders after {} steps"),
    "": ("has begun no step", "have begun no step"),
}
_IN_STEP = ("is in step {}", "are in step {}")


@dataclass(frozen=True, order=True)
class RankStep:
    """The place of ranks of a host; ``stage`` and ``host`` are empty if they never began a step."""

    ranks: str
    host: str
    step: int
    stage: str

    def __str__(self) -> str:
        several = not self.ranks.isdigit()
        who = f"rank{'s' * several} {self.ranks}{f' on {self.host}' * bool(self.host)}"
        return f"{who} {_PLACES.get(self.stage, _IN_STEP)[several].format(self.step)}"


class StalledRanks(Failure, kind="stalled-ranks"):
    """No rank went on since ``since``; ``behind`` are those that are not with the others.

    The others are in step ``others``, in ``stage``. ``behind`` is empty if all ranks are in the same place.
    ``at_limit``: they hung until the time limit, so that errors in the logs only show how they ended.
    """

    since: str
    behind: tuple[RankStep, ...]
    others: int
    stage: str = STEP
    at_limit: bool = False

    @property
    def effect(self) -> Literal["", "late"]:  # type: ignore[override]
        """``late`` if another rank may have failed before."""
        return "" if self.at_limit else "late"

    @property
    def is_cause(self) -> bool:  # type: ignore[override]
        """Whether the ranks hang: a rank that has stopped its clock may evaluate or write a checkpoint."""
        return bool(self.behind) and PAUSED not in (self.stage, *(one.stage for one in self.behind))

    def _what(self) -> str:
        who = f"{join_names([*map(str, self.behind)], most=4)}, the others" if self.behind else "all ranks"
        where = _PLACES.get(self.stage, _IN_STEP)[1].format(self.others)
        return f"no step since {self.since}: {who} {where}"

    def _remedy(self) -> str:
        if any(one.stage == CLOSED for one in self.behind):
            return LEAVE_TOGETHER
        look = "find out what these ranks wait for, such as with py-spy"
        longer = "a longer time limit helps only if they evaluate or write a checkpoint"
        return f"{look}; {longer}" if self.is_cause else ""


# -- files and results ------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Start:
    """A line of the file ``start``: a start of the run's script."""

    job: str
    time: str
    host: str
    restarts: int

    def __str__(self) -> str:
        return f"job {self.job} on {self.host} at {self.time}"


class StartedTwice(Reason, kind="started-twice"):
    """Two starts wrote into the folder of one attempt."""

    first: Start
    second: Start

    def _message(self) -> str:
        starts = f"{self.first}, and {self.second}"
        return f"two starts wrote into the run's folder: {starts}; the values are not valid"


class NoMetrics(Reason, kind="no-metrics"):
    """The run has exit code 0, but no metrics.

    ``of_command`` is true if a command should have recorded them.
    """

    of_command: bool = False

    def _message(self) -> str:
        if not self.of_command:
            return "ended without metrics.csv"
        what = "the command recorded no metrics: use the Recorder in its training loop"
        return f"{what}, or set workload.metrics to the file or output that contains them"


class TooFewEpochs(Reason, kind="too-few-epochs"):
    """The run has exit code 0, but recorded only some of its epochs."""

    epochs: int
    planned: int

    def _message(self) -> str:
        return f"metrics.csv contains {self.epochs} of {self.planned} epochs"


class LossDiverged(Reason, kind="loss-diverged"):
    """The loss that a program recorded is infinite or not a number."""

    loss: str
    epoch: str

    def _message(self) -> str:
        return f"the loss became {self.loss} in epoch {self.epoch}"


class UnreadableMetrics(Reason, kind="unreadable-metrics"):
    """The values in a command's output or file are missing or cannot be read."""

    problem: str

    def _message(self) -> str:
        return self.problem


class DiskFull(Reason, kind="disk-full"):
    """The disk of the run's folder is full, so that the run could not log its error."""

    path: str
    error: str

    def _message(self) -> str:
        return f"the disk of {self.path} is full ({self.error})"


class NotWritable(Reason, kind="not-writable"):
    """The script of the job could not write its end.json."""

    message = "the run's folder could not be written when the job ended: the disk is full or read-only"


# -- Slurm ------------------------------------------------------------------------------


class JobState(Reason, kind="job-state"):
    """The state in which Slurm ended a job.

    Attributes:
        state: the name of the state; empty if only squeue shows it.
        meaning: what the state means.
        detail: the reason in squeue.
        by_notice: true if the state follows from a notice in job.err.
        forgotten: true if Slurm itself has forgotten the job.
    """

    state: str = ""
    meaning: str
    detail: str = ""
    by_notice: bool = False
    forgotten: bool = False

    def _message(self) -> str:
        source = f"according to job.err{'; Slurm has forgotten the job' * self.forgotten}"
        details = [self.detail, source * self.by_notice]
        return _prefix(self.state) + self.meaning + "".join(f" ({one})" for one in details if one)


class JobSays(Reason, kind="job-says"):
    """The state of the job, which differs from what its steps or its files show."""

    state: str

    def _message(self) -> str:
        return f"the job says {self.state}"


class StepState(Reason, kind="step-state"):
    """The state of a step shows why the job failed."""

    state: str
    step: str

    def _message(self) -> str:
        return f"{self.state} in step {self.step}"


class CompletedBut(Reason, kind="completed-but"):
    """The job has completed, but ``steps`` failed, each with its state; or the next reasons say how."""

    severity: Severity = "warning"

    steps: tuple[tuple[str, str], ...] = ()

    def _message(self) -> str:
        steps = "; ".join(f"step {name} says {state}" for name, state in self.steps)
        return f"the job says COMPLETED, but {steps or 'a step failed'}"


class NoOutput(Reason, kind="no-output"):
    """Slurm could not open the output files of the job; ``state`` and ``detail`` are what Slurm shows."""

    state: str = ""
    detail: str = ""

    def _message(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        what = "Slurm could not open the job's output; its folder must exist on the nodes and be writable"
        return f"{_prefix(self.state)}{what}{detail}"


class FailedEarly(Reason, kind="failed-early"):
    """The job failed before it got nodes."""

    message = "FAILED before it started"


class CancelledBy(Reason, kind="cancelled-by"):
    """A user or Slurm cancelled the job; ``waited`` is the reason for which it waited until then."""

    user: str = ""
    started: bool = True
    waited: str = ""

    def _message(self) -> str:
        who = f"user id {self.user}" if self.user else "an unknown user"
        waited = f" (it waited: {self.waited})" if self.waited else ""
        return f"cancelled by {who}" + ("" if self.started else f" before it started{waited}")


class Requeued(Reason, kind="requeued"):
    """Slurm itself started the job again."""

    severity: Severity = "info"

    times: int

    def _message(self) -> str:
        return f"requeued by Slurm {count(self.times, 'time')}"


class SameName(Reason, kind="same-name"):
    """Other jobs have the same name; ``jobs`` are their ids, each with its state."""

    severity: Severity = "info"

    jobs: tuple[tuple[str, str], ...]

    def _message(self) -> str:
        others = " and ".join(f"{job_id} ({state})" for job_id, state in self.jobs)
        return f"another job has the same name: {others}"


class EndedWithPack(Reason, kind="ended-with-pack"):
    """The job that executes many runs ended before this run did; the reasons of its end follow."""

    job: str
    started: bool = True

    def _message(self) -> str:
        if self.started:
            return f"ended with its pack (job {self.job})"
        return f"not started: its pack (job {self.job}) ended before its turn"


# -- hosts and `bench cancel` -----------------------------------------------------------


class LostHost(Reason, kind="lost-host"):
    """A host of a run without Slurm was lost; ``said`` are the last lines of its connection, if it ended."""

    host: str
    said: str | None = None

    def _message(self) -> str:
        if self.said is None:
            return f"{self.host} stopped answering"
        return f"the connection to {self.host} was lost: {self.said}"


class CancelledByUser(Reason, kind="cancelled-by-user"):
    """`bench cancel`, or the end of a waiting `bench submit`, cancelled the run.

    ``was`` is why the state of the run was not known until then.
    """

    with_submit: bool = False
    was: str = ""

    def _message(self) -> str:
        if self.was:
            return f"marked as cancelled by bench cancel: {self.was}"
        return "stopped by the user" if self.with_submit else "cancelled by bench cancel"


def _prefix(state: str) -> str:
    return f"{state}: " if state else ""
