"""Speedup and efficiency of every cell within each of its series.

With T the time per step (per global batch), N the ranks and N₀ those of the baseline:

=======  ==========================================  ==================  =============
regime   constant over the series                    speedup             efficiency
=======  ==========================================  ==================  =============
strong   global batch                                S = T(N₀)/T(N)      E = S·N₀/N
weak     batch per rank                              S = E·N/N₀          E = T(N₀)/T(N)
=======  ==========================================  ==================  =============

(G. M. Amdahl 1967 and J. L. Gustafson 1988.) The batches of a series determine its regime; its label in the
plan does not. A series of neither regime has no efficiency. A series of times to train has only the speedup
T(N₀)/T(N).

The incremental efficiency between the sizes of a and b ranks is e = (E(b) / E(a)) ** (1 / log2(b / a)):
1 if each doubling doubles the throughput. Some sites, such as CSC, grant a larger job only if a doubling
gives 1.5 times the throughput, that is e = 0.75.

Karp-Flatt's serial fraction of a strong series (A. H. Karp and H. P. Flatt, Commun. ACM 33, 1990),
with p = N/N₀, is f = (1/S - 1/p) / (1 - 1/p). It is constant if a fixed serial part limits the speedup.
It grows if communication, imbalance or start-up grow with the size.

Two axes: the efficiency of a size n x k (n nodes of k ranks) is a factor within one node times a factor over
nodes: E(n x k) = E(1 x k) * [E(n x k) / E(1 x k)]. The second factor does not depend on the baseline. It is
T(1 x k) / (n T(n x k)) for strong scaling and T(1 x k) / T(n x k) for weak scaling.

The baseline of a series is the requested size or cell, else the smallest measured size.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.data.load import Study
from analysis.data.names import baseline_names, sizes_of
from analysis.stats.columns import ALL_COLUMNS, INCREMENT_COLUMNS, READINGS
from analysis.stats.decompose import cell_parts, computational_scalability
from analysis.stats.estimate import LogMoments, log_moments, mean_interval, ratio_interval, welch
from analysis.stats.measured import Frames, count_disturbed, measure
from analysis.text import listed, one_line
from bench.errors import BenchError
from bench.study.ledger import RunState

Mask = npt.NDArray[np.bool_]

#: Values of ``--baseline`` for one rank without DDP, and for a number of ranks.
_NO_DDP = re.compile(r"(?:1 (?:gpu|rank) )?(?:no|without)[ -]ddp", re.IGNORECASE)
_RANKS = re.compile(r"([0-9]+)(?: (?:gpus?|ranks?))?", re.IGNORECASE)


def is_baseline(rows: pd.DataFrame, baseline: str) -> Mask:
    """Return a mask of the rows that a value of ``--baseline`` selects.

    ``rows`` have ``cell_id, nodes, gpus_per_node, gpus`` and ``ddp`` (bool). ``baseline`` is a cell's id; a
    size as nodes x ranks per node (``1x4``) or as ranks (``4``, ``4 GPUs``); ``no-ddp`` (one rank without
    DDP); or ``common``, the smallest size that every series has measured. A size selects cells with DDP if
    there are any.
    """
    baseline = baseline.strip()
    by_name = np.asarray(rows["cell_id"] == baseline, dtype=bool)
    if by_name.any():
        return by_name
    if baseline.casefold() == "common":
        return _smallest_common(rows)
    with_ddp = rows["ddp"].to_numpy(dtype=bool)
    if _NO_DDP.fullmatch(baseline):
        return ~with_ddp
    size = np.asarray(sizes_of(rows) == baseline.replace("×", "x").replace(" ", ""), dtype=bool)
    ranks = _RANKS.fullmatch(baseline)
    if ranks and not size.any():
        size = np.asarray(rows["gpus"] == int(ranks[1]), dtype=bool)
    return size & with_ddp if (size & with_ddp).any() else size


def _smallest_common(rows: pd.DataFrame) -> Mask:
    measured = rows[(rows["n"] > 0) & rows["ddp"]]
    series = measured.groupby("gpus")["series_place"].nunique()
    common = series.index[series == rows["series_place"].nunique()]
    return np.asarray((rows["gpus"] == common.min()) & rows["ddp"], dtype=bool)


def check_baseline(rows: pd.DataFrame, baseline: str | None) -> None:
    """Check that the requested baseline exists in some series.

    Raises:
        BenchError: no cell of that name or size was planned; the message lists the sizes.
    """
    if baseline is None or is_baseline(rows, baseline).any():
        return
    if baseline.strip().casefold() == "common":
        raise BenchError(
            "--baseline common: no size was measured in every series", remedy="give a size or omit --baseline"
        )
    ordered = rows.assign(size=sizes_of(rows)).sort_values(["gpus", "nodes"], kind="stable")
    sizes = list(dict.fromkeys(ordered["size"]))
    without = "" if rows["ddp"].all() else ", and no-ddp"
    raise BenchError(
        f"--baseline {one_line(baseline, limit=80)}: no such size or cell; "
        f"the sizes are {listed(sizes, limit=20)}{without}",
        remedy="give one of these sizes, a number of ranks, or the cell_id of one of its cells",
    )


def base_places(rows: pd.DataFrame, baseline: str | None) -> pd.Series:
    """Return for each row the index label of the row that is its baseline; missing without a baseline.

    The baseline of a series is, in order of preference: the requested one, if measured in the series; a
    requested cell without DDP that does the same work in another series; or the smallest measured size (by
    ranks, then nodes, cells with DDP first).
    """
    preferred = is_baseline(rows, baseline) if baseline else np.zeros(len(rows), dtype=bool)
    candidates = rows.assign(preferred=preferred, without_ddp=~rows["ddp"])[rows["n"] > 0]
    keys = ["series_place", "preferred", "without_ddp", "gpus", "nodes", "cell_place"]
    order = [True, False, True, True, True, True]
    candidates = candidates.sort_values(keys, ascending=order, kind="stable")
    first = candidates.drop_duplicates("series_place")
    places = pd.Series(first.index, index=first["series_place"], dtype="Int64")
    elsewhere = candidates[candidates["preferred"] & candidates["without_ddp"]]
    for place in first.loc[~first["preferred"], "series_place"] if len(elsewhere) else ():
        same = _same_work(elsewhere, rows[rows["series_place"] == place])
        if len(same):
            places[place] = same.index[0]
    return rows["series_place"].map(places).astype("Int64")


def _same_work(candidates: pd.DataFrame, series: pd.DataFrame) -> pd.DataFrame:
    """Return the candidates with the settings and batch (strong: global, weak: per rank) of ``series``."""
    mode = series["mode"].iloc[0]
    first = series.iloc[0]
    if mode == "strong":
        same = candidates["global_batch"] == first["global_batch"]
    elif mode == "weak":
        same = candidates["global_batch"] / candidates["gpus"] == first["global_batch"] / first["gpus"]
    else:
        return candidates.iloc[:0]
    for name in ("launcher", "backend", "variant"):
        same &= candidates[name] == first[name]
    return candidates[np.asarray(same, dtype=bool)]


#: Efficiency that POP's guidelines call good scaling (https://pop-coe.eu/node/69).
GUIDE = 0.8


def is_wide(low: Any, high: Any) -> Any:
    """Return whether intervals (numbers or columns) are wide; an unknown interval is not.

    From the middle of a wide interval (on a logarithmic scale), each end is more than a factor of 1 / GUIDE
    away: such an interval around 1 contains :data:`GUIDE`, so it tells nothing about whether a size scales.
    """
    return high / low > GUIDE**-2


#: Runs count the same unit of work if their ratios of counted to planned samples differ by at most this.
SAME_UNIT = 0.01
#: If no run of a cell counts, the state of the cell is the first of these states that any of its runs has.
_STATE_ORDER = (
    *(RunState.RUNNING, RunState.QUEUED, RunState.FAILED, RunState.UNKNOWN, RunState.CANCELLED),
    *(RunState.COMPLETED, RunState.PLANNED),
)

#: The columns of report/axes.csv: one row per series and size, sorted by ranks per node, then nodes.
AXES_COLUMNS = (
    *("cell_id", "series", "baseline", "mode", "nodes", "gpus_per_node", "gpus", "n"),
    *("speedup", "efficiency", "efficiency_low", "efficiency_high"),
    *("efficiency_within_node", "efficiency_over_nodes", "state", "reason"),
)


def scale(source: Study | Frames, *, baseline: str | None = None) -> pd.DataFrame:
    """Return the scaling table, sorted by series, then size; ``reason`` is empty.

    :func:`analysis.checks.scaling_table.scaling_table` adds the reasons. Intervals are 95 % and need three
    runs of the cell and of the baseline. The baseline's efficiency is 1 by definition, without an interval.

    :func:`is_baseline` parses ``baseline``, a size or cell. By default, and in a series without this size or
    cell, the baseline is the smallest measured size.

    Returns:
        The columns of :data:`analysis.stats.columns.SCHEMA`.

    Raises:
        BenchError: no series contains the size or cell ``baseline``.
    """
    frames = source if isinstance(source, Frames) else measure(source)
    moments = _cell_moments(frames)
    rows = _measured_rows(frames, moments)
    check_baseline(rows, baseline)
    rows["label_mode"] = rows["mode"]
    rows["mode"] = _regimes(rows)
    _add_baselines(rows, baseline)
    _add_efficiency(rows, moments)
    rows = _with_increments(rows, moments)
    rows["karp_flatt"] = _karp_flatt(rows)
    every = scale(frames.with_left_out(), baseline=baseline) if frames.runs["left_out"].any() else rows
    rows["throughput_all"] = every["throughput_samples_per_sec"]
    rows["efficiency_all"] = every["efficiency"]
    rows["reason"] = pd.Series("", index=rows.index, dtype="str")
    return rows[list(ALL_COLUMNS)]


def _measured_rows(frames: Frames, moments: LogMoments) -> pd.DataFrame:
    """Return one row per cell and series with the columns that do not depend on the baseline."""
    cells = frames.cells.set_index("cell_id")
    measured = frames.runs[frames.runs["measured"]]
    groups = measured.groupby("cell_id", observed=True, sort=False)
    cells["ddp"] = cells["ddp"].astype(bool) if "ddp" in cells else True
    cells["variant"] = _variants(cells)
    cells["n"] = groups.size().reindex(cells.index).fillna(0).astype("int64")
    finished = frames.runs[frames.runs["measured"] | frames.runs["left_out"]]
    undisturbed = np.array([not found for found in measured["disturbed"]], dtype=bool)
    clean = measured[undisturbed].groupby("cell_id", observed=True).size()
    cells["n_undisturbed"] = clean.reindex(cells.index).fillna(0).astype("int64")
    cells["n_disturbed"] = count_disturbed(finished).reindex(cells.index)
    cells["runs"] = frames.runs.groupby("cell_id").size().reindex(cells.index).fillna(0).astype("int64")
    # The throughput is computed from the mean time per step, so it is the harmonic mean over the runs.
    cells["step_time_sec"] = groups["step_time_sec"].mean()
    cells["throughput_samples_per_sec"] = cells["global_batch"] / cells["step_time_sec"]
    units = groups["unit"]
    # If runs of one cell count different units, the cell gets the unit infinity, unequal to all others.
    cells["unit"] = (
        units.median().where(units.max() <= (1 + SAME_UNIT) * units.min(), np.inf).where(units.count() > 0)
    )
    cells["node_hours"] = cells["nodes"] * groups["wall_s"].mean() / 3600
    cells["throughput_low"], cells["throughput_high"] = mean_interval(moments)
    cells[list(READINGS)] = groups[list(READINGS)].mean()
    cells = cells.join(cell_parts(measured)).join(_cell_states(frames.runs))
    cells["cell_place"] = np.arange(len(cells))
    cells["rate"] = cells["throughput_samples_per_sec"]
    members = frames.members[["cell_id", "series", "mode"]]
    rows = members.join(cells[[name for name in ALL_COLUMNS if name in cells]], on="cell_id")
    order = {name: place for place, name in enumerate(dict.fromkeys(rows["series"]))}
    rows["series_place"] = rows["series"].map(order)
    keys = ["series_place", "gpus", "nodes", "cell_place"]
    return rows.sort_values(keys, kind="stable", ignore_index=True)


def _variants(cells: pd.DataFrame) -> list[str]:
    """Return the variant of each cell: its swept options without ``ddp``.

    Cells of the same variant do the same work.
    """
    if "swept" not in cells:
        return [""] * len(cells)
    return [repr(sorted((k, v) for k, v in swept.items() if k != "ddp")) for swept in cells["swept"]]


def _cell_moments(frames: Frames) -> LogMoments:
    """Return the moments of the runs' log throughput, by the cell's position in ``frames.cells``."""
    measured = frames.runs[frames.runs["measured"]]
    places = pd.Index(frames.cells["cell_id"]).get_indexer(measured["cell_id"])
    values = measured["throughput_samples_per_sec"].to_numpy(dtype=float)
    return log_moments(values, groups=places, size=len(frames.cells))


def _cell_states(runs: pd.DataFrame) -> pd.DataFrame:
    """Return ``state`` by cell_id: completed if a run counts, else its runs' first state by _STATE_ORDER."""
    rank = {str(state): place for place, state in enumerate(_STATE_ORDER)}
    places = runs["state"].map(rank).where(~runs["measured"], -1)
    first = places.groupby(runs["cell_id"]).min()
    names = {-1: str(RunState.COMPLETED), **{place: state for state, place in rank.items()}}
    return pd.DataFrame({"state": first.map(names).astype("str")})


