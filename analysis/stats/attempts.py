"""All attempts of a study's runs: their cost, and how many succeeded.

A run that is started again, for example by ``bench submit --retry-failed``, has several attempts. Only the
latest one can count for the measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import pandas as pd
from scipy import special

from analysis.data.load import Study
from analysis.stats.columns import run_rows
from bench.study.ledger import RunState
from ddp_scaling_bench.finding import Finding


class RecordedReason(Finding, kind="recorded"):
    """Why an attempt has no result, or what is wrong with its files, in the words of the study's files."""

    text: str

    def _message(self) -> str:
        return self.text


def all_attempts(study: Study, runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per attempt, the attempts of a run one after another.

    ``runs`` is :attr:`analysis.stats.measured.Frames.runs`, whose rows are the latest attempts. The result
    has its columns, ``latest``, and ``node_hours`` (the nodes times the time from start to end; NaN if
    unknown). Earlier attempts have no measurements.
    """
    both = runs.assign(latest=True)
    if len(study.earlier):
        earlier = study.earlier.assign(measured=False, left_out=False, outlier=False, latest=False)
        earlier["facts"] = earlier["reason"].map(recorded)
        places = {run_id: place for place, run_id in enumerate(runs["run_id"])}
        both = pd.concat([earlier.assign(wall_s=wall_seconds(earlier)), both])
        both = both.iloc[both["run_id"].map(places).argsort(kind="stable")].reset_index(drop=True)
    nodes = study.cells.set_index("cell_id")["nodes"].reindex(both["cell_id"]).to_numpy(dtype=float)
    both["node_hours"] = both["wall_s"] * nodes / 3600
    return both


def recorded(reason: str) -> tuple[Finding, ...]:
    """Return the recorded reason of a run as a finding."""
    return (RecordedReason(text=reason),) if reason else ()


def wall_seconds(runs: pd.DataFrame) -> pd.Series:
    """Return the seconds from the start to the end of each run; NaN if unknown."""
    return (runs["ended_at"] - runs["started_at"]).dt.total_seconds().where(lambda s: s >= 0)


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
    frames = (study.earlier, study.runs)
    counts = Counter((run.cell_id, run.state) for frame in frames for run in run_rows(frame))
    # A cancelled or queued attempt does not count.
    done, failed = str(RunState.COMPLETED), str(RunState.FAILED)
    return {
        cell: Success(counts[cell, done], counts[cell, done] + counts[cell, failed])
        for cell in study.cells["cell_id"]
    }


def reserve(success: float) -> float:
    """Return the expected cost of failed attempts as a fraction of the cost of the attempt that succeeds.

    The number of attempts until the first success has the geometric distribution with the mean 1/p
    (W. Feller, An Introduction to Probability Theory, vol. 1, 1968, VI.8), so the reserve is 1/p - 1 with
    the success rate p. Attempts are assumed to be independent, and each failed attempt to cost as much as
    a whole job.
    """
    return 1 / success - 1
