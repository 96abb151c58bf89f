"""How often a cell's attempts have completed so far."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special

from analysis.attempts import json_object
from analysis.load import Study
from bench.layout import RunFolder
from bench.ledger import RunState

#: Attempts that ended by themselves: a cancelled or queued one says nothing of the cell.
_DECIDED = (str(RunState.COMPLETED), str(RunState.FAILED))
#: The normal quantile of a two-sided 95 % interval.
_Z = float(special.ndtri(0.975))


def cell_success(study: Study) -> pd.DataFrame:
    """Return by ``cell_id``: attempts ``completed`` and ``attempted``, and ``success_low``.

    Earlier attempts of a run that was started again count. ``success_low`` is the lower bound of
    Wilson's 95 % interval (E. B. Wilson, JASA 22, 1927), so that 3 of 3 is less than 30 of 30;
    0 where nothing was attempted.
    """
    latest = pd.DataFrame({"cell_id": study.runs["cell_id"], "state": study.runs["state"]})
    both = pd.concat([latest, _earlier(study)], ignore_index=True)
    decided = both[both["state"].isin(_DECIDED)]
    groups = decided["state"].eq(str(RunState.COMPLETED)).groupby(decided["cell_id"])
    cells = pd.Index(study.cells["cell_id"], name="cell_id")
    frame = pd.DataFrame({"completed": groups.sum(), "attempted": groups.size()}).reindex(cells)
    frame = frame.fillna(0).astype("int64")
    frame["success_low"] = [
        wilson_low(int(done), int(tried))
        for done, tried in zip(frame["completed"], frame["attempted"], strict=True)
    ]
    return frame


def _earlier(study: Study) -> pd.DataFrame:
    """Return the states of the attempts before each run's latest one."""
    rows = []
    numbers = study.runs["attempt"].to_numpy(dtype=float, na_value=np.nan)
    for place in np.flatnonzero(numbers > 1):
        latest = Path(str(study.attempts[place]))
        for number in range(1, int(numbers[place])):
            content, _ = json_object(str(RunFolder(latest.with_name(f"attempt-{number}")).run_json))
            rows.append((study.runs["cell_id"].iloc[place], (content or {}).get("state")))
    return pd.DataFrame(rows, columns=["cell_id", "state"], dtype="object")


def wilson_low(completed: int, attempted: int) -> float:
    """Return the lower bound of Wilson's 95 % interval of a rate; 0 without attempts."""
    if attempted == 0:
        return 0.0
    rate, spread = completed / attempted, _Z**2 / attempted
    centre = rate + spread / 2
    return float(
        (centre - _Z * math.sqrt(rate * (1 - rate) / attempted + spread / (4 * attempted))) / (1 + spread)
    )
