"""Name the part of the step and the cause that changed between the cells of A and B."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from analysis.causes.table import named, study_causes
from analysis.data.load import Study
from analysis.stats.columns import PARTS
from analysis.text import seconds

#: Words for the parts of a step.
_PART_WORDS = {
    "data": "data loading",
    "other": "what no timer covers",
    "transfer": "exposed communication",
    "wait": "waiting for other ranks",
}


class Change(NamedTuple):
    """The largest change between two cells: a part of the step with its times (s), and a cause.

    Both texts are empty if they are not known.
    """

    part: str = ""
    part_a_s: float = math.nan
    part_b_s: float = math.nan
    cause: str = ""

    def __str__(self) -> str:
        words = _PART_WORDS.get(self.part, self.part)
        times = f"{words}: {seconds(self.part_a_s)} in A, {seconds(self.part_b_s)} in B" if self.part else ""
        return "; ".join(filter(None, (times, f"cause: {self.cause}" if self.cause else "")))


class StepTimes:
    """The times of the parts of a step and of the causes, by cell of one study (s per step)."""

    def __init__(self, study: Study, runs: pd.DataFrame) -> None:
        counted = runs[runs["measured"]]
        self.step_s = _floats(counted.groupby("cell_id")["step_time_sec"].mean())
        known = counted[counted["parts_known"].astype("boolean").fillna(False)]
        self._parts = known.groupby("cell_id")[list(PARTS)].mean()
        self._causes = named(study_causes(study)).drop_duplicates(["cell_id", "cause", "node", "rank"])

    def parts(self, cell: str) -> dict[str, float]:
        """Return the time of each part that is known."""
        return _floats(self._parts.reindex([cell]).iloc[0].dropna())

    def causes(self, cell: str) -> dict[str, float]:
        """Return the time of each cause; 0 if it is not known."""
        own = self._causes[self._causes["cell_id"] == cell]
        times = (own["share"].fillna(0.0) * self.step_s.get(cell, 0.0)).groupby(own["cause"]).sum()
        return _floats(times)


def _floats(values: pd.Series) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def change_between(a: StepTimes, b: StepTimes, cell_a: str, cell_b: str) -> Change:
    """Return the part and the cause whose times changed most in the direction of the step time."""
    slower = b.step_s[cell_b] > a.step_s[cell_a]
    before, after = a.parts(cell_a), b.parts(cell_b)
    part = _largest({name: after[name] - before[name] for name in before.keys() & after.keys()}, slower)
    times = (before[part], after[part]) if part else (math.nan, math.nan)
    old, new = a.causes(cell_a), b.causes(cell_b)
    differences = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in [*new, *old]}
    cause = _largest(differences, slower)
    if not cause:
        # A cause without a known time that only the slower one has.
        only = [name for name in (new if slower else old) if name not in (old if slower else new)]
        cause = only[0] if only else ""
    return Change(part, *times, cause)


def _largest(differences: Mapping[str, float], slower: bool) -> str:
    """Return the name with the largest increase, or with the largest decrease if B is not slower."""
    signed = {name: value if slower else -value for name, value in differences.items()}
    name = max(signed, key=lambda one: signed[one], default="")
    return name if name and signed[name] > 0 else ""
