"""All attempts of a study's runs: their cost, and how many succeeded.

A run that is started again, for example by ``bench submit --retry-failed``, has several attempts. Only the
latest one can count for the measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from scipy import special

from analysis.data.columns import RunRow, grouped
from analysis.data.load import Study
from bench.study.ledger import RunState
from ddp_scaling_bench.finding import Finding


class RecordedReason(Finding, kind="recorded"):
    """Why an attempt has no result, or what is wrong with its files, in the words of the study's files."""

    text: str

    def _message(self) -> str:
        return self.text


def all_attempts(study: Study, runs: Sequence[RunRow]) -> list[RunRow]:
    """Return all attempts, those of a run one after another, with the node-hours of each.

    ``runs`` are the latest attempts with their measurements. Earlier attempts have none.
    """
    earlier = grouped(study.earlier, lambda run: run.run_id)
    found = []
    for latest in runs:
        for run in (*earlier.get(latest.run_id, ()), latest):
            if run is not latest:
                run = replace(run, latest=False, facts=recorded(run.reason), wall_s=wall_seconds(run))
            run.node_hours = run.wall_s * study.cells[run.cell_id].nodes / 3600
            found.append(run)
    return found


def recorded(reason: str) -> tuple[Finding, ...]:
    """Return the recorded reason of a run as a finding."""
    return (RecordedReason(text=reason),) if reason else ()


def wall_seconds(run: RunRow) -> float:
    """Return the seconds from the start to the end of a run; NaN if unknown."""
    if run.started_at is None or run.ended_at is None or run.ended_at < run.started_at:
        return math.nan
    return (run.ended_at - run.started_at).total_seconds()


class Success(NamedTuple):
    """Numbers of attempts that completed, and that ended at all."""

    completed: int = 0
    attempted: int = 0

    @property
    def low(self) -> float:
        """The lower end of Wilson's 95 % interval of the success rate; 0 without attempts.

        It is lower for 3 of 3 than for 30 of 30 (E. B. Wilson, JASA 22, 1927).
        """
        z, n = float(special.ndtri(0.975)), self.attempted
        if not n:
            return 0.0
        rate, spread = self.completed / n, z**2 / n
        return (rate + spread / 2 - z * math.sqrt(rate * (1 - rate) / n + spread / (4 * n))) / (1 + spread)


def cell_success(study: Study) -> dict[str, Success]:
    """Return how often the runs of each cell succeeded, with earlier attempts of restarted runs."""
    counts = Counter((run.cell_id, run.state) for run in (*study.earlier, *study.runs))
    # A cancelled or queued attempt does not count.
    done, failed = str(RunState.COMPLETED), str(RunState.FAILED)
    return {
        cell: Success(counts[cell, done], counts[cell, done] + counts[cell, failed]) for cell in study.cells
    }


def reserve(success: float) -> float:
    """Return the expected cost of failed attempts as a fraction of the cost of the attempt that succeeds.

    The number of attempts until the first success has the geometric distribution with the mean 1/p
    (W. Feller, An Introduction to Probability Theory, vol. 1, 1968, VI.8), so the reserve is 1/p - 1 with
    the success rate p. Attempts are assumed to be independent, and each failed attempt to cost as much as
    a whole job.
    """
    return 1 / success - 1
