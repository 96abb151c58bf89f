"""Divide the loss of a cell into causes, with intervals over its runs.

The unit is the run: each run is divided on its own (:mod:`analysis.causes.divide`), and a share is the mean
over the runs of the cell. A cause is named if more than half of the runs show it. It has a share if all of
these runs measured its time. The mean share must then be at least 2 % of the step; with three or more runs,
its 95 % interval must exclude 0. A cause that fails this test is named without a share if its evidence is a
count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import special

from analysis.causes.catalogue import RESTS
from analysis.causes.claims import RunEvidence, claims_of
from analysis.causes.divide import COMPUTING, LEAST_SHARE, Claim, Division, Key, Parts, divide
from analysis.stats.estimate import LEVEL, MIN_RUNS

#: Without an interval, computation is longer than at the baseline from this fraction of the step.
_LEAST_LONGER = 0.1


@dataclass(frozen=True)
class CellRun:
    """One run of a cell: its evidence, and its step time divided by that of the cell."""

    run_id: str
    evidence: RunEvidence
    factor: float = 1.0

    @property
    def parts(self) -> Parts:
        """The parts of the run's step, relative to the step time of the cell."""
        return {part: self.factor * value for part, value in self.evidence.parts.items()}


@dataclass(frozen=True)
class Share:
    """A row of a cell's divided loss: a cause (or ``other``) and its share of the step; NaN without one."""

    key: Key
    share: float
    low: float
    high: float
    claim: Claim | None = None
    run_id: str = ""
    runs: int = 0


