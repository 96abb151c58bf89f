"""Divide the loss of a cell into causes, with intervals over its runs.

The unit is the run: each run is divided on its own (:mod:`analysis.causes.divide`), and a share is the mean
over the runs of the cell. A cause is named if more than half of the runs show it. It has a share if all of
these runs measured its time. The mean share must then be at least 2 % of the step; with three or more runs,
its 95 % interval must exclude 0. A cause that fails this test is named without a share if its evidence is a
count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from scipy import special

from analysis.causes.claims import CAUSES, Cause, RunEvidence, claims_of
from analysis.causes.divide import (
    LEAST_SHARE,
    NOT_EXPLAINED,
    NOT_VALID,
    RESTS,
    Claim,
    Division,
    Key,
    Parts,
    divide,
)
from analysis.data.columns import part_title
from analysis.stats.estimate import LEVEL, MIN_RUNS
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import known

#: Without an interval, computation is longer than at the baseline from this fraction of the step.
_LEAST_LONGER = 0.1
#: The whole loss of a cell, which is no row of causes.csv.
LOSS = "loss"


class _Rest(NamedTuple):
    """A row that is not a cause, in words."""

    title: str
    meaning: str = ""
    remedy: str = ""
    part: str = ""


_RESTS = {
    LOSS: _Rest("whole loss"),
    NOT_EXPLAINED: _Rest("not explained"),
    NOT_VALID: _Rest(
        "not valid",
        "An error limits the validity of these values.",
        "Remove the error that the first lines of the report show.",
    ),
}


@dataclass(frozen=True)
class CauseRow:
    """A row of causes.csv: a part of the loss of a cell, which is a cause or one of ``RESTS``.

    Attributes:
        share, share_low, share_high: its fraction of the cell's step, beyond the baseline's, and the 95 %
            interval; NaN if unknown.
        node, rank: the node and rank at fault, if a single one is.
        part: the part of the step that has most of its time.
        evidence: the facts of ``run_id``, a run that shows the cause.
        runs: the number of runs that show the cause.
        timed: true if the time of the cause was measured.
        timeless: true if the evidence does not depend on times.
    """

    cause: str
    share: float = math.nan
    share_low: float = math.nan
    share_high: float = math.nan
    node: str = ""
    rank: int | None = None
    part: str = ""
    evidence: tuple[Finding, ...] = ()
    run_id: str = ""
    runs: int = 0
    timed: bool = False
    timeless: bool = False
    series: str = ""
    cell_id: str = ""

    @property
    def is_rest(self) -> bool:
        """True if the row is not a cause."""
        return self.cause in RESTS

    @property
    def _about(self) -> type[Cause] | _Rest:
        return type(CAUSES[self.cause]) if self.cause in CAUSES else _RESTS[self.cause]

    @property
    def title(self) -> str:
        """The row in words, with the part of the step if other runs could have another one."""
        about = self._about
        return about.title if self.part in ("", about.part) else f"{about.title}: {part_title(self.part)}"

    @property
    def meaning(self) -> str:
        """What the row is, in words."""
        return self._about.meaning

    @property
    def remedy(self) -> str:
        """What to change because of it: what its evidence says, else what its cause says."""
        advice = dict.fromkeys(one.remedy for one in self.evidence if one.remedy)
        return " ".join(advice) or self._about.remedy


@dataclass(frozen=True)
class CellDivision:
    """The loss of a cell, divided into causes.

    Attributes:
        rows: the shares, the largest first; ``not-explained`` is last.
        rests: the row ``not-explained``, by part (mean over the runs).
        parts: the whole step, by part (mean over the runs).
    """

    rows: list[CauseRow]
    rests: Parts
    parts: Parts = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The sum of the shares."""
        return sum(row.share for row in self.rows if math.isfinite(row.share))


def divide_cell(runs: Sequence[RunEvidence], base_runs: Sequence[RunEvidence] = ()) -> CellDivision:
    """Divide the loss of one cell; ``base_runs`` are the runs of its baseline, none for a baseline."""
    claims = {run.run_id: claims_of(run) for run in runs}
    by_cause: dict[Key, dict[str, list[Claim]]] = {}
    for run_id, claim in [(run_id, claim) for run_id, own in claims.items() for claim in own]:
        by_cause.setdefault(claim.key, {}).setdefault(run_id, []).append(claim)
    named = {key: own for key, own in by_cause.items() if 2 * len(own) > len(runs)}
    active = {key for key, own in named.items() if all(any(one.timed for one in run) for run in own.values())}
    while True:
        divisions = [_divide_run(run, claims[run.run_id], active) for run in runs]
        keys = dict.fromkeys(key for division in divisions for key in division)
        rows = {key: _row(key, divisions, runs, base_runs) for key in keys}
        weak = {key for key, row in rows.items() if not _is_certain(row)}
        if not weak:
            break
        # What causes with times of their own take is missing elsewhere, so they are removed first.
        own_times = {key for key in weak for run in by_cause[key].values() for one in run if known(one.share)}
        active -= own_times or weak
    alone = sorted((key for key in named.keys() - rows if _stands_alone(named[key], len(runs))), key=str)
    rows |= {key: CauseRow(key.cause, node=key.node, rank=key.rank) for key in alone}
    taken = {
        run.run_id: {key: math.fsum(parts.values()) for key, parts in one.items()}
        for run, one in zip(runs, divisions, strict=True)
    }
    found = [
        row
        if row.is_rest
        else _with_evidence(row, by_cause[key], {run: one.get(key, 0.0) for run, one in taken.items()})
        for key, row in rows.items()
    ]
    found.sort(key=lambda row: (row.is_rest, math.isnan(row.share), -row.share))
    rests = mean_parts([division[Key(NOT_EXPLAINED)] for division in divisions])
    return CellDivision(found, rests, mean_parts([run.relative_parts for run in runs]))


