"""Find the late ranks of each run, and tell a late rank from a late node as far as the study allows it."""

from __future__ import annotations

from collections import defaultdict

import pandas as pd

from analysis.causes.catalogue import TOGETHER
from analysis.causes.claims import LateRank
from analysis.causes.divide import COMPUTING
from analysis.checks.slow_ranks import PART_WORDS, stragglers, unequal_samples
from analysis.stats.decompose import USEFUL_PARTS
from analysis.stats.estimate import lower_median

_PART_OF_WORDS = {words: part for part, words in PART_WORDS.items()}
#: If the other parts of computation exceed the typical ones by less than this fraction of the largest excess,
#: the excess is in one part only.
_CONCENTRATED = 0.25
_BOTH = TOGETHER.join(("late-rank", "late-node"))


def late_ranks(ranks: pd.DataFrame) -> dict[str, list[LateRank]]:
    """Return the late ranks by run.

    If a node has several ranks and all of them are late, the node is late; if some are not, the ranks are. A
    rank that is alone on its node is told apart by the other runs (the rank stays late on other nodes, or the
    node with other ranks), or because a slow node slows all parts of the computation, not only one.

    Args:
        ranks: rows of ranks.csv with ``run_id`` and ``cell_id``.
    """
    found = stragglers(ranks)
    if not len(found):
        return {}
    samples = {
        (row["run_id"], row["most"]): float(row["ratio"]) for row in unequal_samples(ranks).to_dict("records")
    }
    late_here = found.groupby(["run_id", "host"])["rank"].transform("size")
    found["whole"] = late_here == found["host_ranks"]
    found["excess_sec"] = found.groupby(["cell_id", "rank", "host"])["excess_sec"].transform("mean")
    one_part = _in_one_part(ranks)
    moves = _moves(found)
    late: dict[str, list[LateRank]] = defaultdict(list)
    for row in found.to_dict("records"):
        run_id, rank, host = str(row["run_id"]), int(row["rank"]), str(row["host"])
        if row["host_ranks"] > 1:
            cause = "late-node" if row["whole"] else "late-rank"
        elif (run_id, rank) in one_part:
            cause = "late-rank"
        else:
            cause = moves.get((rank, host), _BOTH)
        late[run_id].append(
            LateRank(
                rank,
                host,
                float(row["share_of_step"]),
                float(row["excess_sec"]),
                _PART_OF_WORDS.get(row["part"], row["part"]),
                bool(row["whole"]),
                cause,
                samples.get((run_id, rank), 1.0),
                (run_id, rank) in one_part,
            )
        )
    return late


def _moves(found: pd.DataFrame) -> dict[tuple[int, str], str]:
    """Return late-rank for a rank that is late on several nodes, late-node for a node with several."""
    names = {}
    alone = found[found["host_ranks"] == 1]
    for rank, host in alone[["rank", "host"]].drop_duplicates().itertuples(index=False):
        nodes = alone.loc[alone["rank"] == rank, "host"].nunique()
        ranks = alone.loc[alone["host"] == host, "rank"].nunique()
        if (nodes > 1) != (ranks > 1):
            names[(int(rank), str(host))] = "late-rank" if nodes > 1 else "late-node"
    return names


def _in_one_part(ranks: pd.DataFrame) -> set[tuple[str, int]]:
    """Return (run, rank) of the ranks whose excess is in one part of the computation only."""
    columns = [USEFUL_PARTS[part] for part in COMPUTING]
    frame = ranks[ranks[columns].notna().all(axis=1)]
    keys = [frame["run_id"].astype("str"), frame["rank"].astype("int64")]
    means = frame.groupby(keys)[columns].mean()
    if not len(means):
        return set()
    typical = lower_median(means.groupby(level=0)).reindex(means.index, level=0)
    more_s = (means - typical).clip(lower=0)
    excess = (means - typical) / typical.where(typical > 0)
    largest = excess.max(axis=1)
    both = excess[[USEFUL_PARTS["forward"], USEFUL_PARTS["backward"]]]
    alone = (both.max(axis=1) == largest) & (both.min(axis=1) < _CONCENTRATED * largest) & (largest > 0)
    # The optimizer is short, so its relative excess is noise unless it also is most of the excess in seconds.
    most = more_s[USEFUL_PARTS["optimizer"]] > 0.5 * more_s.sum(axis=1)
    alone |= most & (both.max(axis=1) < _CONCENTRATED * largest)
    return {(str(run_id), int(rank)) for run_id, rank in means.index[alone]}
