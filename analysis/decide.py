"""Judge each size of a series, and recommend one. docs/decision.md states the rule and its simulated errors.

E is the ratio of the throughputs per rank of a size and of its reference, the baseline. From the same t as
its 95 % interval,

    P = P(E >= guide) = F((log E - log guide) / error)    F: Student's t with Welch's degrees of freedom

The recommended size is the largest efficient one whose throughput is above that of each smaller valid size:
the 95 % interval of their ratio is above 1. If the interval of any size is above 1.05, the baseline is slow
or another program. The reference of a size is then the smaller size with the highest throughput per rank.

With fewer than three runs of either, P and the interval need a stated spread s, the standard deviation of a
run's logarithm. They are then those of a normal distribution with the error s √(1/n + 1/n₀).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy import special

from analysis.checks.scaling_table import Invalid, RunsMissing, error_of
from analysis.data.columns import ScalingRow, by_series
from analysis.data.names import ranks
from analysis.stats.estimate import (
    LEVEL,
    MIN_RUNS,
    MOST_RUNS,
    LogMoments,
    LogRatios,
    bounds,
    ratio_interval,
    runs_to_decide,
    unpaired,
)
from analysis.stats.scaling import GUIDE, rate_per_rank
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import count, fraction, fractions, known, listed

#: The least P of an efficient and of a probably efficient size, and the largest P of an inefficient one.
EFFICIENT, PROBABLE, INEFFICIENT = 0.5 + LEVEL / 2, 0.8, 0.5 - LEVEL / 2
#: A size is at the guide if its whole interval is within this share of the guide.
AT_GUIDE = 0.05
#: An efficiency above it shows a slow baseline or another program.
SUPERLINEAR = 1.05
#: Runs are equal if the error of the logarithm is smaller. An efficiency may then miss the guide by as much.
_EQUAL = 1e-6
_NONE: Invalid = {}


class VerdictKind(StrEnum):
    """Verdict on a size; of several that apply, the first."""

    NO_RESULT = "no-result"
    NOT_VALID = "not-valid"
    BASELINE = "baseline"
    #: Not compared: without an efficiency, or not larger than the baseline.
    NO_ADVICE = "no-advice"
    #: A point without an interval, because the size or its reference has fewer than three runs.
    FEW_RUNS = "few-runs"
    EFFICIENT = "efficient"
    AT_THE_GUIDE = "at-the-guide"
    PROBABLE = "probable"
    INEFFICIENT = "inefficient"
    #: Also if the size or its reference has fewer than three undisturbed runs.
    CANNOT_TELL = "cannot-tell"


class SlowBaseline(Finding, kind="slow-baseline"):
    """A size with an efficiency far above 1."""

    heading = "The baseline is slow, or another program"

    baseline: str
    size: str
    efficiency: float

    def _message(self) -> str:
        found = f"{self.size}: efficiency {fraction(self.efficiency, decimals=2)}"
        why = f"the baseline ({self.baseline}) is slow, or another program, precision or machine"
        return f"{found}, so {why}. Reference: the smaller size that is fastest per rank"


class SlowerThanSmaller(Finding, kind="slower-than-smaller"):
    """A size whose throughput is below that of a smaller size; an error without an interval of the ratio."""

    heading = "A size is slower than a smaller one"
    size: str
    smaller: str
    ratio: float
    low: float | None = None
    high: float | None = None

    def _message(self) -> str:
        ends = "" if self.low is None or self.high is None else f" {fractions(self.low, self.high)}"
        return f"{self.size}: {fraction(self.ratio)}{ends} times the throughput of {self.smaller}"

    def _remedy(self) -> str:
        return "" if self.low is not None else f"Measure each of them at least {MIN_RUNS} times."


@dataclass(frozen=True)
class Judged:
    """The efficiency of a size relative to a reference, with its 95 % interval and P(E >= guide).

    Interval, ``p`` and ``error`` (the standard error of the logarithm) are NaN without three runs of both,
    unless they follow from a stated ``spread``, the standard deviation of a run's logarithm (else NaN).
    """

    reference: ScalingRow
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    p: float
    error: float
    spread: float = math.nan


@dataclass(frozen=True)
class Verdict:
    """The verdict on a size.

    Attributes:
        kind: the verdict.
        judged: the efficiency that it is about, None if there is none.
        recommended: whether this is the size to use.
        more_runs: fewest and most further runs, each of the size and of its reference, after which
            ``cannot-tell`` or ``few-runs`` probably ends; None if that is not known.
        error: the error of ``not-valid``.
        outcome: the failure class or state of the runs of ``no-result``.
    """

    kind: VerdictKind
    judged: Judged | None = None
    recommended: bool = False
    more_runs: tuple[float, float] | None = None
    error: Finding | None = None
    outcome: str = ""

    @property
    def p(self) -> float:
        """P(E >= guide); NaN if there is none."""
        return self.judged.p if self.judged else math.nan

    @property
    def reason(self) -> str:
        """The kind of the error, or the outcome."""
        return self.error.kind if self.error else self.outcome


@dataclass(frozen=True)
class Choice:
    """The verdicts on the sizes of one series, by the place of the row, and what follows from them.

    Attributes:
        best: the recommended size, or None.
        below: inefficient sizes, the smallest first.
        findings: a slow baseline, and sizes slower than smaller ones.
    """

    verdicts: Mapping[int, Verdict]
    best: ScalingRow | None = None
    below: Sequence[ScalingRow] = ()
    findings: Sequence[Finding] = ()


def decide(
    rows: Sequence[ScalingRow], *, invalid: Invalid = _NONE, guide: float = GUIDE, spread: float = math.nan
) -> Choice:
    """Judge the sizes of one series; nothing is concluded from the cells in ``invalid``.

    ``spread`` is a stated standard deviation of a run's logarithm, for sizes with fewer than three runs.
    """
    base = next((row.base for row in reversed(rows) if row.base and known(row.efficiency)), None)
    valid = [
        row for row in rows if base and row.n and known(row.efficiency) and not error_of(row, base, invalid)
    ]
    compared = [row for row in valid if base and row.gpus > base.gpus]
    # Without an interval, the point counts.
    ends = ((row, row.efficiency_low if known(row.efficiency_low) else row.efficiency) for row in compared)
    beyond = [row for row, low in ends if low > SUPERLINEAR]
    found: dict[int, Verdict] = {}
    for row in rows:
        if row in compared and base:
            smaller = [base, *(one for one in compared if one.gpus < row.gpus)]
            reference = max(smaller, key=rate_per_rank) if beyond else base
            found[row.place] = _verdict(row, judge(row, reference, guide=guide, spread=spread), guide)
        else:
            found[row.place] = _without_judgement(row, base, invalid)
    ordered = sorted(compared, key=lambda row: (row.gpus, row.rate))
    # A requested baseline is not the smallest size: the smaller ones are faster or slower, too.
    others = [*([base] if base and base not in valid else ()), *valid]
    efficient, below = (
        [row for row in ordered if found[row.place].kind is kind]
        for kind in (VerdictKind.EFFICIENT, VerdictKind.INEFFICIENT)
    )
    best = next((row for row in reversed(efficient) if _is_fastest(row, others)), None)
    if best:
        found[best.place] = replace(found[best.place], recommended=True)
    findings: list[Finding] = []
    if beyond and base:
        most = max(beyond, key=lambda row: row.efficiency)
        findings = [SlowBaseline(baseline=ranks(base), size=ranks(most), efficiency=most.efficiency)]
    findings += [slower for row in ordered if (slower := _slower(row, others))]
    return Choice(found, best, below, findings)


def decide_all(
    rows: Sequence[ScalingRow], *, invalid: Invalid = _NONE, spread: float = math.nan
) -> dict[str, Choice]:
    """Judge the sizes of each series, and fill in the columns ``verdict`` and ``p_guide`` (if measured)."""
    found = {}
    for series, own in by_series(rows).items():
        choice = found[series] = decide(own, invalid=invalid, spread=spread)
        for row in own:
            verdict = choice.verdicts[row.place]
            row.verdict, row.recommended = verdict.kind, verdict.recommended
            row.p_guide = math.nan if verdict.judged and known(verdict.judged.spread) else verdict.p
    return found


def _without_judgement(row: ScalingRow, base: ScalingRow | None, invalid: Invalid) -> Verdict:
    if not row.n:
        lacking = (one.outcomes[0].outcome for one in row.facts if isinstance(one, RunsMissing))
        return Verdict(VerdictKind.NO_RESULT, outcome=next(lacking, ""))
    if error := error_of(row, row.base, invalid):
        return Verdict(VerdictKind.NOT_VALID, error=error)
    return Verdict(VerdictKind.BASELINE if base and row.is_base else VerdictKind.NO_ADVICE)


def _verdict(row: ScalingRow, judged: Judged, guide: float) -> Verdict:
    undisturbed = min(row.n_undisturbed, judged.reference.n_undisturbed)
    if undisturbed < MIN_RUNS:
        is_few = min(row.n, judged.reference.n) < MIN_RUNS
        kind = VerdictKind.FEW_RUNS if is_few else VerdictKind.CANNOT_TELL
        return Verdict(kind, judged, more_runs=(float(MIN_RUNS - undisturbed), math.inf))
    # The interval contains the point, which far outliers take out of that of the geometric mean.
    if judged.p >= EFFICIENT and judged.efficiency_low >= guide * (1 - _EQUAL):
        return Verdict(VerdictKind.EFFICIENT, judged)
    if judged.efficiency_low >= guide * (1 - AT_GUIDE) and judged.efficiency_high <= guide * (1 + AT_GUIDE):
        return Verdict(VerdictKind.AT_THE_GUIDE, judged)
    if judged.p >= PROBABLE:
        return Verdict(VerdictKind.PROBABLE, judged)
    if judged.p <= INEFFICIENT:
        return Verdict(VerdictKind.INEFFICIENT, judged)
    return Verdict(VerdictKind.CANNOT_TELL, judged, more_runs=_more_runs(judged, row, guide))


def judge(
    row: ScalingRow, reference: ScalingRow, *, guide: float = GUIDE, spread: float = math.nan
) -> Judged:
    """Return the efficiency of a size relative to another one, with interval and P(E >= guide).

    ``spread`` is used if one of them has fewer than three runs.
    """
    efficiency = rate_per_rank(row) / rate_per_rank(reference)
    top, bottom = _moments(row), _moments(reference)
    ratio, is_stated = unpaired(bottom, top), min(row.n, reference.n) < MIN_RUNS and known(spread)
    if is_stated:
        stated = np.array([spread * math.sqrt(1 / row.n + 1 / reference.n)])
        ratio = LogRatios(ratio.centre, stated, np.array([np.inf]))
    # From the ratio of the throughputs to that of the throughputs per rank.
    scale = efficiency / (row.rate / reference.rate)
    low, high = (float(np.exp(end)[0]) * scale for end in bounds(ratio))
    error, above = float(ratio.error[0]), float(ratio.centre[0]) + math.log(scale / guide)
    if error > _EQUAL:
        p = float(special.stdtr(ratio.freedom[0], above / error))
    else:
        p = math.nan if math.isnan(error) else float(above >= -_EQUAL)
    ends = min(low, efficiency), max(high, efficiency)
    return Judged(reference, efficiency, *ends, p, error, spread if is_stated else math.nan)


def _moments(row: ScalingRow) -> LogMoments:
    """Return the moments of the throughputs of a row's runs."""
    return LogMoments(*(np.array([float(value)]) for value in (row.n, row.log_mean, row.log_variance)))


