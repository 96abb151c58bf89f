"""Recommend a job size, as far as the intervals of the efficiencies support it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from analysis.stats.estimate import MIN_RUNS, MOST_RUNS, runs_to_decide
from analysis.stats.scaling import GUIDE
from analysis.text import count, fraction, fractions

#: Cells whose values are not valid, each with the reason.
Invalid = Mapping[str, str]
_NONE: Invalid = {}


@dataclass(frozen=True)
class Recommendation:
    """The sizes of a series above its baseline, grouped by whether their intervals reach :data:`GUIDE`.

    Attributes:
        best: the largest size whose interval is at or above the guide; None without one.
        open: the sizes above ``best`` for which the runs decide neither, the smallest first.
        below: the sizes whose interval is below the guide, the smallest first.
    """

    best: pd.Series | None
    open: pd.DataFrame
    below: pd.DataFrame

    @property
    def closest(self) -> pd.Series | None:
        """The size below the guide with the highest efficiency."""
        below = self.below.sort_values("efficiency", kind="stable")
        return below.iloc[-1] if len(below) else None


def recommend(rows: pd.DataFrame, base: pd.Series, *, invalid: Invalid = _NONE) -> Recommendation:
    """Return the recommendation for the rows of one series of the scaling table.

    A size is recommended if the lower end of its 95 % interval is at least :data:`GUIDE`, from at least three
    undisturbed runs of the size and of its baseline, the row ``base``. Nothing is concluded from the cells in
    ``invalid``.
    """
    larger = rows[(rows["gpus"] > rows["base_gpus"]) & rows["efficiency"].notna()]
    larger = larger.sort_values(["gpus", "efficiency"], kind="stable")
    undisturbed = larger["n_undisturbed"].clip(upper=base["n_undisturbed"])
    valid = ~larger["cell_id"].isin(list(invalid)) & (base["cell_id"] not in invalid)
    good = larger[valid & (larger["efficiency_low"] >= GUIDE) & (undisturbed >= MIN_RUNS)]
    below = larger[valid & (larger["efficiency_high"] < GUIDE)]
    best = good.iloc[-1] if len(good) else None
    rest = larger[~larger.index.isin([*good.index, *below.index])]
    return Recommendation(best, rest if best is None else rest[rest["gpus"] > best["gpus"]], below)


def efficiency_text(row: pd.Series) -> str:
    """Return the efficiency of a size with its interval: ``0.94 [0.90, 0.98]``."""
    bounds = fractions(row["efficiency_low"], row["efficiency_high"], decimals=2)
    return f"{fraction(row['efficiency'], decimals=2)} {bounds}".strip()


def what_decides(row: pd.Series, base: pd.Series, *, invalid: Invalid = _NONE) -> str:
    """Return how many runs would decide whether the efficiency of a size is at least :data:`GUIDE`."""
    if reason := invalid_reason(row, base, invalid):
        return f"see the warning {reason}"
    if min(row["n_undisturbed"], base["n_undisturbed"]) < MIN_RUNS:
        return f"{MIN_RUNS} undisturbed runs of this size and of the baseline are needed"
    distance = math.log(row["efficiency"] / GUIDE)
    runs = runs_to_decide(distance, error=row["efficiency_error"], top_n=row["n"], bottom_n=base["n"])
    # The present runs did not decide, so more are needed.
    needed = max(runs, min(row["n"], base["n"]) + 1)
    if needed > MOST_RUNS:
        return f"more than {MOST_RUNS} runs of this size and of the baseline would be needed"
    return f"about {count(int(needed), 'run')} of this size and of the baseline would decide"


def invalid_reason(row: pd.Series, base: pd.Series, invalid: Invalid) -> str:
    """Return why the values of a size or of its baseline are not valid; empty if they are."""
    return invalid.get(row["cell_id"]) or invalid.get(base["cell_id"], "")
