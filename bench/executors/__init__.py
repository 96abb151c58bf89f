"""Executors start runs and find out what became of them: this machine, hosts reached by ssh, or Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.executors.base import Executor
from bench.study.plan_json import PlannedStudy

if TYPE_CHECKING:
    from bench.executors.pack_submission import PackExecutor


def executor_for(study: PlannedStudy, *, pack: bool = False) -> Executor:
    """Return the executor that a study's matrix names, or the one that makes one job of many runs.

    Raises:
        BenchError: an executor that this version does not have.
    """
    if pack:
        return pack_executor(study)
    if study.executor == "local":
        from bench.executors.local import LocalExecutor

        return LocalExecutor(study)
    if study.executor == "ssh":
        from bench.executors.ssh.executor import SshExecutor

        return SshExecutor(study)
    if study.executor == "slurm":
        from bench.executors.slurm import SlurmExecutor

        return SlurmExecutor(study)
    raise BenchError(
        f"executor {study.executor!r} is not known", remedy="plan the study again: bench plan MATRIX"
    )


def pack_executor(study: PlannedStudy) -> PackExecutor:
    """Return the executor that submits many runs as one job.

    Raises:
        BenchError: the study's runs are not jobs of Slurm.
    """
    from bench.executors.pack_submission import PackExecutor

    if study.executor != "slurm":
        what = f"--pack makes one job of Slurm of many runs; the matrix says executor {study.executor}"
        raise BenchError(what, remedy="leave --pack away: there the runs go one after another anyway")
    return PackExecutor(study)