def throughput_ratio(row: ScalingRow, other: ScalingRow) -> tuple[float, float, float]:
    """Return the ratio of the throughputs of two sizes and its 95 % interval, NaN without three runs each."""
    ratio = row.rate / other.rate
    low, high = (float(end[0]) for end in ratio_interval(_moments(row), _moments(other)))
    return ratio, low, high


def _is_fastest(row: ScalingRow, rows: Sequence[ScalingRow]) -> bool:
    """Return whether a size is faster than each smaller one; without an interval, the ratio itself counts."""
    found = [throughput_ratio(row, other) for other in rows if other.gpus < row.gpus]
    return all((low if known(low) else ratio) > 1 for ratio, low, _ in found)


def _slower(row: ScalingRow, rows: Sequence[ScalingRow]) -> Finding | None:
    """Return a finding if a size is slower than a smaller one, the fastest of them."""
    smaller = [other for other in rows if other.gpus < row.gpus]
    other = max(smaller, key=lambda one: one.rate)
    ratio, low, high = throughput_ratio(row, other)
    if not (high if known(high) else ratio) < 1:
        return None
    found = SlowerThanSmaller(
        subject=(row.cell_id,), severity="error", size=ranks(row), smaller=ranks(other), ratio=ratio
    )
    return replace(found, low=low, high=high, severity="warning") if known(low) else found


