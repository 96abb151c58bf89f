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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import permutations
from typing import Annotated

import numpy as np
from scipy import special

from analysis.causes.cells import CauseRow
from analysis.causes.claims import clocks_of
from analysis.causes.table import causes_of, named, read_run_facts
from analysis.checks.assessment import CheckedStudy
from analysis.compare.matching import match_studies, match_within
from analysis.data.columns import PARTS, CellSize, Column, RunRow, columns_of, part_title
from analysis.data.differences import Difference, Observed, differences, observe
from analysis.data.environment import sampled
from analysis.data.load import Study
from analysis.stats.decompose import mean
from analysis.stats.estimate import LEVEL, MIN_RUNS, Floats, LogRatios, bounds, log_moments, paired, unpaired
from analysis.stats.measured import Measured, outcomes_text
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
    not_faster = p_not_faster(ratios)
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


def p_not_faster(ratios: LogRatios) -> Floats:
    """Return one-sided p-values: the probability of a larger t if B is not faster; NaN below 3 runs."""
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
    checked_a, checked_b = (CheckedStudy.of(study) for study in (a, b))
    _require_runs(checked_a)
    _require_runs(checked_b)
    name_a, name_b = (a.name, b.name) if a.name != b.name else (str(a.folder.source), str(b.folder.source))
    pairs = [(name_a, name_b, pair) for pair in matching.pairs]
    cells = _compare(checked_a, checked_b, pairs, minimum_effect)
    found = differences(
        _observed(checked_a, {cell.cell_a for cell in cells}),
        _observed(checked_b, {cell.cell_b for cell in cells}),
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
        validity={"a": checked_a.assessment.findings, "b": checked_b.assessment.findings},
    )


def compare_within(
    about: CheckedStudy, *, key: str, base: str | None = None, minimum_effect: float = MINIMUM_EFFECT
) -> Comparison:
    """Compare cells of one study that differ only in ``key``: A has the value ``base``, B any other value.

    Raises:
        BenchError: ``key`` does not vary or is a size, no cell has the base, or no run has completed.
    """
    matchings = match_within(about.study, key=key, base=base)
    _require_runs(about)
    if not any(matching.pairs for _, _, matching in matchings):
        raise BenchError(
            f"--by {key}: no two cells of study {about.study.name} differ in {key} alone",
            remedy=f"plan cells that differ in {key} and agree in all other settings",
        )
    pairs = [(first, value, pair) for first, value, matching in matchings for pair in matching.pairs]
    first, values = matchings[0][0], ", ".join(value for _, value, _ in matchings)
    unmatched = [matching.only_a for _, _, matching in matchings]
    return Comparison(
        a=f"{key} {first}",
        b=f"{key} {values}",
        minimum_effect=minimum_effect,
        cells=_compare(about, about, pairs, minimum_effect),
        only_a=[cell for cell in unmatched[0] if all(cell in other for other in unmatched[1:])],
        only_b=[cell for _, _, matching in matchings for cell in matching.only_b],
        validity=dict.fromkeys("ab", about.assessment.findings),
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


def _require_runs(about: CheckedStudy) -> None:
    if not any(run.measured for run in about.runs):
        raise BenchError(
            f"{about.study.folder.source}: nothing to compare: no run has completed "
            f"({outcomes_text(about.runs) or 'no run is planned'})",
            remedy=f"run it first: bench submit {about.study.folder.source} --retry-failed",
        )


def _observed(about: CheckedStudy, cells: Collection[str]) -> Observed:
    """Return what describes the measured runs of some cells; of many runs, only a sample is read."""
    study, ids = about.study, {run.run_id for cell in cells for run in about.frames.measured_in(cell)}
    chosen = sampled(study, [run for run in study.runs if run.run_id in ids])
    return observe(study, study.envs_of(run.run_id for run in chosen), clocks_of(read_run_facts(about)))


def _compare(
    a: CheckedStudy,
    b: CheckedStudy,
    named_pairs: Sequence[tuple[str, str, tuple[str, str]]],
    minimum_effect: float,
) -> list[ComparedCell]:
    """Return a row with its verdict for each pair of cells, which has the names of A and of B.

    If a pair of cells has at least three pairs of runs with the same repeat in one allocation, only these
    runs are compared. Otherwise all runs are compared, unpaired. Runs of two studies are never pairs.
    """
    pairs = [pair for *_, pair in named_pairs]
    judgements = judge(ratios_of_runs(a.frames, b.frames, pairs), minimum_effect=minimum_effect)
    tested = sum(known(one.low) for one in judgements)
    cells_a, cells_b = ({cell.cell_id: cell for cell in one.frames.cells} for one in (a, b))
    rows = []
    for (name_a, name_b, (cell_a, cell_b)), judgement in zip(named_pairs, judgements, strict=True):
        size = {name: getattr(cells_a[cell_a], name) for name in columns_of(CellSize)}
        if size["tokens_per_sample"] != cells_b[cell_b].tokens_per_sample:
            size["tokens_per_sample"] = math.nan  # the rates of both sides have one unit
        runs_a, runs_b = a.frames.measured_in(cell_a), b.frames.measured_in(cell_b)
        twins = _twins(a.frames, b.frames, (cell_a, cell_b))
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
            not_valid_a=a.invalid[cell_a].kind if cell_a in a.invalid else "",
            not_valid_b=b.invalid[cell_b].kind if cell_b in b.invalid else "",
        )
        row.remark = "; ".join(_remarks(row, a, b, tested, minimum_effect))
        rows.append(row)
    if changed := [row for row in rows if row.changed]:
        causes_a = named(causes_of(a, a.invalid))
        causes_b = causes_a if a is b else named(causes_of(b, b.invalid))
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
    """Return the ratio of the throughputs of each pair of cells, as :func:`_compare` compares them."""
    twins = [_twins(a, b, pair) for pair in pairs]
    use_pairs = np.array([len(own) >= MIN_RUNS for own in twins], dtype=bool)
    of_pairs = paired(log_moments([[rate_b / rate_a for rate_a, rate_b in own] for own in twins]))
    of_runs = unpaired(
        log_moments([_rates(a.measured_in(one)) for one, _ in pairs]),
        log_moments([_rates(b.measured_in(other)) for _, other in pairs]),
    )
    both = zip(of_pairs, of_runs, strict=True)
    return LogRatios(*(np.where(use_pairs, one, other) for one, other in both))


