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

from analysis.causes.catalogue import RESTS, described
from analysis.causes.claims import RunEvidence, claims_of
from analysis.causes.divide import COMPUTING, LEAST_SHARE, Claim, Division, Key, Parts, divide
from analysis.stats.estimate import LEVEL, MIN_RUNS
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import known

#: Without an interval, computation is longer than at the baseline from this fraction of the step.
_LEAST_LONGER = 0.1

#: The ideal step of the baseline, relative to the step of the cell, and the factors of the baseline's runs.
_Base = tuple[float, np.ndarray]


@dataclass(frozen=True)
class CauseRow:
    """A row of causes.csv: a part of the loss of a cell, which is a cause or one of ``RESTS``.

    Attributes:
        share, share_low, share_high: its fraction of the cell's step and the 95 % interval; NaN if unknown.
        alternative: another cause that the evidence does not distinguish from it, if any.
        node, rank, part: the node, rank and part of the step at fault, if a single one is.
        evidence: the facts of ``run_id``, a run that shows the cause.
        runs: the number of runs that show the cause.
        timed: true if the time of the cause was measured.
        timeless: true if the evidence does not depend on times.
    """

    cause: str
    share: float = math.nan
    share_low: float = math.nan
    share_high: float = math.nan
    alternative: str = ""
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
    def causes(self) -> tuple[str, ...]:
        """The cause, and the alternative if there is one."""
        return (self.cause, self.alternative) if self.alternative else (self.cause,)

    @property
    def name(self) -> str:
        """The value of the column ``cause``."""
        return " or ".join(self.causes)

    @property
    def title(self) -> str:
        """The row in words."""
        return " or ".join(described(name).title for name in self.causes)

    @property
    def meaning(self) -> str:
        """What the row is, in words."""
        return " ".join(described(name).meaning for name in self.causes)

    @property
    def remedy(self) -> str:
        """What to change because of it."""
        return " ".join(described(name).remedy for name in self.causes)


