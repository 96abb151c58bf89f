"""What each further step in size brings, and the serial fraction that a speedup amounts to.

Incremental efficiency of the step from a to b ranks, per doubling::

    e = (E(b) / E(a)) ** (1 / log2(b / a))

1 where every doubling doubles the throughput; 0.75 is the 1.5 times per doubling that some
sites ask for before they grant a larger job (CSC's guide to scaling, for one).

Karp-Flatt's serial fraction of a strong series (A. H. Karp and H. P. Flatt, Commun. ACM 33,
1990), with p = N/N0 and the speedup S::

    f = (1/S - 1/p) / (1 - 1/p)

It is constant where a fixed serial part limits the speedup, and grows where what is added with the
size does: communication, imbalance, start-up.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.data.load import Study
from analysis.data.names import baseline_names
from analysis.stats.baselines import base_places, check_asked
from analysis.stats.decompose import PARTS, cell_parts, computational_scalability
from analysis.stats.estimate import LogMoments, log_moments, mean_interval, ratio_interval
from analysis.stats.measured import SIZE_COLUMNS, Frames, measure
from analysis.stats.reasons import cell_states, row_reasons

INCREMENT_COLUMNS = (
    "incremental_from",
    "incremental_efficiency",
    "incremental_low",
    "incremental_high",
)


def add_increments(rows: pd.DataFrame, moments: LogMoments) -> pd.DataFrame:
    """Return the rows with :data:`INCREMENT_COLUMNS`; NaN where no smaller size was measured.

    ``incremental_from`` is the next smaller measured size (in ranks): with the ranks per node
    fixed where there is one, else within one node, else whichever. Intervals are Welch's, 95 %.

    Args:
        rows: of :func:`analysis.stats.scaling.scale`, with ``mode, efficiency`` and ``cell_place``.
        moments: of the cells' runs.
    """
    places = _smaller(rows)
    known = places >= 0
    before = rows.iloc[np.where(known, places, 0)]
    growth = rows["gpus"].to_numpy(dtype=float) / before["gpus"].to_numpy(dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_doubling = 1 / np.log2(growth)
        gain = rows["rate"].to_numpy(dtype=float) / before["rate"].to_numpy(dtype=float) / growth
        low, high = ratio_interval(
            moments.take(rows["cell_place"].to_numpy()), moments.take(before["cell_place"].to_numpy())
        )
        values = (gain, low / growth, high / growth)
        powers = [np.where(known, value**per_doubling, np.nan) for value in values]
    return rows.assign(
        incremental_from=np.where(known, before["gpus"].to_numpy(dtype=float), np.nan),
        **dict(zip(INCREMENT_COLUMNS[1:], powers, strict=True)),
    )


def _smaller(rows: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return for each row the place of the size that it grew from, or -1."""
    found = np.full(len(rows), -1, dtype=np.int64)
    usable = (rows["mode"] != "") & (rows["n"] > 0) & rows["ddp"] & ~rows["other_unit"]
    numbered = rows.assign(place=np.arange(len(rows)))[usable]
    names = ["place", "gpus", "nodes", "gpus_per_node"]
    for _, own in numbered.groupby("series_place", sort=False):
        seen: list[tuple[int, int, int, str]] = []
        for row in own[names].itertuples(index=False, name=None):
            smaller = [other for other in seen if other[1] < row[1]]
            if smaller:
                path = [other for other in smaller if other[3] == row[3]]
                within = [other for other in smaller if other[2] == 1]
                found[row[0]] = max(path or within or smaller, key=lambda other: other[1])[0]
            seen.append(row)
    return found


def karp_flatt(rows: pd.DataFrame) -> pd.Series:
    """Return the serial fraction of each row of a strong series beyond its baseline; NaN elsewhere."""
    times = rows["gpus"] / rows["base_gpus"].astype("float64")
    usable = (rows["mode"] == "strong") & (times > 1) & rows["ddp"]
    with np.errstate(divide="ignore", invalid="ignore"):
        fraction = (1 / rows["speedup"] - 1 / times) / (1 - 1 / times)
    return fraction.where(usable)


# Speedup and efficiency of every cell within each of its series.
#
# With T the time per step (per global batch), N the ranks and N₀ those of the baseline:
#
# =======  ==========================================  ==================  =============
# regime   what stays constant over the series         speedup             efficiency
# =======  ==========================================  ==================  =============
# strong   the global batch                            S = T(N₀)/T(N)      E = S·N₀/N
# weak     the batch per rank                          S = E·N/N₀          E = T(N₀)/T(N)
# =======  ==========================================  ==================  =============
#
# (G. M. Amdahl 1967 and J. L. Gustafson 1988 for the two views.) The regime follows from the
# batch columns, never from a label; any other series has no efficiency, and a reason. The
# baseline is the smallest size measured, named in the column ``baseline``. A series of times to
# train has the speedup T(N₀)/T(N) and no efficiency.

