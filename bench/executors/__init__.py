"""Executors start runs and find out what became of them: this machine, or Slurm."""

from __future__ import annotations

from bench.errors import BenchError
from bench.executors.base import Executor, PlannedStudy


def executor_for(study: PlannedStudy) -> Executor:
    """Return the executor that a study's matrix names.

    Raises:
        BenchError: an executor that this version does not have.
    """
    if study.executor == "local":
        from bench.executors.local import LocalExecutor

        return LocalExecutor(study)
    if study.executor == "slurm":
        from bench.executors.slurm import SlurmExecutor

        return SlurmExecutor(study)
    raise BenchError(
        f"executor {study.executor!r} is not known", remedy="plan the study again: bench plan MATRIX"
    )
