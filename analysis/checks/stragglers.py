"""Nodes whose ranks take longer for their own work than those of other nodes, run after run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pandas as pd
from scipy import special

from analysis.data.load import Study
from analysis.stats.decompose import USEFUL_PARTS
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.measured import Frames
from analysis.stats.typical_rank import usual_value
from analysis.text import capital, count, listed, one_line, percent, seconds

#: How much longer a slow node's ranks take, at least.
SLOW_NODE = 1.03
#: Of how many runs ranks.csv is read in search of a slow node.
MAX_RUNS_READ = 300
#: What one does about such a node.
WHAT_TO_DO = "leave it out (--exclude) or have it looked at"


def ranks_over_nodes(study: Study, frames: Frames) -> pd.DataFrame:
    """Return the rows of ranks.csv of runs over several nodes, of a very large study of the first ones."""
    wide = set(frames.cells.loc[frames.cells["nodes"] > 1, "cell_id"])
    runs = frames.runs[frames.runs["measured"] & frames.runs["cell_id"].isin(wide)]
    return study.ranks_of(runs["run_id"].head(MAX_RUNS_READ))


def slow_nodes(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return the nodes that are slower than the others of their runs, in several runs: the slowest first.

    A node's time in a run is the median over its ranks and epochs of their own work; its excess
    is that over the median of the run's other nodes, minus 1. It is slow if the interval of the mean
    log ratio over runs (t, at a level that allows for the number of nodes) lies above 0 and the
    excess is above 3 %; with two runs, if it is so in both.

    Args:
        ranks: rows of ranks.csv with ``run_id, host`` and the columns of a rank's own work.

    Returns:
        ``host, runs, excess``.
    """
    ratios = _log_ratios(ranks)
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
    """Return by run and host (where there are others) the logarithm of its time over that of the others."""
    own = ranks[[name for name in USEFUL_PARTS.values() if name in ranks]].astype(float)
    own_s = own.sum(axis=1, min_count=1)
    timed = ranks.assign(own_s=own_s)[own_s > 0]
    by_host = timed.groupby(["run_id", "host"], observed=True, sort=False)["own_s"].median().reset_index()
    ratios = []
    for _, run in by_host.groupby("run_id", observed=True, sort=False):
        times = run["own_s"].to_numpy()
        for place, host in enumerate(run["host"] if len(run) > 1 else ()):
            others = float(np.median(np.delete(times, place)))
            ratios.append((str(host), math.log(times[place] / others)))
    return pd.DataFrame(ratios, columns=["host", "ratio"])


def by_how_much(slow: pd.DataFrame) -> list[str]:
    """Return ``n3 by 20 % in 4 runs`` for each slow node."""
    return [
        f"{one_line(row['host'], limit=60)} by {percent(row['excess'])} in {count(row['runs'], 'run')}"
        for row in slow.to_dict("records")
    ]


# The ranks that the others wait for, by their host, and which part of the step makes them late.
#
# A rank's useful time is its step without exposed communication. A late rank has more of it than
# the others, who spend the difference waiting: they show more exposed communication, and it shows
# less. So a straggler is looked for in useful time, and is never taken for slow communication.

#: One row per run and late rank; times are seconds per step, means over the attribution windows;
#: ``host_ranks`` counts the ranks of that run on its host, late or not.
STRAGGLER_COLUMNS = ("run_id", "cell_id", "rank", "host", "host_ranks", "excess_sec", "share_of_step", "part")
#: A rank is late if its useful time is longer than usual by this share of the step, in every epoch.
LATE_FROM = 0.05
#: The columns of ranks.csv that make up useful time, in words.
_WORDS = {
    USEFUL_PARTS["data"]: "data loading",
    USEFUL_PARTS["forward"]: "forward",
    USEFUL_PARTS["backward"]: "backward",
    USEFUL_PARTS["optimizer"]: "the optimizer",
    USEFUL_PARTS["other"]: "what no timer covered",
}
_MOST_RUNS = 500
_MOST_NAMED = 4
_MEANS = ("excess_sec", "share_of_step")
_EPOCH = ["run_id", "epoch"]


