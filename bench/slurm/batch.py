"""A batch script with what sbatch is told about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchError


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
