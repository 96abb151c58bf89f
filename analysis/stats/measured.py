"""The runs of a study with their measurements: the DataFrames that all analyses start from.

A run is disturbed by something outside its job; :mod:`bench.study.conditions` decides this when the run ends.
The time of a step is never a reason to leave out a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analysis.data.load import Study
from analysis.stats.attempts import wall_seconds
from analysis.stats.decompose import run_parts
from analysis.stats.estimate import Floats, outliers, run_rates, run_readings
from analysis.text import number
from bench.study.conditions import Reason
from bench.study.ledger import RunState


def left_out(runs: pd.DataFrame) -> pd.Series:
    """Return a mask of the disturbed runs that are left out.

    A reason that disturbed all runs of a cell is a property of the study; no run is left out because of it.
    Runs that were disturbed for another reason are left out, unless this applies to all runs of their cell.
    ``runs`` (``cell_id``, ``disturbed``) are those that completed with a throughput.
    """
    own = _reasons_of_run(runs)
    if not own.map(bool).any():
        return pd.Series(False, index=runs.index)
    common = runs["cell_id"].map(common_reasons(runs))
    out = pd.Series([bool(a - b) for a, b in zip(own, common, strict=True)], index=runs.index, dtype=bool)
    return out & ~out.groupby(runs["cell_id"]).transform("all")


def common_reasons(runs: pd.DataFrame) -> dict[str, frozenset[Reason]]:
    """Return, by cell_id, the reasons that disturbed every run of the cell.

    ``runs`` are as for :func:`left_out`.
    """
    found: dict[str, frozenset[Reason]] = {}
    for cell_id, own in zip(runs["cell_id"], _reasons_of_run(runs), strict=True):
        found[cell_id] = found.get(cell_id, own) & own
    return found


def count_disturbed(runs: pd.DataFrame) -> pd.Series:
    """Return the number of disturbed runs by cell_id; missing if no run of the cell recorded disturbances.

    ``runs`` are as for :func:`left_out`.
    """
    known = runs[runs["disturbed"].notna()]
    return known["disturbed"].map(bool).groupby(known["cell_id"]).sum().astype("Int64")


def _reasons_of_run(runs: pd.DataFrame) -> pd.Series:
    values = [frozenset(one.reason for one in found or ()) for found in runs["disturbed"]]
    return pd.Series(values, index=runs.index, dtype=object)


#: Maximum number of runs whose ranks.csv an analysis reads.
MAX_RANKS_FILES = 500


@dataclass(frozen=True)
class Frames:
    """The DataFrames of a study: planned cells, their series, and all runs with their measurements.

    Attributes:
        cells: one row per cell: ``cell_id, launcher, backend``, the size columns; optionally ``ddp``, False
            for one rank without DDP.
        members: one row per cell and series: ``cell_id, series, mode``.
        runs: one row per planned run: ``run_id, cell_id, state, reason, failure_class``; ``measured``
            (True if the run counts: it completed with a throughput and was not left out),
            ``left_out`` (True if it does not count because it was disturbed), ``disturbed`` (as in
            :attr:`analysis.data.load.Study.runs`), ``throughput_samples_per_sec, step_time_sec, wall_s,
            outlier``, ``rate`` (the throughput, even if a table does not give its unit), ``unit`` (counted
            divided by planned samples, NaN if unknown), and the columns of
            :func:`analysis.stats.decompose.run_parts` and :func:`analysis.stats.estimate.run_readings`.
        labelled_by: the source of the modes of the series, for messages: ``the plan`` or ``the table``.
        regime_remedy: advice in messages about a series that is neither strong nor weak; may be empty.
    """

    cells: pd.DataFrame
    members: pd.DataFrame
    runs: pd.DataFrame
    labelled_by: str = "the plan"
    regime_remedy: str = ""

    def with_left_out(self) -> Frames:
        """Return the frames with the left-out runs counted, although they were disturbed."""
        runs = self.runs.assign(measured=self.runs["measured"] | self.runs["left_out"], left_out=False)
        return replace(self, runs=runs)


def measure(study: Study, *, include_disturbed: bool = False) -> Frames:
    """Compute the frames of a study.

    A run counts if it completed with a throughput. A disturbed run is left out (see
    :func:`analysis.stats.measured.left_out`), unless ``include_disturbed``. ``step_time_sec`` is the time per
    global batch: the plan's global batch divided by the throughput.
    """
    runs = study.runs.set_index("run_id", drop=False)
    epochs = study.epochs
    runs = runs.join([run_rates(epochs), run_parts(epochs), run_readings(epochs)])
    runs = runs.set_axis(range(len(runs)))
    completed = runs["state"] == RunState.COMPLETED
    measured = completed & runs["throughput_samples_per_sec"].notna()
    runs["left_out"] = False
    if not include_disturbed:
        runs["left_out"] = left_out(runs[measured]).reindex(runs.index, fill_value=False)
    runs["measured"] = measured & ~runs["left_out"]
    batch = study.cells.set_index("cell_id")["global_batch"].reindex(runs["cell_id"]).to_numpy(dtype=float)
    runs["step_time_sec"] = batch / runs["throughput_samples_per_sec"]
    runs["unit"] = runs["samples"] / runs["steps"] / batch
    runs["wall_s"] = wall_seconds(runs)
    counted = runs["throughput_samples_per_sec"].where(runs["measured"])
    runs["rate"] = runs["throughput_samples_per_sec"]
    runs["outlier"] = outliers(counted, by=runs["cell_id"])
    runs["reason"] = _reasons(runs, batch)
    return Frames(study.cells.assign(ddp=_with_ddp(study)), study.members, runs)


def ranks_sample(runs: pd.DataFrame) -> pd.DataFrame:
    """Select the runs whose ranks.csv is read: all that count; of a large study, each cell's first repeats.

    ``runs`` have ``run_id, cell_id, measured``.
    """
    runs = runs[runs["measured"]]
    repeat = runs.groupby("cell_id").cumcount()
    return runs.loc[repeat.sort_values(kind="stable").index[:MAX_RANKS_FILES]].sort_index()


def _with_ddp(study: Study) -> list[bool]:
    """Return for each cell whether it uses DDP; with ``ddp: false``, a cell of one rank does not."""
    options = [cell.get("workload") for cell in study.plan.get("cells") or []]
    if len(options) != len(study.cells):
        return [True] * len(study.cells)
    return [not isinstance(own, dict) or own.get("ddp") is not False for own in options]


def _reasons(runs: pd.DataFrame, batch: Floats) -> pd.Series:
    """Return each run's ``reason``, followed by the problems of the run's metrics and conditions."""
    reasons = runs["reason"].to_numpy(dtype=object).copy()
    completed = (runs["state"] == RunState.COMPLETED).to_numpy()
    silent = completed & ~runs["measured"].to_numpy() & ~runs["left_out"].to_numpy() & (reasons == "")
    reasons[silent] = "metrics.csv has no epoch with samples and a throughput"
    for place, words in [*_other_work(runs, batch), *_disturbed(runs), *_slow_without_reason(runs)]:
        reasons[place] = f"{reasons[place]}; {words}" if reasons[place] else words
    return pd.Series(reasons, index=runs.index, dtype="str")


def _other_work(runs: pd.DataFrame, batch: Floats) -> Iterator[tuple[int, str]]:
    """Yield the position of each run whose samples per step differ from the plan, with a text."""
    per_step = (runs["samples"] / runs["steps"]).to_numpy(dtype=float)
    with np.errstate(invalid="ignore"):
        other_work = runs["measured"].to_numpy() & (np.abs(per_step / batch - 1) > 0.01)
    for place in np.flatnonzero(other_work):
        planned = f"the plan's global batch is {batch[place]:.0f}"
        yield int(place), f"{number(per_step[place])} samples per step, but {planned}"


def _disturbed(runs: pd.DataFrame) -> Iterator[tuple[int, str]]:
    """Yield the position of each disturbed run, with a text: what disturbed it, on which node and when."""
    for place, (found, out) in enumerate(zip(runs["disturbed"], runs["left_out"], strict=True)):
        if found:
            yield place, f"{'left out: ' if out else ''}disturbed by {'; '.join(map(str, found))}"


def _slow_without_reason(runs: pd.DataFrame) -> Iterator[tuple[int, str]]:
    """Yield the position of each slow outlier for which no disturbance was recorded, with a text."""
    median = runs["rate"].where(runs["measured"]).groupby(runs["cell_id"]).transform("median")
    for place in np.flatnonzero(runs["outlier"] & (runs["rate"] < median)):
        hosts = runs["hosts"].iloc[place]
        if runs["disturbed"].iloc[place] == ():
            yield int(place), f"slow for no recorded reason{f', on {hosts}' if hosts else ''}"
