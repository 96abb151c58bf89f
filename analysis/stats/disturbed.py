"""Decide which disturbed runs are left out of the results.

A run is disturbed by something outside its job; :mod:`bench.study.conditions` decides this when the run ends.
The time of a step is never a reason to leave out a run.
"""

from __future__ import annotations

import pandas as pd

from bench.study.conditions import Reason


def left_out(runs: pd.DataFrame) -> pd.Series:
    """Return a mask of the disturbed runs that are left out.

    A reason that disturbed all runs of a cell is a property of the study, and leaves out none of them. The
    other disturbed runs are left out if their cell has a run that is not.

    Args:
        runs: ``cell_id`` and ``disturbed`` of the runs that completed with a throughput.
    """
    own = _reasons(runs)
    if not own.map(bool).any():
        return pd.Series(False, index=runs.index)
    common = runs["cell_id"].map(common_reasons(runs))
    out = pd.Series([bool(a - b) for a, b in zip(own, common, strict=True)], index=runs.index, dtype=bool)
    return out & ~out.groupby(runs["cell_id"]).transform("all")


def common_reasons(runs: pd.DataFrame) -> dict[str, frozenset[Reason]]:
    """Return, by cell_id, the reasons that disturbed every run of the cell.

    Args:
        runs: ``cell_id`` and ``disturbed`` of the runs that completed with a throughput.
    """
    found: dict[str, frozenset[Reason]] = {}
    for cell_id, own in zip(runs["cell_id"], _reasons(runs), strict=True):
        found[cell_id] = found.get(cell_id, own) & own
    return found


def count_disturbed(runs: pd.DataFrame) -> pd.Series:
    """Return the number of disturbed runs by cell_id; missing if it was recorded for no run of the cell.

    Args:
        runs: ``cell_id`` and ``disturbed`` of the runs that completed with a throughput.
    """
    known = runs[runs["disturbed"].notna()]
    return known["disturbed"].map(bool).groupby(known["cell_id"]).sum().astype("Int64")


def _reasons(runs: pd.DataFrame) -> pd.Series:
    values = [frozenset(one.reason for one in found or ()) for found in runs["disturbed"]]
    return pd.Series(values, index=runs.index, dtype=object)
