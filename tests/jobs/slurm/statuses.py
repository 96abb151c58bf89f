"""The status of several jobs, from one call of sacct."""

from __future__ import annotations

from collections.abc import Sequence

from bench.jobs.contract import Status
from bench.jobs.slurm.parsing import JobRow
from bench.jobs.slurm.states import classify, rows_by_job


def job_statuses(rows: Sequence[JobRow]) -> dict[str, Status]:
    """Return the status of each job that has a row of its own."""
    found = {job: classify(own) for job, own in rows_by_job(rows).items()}
    return {job: status for job, status in found.items() if status is not None}
