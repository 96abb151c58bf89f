"""Run Slurm's commands: submit, query and cancel jobs, and describe the cluster.

This is the only module that runs Slurm's commands. It uses no shell and limits the time of every
command. Errors contain the output of the command.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from ...errors import BenchError, UnavailableError
from . import messages
from .parsing import (
    ACCOUNTING_FIELDS,
    NODES_FORMAT,
    QUEUE_FORMAT,
    AccountingRow,
    NodeGroup,
    QueueRow,
    UnreadableOutputError,
    parse_accounting,
    parse_expected_start,
    parse_nodes,
    parse_queue,
    parse_submission,
)

T = TypeVar("T")

#: --duplicates: earlier attempts of a requeued job are separate rows.
_SACCT = ("sacct", "--noheader", "--parsable2", "--duplicates", f"--format={','.join(ACCOUNTING_FIELDS)}")
#: A job whose submission was not confirmed appears in squeue within this time.
UNCERTAIN_WAIT_S = 10.0
#: Linux limits one argument to 128 KiB; longer lists of job ids are split.
_MAX_LIST_CHARACTERS = 100_000
_COMMAND_NAME = re.compile(
    r"^(?:sbatch|scancel|squeue|sacct|sacctmgr|sinfo|scontrol): (?:(?:error|fatal): )?", re.M
)
_NO_COMMAND, _NO_PERMISSION = "command not found", "permission denied"
_RETRY_REMEDY = "repeat the command when Slurm responds again (scontrol ping); nothing is lost"
_LOCATION_REMEDY = (
    "run this on a login node (perhaps after `module load slurm`), or set cluster.executor: local"
)

#: Variables that filter or reformat the output of queries.
_QUERY_VARIABLES = re.compile(r"(?:SQUEUE|SACCT|SINFO|SCANCEL)_\w+|SLURM_TIME_FORMAT")
#: The only SLURM_* variables passed on to sbatch. All others describe a job in which `bench` itself may run,
#: and would leak into the new job. For example, srun fails with an inherited SLURM_MEM_PER_CPU.
_SUBMISSION_VARIABLES = {"SLURM_CONF", "SLURM_CLUSTERS"}


class SlurmError(BenchError):
    """A Slurm command failed. ``output`` is the text that the command printed, one line per message."""

    def __init__(self, command: str, output: str, *, remedy: str = "") -> None:
        super().__init__(f"{command}: {output}", remedy=remedy)
        self.command = command
        self.output = output


class SlurmUnavailableError(SlurmError, UnavailableError):
    """Slurm or its accounting is unreachable."""

    scheduler = "Slurm"

    @property
    def permanent(self) -> bool:  # type: ignore[override]
        """True if the command or the cluster's accounting does not exist, so that retrying is useless."""
        absent = self.output in (_NO_COMMAND, _NO_PERMISSION)
        return absent or messages.search(messages.NO_ACCOUNTING, self.output) is not None


class SlurmMissingError(SlurmUnavailableError):
    """There is no Slurm on this machine: its commands or its configuration are missing."""

    exit_code = 2
    missing = True

    def __init__(self, command: str, output: str) -> None:
        super().__init__(command, output, remedy=_LOCATION_REMEDY)


class SubmissionUncertainError(SlurmUnavailableError):
    """The answer of sbatch was lost, so the job may or may not have been accepted.

    Search for the job with :meth:`Slurm.find_uncertain` before submitting again.
    """

    def __init__(self, output: str, *, job_name: str) -> None:
        super().__init__(
            "sbatch", output, remedy=f"the job may have been accepted: look for a job named {job_name}"
        )


class SlurmRefusedError(SlurmError):
    """Slurm rejected the request."""

    @property
    def queue_is_full(self) -> bool:
        """True if the reason is a limit on queued jobs, so that a later attempt can succeed."""
        return messages.search(messages.QUEUE_FULL, self.output) is not None


class _TimedOutError(SlurmUnavailableError):
    """A command did not finish within its time limit."""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A batch script with its sbatch options.

    Attributes:
        arguments: arguments of the script (``$1``, ``$2``, ...).
        job_name: a unique name, by which the job can be found if the answer of sbatch is lost.
        output: path of the file for standard output, taken literally: ``%j`` is not replaced.
        error: path of the file for standard error, also taken literally.
    """

    script: Path
    job_name: str
    output: Path
    error: Path
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()

    @property
    def command(self) -> list[str]:
        """The sbatch command with its arguments.

        Raises:
            BenchError: ``output`` or ``error`` contains a backslash.
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