def _more_runs(judged: Judged, row: ScalingRow, guide: float) -> tuple[float, float] | None:
    """Return the fewest and most further runs of both sizes that probably decide; None if they are very many.

    The numbers are those of :func:`runs_to_decide` for the ends of an interval of one standard error around
    E, and for the ends of the 80 % interval of the standard deviation of a run.
    """
    n = min(row.n, judged.reference.n)
    freedom = row.n + judged.reference.n - 2
    # The quantiles of chi squared.
    narrow, wide = (math.sqrt(freedom / float(2 * special.gammaincinv(freedom / 2, q))) for q in (0.9, 0.1))
    distance = abs(math.log(judged.efficiency / guide))
    sizes = {"top_n": row.n, "bottom_n": judged.reference.n}
    fewest = runs_to_decide(distance + judged.error, error=narrow * judged.error, **sizes)
    nearest = max(distance - judged.error, 0.0)
    most = runs_to_decide(nearest, error=wide * judged.error, **sizes) if nearest else math.inf
    return None if fewest > MOST_RUNS else (max(fewest - n, 1), max(most - n, 1))


# -- in words -------------------------------------------------------------------------


def efficiency_text(one: ScalingRow | Judged, *, guide: float = GUIDE) -> str:
    """Return an efficiency with its interval, as ``0.94 [0.90, 0.98]``; no end is rounded to the guide."""
    low, high = one.efficiency_low, one.efficiency_high
    near = [abs(end - guide) for end in (one.efficiency, low, high) if _EQUAL < abs(end - guide) < 0.005]
    decimals = next((digits for digits in (3, 4, 5) if min(near) >= 0.5 * 10**-digits), 6) if near else 2
    return f"{fraction(one.efficiency, decimals=decimals)} {fractions(low, high, decimals=decimals)}".strip()


