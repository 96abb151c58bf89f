"""How asking Slurm can fail: it cannot be asked, it says no, or nobody knows whether it said yes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from bench.errors import BenchError
from bench.slurm.parsing import (
    ACCOUNTING_FIELDS,
    NODES_FORMAT,
    QUEUE_FORMAT,
    AccountingRow,
    NodeGroup,
    QueueRow,
    StartEstimate,
    Submission,
    UnreadableOutputError,
    parse_accounting,
    parse_estimate,
    parse_nodes,
    parse_queue,
    parse_submission,
)

#: Slurm's words for a limit on how many jobs may be queued: later there is room again.
_QUEUE_FULL = re.compile(
    r"(?:Assoc|QOS)\w*(?:Max|Grp)Submit\w*|MaxSubmitJobs\w*|temporarily unable to accept job|MaxJobCount"
)


class SlurmError(BenchError):
    """A command of Slurm failed. ``words`` is what it printed, one line per message."""

    def __init__(self, command: str, words: str, *, remedy: str = "") -> None:
        super().__init__(f"{command}: {words}", remedy=remedy)
        self.command = command
        self.words = words


class SlurmUnavailableError(SlurmError):
    """Slurm (or its accounting) cannot be asked now or here; the caller falls back or tries again."""

    exit_code = 1

    @property
    def lasting(self) -> bool:
        """Whether waiting does not help: the command is not there."""
        return self.words in ("command not found", "permission denied")


class SubmissionUncertainError(SlurmUnavailableError):
    """The connection broke during sbatch: the job may have been accepted all the same.

    Look for ``job_name`` with :meth:`bench.slurm.client.Slurm.queue` before submitting again.
    """

    def __init__(self, words: str, *, job_name: str) -> None:
        super().__init__(
            "sbatch", words, remedy=f"the job may have been accepted: look for the name {job_name}"
        )
        self.job_name = job_name


class SlurmRefusedError(SlurmError):
    """Slurm answered, and said no."""

    @property
    def queue_is_full(self) -> bool:
        """Whether the refusal is a limit on queued jobs, so that waiting helps."""
        return _QUEUE_FULL.search(self.words) is not None


# What Slurm's commands may inherit of the caller's environment.

#: They filter what a query shows, or change how it is printed.
_QUERY_NOISE = re.compile(r"(?:SQUEUE|SACCT|SINFO|SCANCEL)_\w+|SLURM_TIME_FORMAT")
#: What a submission may inherit of SLURM_*. The rest describes the allocation that bench may itself
#: run in, and would reach the job: SLURM_MEM_PER_CPU from outside makes srun inside fail.
_SUBMISSION_KEEPS = {"SLURM_CONF", "SLURM_CLUSTERS"}


def for_query(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command that asks: everything is shown, and times are UTC."""
    kept = {name: value for name, value in environment.items() if not _QUERY_NOISE.fullmatch(name)}
    return {**kept, "TZ": "UTC"}


def for_submission(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of sbatch, which jobs inherit; a run of a pack may submit others."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "BENCH_STEP_")) or name in _SUBMISSION_KEEPS
    }


def overriding(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that win over the directives of a script, silently."""
    return {name: environment[name] for name in sorted(environment) if name.startswith("SBATCH_")}


# A batch script with what sbatch is told about it.


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job to be submitted.

    Attributes:
        script: the batch script.
        arguments: what the script gets as ``$1``, ``$2``, ...
        job_name: the name by which the job can be found when the answer is lost: make it unique.
        output: where the job's standard output goes, taken literally.
        error: where its standard error goes, taken literally.
        options: further options of sbatch.
    """

    script: Path
    job_name: str
    output: Path
    error: Path
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()

    @property
    def command(self) -> list[str]:
        """The words of the command that submits it.

        Raises:
            BenchError: a path that sbatch cannot be told literally.
        """
        return [
            "sbatch",
            "--parsable",
            f"--job-name={self.job_name}",
            f"--output={literal_pattern(self.output)}",
            f"--error={literal_pattern(self.error)}",
            *self.options,
            str(self.script.absolute()),
            *self.arguments,
        ]


def literal_pattern(path: Path) -> str:
    """Return ``path`` so that sbatch's --output and --error take it literally.

    Raises:
        BenchError: it holds a backslash, which those options cannot express.
    """
    text = str(path)
    if "\\" in text:
        raise BenchError(
            f"{text}: Slurm cannot write its output to a path with a backslash",
            remedy="choose another folder for results",
        )
    return text.replace("%", "%%")


# The only place that runs Slurm's commands: no shell, time limits, errors in Slurm's words.

T = TypeVar("T")

#: Linux takes one argument of up to 128 KiB; ids are asked for in lists below that.
_LONGEST_LIST = 100_000
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Unable to establish controller|Connection refused|connect failure"
    r"|Could not establish a configuration source|[Uu]nable to (?:read|process) (?:slurm\.conf|configuration)"
    r"|[Mm]unge encode failed|authentication (?:error|credential)|Slurm backup controller in standby",
)
#: After these, slurmctld may have taken the job.
_UNCERTAIN = re.compile(r"timed out|Zero Bytes were transmitted|Unexpected message received|Connection reset")
_NO_SUCH_JOB = re.compile(r"Invalid job id specified|already completing or completed|Job/step already")
#: Slurm's commands are there, but no cluster is: a laptop, or a node outside of it.
_UNCONFIGURED = re.compile(r"Could not establish a configuration source|[Uu]nable to .*slurm\.conf")
#: What passes: the controller is restarted, or busy.
_AWAY = re.compile(r"[Uu]nable to contact|timed out|Connection (?:refused|reset)")
_LATER = "type it again when Slurm answers (scontrol ping); nothing is lost meanwhile"
_NOT_HERE = "run this on a login node (perhaps after `module load slurm`), or set cluster.executor: local"


