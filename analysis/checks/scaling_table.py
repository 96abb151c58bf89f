"""Compute the scaling table with the reason of each missing value, and recommend a job size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis.data.load import Study
from analysis.data.names import sizes_of, state_name
from analysis.stats.estimate import MIN_RUNS, MOST_RUNS, runs_to_decide
from analysis.stats.measured import Frames, measure
from analysis.stats.scaling import GUIDE, batch_per_rank, is_baseline, scale
from analysis.text import count, fraction, fractions, listed, one_line
from bench.study.ledger import RunState

_OTHER_BATCH = "no efficiency: the runs of this cell or of its baseline process another batch than planned"
_NO_REGIME = "no efficiency: neither the global batch nor the batch per rank is constant over the series"
#: Cells whose values are not valid, each with the reason.
Invalid = Mapping[str, str]
_NONE: Invalid = {}


def scaling_table(source: Study | Frames, *, baseline: str | None = None) -> pd.DataFrame:
    """Return the scaling table of :func:`analysis.stats.scaling.scale`, with the column ``reason`` filled in.

    ``baseline`` is as :func:`analysis.stats.scaling.is_baseline` parses it.

    Raises:
        BenchError: no series contains the size or cell ``baseline``.
    """
    frames = source if isinstance(source, Frames) else measure(source)
    rows = scale(frames, baseline=baseline)
    by_cell = _reasons_of_runs(frames.runs)
    by_regime = _reasons_of_regimes(rows, frames)
    by_baseline = _reasons_of_baselines(rows, baseline)
    reasons = []
    columns = ("cell_id", "series_place", "n", "other_unit")
    for cell_id, place, n, other_unit in zip(*(rows[name] for name in columns), strict=True):
        parts = (by_cell.get(cell_id), by_regime.get(place), by_baseline.get(place) if n else None)
        reasons.append("; ".join(filter(None, (*parts, _OTHER_BATCH if other_unit else ""))))
    rows["reason"] = pd.Series(reasons, index=rows.index, dtype="str")
    return rows


@dataclass
class _RunCounts:
    """Numbers of a cell's runs: ``total``, ``done`` (runs that count), ``left_out`` (because disturbed).

    ``kinds`` counts all other runs by their outcome; ``reason`` is the reason of one of them.
    """

    total: int = 0
    done: int = 0
    left_out: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reason: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self._incomplete, self._disturbed)))

    @property
    def _disturbed(self) -> str:
        if not self.left_out:
            return ""
        return f"{self.left_out} of {count(self.total, 'run')} left out because something disturbed them"

    @property
    def _incomplete(self) -> str:
        if not self.kinds:
            return ""
        finished = self.done + self.left_out
        completed = f"{finished} of {count(self.total, 'run')}" if finished else "no run"
        kinds = listed([f"{amount} {kind}" for kind, amount in self.kinds.most_common()], limit=4)
        return f"{completed} completed: {kinds}" + (f" ({self.reason})" if self.reason else "")


def _reasons_of_runs(runs: pd.DataFrame) -> dict[str, str]:
    """Describe, by cell_id, the runs that do not count; a cell whose runs all count is absent."""
    cells: dict[str, _RunCounts] = {}
    columns = ("cell_id", "measured", "left_out", "state", "failure_class", "reason")
    for cell_id, measured, out, state, failure, reason in zip(*(runs[name] for name in columns), strict=True):
        counts = cells.setdefault(cell_id, _RunCounts())
        counts.total += 1
        if measured:
            counts.done += 1
            continue
        if out:
            counts.left_out += 1
            continue
        failed = state == RunState.FAILED and isinstance(failure, str) and failure
        counts.kinds[f"failed by {failure}" if failed else state_name(state)] += 1
        counts.reason = counts.reason or one_line(reason, limit=160)
    return {cell_id: text for cell_id, counts in cells.items() if (text := str(counts))}


def _reasons_of_baselines(rows: pd.DataFrame, baseline: str | None) -> dict[Hashable, str]:
    """Explain, by series, a baseline that is not the requested one or not the smallest planned size."""
    based = rows.assign(size=sizes_of(rows))[rows["base_place"].notna()]
    if baseline:
        others = based[~based["base_place"].isin(rows.index[is_baseline(rows, baseline)])]
        name = one_line(baseline, limit=80)
        reason = f"the baseline asked for, {name}, was not measured in this series"
        return dict.fromkeys(others["series_place"], reason)
    smaller = based[(based["gpus"] < based["base_gpus"]) & (based["n"] == 0) & based["ddp"]]
    reasons: dict[Hashable, str] = {}
    for place, own in smaller.groupby("series_place"):
        verb = "has" if len(own) == 1 else "have"
        sizes = listed(own["size"].to_list())
        reasons[place] = f"the baseline is {own['baseline'].iloc[0]}: {sizes} {verb} no completed run"
    return reasons


def _reasons_of_regimes(rows: pd.DataFrame, frames: Frames) -> dict[Hashable, str]:
    """Explain, by series, a missing efficiency, or a regime (strong, weak) that differs from the label."""
    reasons: dict[Hashable, str] = {}
    for place, own in rows.groupby("series_place"):
        mode, label = own["mode"].iloc[0], own["label_mode"].iloc[0]
        if mode and not label:
            continue
        if len(own) == 1:
            reasons[place] = "no efficiency: the series has one cell only"
        elif not mode:
            remedy = frames.regime_remedy if _contains_a_series(own) else ""
            reasons[place] = "; ".join(filter(None, (_NO_REGIME, remedy)))
        elif mode != label:
            constant = "global batch" if mode == "strong" else "batch per rank"
            reasons[place] = (
                f"the series is called {label} by {frames.labelled_by}, but its {constant} is constant: "
                f"{mode} scaling"
            )
    return reasons


def _contains_a_series(rows: pd.DataFrame) -> bool:
    """Return whether some of the rows have equal batches and different sizes, and so form a series."""
    batches = (rows["global_batch"], batch_per_rank(rows))
    return any(rows["gpus"].groupby(batch).nunique().max() > 1 for batch in batches)


@dataclass(frozen=True)
class Recommendation:
    """The sizes above a series' baseline, grouped by the interval of the efficiency and :data:`GUIDE`.

    Attributes:
        best: the largest size whose interval is at or above the guide; None if there is none.
        open: the sizes above ``best`` that are neither recommended nor below the guide, the smallest first.
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

    A size is recommended if it and its baseline (the row ``base``) have at least three undisturbed runs each,
    and the lower end of its 95 % interval is at least :data:`GUIDE`. Nothing is concluded from the cells in
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


