"""Detect and describe late ranks (stragglers) and slow nodes, which make all other ranks wait.

Useful time is a rank's step without exposed communication
(:func:`analysis.stats.decompose.useful_time`). A late rank has more useful time than the others. The others
spend the difference waiting, which counts as exposed communication. Stragglers are therefore detected by
useful time, so that they are not mistaken for slow communication. The typical useful time is the lower median
over the ranks, so up to half of the ranks (one node of two) can be late.

All functions read ranks.csv of at most :data:`analysis.stats.measured.MAX_RANKS_FILES` runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pandas as pd
from scipy import special

from analysis.data.load import Study
from analysis.stats.decompose import USEFUL_PARTS, useful_time
from analysis.stats.estimate import MIN_RUNS, lower_median
from analysis.stats.measured import Frames, ranks_sample
from analysis.text import MISSING, capital, clean, count, listed, one_line, percent, seconds

#: A rank is late if its useful time exceeds the typical one by this share of the step, in every epoch.
LATE_FROM = 0.05
#: Least ratio of a slow node's useful time to that of the other nodes.
SLOW_NODE = 1.03
#: Advice about a slow node.
SLOW_NODE_REMEDY = "exclude it (--exclude) or have it checked"
#: Maximum number of cells that :func:`least_balanced_cells` returns.
MAX_CELLS = 2
_MAX_NAMED = 4

#: Columns of :func:`stragglers`: one row per run and late rank. ``excess_sec`` is the useful time beyond the
#: typical one (s per step). ``host_ranks`` counts all ranks of the run on the rank's host, late or not.
STRAGGLER_COLUMNS = ("run_id", "cell_id", "rank", "host", "host_ranks", "excess_sec", "share_of_step", "part")
_LONG_NAMES = {"data": "data loading", "optimizer": "the optimizer", "other": "what no timer covered"}
_PART_NAMES = {column: _LONG_NAMES.get(part, part) for part, column in USEFUL_PARTS.items()}
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
    """Return the ranks that were late in every epoch of their run, with :data:`STRAGGLER_COLUMNS`.

    ``part`` is the part of the step with the largest excess over the typical rank.

    Args:
        ranks: rows of ranks.csv with ``run_id`` and ``cell_id``; rows without an attribution
            window are ignored.
    """
    frame = _with_useful_time(ranks)
    if not len(frame):
        return pd.DataFrame(columns=list(STRAGGLER_COLUMNS))
    frame["excess"] = _beyond_typical(frame, "useful", among=_EPOCH)
    frame["share"] = frame["excess"] / frame.groupby(_EPOCH)["step_time_sec"].transform("max")
    for column, name in _PART_NAMES.items():
        frame[name] = _beyond_typical(frame, column, among=_EPOCH)
    by_rank = frame.groupby(["run_id", "rank"], sort=False)
    found = by_rank.agg(
        cell_id=("cell_id", "first"),
        host=("host", "first"),
        excess_sec=("excess", "mean"),
        share_of_step=("share", "mean"),
        least_share=("share", "min"),
    )
    parts = by_rank[list(_PART_NAMES.values())].mean()
    found["part"] = parts.fillna(float("-inf")).idxmax(axis=1)
    found = found.reset_index()
    found["host_ranks"] = found.groupby(["run_id", "host"])["host"].transform("size")
    found = found[found["least_share"] >= LATE_FROM].reset_index(drop=True)
    found["rank"] = found["rank"].astype("int64")
    return found[list(STRAGGLER_COLUMNS)]


@dataclass(frozen=True)
class LateNodes:
    """The nodes that cause the longest waits: a sentence by host; ``more`` counts late nodes without one."""

    sentences: dict[str, str]
    more: int = 0

    @property
    def texts(self) -> list[str]:
        """The sentences and, as the last text, the number of late nodes without a sentence."""
        return [*self.sentences.values(), *([count(self.more, "more node")] if self.more else [])]


def late_nodes(study: Study, frames: Frames) -> LateNodes:
    """Return the nodes with ranks that were late in more than half of the runs of a cell."""
    sample = ranks_sample(frames.runs)
    return late_nodes_of(stragglers(study.ranks_of(sample["run_id"])), sample["cell_id"])


def late_nodes_of(found: pd.DataFrame, cells: Iterable[str]) -> LateNodes:
    """Describe the late nodes, longest wait first, each in the cell in which it causes the longest wait.

    Args:
        found: from :func:`stragglers`.
        cells: the ``cell_id`` of each run whose ranks.csv was read.
    """
    if not len(found):
        return LateNodes({})
    runs = pd.Series(list(cells), dtype="str").value_counts()
    late = found.groupby([found["cell_id"].astype("str"), "rank", "host"], sort=False)
    ranks = late.agg(
        excess_sec=("excess_sec", "mean"),
        share_of_step=("share_of_step", "mean"),
        late_in=("run_id", "nunique"),
        host_ranks=("host_ranks", "max"),
        part=("part", "first"),
    ).reset_index()
    ranks["of"] = ranks["cell_id"].map(runs)
    ranks = ranks[2 * ranks["late_in"] > ranks["of"]]
    ranks = ranks.sort_values("excess_sec", ascending=False, kind="stable")
    nodes = ranks.groupby("host", sort=False)
    sentences = {str(host): _about_node(str(host), own) for host, own in islice(nodes, _MAX_NAMED)}
    return LateNodes(sentences, nodes.ngroups - len(sentences))


def _about_node(host: str, late: pd.DataFrame) -> str:
    """Return a sentence about the late ranks of one node, in one or more cells, sorted by their excess."""
    worst = late[late["cell_id"] == late["cell_id"].iloc[0]]
    first = worst.iloc[0]
    host = one_line(host, limit=80)
    if len(worst) == 1:
        who = f"rank {first['rank']} on {host} takes"
    else:
        of = int(first["host_ranks"])
        every = "both" if of == 2 else f"all {of}"
        who = f"{every if len(worst) == of else f'{len(worst)} of the {of}'} ranks on {host} take"
    means = worst[["excess_sec", "share_of_step"]].mean()
    others = late["cell_id"].nunique() - 1
    return (
        f"{who} {seconds(means['excess_sec'])} per step longer than the others"
        f" ({percent(means['share_of_step'])} of the step, in {first['part']}),"
        f" in {worst['late_in'].max()} of {count(int(first['of']), 'run')} of {first['cell_id']}"
        + (f", and likewise in {count(others, 'more cell')}" if others else "")
    )


def stragglers_alert(late: LateNodes, *, slow: pd.DataFrame) -> tuple[str, str]:
    """Return the heading and the text of the page's alert about straggler nodes.

    Args:
        late: at least one late node.
        slow: from :func:`slow_nodes`, only nodes in ``late``.
    """
    named = capital(listed(late.texts, limit=_MAX_NAMED + 1))
    text = f"{named}. The others wait for these ranks; such waiting is not slow communication."
    if len(slow):
        text += (
            " The useful time of a slow node is longer than that of the other nodes of the same runs: "
            f"{listed(excess_texts(slow))}. Every step waits for such a node: {SLOW_NODE_REMEDY}."
        )
    return "Straggler nodes", text


def slow_nodes(study: Study, frames: Frames) -> pd.DataFrame:
    """Return the slow nodes of a study, from its runs over several nodes (see :func:`slow_nodes_of`)."""
    wide = frames.cells.loc[frames.cells["nodes"] > 1, "cell_id"]
    sample = ranks_sample(frames.runs[frames.runs["cell_id"].isin(wide)])
    return slow_nodes_of(study.ranks_of(sample["run_id"]))


def slow_nodes_of(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the nodes that are slower than the other nodes in several runs, the slowest first.

    A node's time in a run is the median useful time over its ranks and epochs. Its excess is the ratio of
    this time to the median of the run's other nodes, minus 1. A node is slow if the excess is above 3 % and
    the interval of the mean log ratio over runs (Student's t, corrected for the number of nodes) is above 0.
    With two runs, the excess must be above 3 % in both.

    Args:
        ranks: rows of ranks.csv with ``run_id``.

    Returns:
        A frame with ``host, runs, excess``.
    """
    ratios = _log_ratios(_with_useful_time(ranks))
    table = ratios.groupby("host", sort=False)["ratio"].agg(["size", "mean", "std", "min"])
    table = table[(table["size"] >= 2) & (table["mean"] > math.log(SLOW_NODE))]
    level = 0.5 + (1 - 0.05 / max(ratios["host"].nunique(), 1)) / 2
    half = special.stdtrit(table["size"] - 1, level) * table["std"] / np.sqrt(table["size"])
    few = table["size"] < MIN_RUNS
    slow = table[(few & (table["min"] > math.log(SLOW_NODE))) | (~few & (table["mean"] - half > 0))]
    slow = slow.sort_values("mean", ascending=False)
    return pd.DataFrame(
        {
            "host": slow.index.astype("str"),
            "runs": slow["size"].to_numpy(dtype="int64"),
            "excess": np.expm1(slow["mean"].to_numpy(dtype=float)),
        }
    )