def _twins(a: Measured, b: Measured, cells: tuple[str, str]) -> list[tuple[float, float]]:
    """Return the throughputs of the runs of one study with the same repeat in one allocation."""
    of_a, of_b = (
        {
            (run.job_id, run.repeat): run.throughput_samples_per_sec
            for run in frames.measured_in(cell)
            if run.allocation == "pack" and run.job_id
        }
        for frames, cell in zip((a, b), cells, strict=True)
    )
    return [(rate, of_b[key]) for key, rate in of_a.items() if key in of_b] if a is b else []


def _rates(runs: Iterable[RunRow]) -> list[float]:
    return [run.throughput_samples_per_sec for run in runs]


def _remarks(
    row: ComparedCell, a: CheckedStudy, b: CheckedStudy, tested: int, minimum_effect: float
) -> Iterator[str]:
    """Name what is not valid, explain a missing verdict, and mention unpaired runs and outliers.

    ``tested`` is the number of ratios with an interval.
    """
    error_a, error_b = a.invalid.get(row.cell_a), b.invalid.get(row.cell_b)
    if error_a and error_b and error_a.kind == error_b.kind:
        yield f"A and B are not valid: {heading(error_a)}"
    else:
        errors = {"A": error_a, "B": error_b}
        yield from (f"{side} is not valid: {heading(error)}" for side, error in errors.items() if error)
    labels = ("the study", "the study") if a is b else ("A", "B")
    for label, about, cell in zip(labels, (a, b), (row.cell_a, row.cell_b), strict=True):
        if not about.frames.measured_in(cell):
            runs = about.frames.runs_of_cells.get(cell)
            yield f"{label}: no measured run" + (f" ({outcomes_text(runs)})" if runs else "")
    fewest, most = sorted((row.n_a, row.n_b))
    if row.broken:
        yield "failed in B but completed in A: this counts as a regression"
    elif not known(row.low) and fewest:
        yield f"{count(fewest, 'run')} per side, but an interval needs {MIN_RUNS}"
    elif row.verdict == Verdict.UNKNOWN and fewest:
        yield _why_unknown(row, tested, minimum_effect)
    if row.pairs and row.pairs < most:
        yield f"{row.pairs} interleaved pairs; unpaired runs are ignored"
    measured = (*a.frames.measured_in(row.cell_a), *b.frames.measured_in(row.cell_b))
    if outliers := sum(run.outlier for run in measured):
        yield f"{count(outliers, 'outlier')}, not excluded"


def _why_unknown(row: ComparedCell, tested: int, minimum_effect: float) -> str:
    least, effect = short_percent(minimum_effect), math.log1p(minimum_effect)
    excludes_one = row.low > 1 or row.high < 1
    if excludes_one and abs(math.log(row.ratio)) >= effect:
        return f"the interval excludes 1, but with {tested} cells this may be chance"
    # With the observed noise, half of the interval is then as wide as the minimum effect.
    n, half = row.pairs or min(row.n_a, row.n_b), (math.log(row.high) - math.log(row.low)) / 2
    needed = max(n * (half / effect) ** 2 if effect else math.inf, n + 1)
    effort = f"about {math.ceil(needed)} runs per side are needed" if needed <= 999 else "too much noise"
    more = f"{effort} to detect a difference of {least}"
    return f"there is a change, but it may be smaller than {least}: {more}" if excludes_one else more