@dataclass(frozen=True)
class Slurm:
    """Slurm's commands as methods.

    All methods raise :class:`SlurmUnavailableError` if Slurm is unreachable.

    Attributes:
        timeout_s: time limit of all commands except sbatch.
        submit_timeout_s: time limit of sbatch. While slurmctld is busy, sbatch retries automatically.
        environment: environment variables of the commands; ``os.environ`` by default.
    """

    timeout_s: float = 60
    submit_timeout_s: float = 180
    environment: Mapping[str, str] | None = None

    def submit(self, job: BatchJob, *, pass_fds: Sequence[int] = ()) -> str:
        """Submit a batch script and return the job id.

        Args:
            job: the script and its options.
            pass_fds: file descriptors that sbatch inherits. A lock among them stays held while sbatch runs,
                even if this process dies.

        Raises:
            SlurmRefusedError: Slurm rejected the job.
            SubmissionUncertainError: the answer was lost, and the job may have been accepted.
            SlurmUnavailableError: Slurm is unreachable; nothing was submitted.
        """
        try:
            done = self._run(
                job.command,
                environment=self._submission_environment(),
                timeout_s=self.submit_timeout_s,
                pass_fds=pass_fds,
            )
        except _TimedOutError as error:
            raise SubmissionUncertainError(error.output, job_name=job.job_name) from error
        output = _messages(done)
        job_id = parse_submission(done.stdout)
        if job_id is not None:  # With an id the job exists, whatever the exit code of sbatch.
            return job_id
        if done.returncode < 0:
            raise SubmissionUncertainError(f"killed by signal {-done.returncode}", job_name=job.job_name)
        if done.returncode == 0 or messages.search(messages.UNCERTAIN, output):
            raise SubmissionUncertainError(output or "printed no job id", job_name=job.job_name)
        raise _unavailable_or_refused("sbatch", output)

    def test_only(self, script: Path, *, options: Sequence[str] = ()) -> datetime | None:
        """Return the start time that Slurm expects for a script, without submitting it.

        Returns None if Slurm expects no start within the next year.

        Raises:
            SlurmRefusedError: Slurm would reject the script.
        """
        command = ["sbatch", "--test-only", *options, str(script.absolute())]
        environment = _for_queries(self._submission_environment())
        done = self._run(command, environment=environment, timeout_s=self.submit_timeout_s)
        if done.returncode:
            raise _unavailable_or_refused("sbatch --test-only", _messages(done))
        return parse_expected_start(done.stderr + done.stdout, now=datetime.now(UTC))

    def queue(
        self, job_ids: Sequence[str] | None = None, *, names: Sequence[str] | None = None
    ) -> list[QueueRow]:
        """Return the rows of squeue, which include jobs that ended in the last few minutes.

        Args:
            job_ids: return only these jobs; by default all jobs of the caller. Jobs that Slurm no
                longer knows have no row.
            names: return only jobs with these names.
        """
        # --states=all includes jobs that ended recently; --array prints one row per task.
        command = ["squeue", "--noheader", "--states=all", "--array", f"--format={QUEUE_FORMAT}"]
        if job_ids is None:
            rows = self._query([*command, f"--user={os.geteuid()}"], parse_queue)
        else:
            calls = ([*command, f"--jobs={ids}"] for ids in _joined(job_ids))
            rows = [row for call in calls for row in self._query(call, parse_queue)]
        wanted = None if names is None else set(names)
        return [row for row in rows if wanted is None or row.name in wanted]

    def find_uncertain(self, job_name: str) -> str | None:
        """Return the id of a job whose submission was not confirmed, or None if squeue does not list it."""
        deadline = time.monotonic() + UNCERTAIN_WAIT_S
        while time.monotonic() < deadline:
            with suppress(SlurmUnavailableError):
                if rows := self.queue(names=[job_name]):
                    return rows[0].key.job
            time.sleep(1)
        return None

    def accounting(self, job_ids: Sequence[str]) -> list[AccountingRow]:
        """Return the rows of sacct for jobs, their steps and their earlier attempts.

        Raises:
            SlurmUnavailableError: there is no accounting, or its daemon is down. Use
                :meth:`queue` and the files of the run instead.
        """
        calls = ([*_SACCT, f"--jobs={ids}"] for ids in _joined(job_ids))
        return [row for call in calls for row in self._query(call, parse_accounting)]

    def accounting_by_name(self, names: Sequence[str], *, since: datetime) -> list[AccountingRow]:
        """Return the rows of sacct for the caller's jobs with these names.

        Use this method for jobs whose id is unknown. Slurm 22.05 finds a job by its name about five
        seconds later than by its id, so query :meth:`queue` first.
        """
        command = [*_SACCT, f"--user={os.geteuid()}", f"--starttime={_utc(since)}"]
        rows = self._query(command, parse_accounting)
        jobs = {row.key.job for row in rows if row.key.step is None and row.name in set(names)}
        return [row for row in rows if row.key.job in jobs]

    def jobs_on(self, nodes: Sequence[str], *, start: datetime, end: datetime) -> list[AccountingRow]:
        """Return the jobs of all users that had one of ``nodes`` between two times, without their steps.

        If job data are private (:meth:`jobs_are_private`), jobs of other users are missing.
        """
        # A single argument is long enough for the nodes of any cluster. Without --state, sacct also
        # lists jobs that were suspended or that lost a node; pending jobs have no nodes.
        times = (f"--starttime={_utc(start)}", f"--endtime={_utc(end)}")
        nodelist = f"--nodelist={','.join(dict.fromkeys(nodes))}"
        return self._query([*_SACCT, "--allusers", "--allocations", nodelist, *times], parse_accounting)

    def jobs_are_private(self) -> bool:
        """Return True if Slurm or its accounting daemon may hide the jobs of other users."""
        command = ["sacctmgr", "--noheader", "show", "configuration"]
        return self._query(command, lambda text: messages.search(messages.PRIVATE_JOBS, text) is not None)

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel queued or running jobs; jobs that have already ended are ignored.

        Raises:
            SlurmRefusedError: Slurm denied the request.
        """
        for ids in _joined(job_ids, separator=" "):
            done = self._run(["scancel", *ids.split()], environment=_for_queries(self._inherited()))
            lines = [line for line in _messages(done).splitlines() if not _no_such_job(line)]
            if done.returncode and lines:
                raise _unavailable_or_refused("scancel", "\n".join(lines))

    def nodes(self) -> list[NodeGroup]:
        """Return the partitions and nodes of the cluster."""
        return self._query(["sinfo", "--noheader", f"--format={NODES_FORMAT}"], parse_nodes)

    def sbatch_variables(self) -> dict[str, str]:
        """Return the SBATCH_* variables of the environment, which silently override script directives."""
        environment = self._inherited()
        return {name: environment[name] for name in sorted(environment) if name.startswith("SBATCH_")}

    def _query(self, command: Sequence[str], parse: Callable[[str], T]) -> T:
        """Run a query and parse its output; an unknown job id yields an empty result."""
        done = self._run(command, environment=_for_queries(self._inherited()))
        if done.returncode and not _no_such_job(done.stderr):
            raise _unavailable(command[0], _messages(done) or f"exit code {done.returncode}")
        try:
            return parse(done.stdout)
        except UnreadableOutputError as error:
            raise SlurmUnavailableError(command[0], f"cannot read its output: {error}") from error

    def _run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_s: float | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.CompletedProcess[str]:
        limit = timeout_s or self.timeout_s
        _check_configuration(command[0], environment)
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
                pass_fds=pass_fds,
            )
        except FileNotFoundError as error:
            raise SlurmMissingError(command[0], _NO_COMMAND) from error
        except PermissionError as error:
            raise SlurmMissingError(command[0], _NO_PERMISSION) from error
        except subprocess.TimeoutExpired as error:
            raise _TimedOutError(command[0], f"no answer within {limit:g} s") from error

    def _inherited(self) -> Mapping[str, str]:
        return os.environ if self.environment is None else self.environment

    def _submission_environment(self) -> dict[str, str]:
        """Return the environment of sbatch, which the job inherits."""
        return {
            name: value
            for name, value in self._inherited().items()
            if not name.startswith(("SLURM_", "BENCH_STEP_")) or name in _SUBMISSION_VARIABLES
        }


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _check_configuration(command: str, environment: Mapping[str, str]) -> None:
    """Raise SlurmMissingError if SLURM_CONF names no file: Slurm would search for the file for a minute."""
    path = environment.get("SLURM_CONF")
    if path and not Path(path).exists():
        raise SlurmMissingError(command, f"SLURM_CONF={path}: the file does not exist")


def _for_queries(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for queries: without variables that set filters, and with times in UTC."""
    kept = {name: value for name, value in environment.items() if not _QUERY_VARIABLES.fullmatch(name)}
    return {**kept, "TZ": "UTC"}