def recommended(rows: pd.DataFrame, *, invalid: Invalid = _NONE) -> dict[str, pd.Series]:
    """Return the recommended size of each series that has one; ``rows`` is the whole scaling table."""
    found = {}
    for series, own in rows[rows["efficiency"].notna()].groupby("series", sort=False):
        base = rows.iloc[int(own["base_place"].iloc[-1])]
        if (best := recommend(own, base, invalid=invalid).best) is not None:
            found[str(series)] = best
    return found


def without_result(rows: pd.DataFrame, base: pd.Series, *, series: str) -> str:
    """Return the number of sizes above the baseline without an efficiency, in brackets; empty without any.

    ``rows`` is the whole scaling table.
    """
    lacking = rows[(rows["series"] == series) & (rows["gpus"] > base["gpus"]) & rows["efficiency"].isna()]
    if not (sizes := len(lacking.drop_duplicates(["nodes", "gpus"]))):
        return ""
    return f" ({count(sizes, 'planned size')} {'has' if sizes == 1 else 'have'} no valid result)"


def efficiency_text(row: pd.Series) -> str:
    """Return the efficiency of a size with its interval: ``0.94 [0.90, 0.98]``."""
    bounds = fractions(row["efficiency_low"], row["efficiency_high"], decimals=2)
    return f"{fraction(row['efficiency'], decimals=2)} {bounds}".strip()


def what_decides(row: pd.Series, base: pd.Series, *, invalid: Invalid = _NONE) -> str:
    """Return how many runs would probably decide whether an efficiency is at least :data:`GUIDE`."""
    if reason := invalid_reason(row, base, invalid):
        return f"see the error {reason}"
    if min(row["n_undisturbed"], base["n_undisturbed"]) < MIN_RUNS:
        return f"at least {MIN_RUNS} undisturbed runs of this size and of the baseline are needed"
    distance = math.log(row["efficiency"] / GUIDE)
    runs = runs_to_decide(distance, error=row["efficiency_error"], top_n=row["n"], bottom_n=base["n"])
    # The present runs did not decide, so more are needed.
    needed = max(runs, min(row["n"], base["n"]) + 1)
    if needed > MOST_RUNS:
        return f"more than {MOST_RUNS} runs of this size and of the baseline would be needed"
    return f"about {count(int(needed), 'run')} of this size and of the baseline would probably decide"


def invalid_reason(
    row: pd.Series | Mapping[Any, Any], base: pd.Series | Mapping[Any, Any], invalid: Invalid
) -> str:
    """Return the reason why the values of a size or of its baseline are not valid; empty if they are."""
    return invalid.get(row["cell_id"]) or invalid.get(base["cell_id"], "")
