"""How asking Slurm can fail: it cannot be asked, it says no, or nobody knows whether it said yes."""

from __future__ import annotations

import re

from bench.errors import BenchError

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
