"""Run Slurm's commands: submit, query and cancel jobs, and describe the cluster.

This is the only module that runs Slurm's commands. It uses no shell and limits the time of every
command. Errors contain the output of the command.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from ddp_scaling_bench.errors import BenchError, UnavailableError

from ..contract import RefusedError, UncertainError
from . import messages
from .parsing import (
    ACCOUNTING_FIELDS,
    NODES_FORMAT,
    QUEUE_FORMAT,
    JobRow,
    NodeGroup,
    UnreadableOutputError,
    parse_accounting,
    parse_expected_start,
    parse_nodes,
    parse_queue,
    parse_submission,
)

T = TypeVar("T")

#: --states=all includes jobs that ended some minutes ago.
_SQUEUE = ("squeue", "--noheader", "--states=all", f"--format={QUEUE_FORMAT}")
#: --duplicates: earlier attempts of a requeued job are separate rows.
_COLUMNS = f"--format={','.join(ACCOUNTING_FIELDS)}"
_SACCT = ("sacct", "--noheader", "--parsable2", "--allusers", "--duplicates", _COLUMNS)
#: Linux limits one argument to 128 KiB; longer lists are split.
_MAX_LIST_CHARACTERS = 100_000
_COMMAND_NAME = re.compile(
    r"^(?:sbatch|scancel|squeue|sacct|sacctmgr|sinfo|scontrol): (?:(?:error|fatal): )?", re.M
)
_NO_COMMAND, _NO_PERMISSION = "command not found", "permission denied"
_RETRY_REMEDY = "repeat the command when Slurm responds again (scontrol ping); nothing is lost"
_UNCERTAIN_REMEDY = "run `bench submit` again in a minute; it looks for the job before it submits the run"
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


class SlurmUncertainError(SlurmUnavailableError, UncertainError):
    """The answer of sbatch was lost: the job may have been accepted."""


class SlurmRefusedError(SlurmError, RefusedError):
    """Slurm rejected the request."""

    @property
    def queue_is_full(self) -> bool:  # type: ignore[override]
        """True if the reason is a limit on queued jobs, so that a later attempt can succeed."""
        return messages.search(messages.QUEUE_FULL, self.output) is not None


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

    def submit(self, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> str:
        """Submit a job with ``sbatch --parsable ...``, and return its id.

        sbatch inherits the descriptors ``pass_fds``: a lock among them stays held while sbatch runs, even if
        this process dies.

        Raises:
            SlurmRefusedError: Slurm rejected the job.
            SlurmUncertainError: the answer was lost, and the job may have been accepted.
            SlurmUnavailableError: Slurm is unreachable; nothing was submitted.
        """
        done = self._sbatch(command, pass_fds)
        if job_id := parse_submission(done.stdout):  # the job exists, whatever the exit code of sbatch
            return job_id
        output = _messages(done) or "printed no job id"
        if done.returncode < 0:
            output = f"killed by signal {-done.returncode}"
        if done.returncode <= 0 or messages.search(messages.UNCERTAIN, output):
            raise SlurmUncertainError("sbatch", output, remedy=_UNCERTAIN_REMEDY)
        raise _failed("sbatch", output)

    def test_only(self, script: Path, *, options: Sequence[str] = ()) -> datetime | None:
        """Return the start time that Slurm expects for a script, without submitting it.

        Returns None if Slurm expects no start within the next year.

        Raises:
            SlurmRefusedError: Slurm would reject the script.
        """
        done = self._sbatch(["sbatch", "--test-only", *options, str(script.absolute())])
        if done.returncode:
            raise _failed("sbatch --test-only", _messages(done))
        return parse_expected_start(done.stderr + done.stdout, now=datetime.now(UTC))

    def queue(self, names: Sequence[str]) -> list[JobRow]:
        """Return the rows of squeue for all users' jobs with these names, ended ones too for some minutes."""
        # squeue itself selects from all jobs by their names. A list must fit into an argument.
        listed, wanted = ",".join(names), set(names)
        is_list = len(listed) < _MAX_LIST_CHARACTERS and listed.count(",") == len(names) - 1
        command = [*_SQUEUE, *[f"--name={listed}"] * is_list]
        return [row for row in self._query(command, parse_queue) if row.name in wanted]

    def accounting(self, *options: str) -> list[JobRow]:
        """Return rows of sacct of all users: jobs, their steps and their earlier attempts.

        If job data are private (:meth:`jobs_are_private`), jobs of other users are missing.
        """
        return self._query([*_SACCT, *options], parse_accounting)

    def jobs_are_private(self) -> bool:
        """Return True if Slurm or its accounting daemon may hide the jobs of other users."""
        command = ["sacctmgr", "--noheader", "show", "configuration"]
        return self._query(command, lambda text: messages.search(messages.PRIVATE_JOBS, text) is not None)

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; ended ones are ignored. Raise SlurmRefusedError if Slurm denies the request."""
        for ids in joined_lists(job_ids, separator=" "):
            done = self._run(["scancel", *ids.split()], _for_queries(self._inherited()), self.timeout_s)
            lines = [line for line in _messages(done).splitlines() if not _no_such_job(line)]
            if done.returncode and lines:
                raise _failed("scancel", "\n".join(lines))

    def nodes(self) -> list[NodeGroup]:
        """Return the partitions and nodes of the cluster."""
        return self._query(["sinfo", "--noheader", f"--format={NODES_FORMAT}"], parse_nodes)

    def sbatch_variables(self) -> dict[str, str]:
        """Return the SBATCH_* variables of the environment, which silently override script directives."""
        return {
            name: value for name, value in sorted(self._inherited().items()) if name.startswith("SBATCH_")
        }

    def _query(self, command: Sequence[str], parse: Callable[[str], T]) -> T:
        """Run a query and parse its output; an unknown job id yields an empty result."""
        done = self._run(command, _for_queries(self._inherited()), self.timeout_s)
        if done.returncode and not _no_such_job(done.stderr):
            output = _messages(done) or f"exit code {done.returncode}"
            raise _failed(command[0], output, can_refuse=False)
        try:
            return parse(done.stdout)
        except UnreadableOutputError as error:
            raise SlurmUnavailableError(command[0], f"cannot read its output: {error}") from error

    def _sbatch(
        self, command: Sequence[str], pass_fds: Sequence[int] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run sbatch, in the environment that the job inherits. With --test-only, times are in UTC."""
        environment = {
            name: value
            for name, value in self._inherited().items()
            if not name.startswith(("SLURM_", "BENCH_STEP_")) or name in _SUBMISSION_VARIABLES
        }
        if "--test-only" in command:
            environment = _for_queries(environment)
        return self._run(command, environment, self.submit_timeout_s, pass_fds)

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.CompletedProcess[str]:
        configuration = environment.get("SLURM_CONF")
        if configuration and not Path(configuration).exists():  # Slurm would search for it for a minute
            raise _missing(command[0], f"SLURM_CONF={configuration}: the file does not exist")
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                env=dict(environment),
                encoding="utf-8",
                errors="replace",
                check=False,
                pass_fds=pass_fds,
            )
        except FileNotFoundError:
            raise _missing(command[0], _NO_COMMAND) from None
        except PermissionError:
            raise _missing(command[0], _NO_PERMISSION) from None
        except subprocess.TimeoutExpired:
            what = f"no answer within {timeout_s:g} s"
            if "--parsable" in command:
                raise SlurmUncertainError(command[0], what, remedy=_UNCERTAIN_REMEDY) from None
            raise SlurmUnavailableError(command[0], what) from None

    def _inherited(self) -> Mapping[str, str]:
        return os.environ if self.environment is None else self.environment


