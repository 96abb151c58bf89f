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

from analysis.estimate import LogMoments, ratio_interval

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
        rows: of :func:`analysis.scaling.scale`, with ``mode, efficiency`` and ``cell_place``.
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