@dataclass(frozen=True)
class Slurm:
    """Slurm's commands, as methods.

    Every method raises :class:`SlurmUnavailableError` where Slurm cannot be asked, with its words.

    Attributes:
        timeout_s: the longest any command but sbatch may take.
        submit_timeout_s: the longest sbatch may take; it waits and retries by itself when
            slurmctld is busy.
        environment: the environment of the commands; by default that of this process.
    """

    timeout_s: float = 60
    submit_timeout_s: float = 180
    environment: Mapping[str, str] | None = None

    def submit(self, job: BatchJob, *, keep_open: Sequence[int] = ()) -> Submission:
        """Submit a batch script and return the job's id.

        Args:
            job: the script, and what sbatch is told about it.
            keep_open: file descriptors that sbatch inherits: a lock among them is held as long
                as an sbatch lives that outlasted its caller.

        Raises:
            SlurmRefusedError: Slurm said no.
            SubmissionUncertainError: the answer was lost, and the job may be there.
            SlurmUnavailableError: sbatch could not reach Slurm; nothing was submitted.
        """
        try:
            done = self._run(
                job.command,
                environment=for_submission(self._inherited()),
                timeout_s=self.submit_timeout_s,
                keep_open=keep_open,
            )
        except _TimedOutError as slow:
            raise SubmissionUncertainError(slow.words, job_name=job.job_name) from slow
        words = _words(done)
        submission = parse_submission(done.stdout)
        if submission is not None:  # even where sbatch then failed: the job is there
            return Submission(submission.job_id, submission.cluster, remarks=done.stderr.strip())
        if done.returncode < 0:
            raise SubmissionUncertainError(f"killed by signal {-done.returncode}", job_name=job.job_name)
        if done.returncode == 0 or _UNCERTAIN.search(words):
            raise SubmissionUncertainError(words or "printed no job id", job_name=job.job_name)
        raise _unreachable_or_refused("sbatch", words)

    def test_only(self, script: Path, *, options: Sequence[str] = ()) -> StartEstimate | None:
        """Return when Slurm expects the script to start, without submitting it; None where it is silent.

        Raises:
            SlurmRefusedError: Slurm would not take the script.
        """
        command = ["sbatch", "--test-only", *options, str(script.absolute())]
        environment = for_query(for_submission(self._inherited()))
        done = self._run(command, environment=environment, timeout_s=self.submit_timeout_s)
        estimate = parse_estimate(done.stderr + done.stdout, now=datetime.now(UTC))
        if done.returncode:
            raise _unreachable_or_refused("sbatch --test-only", _words(done))
        return estimate

    def queue(
        self,
        job_ids: Sequence[str] | None = None,
        *,
        names: Sequence[str] | None = None,
        user: str | None = None,
    ) -> list[QueueRow]:
        """Return the rows of squeue for these jobs, in one call for all; ended jobs for some minutes.

        Args:
            job_ids: only these jobs; one that Slurm has forgotten has no row.
            names: only jobs with one of these names.
            user: only jobs of this user; by default, unless ``job_ids`` are given, the caller's.
        """
        # --states=all: jobs that ended lately too; --array: one row per task.
        command = ["squeue", "--noheader", "--states=all", "--array", f"--format={QUEUE_FORMAT}"]
        if job_ids is None:
            rows = self._query([*command, f"--user={user or os.geteuid()}"], parse_queue)
        else:
            calls = ([*command, f"--jobs={ids}"] for ids in _lists(job_ids))
            rows = [row for call in calls for row in self._query(call, parse_queue)]
        wanted = None if names is None else set(names)
        return [row for row in rows if wanted is None or row.name in wanted]

    def accounting(self, job_ids: Sequence[str]) -> list[AccountingRow]:
        """Return sacct's rows of these jobs, steps and earlier attempts included, in one call for all.

        Raises:
            SlurmUnavailableError: there is no accounting, or its daemon is down: fall back on
                :meth:`queue` and the run's own files.
        """
        calls = ([*_SACCT, f"--jobs={ids}"] for ids in _lists(job_ids))
        return [row for call in calls for row in self._query(call, parse_accounting)]

    def accounting_by_name(self, names: Sequence[str], *, since: datetime) -> list[AccountingRow]:
        """Return sacct's rows of the caller's jobs with these names: for jobs whose id was lost.

        Slurm 22.05 shows a job here about five seconds later than by its id; ask :meth:`queue` first.
        """
        start = since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        command = [*_SACCT, f"--user={os.geteuid()}", f"--starttime={start}"]
        rows = self._query(command, parse_accounting)
        jobs = {row.key.job for row in rows if row.key.step is None and row.name in set(names)}
        return [row for row in rows if row.key.job in jobs]

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel these jobs, queued or running; one that has ended already is no error.

        Raises:
            SlurmRefusedError: Slurm did not let us.
        """
        for ids in _lists(job_ids, separator=" "):
            done = self._run(["scancel", *ids.split()], environment=for_query(self._inherited()))
            lines = [line for line in _words(done).splitlines() if not _NO_SUCH_JOB.search(line)]
            if done.returncode and lines:
                raise _unreachable_or_refused("scancel", "\n".join(lines))

    def nodes(self) -> list[NodeGroup]:
        """Return the cluster's partitions and nodes."""
        return self._query(["sinfo", "--noheader", f"--format={NODES_FORMAT}"], parse_nodes)

    def overriding_variables(self) -> dict[str, str]:
        """Return the SBATCH_* variables in force: they win over the directives of a script, silently."""
        return overriding(self._inherited())

    def _query(self, command: Sequence[str], parse: Callable[[str], T]) -> T:
        """Run a command that only asks; that Slurm does not know a job is an empty answer."""
        done = self._run(command, environment=for_query(self._inherited()))
        if done.returncode and not _NO_SUCH_JOB.search(done.stderr):
            raise _unavailable(command[0], _words(done) or f"exit code {done.returncode}")
        try:
            return parse(done.stdout)
        except UnreadableOutputError as strange:
            raise SlurmUnavailableError(command[0], f"cannot read its output: {strange}") from strange

    def _run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_s: float | None = None,
        keep_open: Sequence[int] = (),
    ) -> subprocess.CompletedProcess[str]:
        limit = timeout_s or self.timeout_s
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit,
                env=dict(environment),
                encoding="utf-8",
                errors="replace",
                check=False,
                pass_fds=keep_open,
            )
        except FileNotFoundError as absent:
            raise SlurmUnavailableError(command[0], "command not found", remedy=_NOT_HERE) from absent
        except PermissionError as denied:
            raise SlurmUnavailableError(command[0], "permission denied", remedy=_NOT_HERE) from denied
        except subprocess.TimeoutExpired as slow:
            raise _TimedOutError(command[0], f"no answer within {limit:g} s") from slow

    def _inherited(self) -> Mapping[str, str]:
        return os.environ if self.environment is None else self.environment