def _joined(job_ids: Sequence[str], *, separator: str = ",") -> Iterator[str]:
    """Join the distinct job ids; yield several texts if a single text would be too long."""
    chunk: list[str] = []
    length = 0
    for job_id in dict.fromkeys(job_ids):
        if chunk and length + len(job_id) + 1 > _MAX_LIST_CHARACTERS:
            yield separator.join(chunk)
            chunk, length = [], 0
        chunk.append(job_id)
        length += len(job_id) + 1
    if chunk:
        yield separator.join(chunk)


def _messages(done: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a command without the command's name at the start of lines."""
    printed = done.stderr.strip() or done.stdout.strip()
    return _COMMAND_NAME.sub("", printed)


def _no_such_job(output: str) -> bool:
    return messages.search(messages.NO_SUCH_JOB, output) is not None


def _unavailable(command: str, output: str) -> SlurmUnavailableError:
    if messages.search(messages.UNCONFIGURED, output):
        return SlurmMissingError(command, output)
    remedy = _RETRY_REMEDY if messages.search(messages.TEMPORARY, output) else ""
    return SlurmUnavailableError(command, output, remedy=remedy)


def _unavailable_or_refused(command: str, output: str) -> SlurmUnavailableError | SlurmRefusedError:
    if messages.search((*messages.UNREACHABLE, *messages.UNCERTAIN), output):
        return _unavailable(command, output)
    return SlurmRefusedError(command, output or "failed without a message")
