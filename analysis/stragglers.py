"""The ranks that the others wait for, by their host, and which part of the step makes them late.

A rank's useful time is its step without exposed communication. A late rank has more of it than
the others, who spend the difference waiting: they show more exposed communication, and it shows
less. So a straggler is looked for in useful time, and is never taken for slow communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pandas as pd

from analysis.load import Study
from analysis.wording import count, listed, one_line, percent, seconds

#: One row per run and late rank; times are seconds per step, means over the attribution windows;
#: ``host_ranks`` counts the ranks of that run on its host, late or not.
STRAGGLER_COLUMNS = ("run_id", "cell_id", "rank", "host", "host_ranks", "excess_sec", "share_of_step", "part")
#: A rank is late if its useful time is longer than usual by this share of the step, in every epoch.
LATE_FROM = 0.05
#: The columns of ranks.csv that make up useful time, in words.
PARTS = {
    "data_load_time_sec": "data loading",
    "forward_time_sec": "forward",
    "backward_time_sec": "backward",
    "optimizer_time_sec": "the optimizer",
    "other_time_sec": "what no timer covered",
}
_MOST_RUNS = 500
_MOST_NAMED = 4
_MEANS = ("excess_sec", "share_of_step")


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
    epochs = frame.groupby(["run_id", "epoch"], sort=False)
    frame["useful"] = frame["step_time_sec"] - frame["comm_exposed_time_sec"]
    frame["excess"] = frame["useful"] - _usual(frame, "useful")
    frame["share"] = frame["excess"] / epochs["step_time_sec"].transform("max")
    for column in PARTS:
        frame[f"beyond {column}"] = frame[column] - _usual(frame, column)
    one = frame.groupby(["run_id", "rank"], sort=False)
    late = one["share"].min()
    found = one.agg({"cell_id": "first", "host": "first", "excess": "mean", "share": "mean"})
    beyond = one[[f"beyond {column}" for column in PARTS]].mean().set_axis(list(PARTS.values()), axis=1)
    found["host_ranks"] = found.groupby([found.index.get_level_values("run_id"), "host"])["host"].transform(
        "size"
    )
    found["part"] = beyond.fillna(float("-inf")).idxmax(axis=1)
    found = found[late >= LATE_FROM].reset_index()
    found = found.rename(columns={"excess": "excess_sec", "share": "share_of_step"})
    found["rank"] = found["rank"].astype("int64")
    return found[list(STRAGGLER_COLUMNS)]


def _usual(frame: pd.DataFrame, column: str) -> pd.Series:
    """Return for each row the lower median over the ranks of its run and epoch."""
    keys = ["run_id", "epoch"]
    # One quantile of all groups: a function called group by group takes seconds in a large study.
    medians = frame.groupby(keys, sort=False)[column].quantile(0.5, interpolation="lower")
    values = medians.reindex(pd.MultiIndex.from_frame(frame[keys])).to_numpy(dtype=float)
    return pd.Series(values, index=frame.index)


def name_stragglers(study: Study) -> list[str]:
    """Return a sentence for each node with ranks that were late in more than half of the runs of a cell.

    Only completed runs are looked at, of a very large study the first 500.
    """
    measured = study.runs.loc[study.runs["state"].astype("str") == "completed", ["run_id", "cell_id"]]
    measured = measured.head(_MOST_RUNS)
    return sentences(stragglers(study.ranks_of(measured["run_id"])), measured["cell_id"])


def sentences(found: pd.DataFrame, cells: Iterable[str]) -> list[str]:
    """Return a sentence for each node, the longest wait first, of the cell where it is longest.

    Args:
        found: from :func:`stragglers`.
        cells: the cell of every run that was looked at.
    """
    if not len(found):
        return []
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
    told = [_about_node(str(host), own) for host, own in islice(nodes, _MOST_NAMED)]
    if (more := nodes.ngroups - len(told)) > 0:
        told.append(count(more, "more node"))
    return told


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


def alert(study: Study) -> tuple[str, str] | None:
    """Return a heading and words for the page; None where no rank is late."""
    told = name_stragglers(study)
    if not told:
        return None
    words = listed(told, limit=_MOST_NAMED + 1)
    return "The others wait", f"{words[0].upper()}{words[1:]}. This is waiting, not slow communication."