# Steps and duplicates (earlier attempts of a requeued job) are rows of their own.
_SACCT = ("sacct", "--noheader", "--parsable2", "--duplicates", f"--format={','.join(ACCOUNTING_FIELDS)}")


class _TimedOutError(SlurmUnavailableError):
    """A command took longer than it may."""


def _lists(job_ids: Sequence[str], *, separator: str = ",") -> Iterator[str]:
    """Yield the ids as one list, or as several where one would be too long for a command line."""
    chunk: list[str] = []
    length = 0
    for job_id in dict.fromkeys(job_ids):
        if chunk and length + len(job_id) + 1 > _LONGEST_LIST:
            yield separator.join(chunk)
            chunk, length = [], 0
        chunk.append(job_id)
        length += len(job_id) + 1
    if chunk:
        yield separator.join(chunk)


def _words(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command said, without its own name before every line."""
    said = done.stderr.strip() or done.stdout.strip()
    return re.sub(r"^(?:sbatch|scancel|squeue|sacct|sinfo|scontrol): (?:error: )?", "", said, flags=re.M)


def _unavailable(command: str, words: str) -> SlurmUnavailableError:
    remedy = _NOT_HERE if _UNCONFIGURED.search(words) else _LATER if _AWAY.search(words) else ""
    return SlurmUnavailableError(command, words, remedy=remedy)


def _unreachable_or_refused(command: str, words: str) -> SlurmUnavailableError | SlurmRefusedError:
    if _UNREACHABLE.search(words) or _UNCERTAIN.search(words):
        return _unavailable(command, words)
    return SlurmRefusedError(command, words or "failed without a word")
