"""The runs of a study with what each one measured: the frame that all analysis starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.data.load import Study
from analysis.stats.decompose import run_parts
from analysis.stats.estimate import outliers, run_rates
from analysis.text import number
from bench.study.ledger import RunState

#: What a cell is; ``gpus_per_node`` is an empty text where a table does not tell the nodes.
SIZE_COLUMNS = ("nodes", "gpus_per_node", "gpus", "global_batch", "per_gpu_batch")

#: What the throughput of a study counts.
SAMPLES_PER_S = "samples/s"


@dataclass(frozen=True)
class Frames:
    """Planned cells, their series, and all runs with what they measured.

    Attributes:
        cells: one row per cell: ``cell_id, launcher, backend`` and :data:`SIZE_COLUMNS`; ``ddp`` is
            false where a single rank ran without DDP (left out: with).
        members: one row per cell and series: ``cell_id, series, mode``.
        runs: one row per planned run: ``run_id, cell_id, state, reason, failure_class``;
            ``measured`` (completed, with a throughput: the runs that count),
            ``throughput_samples_per_sec, step_time_sec, wall_s, outlier``, ``rate`` (the throughput,
            also where a table does not tell its unit), ``unit`` (samples that it counted over those
            planned; NaN where it does not tell) and the columns of
            :func:`analysis.stats.decompose.run_parts`.
        labelled_by: who gave the series their mode, in words.
        regime_remedy: what to do about a series of neither regime, in words; empty where it was
            planned so.
        to_train: series whose times are those of a whole training: they include convergence,
            so that a ratio of them is no parallel efficiency.
        rate_unit: what a throughput counts; a table measured elsewhere may count tokens, say.
    """

    cells: pd.DataFrame
    members: pd.DataFrame
    runs: pd.DataFrame
    labelled_by: str = "the plan"
    regime_remedy: str = ""
    to_train: frozenset[str] = frozenset()
    rate_unit: str = SAMPLES_PER_S


def measure(study: Study) -> Frames:
    """Return the study's frames.

    A run counts if it completed and left a throughput. ``step_time_sec`` is the time per
    global batch: the plan's global batch over the throughput.
    """
    runs = study.runs.set_index("run_id", drop=False)
    rates = run_rates(study.epochs)
    runs = runs.join(rates).join(run_parts(study.epochs))
    runs = runs.set_axis(range(len(runs)))
    completed = runs["state"] == RunState.COMPLETED
    runs["measured"] = completed & runs["throughput_samples_per_sec"].notna()
    batch = study.cells.set_index("cell_id")["global_batch"].reindex(runs["cell_id"]).to_numpy(dtype=float)
    runs["step_time_sec"] = batch / runs["throughput_samples_per_sec"]
    runs["unit"] = runs["samples"] / runs["steps"] / batch
    runs["wall_s"] = (runs["ended_at"] - runs["started_at"]).dt.total_seconds().where(lambda s: s >= 0)
    counted = runs["throughput_samples_per_sec"].where(runs["measured"])
    runs["rate"] = runs["throughput_samples_per_sec"]
    runs["outlier"] = outliers(counted, by=runs["cell_id"])
    runs["reason"] = _reasons(runs, batch)
    return Frames(study.cells.assign(ddp=_with_ddp(study)), study.members, runs)


def _with_ddp(study: Study) -> list[bool]:
    """Return by cell whether its ranks run under DDP: one rank alone can do without (``ddp: false``)."""
    options = [cell.get("workload") for cell in study.plan.get("cells") or []]
    if len(options) != len(study.cells):
        return [True] * len(study.cells)
    return [not isinstance(own, dict) or own.get("ddp") is not False for own in options]


def _reasons(runs: pd.DataFrame, batch: np.ndarray[tuple[int], np.dtype[np.float64]]) -> pd.Series:
    """Return the runs' reasons with what the metrics themselves give away."""
    reasons = runs["reason"].to_numpy(dtype=object).copy()
    completed = (runs["state"] == RunState.COMPLETED).to_numpy()
    silent = completed & ~runs["measured"].to_numpy() & (reasons == "")
    reasons[silent] = "metrics.csv has no epoch with samples and a throughput"
    per_step = (runs["samples"] / runs["steps"]).to_numpy(dtype=float)
    with np.errstate(invalid="ignore"):
        other_work = runs["measured"].to_numpy() & (np.abs(per_step / batch - 1) > 0.01)
    for place in np.flatnonzero(other_work):
        odd = f"{number(per_step[place])} samples per step, but the plan's global batch is {batch[place]:.0f}"
        reasons[place] = f"{reasons[place]}; {odd}" if reasons[place] else odd
    return pd.Series(reasons, index=runs.index, dtype="str")