#: The efficiency from which on POP's guidelines speak of good scaling (https://pop-coe.eu/node/69).
GUIDE = 0.8

#: How far the samples per step of two cells may lie from their plans', relatively, to be of one unit.
SAME_UNIT = 0.01

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


#: What report/scaling.csv holds after these.
FURTHER_COLUMNS = (*INCREMENT_COLUMNS, "karp_flatt")


def scaling_table(source: Study | Frames, *, baseline: str | None = None) -> pd.DataFrame:
    """Return one row per cell and series with the columns of report/scaling.csv.

    What was not measured is NaN. Intervals are 95 %, from three runs on either side;
    the baseline's own efficiency is 1 by definition and has none. ``n`` counts the runs
    that completed with a throughput, ``node_hours`` is the mean of one such run.

    Args:
        source: a study, or its frames.
        baseline: which measured cell a series starts from, as :func:`analysis.stats.baselines.asked_for`
            reads it; a series that lacks it, and by default every series, starts from its
            smallest measured size.

    Raises:
        BenchError: no series has such a baseline.
    """
    return scale(source, baseline=baseline)[list(COLUMNS)]


def scale(source: Study | Frames, *, baseline: str | None = None) -> pd.DataFrame:
    """Return the scaling table with what figures and words need beside it.

    Beyond :data:`COLUMNS` and :data:`FURTHER_COLUMNS`: ``runs`` (planned), ``label_mode`` (the
    plan's), ``base_place`` (the label of the baseline's row), ``base_cell``, ``base_gpus, is_base``,
    ``speedup_low, speedup_high``, ``ddp, to_train``, ``other_unit`` (no efficiency, since its work is
    counted otherwise), ``rate`` (as ``throughput_samples_per_sec``, also where a table hides that),
    and the step's ``PARTS`` with ``exposed`` and ``useful_s`` (seconds per step).
    ``series_place`` and ``cell_place`` number series and cells in the plan's order; rows are sorted by
    series, then size.
    """
    frames = source if isinstance(source, Frames) else measure(source)
    moments = _cell_moments(frames)
    rows = _rows(frames, moments)
    check_asked(rows, baseline)
    rows["label_mode"] = rows["mode"]
    rows["to_train"] = rows["series"].isin(frames.to_train)
    rows["mode"] = _regimes(rows).where(~rows["to_train"], "")
    _add_baselines(rows, baseline)
    _add_efficiency(rows, moments)
    rows = add_increments(rows, moments)
    rows["karp_flatt"] = karp_flatt(rows)
    rows["reason"] = row_reasons(rows, frames, asked=baseline)
    return rows


def _rows(frames: Frames, moments: LogMoments) -> pd.DataFrame:
    """Return one row per cell and series with what its runs measured, whatever the series."""
    cells = frames.cells.set_index("cell_id")
    measured = frames.runs[frames.runs["measured"]]
    groups = measured.groupby("cell_id", observed=True, sort=False)
    cells["ddp"] = cells["ddp"].astype(bool) if "ddp" in cells else True
    cells["variant"] = _variants(cells)
    cells["n"] = groups.size().reindex(cells.index).fillna(0).astype("int64")
    cells["runs"] = frames.runs.groupby("cell_id").size().reindex(cells.index).fillna(0).astype("int64")
    # The mean time per step, which makes the throughput the harmonic mean of the runs'.
    cells["step_time_sec"] = groups["step_time_sec"].mean()
    cells["throughput_samples_per_sec"] = cells["global_batch"] / cells["step_time_sec"]
    units = groups["unit"]
    # Runs of one cell that count different units have no mean: infinity agrees with no other cell.
    cells["unit"] = (
        units.median().where(units.max() <= (1 + SAME_UNIT) * units.min(), np.inf).where(units.count() > 0)
    )
    cells["node_hours"] = cells["nodes"] * groups["wall_s"].mean() / 3600
    cells["throughput_low"], cells["throughput_high"] = mean_interval(moments)
    cells = cells.join(cell_parts(measured)).join(cell_states(frames.runs))
    cells["cell_place"] = np.arange(len(cells))
    columns = ["launcher", "backend", *SIZE_COLUMNS, "n", "runs", "step_time_sec", "cell_place"]
    columns += ["throughput_samples_per_sec", "throughput_low", "throughput_high", "node_hours"]
    columns += ["load_balance", "comm_efficiency", "pop_parallel_efficiency", "useful_s", "state"]
    columns += ["ddp", "variant", "unit"]
    rows = frames.members[["cell_id", "series", "mode"]].join(
        cells[[*columns, *PARTS, "exposed"]], on="cell_id"
    )
    order = {name: place for place, name in enumerate(dict.fromkeys(rows["series"]))}
    rows["series_place"] = rows["series"].map(order)
    keys = ["series_place", "gpus", "nodes", "cell_place"]
    rows["rate"] = rows["throughput_samples_per_sec"]
    return rows.sort_values(keys, kind="stable", ignore_index=True)


