"""Detect and describe late ranks (stragglers) and slow nodes, which make all other ranks wait.

Useful time is a rank's step without exposed communication
(:func:`analysis.stats.decompose.useful_time`). A late rank has more useful time than the others. The others
spend the difference waiting, which counts as exposed communication. Stragglers are therefore detected by
useful time, so that they are not mistaken for slow communication. The typical useful time is the lower median
over the ranks, so up to half of the ranks (one node of two) can be late.

Nodes are only compared with the other nodes of the same run: runs differ for reasons that no node causes.
All functions read ranks.csv of at most :data:`analysis.stats.measured.MAX_RANKS_FILES` runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import special

from analysis.data.load import Study
from analysis.stats.columns import ScalingRow, first_of_cells
from analysis.stats.decompose import USEFUL_PARTS, useful_time
from analysis.stats.estimate import MIN_RUNS, lower_median
from analysis.stats.measured import ranks_sample
from analysis.text import clean
from bench.facts import Fact
from bench.units import MISSING, known

#: A rank is late if its useful time exceeds the typical one by this share of the step, in every epoch. If
#: most of the excess is outside all timers, the mean over the epochs and more than half of them are enough:
#: some epochs can lack work that a rank does every N steps.
LATE_FROM = 0.05
#: Ranks that wait for each other have equal steps. If their steps differ by more than this factor, a rank has
#: stopped its clock alone (it paused the recorder), and the ranks cannot be compared.
COMPARABLE_STEPS = 1.1
#: Minimum ratio of a slow node's useful time to that of the other nodes.
SLOW_NODE = 1.03
#: Probability of reporting a slow node in a study without one, if the noise is as in
#: benchmarks/campaign_slow_nodes.py. The limit is 1 %; the difference allows for noise with heavier tails.
SLOW_NODE_LEVEL = 0.005
#: Numbers of samples count as equal if they differ by at most this fraction.
SAMPLES_APART = 0.02
#: The windows of two ranks are equally long if they differ by at most this many steps, or by this fraction.
WINDOW_STEPS, WINDOWS_APART = 2, 0.1
#: Maximum number of cells that :func:`least_balanced_cells` returns.
MAX_CELLS = 2
_MAX_DESCRIBED = 2

#: Columns of :func:`stragglers`: one row per run and late rank. ``excess_sec`` is the useful time beyond the
#: typical one (s per step), ``part`` the part of the step with most of it, and ``part_share`` this fraction.
#: ``ranks`` and ``host_ranks`` count all ranks of the run and those on the rank's host, late or not.
STRAGGLER_COLUMNS = (
    *("run_id", "cell_id", "rank", "host", "ranks", "host_ranks", "excess_sec", "share_of_step", "part"),
    "part_share",
)
#: An excess is in one part of the step if that part has this fraction of it.
_WHOLE_EXCESS = 0.9
_PART_NAMES = {column: part for part, column in USEFUL_PARTS.items()}
#: The columns of report/nodes.csv, one row per cell and host; times are seconds per step.
NODE_COLUMNS = (
    *("cell_id", "host", "ranks", "n", "useful_sec", "data_sec", "compute_sec", "wait_sec", "transfer_sec"),
    *("step_sec", "beyond_usual"),
)
_TIMES = ("data", "compute", "rest", "useful", "transfer", "wait", "step")
_EPOCH = ["run_id", "epoch"]


def _with_useful_time(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have an attribution window, and add the column ``useful`` (useful time in s)."""
    useful = useful_time(ranks)
    return ranks.assign(useful=useful, run_id=ranks["run_id"].astype("str"))[useful.notna()]


def _beyond_typical(frame: pd.DataFrame, column: str, *, among: list[str]) -> pd.Series:
    """Return a column minus its lower median over rows with equal values in the columns ``among``."""
    typical = lower_median(frame.groupby(among, sort=False)[column]).rename("typical")
    return frame[column] - frame[among].join(typical, on=among)["typical"]


