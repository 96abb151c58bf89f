"""Compare throughputs cell by cell: of two studies, or of the values of one setting within a study.

:mod:`analysis.compare.matching` selects the cells. Ratios are B over A and are never averaged over cells. If
the runs of A and B are interleaved in one allocation, the ratio is the geometric mean of the pairwise ratios,
and its interval is Student's t on their logarithms. Otherwise it is the ratio of the geometric means over
runs, with Welch's t on the logarithms (B. L. Welch, Biometrika 34, 1947). Assumptions: pairs, or
unpaired runs, are independent, and noise is multiplicative.

With many cells, false alarms become likely. Therefore the one-sided p-values of each direction are
adjusted as described by Benjamini and Hochberg (J. R. Stat. Soc. B 57, 1995), each direction with half
of the error rate. If no cell is slower, at most 2.5 % of comparisons report a slower cell, for any number
of cells; likewise for faster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import permutations
from typing import Annotated

import numpy as np
from scipy import special

from analysis.causes.cells import CauseRow
from analysis.causes.claims import clocks_of
from analysis.causes.table import named, read_run_facts, study_causes
from analysis.checks.assessment import Assessment, assess
from analysis.compare.matching import match_studies, match_within
from analysis.data.columns import PARTS, CellSize, Column, RunRow, columns_of, part_title
from analysis.data.differences import Difference, Observed, differences, observe
from analysis.data.environment import sampled
from analysis.data.load import Study
from analysis.stats.decompose import mean
from analysis.stats.estimate import LEVEL, MIN_RUNS, Floats, LogRatios, bounds, log_moments, paired, unpaired
from analysis.stats.measured import Measured, measure, outcomes_text
from analysis.text import heading
from bench.study.ledger import RunState
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import count, known, seconds, short_percent

#: A smaller relative change of the throughput is not called faster or slower.
MINIMUM_EFFECT = 0.02


class Verdict(StrEnum):
    """Verdict on B relative to A."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNKNOWN = "cannot tell"


@dataclass
class Judgement:
    """A ratio with its 95 % interval, one-sided p-values adjusted over all ratios, and the verdict."""

    ratio: Annotated[float, Column("B over A by geometric means, or that of pairwise ratios")] = math.nan
    low: Annotated[float, Column("lower end of the ratio's 95 % interval")] = math.nan
    high: Annotated[float, Column("upper end of the ratio's 95 % interval")] = math.nan
    p_slower: Annotated[float, Column("adjusted p-value of a slower B")] = math.nan
    p_faster: Annotated[float, Column("adjusted p-value of a faster B")] = math.nan
    verdict: Annotated[Verdict, Column("verdict on B")] = Verdict.UNKNOWN


def judge(ratios: LogRatios, *, minimum_effect: float = MINIMUM_EFFECT) -> list[Judgement]:
    """Judge each ratio.

    With δ = log(1 + minimum effect), the verdicts are:

    - faster, slower: the adjusted p-value is at most 2.5 %, and the logarithm of the ratio is beyond ±δ.
    - same: the interval of the logarithm is within ±δ.
    - cannot tell: all other cases, and always below 3 runs.
    """
    low, high = bounds(ratios)
    not_faster = _p_not_faster(ratios)
    slower, faster = (benjamini_hochberg(p) for p in (1 - not_faster, not_faster))
    delta, threshold = math.log1p(minimum_effect), (1 - LEVEL) / 2 + 1e-12

    def verdict(centre: float, low: float, high: float, slower: float, faster: float) -> Verdict:
        if faster <= threshold and centre >= delta:
            return Verdict.FASTER
        if slower <= threshold and centre <= -delta:
            return Verdict.SLOWER
        return Verdict.SAME if low >= -delta and high <= delta else Verdict.UNKNOWN

    p_values = slower.tolist(), faster.tolist()
    verdicts = map(verdict, ratios.centre.tolist(), low.tolist(), high.tolist(), *p_values)
    values = (np.exp(one).tolist() for one in (ratios.centre, low, high))
    return [Judgement(*one) for one in zip(*values, *p_values, verdicts, strict=True)]


def p_faster(ratios: LogRatios) -> Floats:
    """Return the probability that B is faster, from the t of each interval; NaN below 3 runs."""
    return 1 - _p_not_faster(ratios)