def probability_text(p: float) -> str:
    """Return P in words: ``P = 0.93``, ``P > 0.99`` or ``P < 0.01``; empty if it is not known."""
    if not known(p):
        return ""
    return "P > 0.99" if p > 0.99 else "P < 0.01" if p < 0.01 else f"P = {p:.2f}"


def what_decides(verdict: Verdict, row: ScalingRow) -> str:
    """Return what would probably decide whether a size reaches the guide."""
    reference = verdict.judged.reference if verdict.judged else row
    lacking = [(MIN_RUNS - one.n_undisturbed, ranks(one)) for one in (row, reference)]
    if needs := [f"{count(runs, 'more undisturbed run')} on {name}" for runs, name in lacking if runs > 0]:
        return f"an interval needs {listed(needs)}"
    each = f"more runs each on {ranks(row)} and on {ranks(reference)}"
    if verdict.more_runs is None:
        return f"more than {MOST_RUNS} {each}"
    fewest, most = verdict.more_runs
    if most > MOST_RUNS:
        return f"{fewest:.0f} or more, perhaps over {MOST_RUNS}, {each}"
    if most == 1:
        return f"about 1 {each.replace('runs', 'run', 1)}"
    span = f"{fewest:.0f}" if fewest == most else f"{fewest:.0f} to {most:.0f}"
    return f"about {span} {each}"
