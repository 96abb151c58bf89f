"""The status of several jobs, from one call of sacct."""

from __future__ import annotations

from collections.abc import Sequence

from bench.jobs.outcome import JobStatus
from bench.jobs.slurm.job_states import classify
from bench.jobs.slurm.parsing import AccountingRow


def job_statuses(rows: Sequence[AccountingRow]) -> dict[str, JobStatus]:
    """Return the status of each job that has a row of its own."""
    jobs = {row.key.job for row in rows}
    found = {job: classify([row for row in rows if row.key.job == job]) for job in jobs}
    return {job: status for job, status in found.items() if status is not None}