def _regimes(rows: pd.DataFrame) -> pd.Series:
    """Return ``strong``, ``weak`` or an empty text for each row, from all batches of the row's series."""
    per_rank = batch_per_rank(rows)
    by = rows["series_place"]
    same_global = rows["global_batch"].groupby(by).transform("nunique") == 1
    same_per_rank = per_rank.groupby(by).transform("nunique") == 1
    alone = by.groupby(by).transform("size") == 1
    regime = np.select([same_global & ~same_per_rank, same_per_rank & ~same_global], ["strong", "weak"], "")
    # If all cells have one size, the batches fit both regimes: the plan's label decides.
    either = (same_global & same_per_rank).to_numpy()
    regime = np.where(either, rows["label_mode"].to_numpy(dtype=object), regime)
    return pd.Series(np.where(alone, rows["label_mode"], regime), index=rows.index, dtype="str")


def batch_per_rank(rows: pd.DataFrame) -> pd.Series:
    """Return the global batch per rank as text with nine digits, so that rounding errors do not matter."""
    return (rows["global_batch"] / rows["gpus"]).map(lambda value: f"{value:.9g}")


def _add_baselines(rows: pd.DataFrame, baseline: str | None) -> None:
    """Add the columns base_place, base_gpus, base_cell, is_base and baseline."""
    alone = rows.groupby("series_place")["cell_id"].transform("size") == 1
    base = base_places(rows, baseline)
    elsewhere = base.map(rows["series_place"]) != rows["series_place"]
    rows["base_place"] = base.mask((alone & ~elsewhere.fillna(False)) | (rows["mode"] == ""))
    rows["base_gpus"] = rows["base_place"].map(rows["gpus"])
    rows["base_cell"] = rows["base_place"].map(rows["cell_id"])
    rows["is_base"] = (rows["base_place"] == rows.index.to_series()).fillna(False).astype(bool)
    rows["baseline"] = rows["base_place"].map(_baseline_names(rows)).fillna("").astype("str")