@dataclass(frozen=True)
class CellDivision:
    """The loss of a cell, divided into causes.

    Attributes:
        rows: the shares, the largest first; ``other`` and ``not-explained`` are last.
        ideal: the ideal part of the step, by part (mean over the runs).
        rests: the row ``not-explained``, by part (mean over the runs).
        parts: the whole step, by part (mean over the runs).
    """

    rows: list[Share]
    ideal: Parts
    rests: Parts
    parts: Parts = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The sum of the shares."""
        return sum(row.share for row in self.rows if math.isfinite(row.share))


@dataclass(frozen=True)
class Baseline:
    """The baseline of a cell.

    Attributes:
        reference: the ideal parts of its step, relative to the step of the cell.
        runs: the number of its runs.
        error: relative standard error of its step time; NaN if unknown.
    """

    reference: Parts
    runs: int = 0
    error: float = math.nan


def divide_cell(runs: Sequence[CellRun], baseline: Baseline | None = None) -> CellDivision:
    """Divide the loss of one cell.

    Args:
        runs: the cell's runs.
        baseline: the cell's baseline; None if the cell is a baseline.
    """
    reference = baseline.reference if baseline else None
    claims = {run.run_id: claims_of(run.evidence) for run in runs}
    shown = Counter(key for own in claims.values() for key in {claim.key for claim in own})
    named = {key for key, number in shown.items() if 2 * number > len(runs)}
    active = named - _without_time(claims)
    factors = np.array([run.factor for run in runs])
    while True:
        divisions = [_divide_run(run, claims[run.run_id], active, reference) for run in runs]
        shares = _shares(divisions, factors, baseline)
        weak = {key for key, share in shares.items() if not _is_certain(share)}
        if not weak:
            break
        active -= weak
    alone = {key for key in named - shares.keys() if _stands_alone(key, claims)}
    if not _computes_longer(divisions, factors, baseline):
        alone.discard(Key("smaller-share"))
    nan = math.nan
    found = [*shares.values(), *(Share(key, nan, nan, nan) for key in sorted(alone, key=str))]
    rows = [_with_evidence(share, runs, claims) for share in found]
    rows.sort(key=lambda row: (row.key.cause in RESTS, math.isnan(row.share), -row.share))
    return CellDivision(
        rows,
        _means([one.ideal for one in divisions]),
        _means([one.rests for one in divisions]),
        _means([run.parts for run in runs]),
    )


def without_times(division: CellDivision) -> CellDivision:
    """Return only the causes whose evidence does not depend on times, without their shares."""
    nan = math.nan
    timeless = [row for row in division.rows if row.claim and row.claim.timeless]
    return replace(division, rows=[replace(row, share=nan, low=nan, high=nan) for row in timeless])


def _divide_run(run: CellRun, claims: Sequence[Claim], active: set[Key], reference: Parts | None) -> Division:
    return divide(
        run.parts,
        [_scaled(claim, run.factor) for claim in claims if claim.key in active],
        reference=reference,
    )


def _scaled(claim: Claim, factor: float) -> Claim:
    return claim if claim.share is None else replace(claim, share=claim.share * factor)


def _without_time(claims: Mapping[str, Sequence[Claim]]) -> set[Key]:
    """Return the causes that a run shows without a measured time."""
    found: set[Key] = set()
    for own in claims.values():
        found |= {claim.key for claim in own} - {claim.key for claim in own if claim.share is not None}
    return found


def _is_certain(share: Share) -> bool:
    """Return True if a share is large enough to be named and its interval, if known, excludes 0."""
    return share.key.cause in RESTS or (share.share >= LEAST_SHARE and not share.low <= 0)


def _stands_alone(key: Key, claims: Mapping[str, Sequence[Claim]]) -> bool:
    """Return whether the evidence shows that a cause is present even if it has no share."""
    own = [claim for found in claims.values() for claim in found if claim.key == key]
    is_counted = 2 * sum(one.counted for one in own) > len(claims)
    return is_counted or any(one.share is None for one in own)


def _computes_longer(divisions: Sequence[Division], factors: np.ndarray, baseline: Baseline | None) -> bool:
    """Return whether computation takes longer than at the baseline, by more than causes and noise explain."""
    values = np.array([sum(one.rests.get(part, 0.0) for part in COMPUTING) for one in divisions])
    mean, half = float(values.mean()), _half_width(values, factors, baseline)
    return mean >= _LEAST_LONGER if math.isnan(half) else mean >= max(LEAST_SHARE, half)


def _shares(
    divisions: Sequence[Division], factors: np.ndarray, baseline: Baseline | None
) -> dict[Key, Share]:
    keys = dict.fromkeys(key for division in divisions for key in division.shares)
    found = {}
    for key in keys:
        values = np.array([division.shares.get(key, 0.0) for division in divisions])
        relative = any(key in division.relative for division in divisions)
        half = _half_width(values, factors, baseline if relative else None)
        mean = float(values.mean())
        found[key] = Share(key, mean, mean - half, min(mean + half, 1.0))
    return found


def _half_width(values: np.ndarray, factors: np.ndarray, baseline: Baseline | None) -> float:
    """Return half of the 95 % interval of a mean share; NaN with too few runs.

    The variance is that of the fractions of each run's own step, ``values / factors``. If the share depends
    on the baseline, the baseline's variance is added, with the degrees of freedom of Welch and Satterthwaite.
    """
    n = len(values)
    if n < MIN_RUNS:
        return math.nan
    variance = float((values / factors).var(ddof=1)) / n
    freedom = float(n - 1)
    if baseline is not None:
        if not (baseline.runs >= MIN_RUNS and math.isfinite(baseline.error)):
            return math.nan
        of_base = (baseline.error * sum(baseline.reference.values())) ** 2
        total = variance + of_base
        if total > 0:
            freedom = total**2 / (variance**2 / (n - 1) + of_base**2 / (baseline.runs - 1))
        variance = total
    return float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * math.sqrt(variance)


def _with_evidence(share: Share, runs: Sequence[CellRun], claims: Mapping[str, Sequence[Claim]]) -> Share:
    """Add evidence to a row: the claims of the first run that shows the row's cause."""
    if share.key.cause in RESTS:
        return share
    found = [(run.run_id, [one for one in claims[run.run_id] if one.key == share.key]) for run in runs]
    found = [(run_id, ones) for run_id, ones in found if ones]
    run_id, first = found[0]
    words = "; ".join(dict.fromkeys(claim.evidence for claim in first))
    nodes = {claim.node for _, ones in found for claim in ones}
    claim = replace(
        first[0],
        evidence=words,
        node=nodes.pop() if len(nodes) == 1 else "",
        timeless=all(claim.timeless for claim in first),
    )
    return replace(share, claim=claim, run_id=run_id, runs=len(found))


def _means(parts: Sequence[Parts]) -> dict[str, float]:
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: float(np.mean([one.get(name, 0.0) for one in parts])) for name in names}