def stragglers(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the late ranks of each run (see :data:`LATE_FROM`), with :data:`STRAGGLER_COLUMNS`.

    ``ranks`` are rows of ranks.csv with ``run_id`` and ``cell_id``; rows without an attribution window are
    ignored.
    """
    frame = _with_useful_time(ranks)
    steps = frame.groupby(_EPOCH, sort=False)["step_time_sec"]
    frame = frame[steps.transform("max") <= COMPARABLE_STEPS * steps.transform("min")].copy()
    if not len(frame):
        return pd.DataFrame(columns=list(STRAGGLER_COLUMNS))
    frame["longest"] = frame.groupby(_EPOCH)["step_time_sec"].transform("max")
    frame["share"] = _beyond_typical(frame, "useful", among=_EPOCH) / frame["longest"]
    by_rank = frame.groupby(["run_id", "rank"], sort=False)
    found = by_rank.agg(
        cell_id=("cell_id", "first"),
        host=("host", "first"),
        least_share=("share", "min"),
        late_in=("share", lambda shares: (shares >= LATE_FROM).mean()),
    )
    # The excess is that of the means over the epochs: a rank may be faster than the others in some of them.
    means = by_rank[["useful", "longest", *_PART_NAMES]].mean().reset_index()
    excess = pd.DataFrame(
        {name: _beyond_typical(means, name, among=["run_id"]) for name in ("useful", *_PART_NAMES)}
    ).set_axis(found.index)
    found["excess_sec"] = excess.pop("useful")
    found["share_of_step"] = found["excess_sec"] / means["longest"].to_numpy()
    excess = excess.rename(columns=_PART_NAMES)
    found["part"] = excess.fillna(float("-inf")).idxmax(axis=1)
    found["part_share"] = excess.max(axis=1) / found["excess_sec"]
    found = found.reset_index()
    found["ranks"] = found.groupby("run_id")["rank"].transform("size")
    found["host_ranks"] = found.groupby(["run_id", "host"])["host"].transform("size")
    now_and_then = (found["part"] == "other") & (found["part_share"] >= 0.5)
    now_and_then &= (found["share_of_step"] >= LATE_FROM) & (found["late_in"] > 0.5)
    found = found[(found["least_share"] >= LATE_FROM) | now_and_then].reset_index(drop=True)
    found["rank"] = found["rank"].astype("int64")
    return found[list(STRAGGLER_COLUMNS)]


def late_nodes_of(found: pd.DataFrame, cells: Iterable[str]) -> Fact | None:
    """Return the fact about the late nodes, longest wait first; None if no node is late.

    The first nodes are described by their late ranks in the cell in which they cause the longest wait.
    ``found`` is from :func:`stragglers`, and ``cells`` is the ``cell_id`` of each run that was read.
    """
    ranks = _late_ranks(found, cells) if len(found) else found
    if not len(ranks):
        return None
    nodes = ranks.groupby("host", sort=False)
    late = [_late_node(str(host), own) for host, own in islice(nodes, _MAX_DESCRIBED)]
    more = {"more": nodes.ngroups - len(late)} if nodes.ngroups > len(late) else {}
    hosts = [str(host) for host in ranks["host"].unique()]
    return Fact("straggler", tuple(ranks["cell_id"].unique()), {"nodes": hosts, "late": late, **more})


def _late_ranks(found: pd.DataFrame, cells: Iterable[str]) -> pd.DataFrame:
    """Return the ranks that are late in more than half of the runs of their cell, longest excess first."""
    runs = pd.Series(list(cells), dtype="str").value_counts()
    late = found.groupby([found["cell_id"].astype("str"), "rank", "host"], sort=False)
    ranks = late.agg(
        excess_sec=("excess_sec", "mean"),
        share_of_step=("share_of_step", "mean"),
        late_in=("run_id", "nunique"),
        host_ranks=("host_ranks", "max"),
        part=("part", "first"),
        part_share=("part_share", "mean"),
    ).reset_index()
    ranks["of"] = ranks["cell_id"].map(runs).astype(float)  # text if no rank is late
    ranks = ranks[2 * ranks["late_in"] > ranks["of"]]
    return ranks.sort_values("excess_sec", ascending=False, kind="stable")


def _late_node(host: str, late: pd.DataFrame) -> dict[str, Any]:
    """Return the values of a node from its late ranks in all cells, which are sorted by their excess."""
    worst = late[late["cell_id"] == late["cell_id"].iloc[0]]
    more = late["cell_id"].nunique() - 1
    return {
        "cell": worst["cell_id"].iloc[0],
        # Ranks that are late in different parts of the step have different reasons.
        "parts": [_late_part(own, clean(host)) for _, own in worst.groupby("part", sort=False)],
        "late_in": sorted({int(worst["late_in"].min()), int(worst["late_in"].max())}),
        "runs": int(worst["of"].iloc[0]),
        **({"more_cells": more} if more else {}),
    }


def _late_part(late: pd.DataFrame, host: str) -> dict[str, Any]:
    """Return the values of the ranks of one node and cell that are late in the same part of the step."""
    ranks, means = int(late["host_ranks"].iloc[0]), late[["excess_sec", "share_of_step", "part_share"]].mean()
    late_ranks = {"late": len(late)} if len(late) < ranks else {}
    return {
        "host": host,
        "ranks": ranks,
        **({"rank": int(late["rank"].iloc[0])} if len(late) == 1 else late_ranks),
        "excess_s": float(means["excess_sec"]),
        "share": float(means["share_of_step"]),
        "part": str(late["part"].iloc[0]),
        "extent": extent(means["part_share"]),
    }


def extent(share: float) -> Literal["whole", "most", "several"]:
    """Return whether the part of the step with the largest ``share`` of an excess has all or most of it."""
    if _WHOLE_EXCESS <= share <= 1 / _WHOLE_EXCESS:
        return "whole"
    return "most" if share >= 0.5 else "several"


def slow_nodes_of(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the nodes that are slower than the other nodes of the same runs, the slowest first.

    A node's time in a run is the median useful time over its ranks and epochs. Its excess is the ratio of
    this time to the median of the run's other nodes, minus 1. A node is slow if it took part in three runs or
    more, its mean excess is above 3 %, and Student's t of its mean log ratio is significant at
    :data:`SLOW_NODE_LEVEL`, divided by the number of nodes. The standard deviation is that of the node or of
    all nodes, whichever is larger: three runs do not determine a standard deviation.

    Runs whose ranks process different numbers of samples are left out. Nodes with different numbers of ranks
    are not compared with each other, because their times differ by design. ``ranks`` are rows of ranks.csv
    with ``run_id``.

    Returns:
        A frame with ``host, runs, excess``.
    """
    ratios = _log_ratios(_with_useful_time(_with_equal_samples(ranks)))
    hosts = ratios.groupby("host", sort=False)
    table = hosts["ratio"].agg(["size", "mean", "var"])
    enough = table["size"] >= MIN_RUNS
    beyond_mean = table["size"] - 1
    pooled = float((table["var"] * beyond_mean).sum() / max(beyond_mean.sum(), 1))
    # Of the ratios of k nodes in a run, k - 1 are independent.
    freedom = float((beyond_mean * hosts["independent"].mean()).sum())
    quantile = special.stdtrit(max(freedom, 1.0), 1 - SLOW_NODE_LEVEL / max(enough.sum(), 1))
    error = np.sqrt(np.maximum(table["var"], pooled) / table["size"])
    slow = table[enough & (table["mean"] > math.log(SLOW_NODE)) & (table["mean"] > quantile * error)]
    slow = slow.sort_values("mean", ascending=False)
    return pd.DataFrame(
        {
            "host": slow.index.astype("str"),
            "runs": slow["size"].to_numpy(dtype="int64"),
            "excess": np.expm1(slow["mean"].to_numpy(dtype=float)),
        }
    )


def _with_equal_samples(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the runs whose ranks process equal or unknown numbers of samples."""
    uneven = unequal_samples(ranks)["run_id"]
    even: pd.DataFrame = ranks[~ranks["run_id"].astype("str").isin(uneven)]
    return even


def unequal_samples(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the runs in which one rank processes more samples than another, by more than 2 %.

    ``ranks`` are rows of ranks.csv with ``run_id`` and ``cell_id``.

    Returns:
        A frame with ``run_id, cell_id, most`` (rank with the most samples), ``least``, ``ratio``.
    """
    frame = ranks[ranks["samples"].notna() & ranks["rank"].notna()] if "samples" in ranks else ranks.iloc[:0]
    columns = ["run_id", "cell_id", "most", "least", "ratio"]
    if not len(frame):
        return pd.DataFrame(columns=columns)
    keys = {name: frame[name].astype("str") for name in ("run_id", "cell_id")}
    by_rank = frame.assign(**keys).groupby(["run_id", "cell_id", "rank"], sort=False)
    totals = by_rank["samples"].sum().reset_index()
    by_run = totals.groupby("run_id", sort=False)["samples"]
    most, least = totals.loc[by_run.idxmax()], totals.loc[by_run.idxmin()]
    found = pd.DataFrame({name: most[name].to_numpy() for name in ("run_id", "cell_id")})
    found["most"], found["least"] = (
        most["rank"].to_numpy(dtype="int64"),
        least["rank"].to_numpy(dtype="int64"),
    )
    found["ratio"] = most["samples"].to_numpy(dtype=float) / least["samples"].clip(lower=1e-9).to_numpy()
    odd: pd.DataFrame = found[found["ratio"] > 1 + SAMPLES_APART].reset_index(drop=True)
    return odd


def unequal_windows(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the runs in which the throughput window of one rank is longer than that of another one.

    The difference is more than :data:`WINDOW_STEPS` steps and more than :data:`WINDOWS_APART` of the shorter
    window. Ranks that train together need equally long for a window, except for about one step. A rank whose
    window is far shorter has stopped its clock alone, and the others have waited for it. ``ranks`` are rows
    of ranks.csv with ``run_id`` and ``cell_id``.

    Returns:
        A frame with ``run_id, cell_id, shortest, longest`` (ranks), ``shortest_sec, longest_sec``; one row
        per run, for the epoch with the largest difference. The largest difference is first.
    """
    frame = ranks[ranks["rank"].notna() & (ranks["window_time_sec"] > 0) & (ranks["steps"] > 0)]
    keys = {name: frame[name].astype("str") for name in ("run_id", "cell_id")}
    frame = frame.assign(**keys).sort_values("window_time_sec", kind="stable")
    by_epoch = frame.groupby(_EPOCH, sort=False)
    names = {"rank": "shortest", "window_time_sec": "shortest_sec"}
    found = by_epoch[["cell_id", "steps", *names]].first().rename(columns=names)
    last = by_epoch[["rank", "window_time_sec"]].last()
    found["longest"], found["longest_sec"] = last["rank"], last["window_time_sec"]
    more_s = found["longest_sec"] - found["shortest_sec"]
    allowed = np.maximum(WINDOW_STEPS / found["steps"], WINDOWS_APART) * found["shortest_sec"]
    found = found.assign(more=more_s)[more_s > allowed].sort_values("more", ascending=False).reset_index()
    found = found.drop_duplicates("run_id").astype({"shortest": "int64", "longest": "int64"})
    columns = ["run_id", "cell_id", "shortest", "longest", "shortest_sec", "longest_sec"]
    unequal: pd.DataFrame = found[columns].reset_index(drop=True)
    return unequal


def _log_ratios(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return one row per run and host: the log of the host's useful time over the other hosts' median.

    ``independent`` is the share of these ratios that are independent: (k - 1) / k of k hosts. Only hosts with
    the same number of ranks are compared.
    """
    timed = ranks[ranks["useful"] > 0]
    places = timed.groupby(["run_id", "host"], observed=True, sort=False)
    by_host = places.agg(useful=("useful", "median"), ranks=("rank", "nunique")).reset_index()
    ratios = []
    for _, alike in by_host.groupby(["run_id", "ranks"], observed=True, sort=False):
        times = alike["useful"].to_numpy()
        for place, host in enumerate(alike["host"] if len(alike) > 1 else ()):
            others = float(np.median(np.delete(times, place)))
            ratios.append((str(host), math.log(times[place] / others), 1 - 1 / len(times)))
    return pd.DataFrame(ratios, columns=["host", "ratio", "independent"])


@dataclass(frozen=True)
class RankMeans:
    """Means per step of the ranks and nodes of some cells.

    Attributes:
        by_rank: ``cell_id, host, rank, n`` (runs), the times ``data, compute, rest, useful, transfer, wait,
            step`` in seconds, ``beyond``: excess over the typical useful time, as a share of the step, and
            ``late``: whether the rank is late in more than half of the cell's runs (:func:`stragglers`).
            ``data``, ``compute`` and ``rest`` (all other work) add up to ``useful``.
        by_host: the same columns by ``cell_id`` and ``host``, with ``ranks`` (number) instead of ``rank``.
            A host is ``late`` if one of its ranks is.
    """

    by_rank: pd.DataFrame
    by_host: pd.DataFrame


def least_balanced_cells(rows: Sequence[ScalingRow]) -> list[str]:
    """Return the measured multi-rank cells with the lowest load balance, the lowest first."""
    wide = [row for row in first_of_cells(rows) if row.n and row.gpus > 1 and known(row.load_balance)]
    # Rounded, so that cells with equal load balance are in the order of the table.
    return [row.cell_id for row in sorted(wide, key=lambda row: round(row.load_balance, 9))[:MAX_CELLS]]


def rank_means(study: Study, cells: Sequence[str], runs: pd.DataFrame) -> RankMeans | None:
    """Return the mean times of ranks and nodes over epochs and runs; None if no run has ranks.csv.

    ``cells`` are the ids in the order of the result.
    """
    sample = ranks_sample(runs[runs["cell_id"].isin(cells)])
    read = _with_useful_time(study.ranks_of(sample["run_id"]))
    read = read[read["rank"].notna()]
    if not len(read):
        return None
    hosts = [clean(host) if isinstance(host, str) and host else MISSING for host in read["host"]]
    read = read.assign(cell_id=read["cell_id"].astype("str"), host=hosts, rank=read["rank"].astype("int64"))
    own = ["cell_id", "rank", "host"]
    late = _late_ranks(stragglers(read), sample["cell_id"])
    frame = pd.DataFrame(
        {
            **{name: read[name] for name in ("run_id", *own)},
            "late": pd.MultiIndex.from_frame(read[own]).isin(pd.MultiIndex.from_frame(late[own])),
            "step": read["step_time_sec"],
            "data": read["data_load_time_sec"],
            "compute": read["forward_time_sec"] + read["backward_time_sec"],
            "useful": read["useful"],
            "wait": read["comm_wait_time_sec"],
        }
    )
    frame["rest"] = frame["useful"] - frame["data"].fillna(0) - frame["compute"].fillna(0)
    frame["transfer"] = read["comm_exposed_time_sec"] - frame["wait"].fillna(0)
    frame["place"] = frame["cell_id"].map({cell: place for place, cell in enumerate(cells)})
    keys = ["place", "cell_id", "host"]
    by_host = _means(frame, keys)
    by_host["ranks"] = frame.groupby(keys)["rank"].nunique().to_numpy()
    by_host = by_host.sort_values(
        ["place", "beyond"], ascending=[True, False], kind="stable", ignore_index=True
    )
    return RankMeans(_means(frame, [*keys, "rank"]), by_host)


def _means(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return means over epochs and runs. ``beyond`` is computed within each run, then averaged over runs."""
    by_run = frame.groupby([*keys, "run_id"])[list(_TIMES)].mean().reset_index()
    own = by_run.groupby("run_id")
    by_run["beyond"] = _beyond_typical(by_run, "useful", among=["run_id"]) / own["step"].transform("max")
    rows, runs = frame.groupby(keys), by_run.groupby(keys)
    means = rows[list(_TIMES)].mean()
    return means.assign(n=runs.size(), beyond=runs["beyond"].mean(), late=rows["late"].any()).reset_index()


def nodes_table(means: RankMeans) -> pd.DataFrame:
    """Return the content of nodes.csv: the least balanced cell first, in each cell the slowest host first."""
    names = {name: f"{name}_sec" for name in ("useful", "data", "compute", "step", "wait", "transfer")}
    return means.by_host.rename(columns={**names, "beyond": "beyond_usual"})[list(NODE_COLUMNS)]