def _baseline_names(rows: pd.DataFrame) -> pd.Series:
    """Return each row's name for the column ``baseline``: its size and, if that is ambiguous, its cell_id."""
    named = pd.Series(baseline_names(rows), index=rows.index, dtype="str")
    named = named.where(rows["ddp"], named + " without DDP")
    same_size = rows[rows["n"] > 0].groupby(["series_place", "nodes", "gpus_per_node", "gpus", "ddp"])
    if (same_size["cell_id"].nunique() > 1).any():
        named = named + ", " + rows["cell_id"]
    return named


def _other_unit(units: pd.Series, base: pd.Series) -> pd.Series:
    """Return a mask of the rows whose unit of work varies between runs or differs from the baseline's."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(units.fillna(1.0).to_numpy() / base.fillna(1.0).to_numpy() - 1)
    return pd.Series(~(apart <= SAME_UNIT), index=units.index)


def _add_efficiency(rows: pd.DataFrame, moments: LogMoments) -> None:
    """Add speedup and efficiency with their intervals, and the factors that are relative to the baseline."""
    has_base = rows["base_place"].notna().to_numpy()
    places = np.where(has_base, rows["base_place"].fillna(0).astype("int64"), 0)
    base = rows.iloc[places].set_axis(rows.index)
    growth = rows["gpus"] / base["gpus"]
    time_ratio = base["step_time_sec"] / rows["step_time_sec"]
    strong = rows["mode"] == "strong"
    rows["other_unit"] = _other_unit(rows["unit"], base["unit"]) & has_base
    has_base = has_base & ~rows["other_unit"].to_numpy()
    rows["efficiency"] = (time_ratio / growth).where(strong, time_ratio).where(has_base)
    top, bottom = (moments.take(one["cell_place"].to_numpy()) for one in (rows, base))
    low, high = ratio_interval(top, bottom)
    # In both regimes, E is the ratio of the throughputs per rank.
    work = (rows["global_batch"] / base["global_batch"]).to_numpy()
    per_rank = np.where(strong, 1 / growth, 1 / work)
    comparable = has_base & ~rows["is_base"].to_numpy()
    rows["efficiency_low"] = np.where(comparable, low * per_rank, np.nan)
    rows["efficiency_high"] = np.where(comparable, high * per_rank, np.nan)
    rows["efficiency_error"] = np.where(np.isnan(rows["efficiency_low"]), np.nan, welch(top, bottom)[1])
    for name in ("", "_low", "_high"):
        rows[f"speedup{name}"] = rows[f"efficiency{name}"] * growth
    rows["computational_scalability"] = computational_scalability(
        rows["useful_s"],
        ranks=rows["gpus"],
        samples_per_step=rows["global_batch"],
        reference=pd.Series(places, index=rows.index),
    ).where(has_base)
    rows["global_efficiency"] = rows["pop_parallel_efficiency"] * rows["computational_scalability"]


def _with_increments(rows: pd.DataFrame, moments: LogMoments) -> pd.DataFrame:
    """Add :data:`INCREMENT_COLUMNS`; NaN if no smaller size was measured."""
    places = _smaller_places(rows)
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


def _smaller_places(rows: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return for each row the position of the next smaller measured size in its series; -1 without one.

    A size with the same ranks per node is preferred, then one on a single node, then any other size.
    """
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


