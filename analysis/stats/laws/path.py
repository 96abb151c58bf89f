"""Which runs of a series one law can hold for: a path through its sizes, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from analysis.stats.measured import Frames
from analysis.text import count

#: Fewest sizes that a law is fitted to.
MIN_SIZES = 5
#: Fewest sizes over several nodes, where others lie within one.
_MIN_ACROSS = 3
#: The name of the path that leaves no size out.
ALL_SIZES = "all sizes"


@dataclass(frozen=True)
class Refusal:
    """No law is fitted: why, and what would change that."""

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


@dataclass(frozen=True)
class SizePath:
    """The runs that a law is fitted to.

    Attributes:
        runs: of one layout per size.
        name: which sizes these are, in words.
        largest_within: the most ranks within one node, where other sizes leave it; 0 where no
            node boundary needs a term (one rank alone has no communication, wherever it is).
    """

    runs: pd.DataFrame
    name: str
    largest_within: int = 0


def runs_of(rows: pd.DataFrame, frames: Frames) -> pd.DataFrame:
    """Return the runs of one series as :func:`analysis.stats.laws.choose.fit_laws` takes them.

    Args:
        rows: the series' measured rows with DDP.
        frames: with the runs. Where a table does not tell the batch, its time is in units of its own.
    """
    runs = frames.runs[frames.runs["measured"]]
    cells = rows[["cell_id", "gpus", "nodes", "gpus_per_node"]].drop_duplicates("cell_id")
    found = cells.merge(runs[["cell_id", "rate"]], on="cell_id")
    work = found["cell_id"].map(frames.cells.set_index("cell_id")["global_batch"])
    found["step_time_sec"] = work.astype(float) / found["rate"]
    unknown = (rows["gpus_per_node"] == "").any()
    return found.drop(columns=["nodes", "gpus_per_node"] if unknown else [])


def path_of(runs: pd.DataFrame) -> SizePath | Refusal:
    """Return the path that a law is fitted to, or why there is none.

    All sizes, where each has one layout and no node boundary lies between them; else those over
    nodes with the ranks per node fixed, where they are enough; else, for each size, the layout on
    the fewest nodes.

    Args:
        runs: one row per run with ``gpus``; where the nodes are known with ``nodes``, too, and perhaps
            ``gpus_per_node`` (text).
    """
    total = runs["gpus"].nunique()
    if total < MIN_SIZES:
        return _too_few(total)
    if "nodes" not in runs:
        return SizePath(runs, ALL_SIZES)
    own, name = runs, ALL_SIZES
    if _most_within(runs) or runs.groupby("gpus")["nodes"].nunique().gt(1).any():
        each = (runs["gpus_per_node"] if "gpus_per_node" in runs else runs["gpus"] // runs["nodes"]).astype(
            "str"
        )
        sizes = runs["gpus"].groupby(each).nunique()
        if sizes.max() >= MIN_SIZES:
            own, name = runs[each == sizes.idxmax()], f"over nodes with {sizes.idxmax()} per node"
        else:
            own = runs[runs["nodes"] == runs.groupby("gpus")["nodes"].transform("min")]
            name = "for each size the layout on the fewest nodes"
    most_within = _most_within(own)
    across = own.loc[own["nodes"] > 1, "gpus"].nunique()
    if most_within and across < _MIN_ACROSS:
        return Refusal(
            f"the sizes lie on both sides of a node boundary, only {across} of them over several nodes: what "
            "leaving the node costs cannot be told from what a larger size costs",
            f"measure {_MIN_ACROSS} sizes or more over several nodes, or all within one",
        )
    return SizePath(own, name, most_within)


def _most_within(runs: pd.DataFrame) -> int:
    """Return the largest size within one node that communicates, where others lie across nodes; else 0."""
    within = runs[(runs["nodes"] == 1) & (runs["gpus"] > 1)]
    return int(within["gpus"].max()) if len(within) and (runs["nodes"] > 1).any() else 0


def _too_few(total: int) -> Refusal:
    return Refusal(
        f"{count(total, 'size')} measured, and a law needs {MIN_SIZES} or more: "
        "with fewer, many laws fit and none can be told from another",
        f"measure {count(MIN_SIZES - total, 'more size')}",
    )
