"""The all-reduce of a series as its runs probed it, for the communication model."""

from __future__ import annotations

import math

import pandas as pd

from analysis.fabric import fabric_table, sweep_rows
from analysis.laws_communication import Fabric
from analysis.load import Study


def fabrics(study: Study, rows: pd.DataFrame) -> dict[str, Fabric]:
    """Return :func:`fabrics_of` a study's probes.json."""
    sweep = sweep_rows(study)
    return fabrics_of(sweep, fabric_table(sweep), rows)


def fabrics_of(sweep: pd.DataFrame, fits: pd.DataFrame, rows: pd.DataFrame) -> dict[str, Fabric]:
    """Return by series the fabric that its largest probed size saw; series without one are left out.

    The largest size stands for the others: its ring takes the path that larger ones take. Which
    bucket is ready last is not told by the probes: it is counted with the mean size.

    Args:
        sweep: from :func:`analysis.fabric.sweep_rows`.
        fits: its :func:`analysis.fabric.fabric_table`.
        rows: from :func:`analysis.scaling.scale`.
    """
    table = fits.set_index("cell_id")
    known = table[(table["alpha_sec"] >= 0) & (table["beta_sec_per_byte"] > 0)]
    buckets = sweep[sweep["buckets"] > 0].drop_duplicates(["cell_id", "bytes"])
    found = {}
    for series, own in rows[rows["cell_id"].isin(known.index)].groupby("series", sort=False):
        cell = own.sort_values("gpus", kind="stable")["cell_id"].iloc[-1]
        real = buckets[buckets["cell_id"] == cell]
        amount = int(real["buckets"].sum())
        payload = float((real["bytes"] * real["buckets"]).sum())
        if amount and math.isfinite(payload):
            alpha, beta = known.loc[cell, ["alpha_sec", "beta_sec_per_byte"]].to_numpy(dtype=float)
            found[str(series)] = Fabric(float(alpha), float(beta), payload, payload / amount, amount)
    return found