def _karp_flatt(rows: pd.DataFrame) -> pd.Series:
    """Return the serial fraction of rows with strong scaling and more ranks than the baseline, else NaN."""
    times = rows["gpus"] / rows["base_gpus"].astype("float64")
    usable = (rows["mode"] == "strong") & (times > 1) & rows["ddp"]
    with np.errstate(divide="ignore", invalid="ignore"):
        fraction = (1 / rows["speedup"] - 1 / times) / (1 - 1 / times)
    return fraction.where(usable)


def two_axes(rows: pd.DataFrame) -> pd.DataFrame:
    """Split the efficiency into a factor within one node and a factor over nodes.

    The result contains the series that have several node counts and several values of ranks per node. Sizes
    with unequal nodes and series without a baseline are left out. If several cells of a series have the same
    size, the first measured one is used.

    Returns:
        A frame with :data:`AXES_COLUMNS` and ``per_node``, the ranks per node as an integer.
    """
    frame = rows[rows["gpus_per_node"].str.isdecimal() & (rows["baseline"] != "")].copy()
    frame["per_node"] = frame["gpus_per_node"].astype("int64")
    frame["unmeasured"] = frame["n"] == 0
    size = ["series_place", "per_node", "nodes"]
    frame = frame.sort_values([*size, "unmeasured"], kind="stable").drop_duplicates(size)
    by = frame.groupby("series_place")
    grown = (by["nodes"].transform("nunique") > 1) & (by["per_node"].transform("nunique") > 1)
    frame = frame[grown.astype(bool)].reset_index(drop=True)
    one_node = frame[frame["nodes"] == 1].set_index(["series_place", "per_node"])["efficiency"]
    places = pd.MultiIndex.from_frame(frame[["series_place", "per_node"]])
    within = one_node.reindex(places).to_numpy(dtype=float)
    base_nodes = frame["base_place"].map(rows["nodes"]).to_numpy(dtype=float)
    frame["efficiency_within_node"] = np.where(base_nodes == 1, within, np.nan)
    frame["efficiency_over_nodes"] = frame["efficiency"].to_numpy(dtype=float) / within
    return frame[[*AXES_COLUMNS, "per_node"]]