def _log_ratios(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return, by run and host, the logarithm of the host's useful time over that of the run's other hosts."""
    timed = ranks[ranks["useful"] > 0]
    by_host = timed.groupby(["run_id", "host"], observed=True, sort=False)["useful"].median().reset_index()
    ratios = []
    for _, run in by_host.groupby("run_id", observed=True, sort=False):
        times = run["useful"].to_numpy()
        for place, host in enumerate(run["host"] if len(run) > 1 else ()):
            others = float(np.median(np.delete(times, place)))
            ratios.append((str(host), math.log(times[place] / others)))
    return pd.DataFrame(ratios, columns=["host", "ratio"])


def excess_texts(slow: pd.DataFrame) -> list[str]:
    """Return a text such as ``n3 by 20 % in 4 runs`` for each slow node."""
    return [
        f"{one_line(row['host'], limit=60)} by {percent(row['excess'])} in {count(row['runs'], 'run')}"
        for row in slow.to_dict("records")
    ]


@dataclass(frozen=True)
class RankMeans:
    """Means per step of the ranks and nodes of some cells.

    Attributes:
        by_rank: ``cell_id, host, rank, n`` (runs), the times ``data, compute, rest, useful, transfer, wait,
            step`` in seconds, and ``beyond``: excess over the typical useful time, as a share of the step.
            ``data``, ``compute`` and ``rest`` (all other work) add up to ``useful``.
        by_host: the same columns by ``cell_id`` and ``host``, with ``ranks`` (number) instead of ``rank``.
    """

    by_rank: pd.DataFrame
    by_host: pd.DataFrame


def least_balanced_cells(rows: pd.DataFrame) -> list[str]:
    """Return the measured cells of several ranks with the lowest load balance, the lowest first."""
    wide = rows[(rows["n"] > 0) & (rows["gpus"] > 1) & rows["load_balance"].notna()]
    order = wide.drop_duplicates("cell_id").sort_values("load_balance", kind="stable")
    return [str(name) for name in order["cell_id"].head(MAX_CELLS)]


def rank_means(study: Study, cells: Sequence[str], runs: pd.DataFrame) -> RankMeans | None:
    """Return the mean times of ranks and nodes over epochs and runs; None if no run has ranks.csv.

    Args:
        study: the study whose ranks.csv files are read.
        cells: each ``cell_id`` to include, in the order of the result.
        runs: all runs of the study's frames.
    """
    sample = ranks_sample(runs[runs["cell_id"].isin(cells)])
    read = _with_useful_time(study.ranks_of(sample["run_id"]))
    read = read[read["rank"].notna()]
    if not len(read):
        return None
    frame = pd.DataFrame(
        {
            "run_id": read["run_id"],
            "cell_id": read["cell_id"].astype("str"),
            "host": [clean(host) if isinstance(host, str) and host else MISSING for host in read["host"]],
            "rank": read["rank"].astype("int64"),
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
    groups = frame.groupby(keys)
    means = groups[list(_TIMES)].mean()
    means["n"] = groups["run_id"].nunique()
    means = means.reset_index()
    longest = means.groupby("cell_id")["step"].transform("max")
    means["beyond"] = _beyond_typical(means, "useful", among=["cell_id"]) / longest
    return means


def nodes_table(means: RankMeans) -> pd.DataFrame:
    """Return the content of nodes.csv: the least balanced cell first, in each cell the slowest host first."""
    names = {name: f"{name}_sec" for name in ("useful", "data", "compute", "step", "wait", "transfer")}
    return means.by_host.rename(columns={**names, "beyond": "beyond_usual"})[list(NODE_COLUMNS)]