def stragglers(ranks: pd.DataFrame) -> pd.DataFrame:
    """Return :data:`STRAGGLER_COLUMNS`: the ranks that were late in every epoch of their run.

    Usual is the lower median over the ranks of the same epoch, so that up to half of the ranks
    (a whole node of two) can be late. ``part`` is the part of the step that is longest beyond
    the ranks' lower median of that part.

    Args:
        ranks: rows of ranks.csv with ``run_id`` and ``cell_id``; rows without an attribution
            window are left out.
    """
    needed = ["step_time_sec", "comm_exposed_time_sec"]
    frame = ranks[ranks[needed].notna().all(axis=1)].copy()
    if not len(frame):
        return pd.DataFrame(columns=list(STRAGGLER_COLUMNS))
    frame["run_id"] = frame["run_id"].astype("str")
    epochs = frame.groupby(_EPOCH, sort=False)
    frame["useful"] = frame["step_time_sec"] - frame["comm_exposed_time_sec"]
    frame["excess"] = frame["useful"] - usual_value(frame, "useful", among=_EPOCH)
    frame["share"] = frame["excess"] / epochs["step_time_sec"].transform("max")
    for column in _WORDS:
        frame[f"beyond {column}"] = frame[column] - usual_value(frame, column, among=_EPOCH)
    one = frame.groupby(["run_id", "rank"], sort=False)
    late = one["share"].min()
    found = one.agg({"cell_id": "first", "host": "first", "excess": "mean", "share": "mean"})
    beyond = one[[f"beyond {column}" for column in _WORDS]].mean().set_axis(list(_WORDS.values()), axis=1)
    found["host_ranks"] = found.groupby([found.index.get_level_values("run_id"), "host"])["host"].transform(
        "size"
    )
    found["part"] = beyond.fillna(float("-inf")).idxmax(axis=1)
    found = found[late >= LATE_FROM].reset_index()
    found = found.rename(columns={"excess": "excess_sec", "share": "share_of_step"})
    found["rank"] = found["rank"].astype("int64")
    return found[list(STRAGGLER_COLUMNS)]


@dataclass(frozen=True)
class LateNodes:
    """The nodes that the others wait for longest: a sentence by host, and how many more there are."""

    sentences: dict[str, str]
    more: int = 0

    @property
    def told(self) -> list[str]:
        """The sentences, and a last one that counts the rest."""
        return [*self.sentences.values(), *([count(self.more, "more node")] if self.more else [])]


def late_nodes(study: Study) -> LateNodes:
    """Return the nodes with ranks that were late in more than half of the runs of a cell.

    Only completed runs are looked at, of a very large study the first 500.
    """
    measured = study.runs.loc[study.runs["state"].astype("str") == "completed", ["run_id", "cell_id"]]
    measured = measured.head(_MOST_RUNS)
    return by_node(stragglers(study.ranks_of(measured["run_id"])), measured["cell_id"])


def by_node(found: pd.DataFrame, cells: Iterable[str]) -> LateNodes:
    """Return a sentence for each node, the longest wait first, of the cell where it is longest.

    Args:
        found: from :func:`stragglers`.
        cells: the cell of every run that was looked at.
    """
    if not len(found):
        return LateNodes({})
    runs = pd.Series(list(cells), dtype="str").value_counts()
    late = found.groupby([found["cell_id"].astype("str"), "rank", "host"], sort=False)
    ranks = late.agg(
        {**dict.fromkeys(_MEANS, "mean"), "run_id": "nunique", "host_ranks": "max", "part": "first"}
    )
    ranks = ranks.reset_index().rename(columns={"run_id": "late_in"})
    ranks["of"] = ranks["cell_id"].map(runs)
    ranks = ranks[2 * ranks["late_in"] > ranks["of"]].sort_values(
        "excess_sec", ascending=False, kind="stable"
    )
    nodes = ranks.groupby("host", sort=False)
    told = {str(host): _about_node(str(host), own) for host, own in islice(nodes, _MOST_NAMED)}
    return LateNodes(told, nodes.ngroups - len(told))


def _about_node(host: str, late: pd.DataFrame) -> str:
    """Return what is said of one node: its late ranks, the longest wait first, of one cell or several."""
    worst = late[late["cell_id"] == late["cell_id"].iloc[0]]
    first = worst.iloc[0]
    host = one_line(host, limit=80)
    if len(worst) == 1:
        who = f"rank {first['rank']} on {host} takes"
    else:
        of = int(first["host_ranks"])
        every = "both" if of == 2 else f"all {of}"
        who = f"{every if len(worst) == of else f'{len(worst)} of the {of}'} ranks on {host} take"
    means = worst[list(_MEANS)].mean()
    others = late["cell_id"].nunique() - 1
    return (
        f"{who} {seconds(means['excess_sec'])} per step longer than the others"
        f" ({percent(means['share_of_step'])} of the step, in {first['part']}),"
        f" in {worst['late_in'].max()} of {count(int(first['of']), 'run')} of {first['cell_id']}"
        + (f", and likewise in {count(others, 'more cell')}" if others else "")
    )


def others_wait(late: LateNodes, *, slow: pd.DataFrame) -> tuple[str, str]:
    """Return a heading and words for the page.

    Args:
        late: at least one node.
        slow: of :func:`analysis.checks.stragglers.slow_nodes`, those of these nodes.
    """
    words = f"{capital(listed(late.told, limit=_MOST_NAMED + 1))}. This is waiting, not slow communication."
    if len(slow):
        words += (
            " Work that waits for nobody takes longer there than on the other nodes of the same runs: "
            f"{listed(by_how_much(slow))}. Every step waits for such a node: {WHAT_TO_DO}."
        )
    return "The others wait", words