def _variants(cells: pd.DataFrame) -> list[str]:
    """Return the swept options of each cell but for ``ddp``: cells of one variant do the same work."""
    if "swept" not in cells:
        return [""] * len(cells)
    return [repr(sorted((k, v) for k, v in swept.items() if k != "ddp")) for swept in cells["swept"]]


def _cell_moments(frames: Frames) -> LogMoments:
    """Return the moments of the runs' log throughput, by the cell's place in ``frames.cells``."""
    measured = frames.runs[frames.runs["measured"]]
    places = pd.Index(frames.cells["cell_id"]).get_indexer(measured["cell_id"])
    values = measured["throughput_samples_per_sec"].to_numpy(dtype=float)
    return log_moments(values, groups=places, size=len(frames.cells))


def _regimes(rows: pd.DataFrame) -> pd.Series:
    """Return ``strong``, ``weak`` or nothing for each row, from the batches of its whole series."""
    # To nine digits: the batch of a table may be a product that was rounded.
    per_rank = (rows["global_batch"] / rows["gpus"]).map(lambda value: f"{value:.9g}")
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
    alone = rows.groupby("series_place")["cell_id"].transform("size") == 1
    base = base_places(rows, asked)
    elsewhere = base.map(rows["series_place"]) != rows["series_place"]
    none = (rows["mode"] == "") & ~rows["to_train"]
    rows["base_place"] = base.mask((alone & ~elsewhere.fillna(False)) | none)
    rows["base_gpus"] = rows["base_place"].map(rows["gpus"])
    rows["base_cell"] = rows["base_place"].map(rows["cell_id"])
    rows["is_base"] = (rows["base_place"] == rows.index.to_series()).fillna(False).astype(bool)
    rows["baseline"] = rows["base_place"].map(_names(rows)).fillna("").astype("str")


def _names(rows: pd.DataFrame) -> pd.Series:
    """Return what each row is called as a baseline: its size, and more where that does not tell."""
    named = pd.Series(baseline_names(rows), index=rows.index, dtype="str")
    named = named.where(rows["ddp"], named + " without DDP")
    same_size = rows[rows["n"] > 0].groupby(["series_place", "nodes", "gpus_per_node", "gpus", "ddp"])
    if (same_size["cell_id"].nunique() > 1).any():
        # Two baselines of one size (with and without DDP, say): the size does not name it.
        named = named + ", " + rows["cell_id"]
    return named


def _other_unit(units: pd.Series, base: pd.Series) -> pd.Series:
    """Return which rows count another unit of work (tokens, say) than their baseline, or several."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(units.fillna(1.0).to_numpy() / base.fillna(1.0).to_numpy() - 1)
    return pd.Series(~(apart <= SAME_UNIT), index=units.index)


def _add_efficiency(rows: pd.DataFrame, moments: LogMoments) -> None:
    """Add speedup, efficiency, their intervals, and the factors that need the baseline."""
    has_base = rows["base_place"].notna().to_numpy()
    places = np.where(has_base, rows["base_place"].fillna(0).astype("int64"), 0)
    base = rows.iloc[places].set_axis(rows.index)
    growth = rows["gpus"] / base["gpus"]
    time_ratio = base["step_time_sec"] / rows["step_time_sec"]
    strong = rows["mode"] == "strong"
    rows["other_unit"] = _other_unit(rows["unit"], base["unit"]) & has_base
    has_base = has_base & ~rows["other_unit"].to_numpy()
    efficiency = (time_ratio / growth).where(strong, time_ratio).where(has_base)
    top = moments.take(rows["cell_place"].to_numpy())
    bottom = moments.take(base["cell_place"].to_numpy())
    low, high = ratio_interval(top, bottom)
    # E is the ratio of the throughputs per rank, in either regime.
    work = (rows["global_batch"] / base["global_batch"]).to_numpy()
    per_rank = np.where(strong, 1 / growth, 1 / work)
    comparable = has_base & ~rows["is_base"].to_numpy()
    rows["efficiency"] = efficiency
    to_train = rows["to_train"].to_numpy()
    rows["efficiency_low"] = np.where(comparable, low * per_rank, np.nan)
    rows["efficiency_high"] = np.where(comparable, high * per_rank, np.nan)
    for name in ("", "_low", "_high"):
        rows[f"speedup{name}"] = rows[f"efficiency{name}"] * np.where(to_train, 1.0, growth)
        rows[f"efficiency{name}"] = rows[f"efficiency{name}"].mask(to_train)
    rows["computational_scalability"] = computational_scalability(
        rows["useful_s"],
        ranks=rows["gpus"],
        samples_per_step=rows["global_batch"],
        reference=pd.Series(places, index=rows.index),
    ).where(has_base)
    rows["global_efficiency"] = rows["pop_parallel_efficiency"] * rows["computational_scalability"]