def between(start: datetime, end: datetime) -> tuple[str, str]:
    """Return the options of sacct for jobs that existed between two times."""
    begin, until = (moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S") for moment in (start, end))
    return f"--starttime={begin}", f"--endtime={until}"


def _for_queries(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for queries: without variables that set filters, and with times in UTC."""
    kept = {name: value for name, value in environment.items() if not _QUERY_VARIABLES.fullmatch(name)}
    return {**kept, "TZ": "UTC"}


def joined_lists(items: Iterable[str], *, separator: str = ",") -> Iterator[str]:
    """Join the distinct items (ids or names); yield several texts if a single text would be too long."""
    chunk: list[str] = []
    length = 0
    for item in dict.fromkeys(items):
        if chunk and length + len(item) + 1 > _MAX_LIST_CHARACTERS:
            yield separator.join(chunk)
            chunk, length = [], 0
        chunk.append(item)
        length += len(item) + 1
    if chunk:
        yield separator.join(chunk)


def _messages(done: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a command without the command's name at the start of lines."""
    return _COMMAND_NAME.sub("", done.stderr.strip() or done.stdout.strip())


def _no_such_job(output: str) -> bool:
    return messages.search(messages.NO_SUCH_JOB, output) is not None


def _missing(command: str, output: str) -> SlurmMissingError:
    return SlurmMissingError(command, output, remedy=_LOCATION_REMEDY)


def _failed(command: str, output: str, *, can_refuse: bool = True) -> SlurmError:
    """Return the error for the output of a command: Slurm is missing, unreachable, or refuses the request."""
    if messages.search(messages.UNCONFIGURED, output):
        return _missing(command, output.strip().splitlines()[-1])  # the lines before say how it searched
    if can_refuse and not messages.search((*messages.UNREACHABLE, *messages.UNCERTAIN), output):
        return SlurmRefusedError(command, output or "failed without a message")
    remedy = _RETRY_REMEDY if messages.search(messages.TEMPORARY, output) else ""
    return SlurmUnavailableError(command, output, remedy=remedy)