@dataclass(frozen=True)
class CellDivision:
    """The loss of a cell, divided into causes.

    Attributes:
        rows: the shares, the largest first; ``other`` and ``not-explained`` are last.
        ideal: the ideal part of the step, by part (mean over the runs).
        rests: the row ``not-explained``, by part (mean over the runs).
        parts: the whole step, by part (mean over the runs).
    """

    rows: list[CauseRow]
    ideal: Parts
    rests: Parts
    parts: Parts = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The sum of the shares."""
        return sum(row.share for row in self.rows if math.isfinite(row.share))


def divide_cell(
    runs: Sequence[RunEvidence], reference: Parts | None = None, base_runs: Sequence[RunEvidence] = ()
) -> CellDivision:
    """Divide the loss of one cell.

    ``reference`` contains the ideal parts of the baseline's step, relative to the step of the cell, and
    ``base_runs`` are the runs of the baseline; without them, the cell is a baseline.
    """
    base = (sum(reference.values()), np.array([run.factor for run in base_runs])) if reference else None
    claims = {run.run_id: claims_of(run) for run in runs}
    shown = Counter(key for own in claims.values() for key in {claim.key for claim in own})
    named = {key for key, number in shown.items() if 2 * number > len(runs)}
    active = named - _without_time(claims)
    factors = np.array([run.factor for run in runs])
    while True:
        divisions = [_divide_run(run, claims[run.run_id], active, reference) for run in runs]
        shares = _shares(divisions, factors, base)
        weak = {key for key, row in shares.items() if not _is_certain(row)}
        if not weak:
            break
        active -= weak
    alone = {key for key in named - shares.keys() if _stands_alone(key, claims)}
    if not _computes_longer(divisions, factors, base):
        alone.discard(Key("smaller-share"))
    found = shares | {key: _row(key) for key in sorted(alone, key=str)}
    rows = [_with_evidence(key, row, runs, claims) for key, row in found.items()]
    rows.sort(key=lambda row: (row.is_rest, math.isnan(row.share), -row.share))
    return CellDivision(
        rows,
        _means([one.ideal for one in divisions]),
        _means([one.rests for one in divisions]),
        _means([_relative(run) for run in runs]),
    )


def _divide_run(
    run: RunEvidence, claims: Sequence[Claim], active: set[Key], reference: Parts | None
) -> Division:
    """Divide the step of a run, relative to the mean step of the cell."""
    scaled = [replace(one, share=one.share * run.factor) for one in claims if one.key in active]
    return divide(_relative(run), scaled, reference=reference)


def _relative(run: RunEvidence) -> Parts:
    return {part: run.factor * value for part, value in run.parts.items()}


def _without_time(claims: Mapping[str, Sequence[Claim]]) -> set[Key]:
    """Return the causes that a run shows without a measured time."""
    found: set[Key] = set()
    for own in claims.values():
        found |= {claim.key for claim in own} - {claim.key for claim in own if known(claim.share)}
    return found


def _is_certain(row: CauseRow) -> bool:
    """Return True if a share is large enough to be named and its interval, if known, excludes 0."""
    return row.is_rest or (row.share >= LEAST_SHARE and not row.share_low <= 0)


def _stands_alone(key: Key, claims: Mapping[str, Sequence[Claim]]) -> bool:
    """Return whether the evidence shows that a cause is present even if it has no share."""
    own = [claim for found in claims.values() for claim in found if claim.key == key]
    is_counted = 2 * sum(one.counted for one in own) > len(claims)
    return is_counted or any(not known(one.share) for one in own)


def _computes_longer(divisions: Sequence[Division], factors: np.ndarray, base: _Base | None) -> bool:
    """Return whether computation takes longer than at the baseline, by more than causes and noise explain."""
    values = np.array([sum(one.rests.get(part, 0.0) for part in COMPUTING) for one in divisions])
    mean, half = float(values.mean()), _half_width(values, factors, base)
    return mean >= _LEAST_LONGER if math.isnan(half) else mean >= max(LEAST_SHARE, half)


def _shares(divisions: Sequence[Division], factors: np.ndarray, base: _Base | None) -> dict[Key, CauseRow]:
    keys = dict.fromkeys(key for division in divisions for key in division.shares)
    found = {}
    for key in keys:
        values = np.array([division.shares.get(key, 0.0) for division in divisions])
        relative = any(key in division.relative for division in divisions)
        half = _half_width(values, factors, base if relative else None)
        mean = float(values.mean())
        found[key] = replace(_row(key), share=mean, share_low=mean - half, share_high=min(mean + half, 1.0))
    return found


def _half_width(values: np.ndarray, factors: np.ndarray, base: _Base | None) -> float:
    """Return half of the 95 % interval of a mean share; NaN with too few runs.

    The variance is that of the fractions of each run's own step, ``values / factors``. If the share depends
    on the baseline, that of its step is added, with the degrees of freedom of Welch and Satterthwaite.
    """
    n = len(values)
    if n < MIN_RUNS:
        return math.nan
    variance = float((values / factors).var(ddof=1)) / n
    freedom = float(n - 1)
    if base is not None:
        ideal, of_runs = base
        if len(of_runs) < MIN_RUNS:
            return math.nan
        of_base = ideal**2 * float(of_runs.var(ddof=1)) / len(of_runs)
        total = variance + of_base
        if total > 0:
            freedom = total**2 / (variance**2 / (n - 1) + of_base**2 / (len(of_runs) - 1))
        variance = total
    return float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * math.sqrt(variance)


def _row(key: Key) -> CauseRow:
    return CauseRow(key.cause, alternative=key.alternative, node=key.node, rank=key.rank)


def _with_evidence(
    key: Key, row: CauseRow, runs: Sequence[RunEvidence], claims: Mapping[str, Sequence[Claim]]
) -> CauseRow:
    """Add evidence to a row: the claims of the first run that shows the row's cause."""
    if row.is_rest:
        return row
    found = {run.run_id: own for run in runs if (own := [c for c in claims[run.run_id] if c.key == key])}
    run_id, first = next(iter(found.items()))
    evidence = [one for claim in first for one in claim.evidence]
    nodes = {claim.node for own in found.values() for claim in own}
    return replace(
        row,
        node=nodes.pop() if len(nodes) == 1 else "",
        part=first[0].part,
        evidence=tuple(one for place, one in enumerate(evidence) if one not in evidence[:place]),
        run_id=run_id,
        runs=len(found),
        timed=known(first[0].share),
        timeless=all(claim.timeless for claim in first),
    )


def _means(parts: Sequence[Parts]) -> dict[str, float]:
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: math.fsum(one.get(name, 0.0) for one in parts) / len(parts) for name in names}