def _p_not_faster(ratios: LogRatios) -> Floats:
    """Return one-sided p-values: the probability of a larger t if B is not faster."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = ratios.centre / ratios.error
    p = special.stdtr(ratios.freedom, -t)
    without_noise = np.where(ratios.centre > 0, 0.0, np.where(ratios.centre < 0, 1.0, 0.5))
    return np.asarray(np.where(ratios.error == 0, without_noise, p), dtype=float)


def benjamini_hochberg(p: Floats) -> Floats:
    """Return adjusted p-values; NaN values remain and do not count as tests."""
    order = np.argsort(p)[: np.count_nonzero(~np.isnan(p))]  # NaN is last
    adjusted = np.full(len(p), np.nan)
    scaled = p[order] * (len(order) / np.arange(1, len(order) + 1))
    adjusted[order] = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1)
    return adjusted


def runs_needed(ratios: LogRatios, *, minimum_effect: float = MINIMUM_EFFECT, n: Floats) -> Floats:
    """Estimate the runs per side for which half of the interval is as wide as the minimum effect.

    The estimate assumes the observed noise. It is at least one more than ``n``, the observed runs per side,
    and NaN for a ratio without an interval.
    """
    low, high = bounds(ratios)
    with np.errstate(invalid="ignore"):
        factor = ((high - low) / 2 / math.log1p(minimum_effect)) ** 2
        return np.asarray(np.maximum(np.ceil(n * factor), n + 1), dtype=float)


@dataclass(kw_only=True)
class ComparedCell(CellSize, Judgement):
    """One pair of matched cells, with the size of that of A.

    Throughputs are harmonic means over the compared runs. The verdict is that of the throughputs, even if
    the values of a side are not valid.
    """

    a: Annotated[str, Column("name or value of A")]
    b: Annotated[str, Column("name or value of B")]
    cell_a: Annotated[str, Column("cell of A")]
    cell_b: Annotated[str, Column("cell of B")]
    n_a: Annotated[int, Column("measured runs of A")]
    n_b: Annotated[int, Column("measured runs of B")]
    pairs: Annotated[int | None, Column("interleaved pairs of runs; None if runs are unpaired")]
    throughput_a: Annotated[float, Column("throughput of A", "samples/s")]
    throughput_b: Annotated[float, Column("throughput of B", "samples/s")]
    broken: Annotated[bool, Column("the cell completed in A and failed in B")]
    not_valid_a: Annotated[str, Column("reason why the values of A are not valid")]
    not_valid_b: Annotated[str, Column("reason why the values of B are not valid")]
    part: Annotated[str, Column("part of the step that changed most, if faster or slower")] = ""
    part_a_sec: Annotated[float, Column("its time in A", "s")] = math.nan
    part_b_sec: Annotated[float, Column("its time in B", "s")] = math.nan
    cause: Annotated[str, Column("cause that changed most, if faster or slower")] = ""
    remark: Annotated[str, Column("remarks")] = ""
    missing: str
    outliers: int
    error_a: Finding | None
    error_b: Finding | None

    @property
    def changed(self) -> bool:
        """True if B is faster or slower."""
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing throughputs cell by cell.

    Attributes:
        b: name of B; within one study, the compared setting with all its values except that of A.
        minimum_effect: a smaller relative change is not called faster or slower.
        only_a: unmatched cells of A.
        only_b: unmatched cells of B.
        differences: settings, software, hosts, variables and clocks that differ between A and B as a whole.
        notes: remarks for the reader.
        validity: the findings about A and B, by ``a`` and ``b``.
    """

    a: str
    b: str
    minimum_effect: float
    cells: list[ComparedCell]
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    validity: Mapping[str, Sequence[Finding]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """The number of cells with each verdict."""
        return {str(verdict): [cell.verdict for cell in self.cells].count(verdict) for verdict in Verdict}

    @property
    def regression(self) -> bool:
        """True if a cell is slower in B, or completed in A and failed in B."""
        return any(cell.verdict == Verdict.SLOWER or cell.broken for cell in self.cells)

    @property
    def undecided(self) -> bool:
        """True if the verdict of some cell is ``cannot tell``."""
        return any(cell.verdict == Verdict.UNKNOWN for cell in self.cells)


def compare_studies(
    a: Study, b: Study, *, minimum_effect: float = MINIMUM_EFFECT, ignore: Collection[str] = ()
) -> Comparison:
    """Compare study B with study A cell by cell.

    Raises:
        BenchError: A and B are the same folder, no cells match, or a study has no completed run.
    """
    if a.folder.source.resolve() == b.folder.source.resolve():
        raise BenchError(
            f"{a.folder.source} and {b.folder.source} are the same study",
            remedy="give two different studies, or compare cells of one study with --by KEY",
        )
    matching = match_studies(a, b, ignore=ignore)
    runs_a, runs_b = _Runs.of(a, "A"), _Runs.of(b, "B")
    name_a, name_b = (a.name, b.name) if a.name != b.name else (str(a.folder.source), str(b.folder.source))
    cells = _compare(runs_a, runs_b, [(name_a, name_b, pair) for pair in matching.pairs], minimum_effect)
    found = differences(
        runs_a.observed(cell.cell_a for cell in cells), runs_b.observed(cell.cell_b for cell in cells)
    )
    return Comparison(
        a=name_a,
        b=name_b,
        minimum_effect=minimum_effect,
        cells=cells,
        only_a=matching.only_a,
        only_b=matching.only_b,
        differences=[one for one in found if one.kind != "setting" or one.name not in matching.compared],
        notes=_notes_on_time(a, b),
        validity={"a": runs_a.assessment.findings, "b": runs_b.assessment.findings},
    )


def compare_within(
    study: Study,
    *,
    key: str,
    base: str | None = None,
    minimum_effect: float = MINIMUM_EFFECT,
    measured: tuple[Measured, Assessment] | None = None,
) -> Comparison:
    """Compare cells of one study that differ only in ``key``: A has the value ``base``, B any other value.

    ``measured`` are the frames and the assessment of the study, if they are known.

    Raises:
        BenchError: ``key`` does not vary or is a size, no cell has the base, or no run has completed.
    """
    matchings = match_within(study, key=key, base=base)
    runs = _Runs.of(study, "the study", measured)
    if not any(matching.pairs for _, _, matching in matchings):
        raise BenchError(
            f"--by {key}: no two cells of study {study.name} differ in {key} alone",
            remedy=f"plan cells that differ in {key} and agree in all other settings",
        )
    pairs = [(first, value, pair) for first, value, matching in matchings for pair in matching.pairs]
    first, values = matchings[0][0], ", ".join(value for _, value, _ in matchings)
    unmatched = [matching.only_a for _, _, matching in matchings]
    return Comparison(
        a=f"{key} {first}",
        b=f"{key} {values}",
        minimum_effect=minimum_effect,
        cells=_compare(runs, runs, pairs, minimum_effect),
        only_a=[cell for cell in unmatched[0] if all(cell in other for other in unmatched[1:])],
        only_b=[cell for _, _, matching in matchings for cell in matching.only_b],
        validity=dict.fromkeys("ab", runs.assessment.findings),
    )


def _notes_on_time(a: Study, b: Study) -> list[str]:
    """Return a note if one study ran completely before the other."""
    times = [
        [time for run in study.runs for time in (run.started_at, run.ended_at) if time] for study in (a, b)
    ]
    for (first, before), (second, after) in permutations(zip("AB", times, strict=True)):
        if before and after and max(before) < min(after):
            return [
                f"{first} ended ({max(before):%Y-%m-%d %H:%M} UTC) before {second} began "
                f"({min(after):%Y-%m-%d %H:%M} UTC): the difference includes all other changes between "
                "these times"
            ]
    return []


@dataclass(frozen=True)
class _Runs:
    """The cells and runs of A or B."""

    label: str
    study: Study
    frames: Measured
    assessment: Assessment

    @classmethod
    def of(cls, study: Study, label: str, measured: tuple[Measured, Assessment] | None = None) -> _Runs:
        """Return the runs of a study; ``measured`` are its frames and assessment, if they are known.

        Raises:
            BenchError: no run has completed.
        """
        frames = measured[0] if measured else measure(study)
        if not any(run.measured for run in frames.runs):
            raise BenchError(
                f"{study.folder.source}: nothing to compare: no run has completed "
                f"({outcomes_text(frames.runs) or 'no run is planned'})",
                remedy="run it first: bench submit",
            )
        return cls(label, study, frames, measured[1] if measured else assess(study, frames))

    def observed(self, cells: Iterable[str]) -> Observed:
        """Return what describes the measured runs of some cells; of many runs, only a sample is read."""
        ids = {run.run_id for cell in cells for run in self.frames.measured_in(cell)}
        chosen = sampled(self.study, [run for run in self.study.runs if run.run_id in ids])
        facts = read_run_facts(self.study, self.frames)
        return observe(self.study, self.study.envs_of(run.run_id for run in chosen), clocks_of(facts))

    def missing(self, cell: str) -> str:
        """Describe the runs of a cell of which none is measured; empty if a run is measured."""
        if self.frames.measured_in(cell):
            return ""
        runs = self.frames.runs_of_cells.get(cell)
        found = f" ({outcomes_text(runs)})" if runs else ""
        return f"{self.label}: no measured run{found}"


def _compare(
    a: _Runs, b: _Runs, named_pairs: Sequence[tuple[str, str, tuple[str, str]]], minimum_effect: float
) -> list[ComparedCell]:
    """Return a row with its verdict for each pair of cells, which has the names of A and of B.

    If a pair of cells has at least three pairs of runs with the same repeat in one allocation, only these
    runs are compared. Otherwise all runs are compared, unpaired. Runs of two studies are never pairs.
    """
    pairs = [pair for *_, pair in named_pairs]
    ratios = ratios_of_runs(a.frames, b.frames, pairs)
    judgements = judge(ratios, minimum_effect=minimum_effect)
    cells_a, cells_b = ({cell.cell_id: cell for cell in one.frames.cells} for one in (a, b))
    rows = []
    parts = zip(named_pairs, _twins(a.frames, b.frames, pairs), judgements, strict=True)
    for (name_a, name_b, (cell_a, cell_b)), twins, judgement in parts:
        size = {name: getattr(cells_a[cell_a], name) for name in columns_of(CellSize)}
        if size["tokens_per_sample"] != cells_b[cell_b].tokens_per_sample:
            size["tokens_per_sample"] = math.nan  # the rates of both sides have one unit
        runs_a, runs_b = a.frames.measured_in(cell_a), b.frames.measured_in(cell_b)
        error_a, error_b = a.assessment.invalid.get(cell_a), b.assessment.invalid.get(cell_b)
        is_paired = len(twins) >= MIN_RUNS
        failed_in_b = any(run.state == RunState.FAILED for run in b.frames.runs_of_cells.get(cell_b, []))
        rates_a, rates_b = zip(*twins, strict=True) if is_paired else (_rates(runs_a), _rates(runs_b))
        row = ComparedCell(
            **size,
            **vars(judgement),
            a=name_a,
            b=name_b,
            cell_a=cell_a,
            cell_b=cell_b,
            n_a=len(runs_a),
            n_b=len(runs_b),
            pairs=len(twins) if is_paired else None,
            throughput_a=1 / mean(1 / rate for rate in rates_a),
            throughput_b=1 / mean(1 / rate for rate in rates_b),
            broken=bool(runs_a) and not runs_b and failed_in_b,
            not_valid_a=error_a.kind if error_a else "",
            not_valid_b=error_b.kind if error_b else "",
            error_a=error_a,
            error_b=error_b,
            missing="; ".join(filter(None, (a.missing(cell_a), b.missing(cell_b)))),
            outliers=sum(run.outlier for run in [*runs_a, *runs_b]),
        )
        rows.append(row)
    n = np.array([row.pairs or min(row.n_a, row.n_b) for row in rows], dtype=float)
    needed = runs_needed(ratios, minimum_effect=minimum_effect, n=n)
    tested = sum(known(row.low) for row in rows)
    for row, more in zip(rows, needed.tolist(), strict=True):
        row.remark = _remark(row, more, tested, minimum_effect)
    if changed := [row for row in rows if row.changed]:
        causes_a = named(study_causes(a.study))
        causes_b = causes_a if a is b else named(study_causes(b.study))
        for row in changed:
            _add_change(row, a.frames, b.frames, causes_a, causes_b)
    return rows


def _add_change(
    row: ComparedCell, a: Measured, b: Measured, causes_a: Iterable[CauseRow], causes_b: Iterable[CauseRow]
) -> None:
    """Add the part and the cause whose times changed most in the direction of the step time."""
    runs_a, runs_b = a.measured_in(row.cell_a), b.measured_in(row.cell_b)
    step_a_s, step_b_s = (mean(run.step_time_sec for run in runs) for runs in (runs_a, runs_b))
    is_slower = step_b_s > step_a_s
    before, after = _part_times(runs_a), _part_times(runs_b)
    texts = [row.remark] if row.remark else []
    if part := _largest({name: after[name] - before[name] for name in before if name in after}, is_slower):
        row.part, row.part_a_sec, row.part_b_sec = part, before[part], after[part]
        texts.append(f"{part_title(part)}: {seconds(before[part])} in A, {seconds(after[part])} in B")
    old, new = _cause_times(causes_a, row.cell_a, step_a_s), _cause_times(causes_b, row.cell_b, step_b_s)
    row.cause = _largest({name: new.get(name, 0.0) - old.get(name, 0.0) for name in [*new, *old]}, is_slower)
    # Otherwise, name a cause without a known time if only the slower cell has this cause.
    only = [name for name in (new if is_slower else old) if name not in (old if is_slower else new)]
    row.cause = row.cause or next(iter(only), "")
    row.remark = "; ".join([*texts, f"cause: {row.cause}"] if row.cause else texts)


def _part_times(runs: Sequence[RunRow]) -> dict[str, float]:
    times = {part: mean(getattr(run, part) for run in runs if run.parts_known) for part in PARTS}
    return {part: time_s for part, time_s in times.items() if known(time_s)}


def _cause_times(causes: Iterable[CauseRow], cell: str, step_s: float) -> dict[str, float]:
    """Return the time of each cause in a cell; 0 if it is not known."""
    times: dict[str, float] = {}
    for one in causes:
        if one.cell_id == cell:
            time_s = one.share * step_s
            times[one.cause] = times.get(one.cause, 0.0) + (time_s if known(time_s) else 0.0)
    return times


def _largest(changes: Mapping[str, float], is_slower: bool) -> str:
    """Return the name with the largest increase, or with the largest decrease if B is not slower."""
    signed = {name: value if is_slower else -value for name, value in changes.items()}
    name = max(signed, key=signed.__getitem__, default="")
    return name if name and signed[name] > 0 else ""


def ratios_of_runs(a: Measured, b: Measured, pairs: Sequence[tuple[str, str]]) -> LogRatios:
    """Return the ratio of the throughputs of each pair of cells, as :func:`_compare_runs` compares them."""
    twins = _twins(a, b, pairs)
    use_pairs = np.array([len(own) >= MIN_RUNS for own in twins], dtype=bool)
    of_pairs = paired(log_moments([[rate_b / rate_a for rate_a, rate_b in own] for own in twins]))
    of_runs = unpaired(
        log_moments([_rates(a.measured_in(one)) for one, _ in pairs]),
        log_moments([_rates(b.measured_in(other)) for _, other in pairs]),
    )
    both = zip(of_pairs, of_runs, strict=True)
    return LogRatios(*(np.where(use_pairs, one, other) for one, other in both))


def _twins(a: Measured, b: Measured, pairs: Sequence[tuple[str, str]]) -> list[list[tuple[float, float]]]:
    """Return the pairs of runs of each pair of cells; runs of two studies are none."""
    return [
        _pairs_of_runs(a.measured_in(one), b.measured_in(other)) if a is b else [] for one, other in pairs
    ]


def _rates(runs: Iterable[RunRow]) -> list[float]:
    return [run.throughput_samples_per_sec for run in runs]


def _pairs_of_runs(a: Iterable[RunRow], b: Iterable[RunRow]) -> list[tuple[float, float]]:
    """Return the throughputs of the runs of one study with the same repeat in one allocation."""
    shared = [{(run.job_id, run.repeat): run for run in runs if run.allocation == "pack"} for runs in (a, b)]
    keys = [key for key in shared[0] if key in shared[1] and key[0]]
    return [(_rates([shared[0][key]])[0], _rates([shared[1][key]])[0]) for key in keys]


def _remark(row: ComparedCell, needed: float, tested: int, minimum_effect: float) -> str:
    """Name what is not valid, explain a missing verdict, and mention unpaired runs and outliers."""
    sides = {"A": row.error_a, "B": row.error_b}
    texts = [f"{side} is not valid: {heading(error)}" for side, error in sides.items() if error]
    if row.error_a and row.not_valid_a == row.not_valid_b:
        texts = [f"A and B are not valid: {heading(row.error_a)}"]
    texts += [row.missing] if row.missing else []
    fewest, most = sorted((row.n_a, row.n_b))
    if row.broken:
        texts.append("failed in B but completed in A: this counts as a regression")
    elif not known(row.low) and not row.missing:
        texts.append(f"{count(fewest, 'run')} per side, but an interval needs {MIN_RUNS}")
    elif row.verdict == Verdict.UNKNOWN and not row.missing:
        texts.append(_why_unknown(row, needed, tested, minimum_effect))
    if row.pairs and row.pairs < most:
        texts.append(f"{row.pairs} interleaved pairs; unpaired runs are ignored")
    if row.outliers:
        texts.append(f"{count(row.outliers, 'outlier')}, not excluded")
    return "; ".join(texts)


def _why_unknown(row: ComparedCell, needed: float, tested: int, minimum_effect: float) -> str:
    least = short_percent(minimum_effect)
    excludes_one = row.low > 1 or row.high < 1
    if excludes_one and abs(math.log(row.ratio)) >= math.log1p(minimum_effect):
        return f"the interval excludes 1, but with {tested} cells this may be chance"
    effort = f"about {needed:.0f} runs per side are needed" if needed < 1000 else "too much noise"
    more = f"{effort} to detect a difference of {least}"
    return f"there is a change, but it may be smaller than {least}: {more}" if excludes_one else more
