"""Start runs and find out how they end: on this machine, on hosts reached by ssh, or with Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.executors.base import Executor
from bench.study.plan_json import REPLAN, PlannedStudy

if TYPE_CHECKING:
    from bench.executors.pack_submission import PackExecutor


def executor_for(study: PlannedStudy, *, pack: bool = False) -> Executor:
    """Return the executor of a study's matrix, or with ``pack`` the one that submits a single job."""
    if pack:
        return pack_executor(study)
    if study.executor == "local":
        from bench.executors.local import LocalExecutor

        return LocalExecutor(study)
    if study.executor == "ssh":
        from bench.executors.ssh import SshExecutor

        return SshExecutor(study)
    if study.executor == "slurm":
        from bench.executors.slurm import SlurmExecutor

        return SlurmExecutor(study)
    raise BenchError(f"executor {study.executor!r} is unknown", remedy=REPLAN)


def pack_executor(study: PlannedStudy) -> PackExecutor:
    """Return the executor that submits many runs as one job; raise BenchError without Slurm."""
    from bench.executors.pack_submission import PackExecutor

    if study.executor != "slurm":
        what = f"--pack submits many runs as one Slurm job, but the matrix says executor {study.executor}"
        raise BenchError(what, remedy="leave --pack out: without Slurm, runs go one after another anyway")
    return PackExecutor(study)