def _divide_run(run: RunEvidence, claims: Sequence[Claim], active: set[Key]) -> Division:
    """Divide the step of a run, relative to the mean step of the cell."""
    taken = [one for one in claims if one.key in active]
    reference = run.reference.parts if run.reference else None
    return divide(run.relative_parts, taken, reference=reference, factor=run.factor)


def _is_certain(row: CauseRow) -> bool:
    """Return True if a share is large enough to be named and its interval, if known, excludes 0."""
    least = _LEAST_LONGER if row.cause == "computation" and math.isnan(row.share_low) else LEAST_SHARE
    return row.is_rest or (row.share >= least and not row.share_low <= 0)


def _stands_alone(claims: Mapping[str, Sequence[Claim]], runs: int) -> bool:
    """Return whether the evidence shows that a cause is present even if it has no share."""
    own = [claim for found in claims.values() for claim in found]
    return 2 * sum(one.counted for one in own) > runs or any(not one.timed for one in own)


def _row(
    key: Key, divisions: Sequence[Division], runs: Sequence[RunEvidence], base_runs: Sequence[RunEvidence]
) -> CauseRow:
    """Return the mean share of a cause, or of what is not explained, with its interval."""
    taken = [division.get(key, {}) for division in divisions]
    values = [math.fsum(parts.values()) for parts in taken]
    parts = mean_parts(taken)
    half = _half_width(values, runs, base_runs, parts)
    share = math.fsum(values) / len(values)
    part = "" if key.cause in RESTS else max(parts, key=parts.__getitem__)
    return CauseRow(key.cause, share, share - half, min(share + half, 1.0), key.node, key.rank, part)


def _half_width(
    values: Sequence[float],
    runs: Sequence[RunEvidence],
    base_runs: Sequence[RunEvidence],
    sources: Collection[str],
) -> float:
    """Return half of the 95 % interval of a mean share; NaN with too few runs.

    The variance is that of the fractions of each run's own step. With a baseline, that of the same parts of
    its step (``sources``) is added, with the degrees of freedom of Welch and Satterthwaite.
    """
    n = len(values)
    if n < MIN_RUNS:
        return math.nan
    total = of_cell = _variance([value / run.factor for value, run in zip(values, runs, strict=True)]) / n
    freedom = float(n - 1)
    if reference := runs[0].reference:
        if len(base_runs) < MIN_RUNS:
            return math.nan
        spent = [run.factor * sum(run.parts.get(part, 0.0) for part in sources) for run in base_runs]
        of_base = reference.rate**2 * _variance(spent) / len(spent)
        total = of_cell + of_base
        if total > 0:
            freedom = total**2 / (of_cell**2 / (n - 1) + of_base**2 / (len(spent) - 1))
    return float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * math.sqrt(total)


def _variance(values: Sequence[float]) -> float:
    """Return the variance of a sample; that of the standard library computes with fractions."""
    centre = math.fsum(values) / len(values)
    return math.fsum([(value - centre) ** 2 for value in values]) / (len(values) - 1)


def _with_evidence(
    row: CauseRow, claims: Mapping[str, Sequence[Claim]], taken: Mapping[str, float]
) -> CauseRow:
    """Add evidence to a row: the claims of the run whose share, in ``taken``, is closest to the mean."""
    # Of two runs, both are equally close but for rounding: the first one is shown.
    run_id = min(claims, key=lambda run: round(abs(taken[run] - row.share), 9) if known(row.share) else 0.0)
    first = claims[run_id]
    # Without a share, longer parts are noise.
    shown = [claim for claim in first if known(row.share) or not math.isinf(claim.share)]
    evidence = [one for claim in shown for one in claim.evidence]
    nodes = {claim.node for own in claims.values() for claim in own}
    return replace(
        row,
        node=nodes.pop() if len(nodes) == 1 else "",
        part=next((claim.part for claim in first if claim.part), row.part or (*first[0].pools, "")[0]),
        evidence=tuple(one for place, one in enumerate(evidence) if one not in evidence[:place]),
        run_id=run_id,
        runs=len(claims),
        timed=any(claim.timed for claim in shown),
        timeless=any(claim.timeless for claim in first),
    )


def mean_parts(parts: Sequence[Parts]) -> dict[str, float]:
    """Return the mean of each part over some runs; a part that a run lacks is 0 there."""
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: math.fsum([one.get(name, 0.0) for one in parts]) / len(parts) for name in names}
