"""Speedup and efficiency of every cell within each of its series.

With T the time per step (per global batch), N the ranks and N₀ those of the baseline:

=======  ==========================================  ==================  =============
regime   what stays constant over the series         speedup             efficiency
=======  ==========================================  ==================  =============
strong   the global batch                            S = T(N₀)/T(N)      E = S·N₀/N
weak     the batch per rank                          S = E·N/N₀          E = T(N₀)/T(N)
=======  ==========================================  ==================  =============

(G. M. Amdahl 1967 and J. L. Gustafson 1988 for the two views.) The regime follows from the
batch columns, never from a label; any other series has no efficiency, and a reason. The
baseline is the smallest size measured, named in the column ``baseline``.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.decompose import PARTS, cell_parts, computational_scalability
from analysis.estimate import LogMoments, log_moments, mean_interval, ratio_interval
from analysis.load import Study
from analysis.measured import SIZE_COLUMNS, Frames, measure
from analysis.reasons import cell_states, row_reasons

#: The efficiency from which on POP's guidelines speak of good scaling (https://pop-coe.eu/node/69).
GUIDE = 0.8

#: The columns of report/scaling.csv, one row per cell and series.
COLUMNS = (
    "cell_id",
    "series",
    "baseline",
    "mode",
    "launcher",
    "backend",
    "nodes",
    "gpus_per_node",
    "gpus",
    "global_batch",
    "per_gpu_batch",
    "n",
    "throughput_samples_per_sec",
    "throughput_low",
    "throughput_high",
    "step_time_sec",
    "speedup",
    "efficiency",
    "efficiency_low",
    "efficiency_high",
    "load_balance",
    "comm_efficiency",
    "pop_parallel_efficiency",
    "computational_scalability",
    "global_efficiency",
    "node_hours",
    "state",
    "reason",
)


def scaling_table(source: Study | Frames, *, baseline: str | None = None) -> pd.DataFrame:
    """Return one row per cell and series with the columns of report/scaling.csv.

    What was not measured is NaN. Intervals are 95 %, from three runs on either side;
    the baseline's own efficiency is 1 by definition and has none. ``n`` counts the runs
    that completed with a throughput, ``node_hours`` is the mean of one such run.

    Args:
        source: a study, or its frames.
        baseline: which measured cell a series starts from, by its ``cell_id`` or its size
            as nodes x ranks per node (``1x4``); a series that lacks it, and by default every
            series, starts from its smallest measured size.
    """
    return scale(source, baseline=baseline)[list(COLUMNS)]


def scale(source: Study | Frames, *, baseline: str | None = None) -> pd.DataFrame:
    """Return the scaling table with what figures and words need beside it.

    Beyond :data:`COLUMNS`: ``runs`` (planned), ``label_mode`` (the plan's), ``base_cell``,
    ``base_gpus, is_base``, ``speedup_low, speedup_high``, and the step's
    :data:`analysis.decompose.PARTS` with ``exposed`` (seconds per step).
    """
    frames = source if isinstance(source, Frames) else measure(source)
    rows = _rows(frames)
    rows["label_mode"] = rows["mode"]
    rows["mode"] = _regimes(rows)
    _add_baselines(rows, baseline)
    _add_efficiency(rows, _cell_moments(frames))
    rows["reason"] = row_reasons(rows, frames, asked=baseline)
    return rows


def _rows(frames: Frames) -> pd.DataFrame:
    """Return one row per cell and series with what its runs measured, whatever the series."""
    cells = frames.cells.set_index("cell_id")
    measured = frames.runs[frames.runs["measured"]]
    groups = measured.groupby("cell_id", observed=True, sort=False)
    cells["n"] = groups.size().reindex(cells.index).fillna(0).astype("int64")
    cells["runs"] = frames.runs.groupby("cell_id").size().reindex(cells.index).fillna(0).astype("int64")
    # The mean time per step, which makes the throughput the harmonic mean of the runs'.
    cells["step_time_sec"] = groups["step_time_sec"].mean()
    cells["throughput_samples_per_sec"] = cells["global_batch"] / cells["step_time_sec"]
    cells["node_hours"] = cells["nodes"] * groups["wall_s"].mean() / 3600
    moments = _cell_moments(frames)
    cells["throughput_low"], cells["throughput_high"] = mean_interval(moments)
    cells = cells.join(cell_parts(measured)).join(cell_states(frames.runs))
    cells["cell_place"] = np.arange(len(cells))
    columns = ["launcher", "backend", *SIZE_COLUMNS, "n", "runs", "step_time_sec", "cell_place"]
    columns += ["throughput_samples_per_sec", "throughput_low", "throughput_high", "node_hours"]
    columns += ["load_balance", "comm_efficiency", "pop_parallel_efficiency", "useful_s", "state"]
    rows = frames.members[["cell_id", "series", "mode"]].join(
        cells[[*columns, *PARTS, "exposed"]], on="cell_id"
    )
    order = {name: place for place, name in enumerate(dict.fromkeys(rows["series"]))}
    rows["series_place"] = rows["series"].map(order)
    keys = ["series_place", "gpus", "nodes", "cell_place"]
    return rows.sort_values(keys, kind="stable", ignore_index=True)


def _cell_moments(frames: Frames) -> LogMoments:
    """Return the moments of the runs' log throughput, by the cell's place in ``frames.cells``."""
    measured = frames.runs[frames.runs["measured"]]
    places = pd.Index(frames.cells["cell_id"]).get_indexer(measured["cell_id"])
    values = measured["throughput_samples_per_sec"].to_numpy(dtype=float)
    return log_moments(values, groups=places, size=len(frames.cells))


def _regimes(rows: pd.DataFrame) -> pd.Series:
    """Return ``strong``, ``weak`` or nothing for each row, from the batches of its whole series."""
    per_rank = rows["global_batch"] / rows["gpus"]
    by = rows["series_place"]
    same_global = rows["global_batch"].groupby(by).transform("nunique") == 1
    same_per_rank = per_rank.groupby(by).transform("nunique") == 1
    alone = by.groupby(by).transform("size") == 1
    regime = np.select([same_global & ~same_per_rank, same_per_rank & ~same_global], ["strong", "weak"], "")
    # All cells of one size: the batches leave both open, so the plan's word stands.
    either = (same_global & same_per_rank).to_numpy()
    regime = np.where(either, rows["label_mode"].to_numpy(dtype=object), regime)
    return pd.Series(np.where(alone, rows["label_mode"], regime), index=rows.index, dtype="str")


def _add_baselines(rows: pd.DataFrame, asked: str | None) -> None:
    """Add base_place (the base's row), base_gpus, is_base and baseline, where there is one."""
    size = rows["nodes"].astype(str) + "x" + rows["gpus_per_node"].astype(str)
    preferred = (rows["cell_id"] == asked) | (size == asked) if asked else False
    candidates = rows.assign(preferred=preferred)[rows["n"] > 0]
    keys = ["series_place", "preferred", "gpus", "nodes", "cell_place"]
    candidates = candidates.sort_values(keys, ascending=[True, False, True, True, True], kind="stable")
    first = candidates.drop_duplicates("series_place")
    places = pd.Series(first.index, index=first["series_place"])
    base = rows["series_place"].map(places).astype("Int64")
    alone = rows.groupby("series_place")["cell_id"].transform("size") == 1
    rows["base_place"] = base.mask(alone | (rows["mode"] == ""))
    rows["base_gpus"] = rows["base_place"].map(rows["gpus"])
    rows["base_cell"] = rows["base_place"].map(rows["cell_id"])
    rows["is_base"] = (rows["base_place"] == rows.index.to_series()).fillna(False).astype(bool)
    ranks = np.where(rows["gpus"] == 1, " rank)", " ranks)")
    names = pd.Series(
        [f"{a} ({b}{c}" for a, b, c in zip(size, rows["gpus"], ranks, strict=True)], dtype="str"
    )
    same_size = candidates.groupby(["series_place", "nodes", "gpus_per_node"])["cell_id"].nunique()
    if (same_size > 1).any():
        # Two baselines of one size (with and without DDP, say): the size does not name it.
        names = names + ", " + rows["cell_id"]
    rows["baseline"] = rows["base_place"].map(names).fillna("").astype("str")


def _add_efficiency(rows: pd.DataFrame, moments: LogMoments) -> None:
    """Add speedup, efficiency, their intervals, and the factors that need the baseline."""
    has_base = rows["base_place"].notna().to_numpy()
    places = np.where(has_base, rows["base_place"].fillna(0).astype("int64"), 0)
    base = rows.iloc[places].set_axis(rows.index)
    growth = rows["gpus"] / base["gpus"]
    time_ratio = base["step_time_sec"] / rows["step_time_sec"]
    strong = rows["mode"] == "strong"
    efficiency = (time_ratio / growth).where(strong, time_ratio).where(has_base)
    top = moments.take(rows["cell_place"].to_numpy())
    bottom = moments.take(base["cell_place"].to_numpy())
    low, high = ratio_interval(top, bottom)
    # E is the ratio of the throughputs per rank, in either regime.
    work = (rows["global_batch"] / base["global_batch"]).to_numpy()
    per_rank = np.where(strong, 1 / growth, 1 / work)
    comparable = has_base & ~rows["is_base"].to_numpy()
    rows["efficiency"] = efficiency
    rows["efficiency_low"] = np.where(comparable, low * per_rank, np.nan)
    rows["efficiency_high"] = np.where(comparable, high * per_rank, np.nan)
    for name in ("", "_low", "_high"):
        rows[f"speedup{name}"] = rows[f"efficiency{name}"] * growth
    rows["computational_scalability"] = computational_scalability(
        rows["useful_s"],
        ranks=rows["gpus"],
        samples_per_step=rows["global_batch"],
        reference=pd.Series(places, index=rows.index),
    ).where(has_base)
    rows["global_efficiency"] = rows["pop_parallel_efficiency"] * rows["computational_scalability"]
