"""Find the baseline of each series: the requested size or cell, else the smallest measured size."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.data.names import sizes_of
from analysis.text import listed, one_line
from bench.errors import BenchError

Mask = npt.NDArray[np.bool_]

#: Values of ``--baseline`` for one rank without DDP, and for a number of ranks.
_NO_DDP = re.compile(r"(?:1 (?:gpu|rank) )?(?:no|without)[ -]ddp", re.IGNORECASE)
_RANKS = re.compile(r"([0-9]+)(?: (?:gpus?|ranks?))?", re.IGNORECASE)


def is_baseline(rows: pd.DataFrame, baseline: str) -> Mask:
    """Return a mask of the rows that a value of ``--baseline`` selects.

    Args:
        rows: ``cell_id, nodes, gpus_per_node, gpus`` and ``ddp`` (bool).
        baseline: a cell's id; a size as nodes x ranks per node (``1x4``) or as ranks (``4``,
            ``4 GPUs``); ``no-ddp`` (one rank without DDP); or ``common``, the smallest size that
            every series has measured. A size selects cells with DDP if there are any.
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
