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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scipy import special

from analysis.causes.claims import CAUSES, RunEvidence, claims_of
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
#: Titles, meanings and remedies of the rows that are not causes.
_OTHER_ROWS = {
    LOSS: ("whole loss", "", ""),
    NOT_EXPLAINED: ("not explained", "", ""),
    NOT_VALID: (
        "not valid",
        "An error limits the validity of these values.",
        "Remove the error that the table Validity of the report shows.",
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
    def title(self) -> str:
        """The row in words, with the part of the step if other runs could have another one."""
        if (cause := CAUSES.get(self.cause)) is None:
            return _OTHER_ROWS[self.cause][0]
        return cause.title if self.part in ("", cause.part) else f"{cause.title}: {part_title(self.part)}"

    @property
    def meaning(self) -> str:
        """What the row is, in words."""
        cause = CAUSES.get(self.cause)
        return cause.meaning if cause else _OTHER_ROWS[self.cause][1]

    @property
    def remedy(self) -> str:
        """What to change because of it: what its evidence says, else what its cause says."""
        if (cause := CAUSES.get(self.cause)) is None:
            return _OTHER_ROWS[self.cause][2]
        return " ".join(dict.fromkeys(one.remedy for one in self.evidence if one.remedy)) or cause.remedy


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
    shown = Counter(key for own in claims.values() for key in {claim.key for claim in own})
    named = {key for key, number in shown.items() if 2 * number > len(runs)}
    active = named - _without_time(claims)
    own_times = {claim.key for own in claims.values() for claim in own if known(claim.share)}
    while True:
        divisions = [_divide_run(run, claims[run.run_id], active) for run in runs]
        shares = _shares(divisions, runs, base_runs)
        weak = {key for key, row in shares.items() if not _is_certain(row)}
        if not weak:
            break
        # What causes with times of their own take is missing elsewhere, so they are removed first.
        active -= {key for key in weak if key in own_times} or weak
    alone = {key for key in named - shares.keys() if _stands_alone(key, claims)}
    found = shares | {key: _row(key) for key in sorted(alone, key=str)}
    rows = [_with_evidence(key, row, runs, claims) for key, row in found.items()]
    rows.sort(key=lambda row: (row.is_rest, math.isnan(row.share), -row.share))
    return CellDivision(
        rows,
        mean_parts([one.rests for one in divisions]),
        mean_parts([_relative(run) for run in runs]),
    )


def _divide_run(run: RunEvidence, claims: Sequence[Claim], active: set[Key]) -> Division:
    """Divide the step of a run, relative to the mean step of the cell."""
    scaled = [replace(one, share=one.share * run.factor) for one in claims if one.key in active]
    return divide(_relative(run), scaled, reference=run.reference.parts if run.reference else None)


def _relative(run: RunEvidence) -> Parts:
    return {part: run.factor * value for part, value in run.parts.items()}


def _without_time(claims: Mapping[str, Sequence[Claim]]) -> set[Key]:
    """Return the causes that a run shows without a measured time."""
    found: set[Key] = set()
    for own in claims.values():
        found |= {claim.key for claim in own} - {claim.key for claim in own if claim.timed}
    return found


def _is_certain(row: CauseRow) -> bool:
    """Return True if a share is large enough to be named and its interval, if known, excludes 0."""
    least = _LEAST_LONGER if row.cause == "computation" and math.isnan(row.share_low) else LEAST_SHARE
    return row.is_rest or (row.share >= least and not row.share_low <= 0)


def _stands_alone(key: Key, claims: Mapping[str, Sequence[Claim]]) -> bool:
    """Return whether the evidence shows that a cause is present even if it has no share."""
    own = [claim for found in claims.values() for claim in found if claim.key == key]
    is_counted = 2 * sum(one.counted for one in own) > len(claims)
    return is_counted or any(not one.timed for one in own)


def _shares(
    divisions: Sequence[Division], runs: Sequence[RunEvidence], base_runs: Sequence[RunEvidence]
) -> dict[Key, CauseRow]:
    keys = dict.fromkeys(key for division in divisions for key in division.shares)
    found = {}
    for key in keys:
        values = [division.shares.get(key, 0.0) for division in divisions]
        parts = mean_parts([division.taken.get(key, {}) for division in divisions])
        sources = parts if parts else {part for division in divisions for part in division.rests}
        half = _half_width(values, runs, base_runs, sources)
        mean = math.fsum(values) / len(values)
        found[key] = CauseRow(
            key.cause,
            share=mean,
            share_low=mean - half,
            share_high=min(mean + half, 1.0),
            node=key.node,
            rank=key.rank,
            part=max(parts, key=lambda part: parts[part], default=""),
        )
    return found


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
    variance = _variance([value / run.factor for value, run in zip(values, runs, strict=True)]) / n
    freedom = float(n - 1)
    if reference := runs[0].reference:
        if len(base_runs) < MIN_RUNS:
            return math.nan
        spent = [run.factor * sum(run.parts.get(part, 0.0) for part in sources) for run in base_runs]
        of_base = reference.rate**2 * _variance(spent) / len(spent)
        total = variance + of_base
        if total > 0:
            freedom = total**2 / (variance**2 / (n - 1) + of_base**2 / (len(spent) - 1))
        variance = total
    return float(special.stdtrit(freedom, 0.5 + LEVEL / 2)) * math.sqrt(variance)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _row(key: Key) -> CauseRow:
    return CauseRow(key.cause, node=key.node, rank=key.rank)


def _with_evidence(
    key: Key, row: CauseRow, runs: Sequence[RunEvidence], claims: Mapping[str, Sequence[Claim]]
) -> CauseRow:
    """Add evidence to a row: the claims of the first run that shows the row's cause."""
    if row.is_rest:
        return row
    found = {run.run_id: own for run in runs if (own := [c for c in claims[run.run_id] if c.key == key])}
    run_id, first = next(iter(found.items()))
    # Without a share, longer parts are noise.
    shown = [claim for claim in first if known(row.share) or not math.isinf(claim.share)]
    evidence = [one for claim in shown for one in claim.evidence]
    nodes = {claim.node for own in found.values() for claim in own}
    return replace(
        row,
        node=nodes.pop() if len(nodes) == 1 else "",
        part=next((claim.part for claim in first if claim.part), row.part or (*first[0].pools, "")[0]),
        evidence=tuple(one for place, one in enumerate(evidence) if one not in evidence[:place]),
        run_id=run_id,
        runs=len(found),
        timed=any(claim.timed for claim in shown),
        timeless=any(claim.timeless for claim in first),
    )


def mean_parts(parts: Sequence[Parts]) -> dict[str, float]:
    """Return the mean of each part over some runs; a part that a run lacks is 0 there."""
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: math.fsum(one.get(name, 0.0) for one in parts) / len(parts) for name in names}
