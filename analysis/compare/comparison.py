"""Compare throughputs cell by cell: of two studies, or of the values of one setting within a study.

:mod:`analysis.compare.matching` selects the cells. Ratios are B over A and are never averaged over cells. A
ratio is the geometric mean of the runs of B over that of A. If the runs of A and B are interleaved in one
allocation, the interval of the ratio is Student's t on the logarithms of the pairwise ratios. Otherwise it is
Welch's t on the logarithms of the runs (B. L. Welch, Biometrika 34, 1947). Assumptions: pairs, or unpaired
runs, are independent, and noise is multiplicative.

With many cells, false alarms become likely. Therefore the one-sided p-values of each direction are
adjusted as described by Benjamini and Hochberg (J. R. Stat. Soc. B 57, 1995), each direction with half
of the error rate. If no cell is slower, at most 2.5 % of comparisons report a slower cell, for any number
of cells; likewise for faster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from analysis.causes.table import LOST_WORDS, named, study_causes
from analysis.checks.assessment import Assessment, assess
from analysis.compare.matching import Difference, environment_differences, match_studies, match_within
from analysis.data.load import Study
from analysis.data.names import state_counts
from analysis.stats.columns import PARTS
from analysis.stats.estimate import LEVEL, MIN_RUNS, Floats, LogMoments, log_moments, welch
from analysis.stats.measured import measure
from analysis.text import count, seconds, short_percent
from bench.errors import BenchError
from bench.facts import Fact
from bench.study.ledger import RunState

#: A smaller relative change of the throughput is not called faster or slower.
MINIMUM_EFFECT = 0.02


class Verdict(StrEnum):
    """Verdict on B relative to A."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNKNOWN = "cannot tell"


class LogRatios(NamedTuple):
    """Ratios B / A of all cells as means of log B - log A, with standard errors and degrees of freedom."""

    centre: Floats
    error: Floats
    freedom: Floats


def unpaired(a: LogMoments, b: LogMoments) -> LogRatios:
    """Return the ratios of independent runs; standard errors are NaN below 3 runs in A or B."""
    centre, error, freedom = welch(b, a)
    enough = (a.n >= MIN_RUNS) & (b.n >= MIN_RUNS)
    return LogRatios(centre, np.where(enough, error, np.nan), np.where(enough, freedom, np.nan))


def paired(differences: LogMoments) -> LogRatios:
    """Return the ratios of paired runs from the pairs' moments; standard errors are NaN below 3 pairs."""
    enough = differences.n >= MIN_RUNS
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(differences.variance / differences.n)
    freedom = np.where(enough, differences.n - 1, np.nan)
    return LogRatios(differences.mean, np.where(enough, error, np.nan), freedom)


def joined(parts: Sequence[LogRatios]) -> LogRatios:
    """Concatenate ratios, so that :func:`judge` adjusts the p-values over all ratios."""
    return LogRatios(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def judge(ratios: LogRatios, *, minimum_effect: float = MINIMUM_EFFECT) -> pd.DataFrame:
    """Return one row per ratio: ``ratio, low, high, p_slower, p_faster, verdict``.

    ``low`` and ``high`` are the 95 % interval of the single ratio. ``p_slower`` and ``p_faster`` are
    one-sided and adjusted over all rows. With δ = log(1 + minimum effect), the verdicts are:

    - faster, slower: the adjusted p-value is at most 2.5 %, and the logarithm of the ratio is beyond ±δ.
    - same: the interval of the logarithm is within ±δ.
    - cannot tell: all other cases, and always below 3 runs.
    """
    centre = ratios.centre
    low, high = bounds(ratios)
    not_faster = _p_not_faster(ratios)
    slower, faster = (benjamini_hochberg(p) for p in (1 - not_faster, not_faster))
    delta, threshold = math.log1p(minimum_effect), (1 - LEVEL) / 2 + 1e-12
    with np.errstate(invalid="ignore"):
        conditions = [
            (faster <= threshold) & (centre >= delta),
            (slower <= threshold) & (centre <= -delta),
            (low >= -delta) & (high <= delta),
        ]
    verdicts = np.select(conditions, [Verdict.FASTER, Verdict.SLOWER, Verdict.SAME], Verdict.UNKNOWN)
    rows = pd.DataFrame({"ratio": np.exp(centre), "low": np.exp(low), "high": np.exp(high)})
    return rows.assign(p_slower=slower, p_faster=faster, verdict=[str(verdict) for verdict in verdicts])


def bounds(ratios: LogRatios) -> tuple[Floats, Floats]:
    """Return the lower and upper ends of the 95 % interval of each difference of logarithms."""
    freedom = np.where(ratios.freedom > 0, ratios.freedom, np.nan)
    half = special.stdtrit(freedom, 0.5 + LEVEL / 2) * ratios.error
    half = np.where(ratios.error == 0, 0.0, half)
    return ratios.centre - half, ratios.centre + half


def _p_not_faster(ratios: LogRatios) -> Floats:
    """Return one-sided p-values: the probability of a larger t if B is not faster."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = ratios.centre / ratios.error
    p = special.stdtr(ratios.freedom, -t)
    without_noise = np.where(ratios.centre > 0, 0.0, np.where(ratios.centre < 0, 1.0, 0.5))
    return np.asarray(np.where(ratios.error == 0, without_noise, p), dtype=float)


def benjamini_hochberg(p: Floats) -> Floats:
    """Return adjusted p-values; NaN values remain and do not count as tests."""
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    ranked = p[order] * len(order) / np.arange(1, len(order) + 1)
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.minimum(np.minimum.accumulate(ranked[::-1])[::-1], 1.0)
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


class Change(NamedTuple):
    """The largest changes between two cells: a part of the step with its times (s), and a cause.

    A text is empty if it is not known.
    """

    part: str = ""
    part_a_s: float = math.nan
    part_b_s: float = math.nan
    cause: str = ""

    def __str__(self) -> str:
        words = LOST_WORDS.get(self.part, self.part)
        times = f"{words}: {seconds(self.part_a_s)} in A, {seconds(self.part_b_s)} in B" if self.part else ""
        return "; ".join(filter(None, (times, f"cause: {self.cause}" if self.cause else "")))


class StepTimes:
    """The times (s) of the parts of a step and of its causes, for each cell of a study."""

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
        # Name a cause without a known time if only the slower cell has this cause.
        only = [name for name in (new if slower else old) if name not in (old if slower else new)]
        cause = only[0] if only else ""
    return Change(part, *times, cause)


def _largest(differences: Mapping[str, float], slower: bool) -> str:
    """Return the name with the largest increase, or with the largest decrease if B is not slower."""
    signed = {name: value if slower else -value for name, value in differences.items()}
    name = max(signed, key=lambda one: signed[one], default="")
    return name if name and signed[name] > 0 else ""


_RATE = "throughput_samples_per_sec"
#: Columns of :attr:`Comparison.cells`, taken from the cell of A.
_CELL = ("nodes", "gpus_per_node", "gpus", "global_batch", "per_gpu_batch", "launcher", "backend")
#: Columns of :attr:`Comparison.cells`: one row per matched pair of cells.
COLUMNS = (
    *("a", "b", "cell_a", "cell_b", *_CELL, "n_a", "n_b", "pairs", "throughput_a", "throughput_b"),
    *("ratio", "low", "high", "p_slower", "p_faster", "verdict", "broken", "not_valid_a", "not_valid_b"),
    "remark",
    *("part", "part_a_sec", "part_b_sec", "cause"),
)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing throughputs cell by cell.

    Attributes:
        b: name of B; within one study, the compared setting with all its values except that of A.
        minimum_effect: a smaller relative change is not called faster or slower.
        cells: one row per pair of cells, :data:`COLUMNS`. Throughputs are samples/s (geometric means over the
            compared runs). ``ratio`` is the throughput of B divided by that of A, ``low`` and ``high`` are
            the ratio's 95 % interval. For cells that are faster or slower, ``part`` is the part of the step
            that changed most, with its times in A and B, and ``cause`` is the cause that changed most.
            ``pairs`` is the number of interleaved pairs of runs, missing if runs are unpaired. ``broken``
            marks cells that completed in A and failed in B. ``not_valid_a`` and ``not_valid_b`` are the
            reasons why the values are not valid; the verdict is nevertheless that of the throughputs.
        only_a: unmatched cells of A.
        only_b: unmatched cells of B.
        settings: settings that differ between A and B as a whole.
        environment: differences in software, hardware, hosts and variables.
        notes: remarks for the reader.
        validity: the findings about A and B, by ``a`` and ``b``.
    """

    a: str
    b: str
    minimum_effect: float
    cells: pd.DataFrame
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    settings: list[Difference] = field(default_factory=list)
    environment: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    validity: dict[str, list[Fact]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """The number of cells with each verdict."""
        found = self.cells["verdict"].value_counts()
        return {str(verdict): int(found.get(str(verdict), 0)) for verdict in Verdict}

    @property
    def regression(self) -> bool:
        """True if a cell is slower in B, or completed in A and failed in B."""
        return bool((self.cells["verdict"] == Verdict.SLOWER).any() or self.cells["broken"].any())

    @property
    def undecided(self) -> bool:
        """True if the verdict of some cell is ``cannot tell``."""
        return bool((self.cells["verdict"] == Verdict.UNKNOWN).any())


def compare_studies(
    a: Study, b: Study, *, minimum_effect: float = MINIMUM_EFFECT, ignore: Collection[str] = ()
) -> Comparison:
    """Compare study B with study A cell by cell.

    Raises:
        BenchError: A and B are the same folder, no cells match, or a study has no completed run.
    """
    if a.folder.path.resolve() == b.folder.path.resolve():
        raise BenchError(
            f"{a.folder.path} and {b.folder.path} are the same study",
            remedy="give two different studies, or compare cells of one study with --by KEY",
        )
    matching = match_studies(a, b, ignore=ignore)
    runs_a, runs_b = _Runs.of(a, "A"), _Runs.of(b, "B")
    name_a, name_b = (a.name, b.name) if a.name != b.name else (str(a.folder.path), str(b.folder.path))
    cells = _judged([_compare_runs(runs_a, runs_b, matching.pairs, (name_a, name_b))], minimum_effect)
    cells = _with_changes(cells, runs_a, runs_b)
    return Comparison(
        a=name_a,
        b=name_b,
        minimum_effect=minimum_effect,
        cells=cells,
        only_a=matching.only_a,
        only_b=matching.only_b,
        settings=matching.changes,
        environment=environment_differences(
            a, b, runs_a=runs_a.measured_in(cells["cell_a"]), runs_b=runs_b.measured_in(cells["cell_b"])
        ),
        notes=_notes_on_time(a, b),
        validity={"a": runs_a.assessment.facts, "b": runs_b.assessment.facts},
    )


def compare_within(
    study: Study, *, key: str, base: str | None = None, minimum_effect: float = MINIMUM_EFFECT
) -> Comparison:
    """Compare cells of one study that differ only in ``key``: A has the value ``base``, B any other value.

    Raises:
        BenchError: ``key`` does not vary or is a size, no cell has the base, or no run has completed.
    """
    matchings = match_within(study, key=key, base=base)
    runs = _Runs.of(study, "the study")
    if not any(matching.pairs for _, _, matching in matchings):
        raise BenchError(
            f"--by {key}: no two cells of study {study.name} differ in {key} alone",
            remedy=f"plan cells that differ in {key} and agree in all other settings",
        )
    parts = [
        _compare_runs(runs, runs, matching.pairs, (first, value)) for first, value, matching in matchings
    ]
    first, values = matchings[0][0], ", ".join(value for _, value, _ in matchings)
    unmatched = [matching.only_a for _, _, matching in matchings]
    return Comparison(
        a=f"{key} {first}",
        b=f"{key} {values}",
        minimum_effect=minimum_effect,
        cells=_with_changes(_judged(parts, minimum_effect), runs, runs),
        only_a=[cell for cell in unmatched[0] if all(cell in other for other in unmatched[1:])],
        only_b=[cell for _, _, matching in matchings for cell in matching.only_b],
        validity=dict.fromkeys("ab", runs.assessment.facts),
    )


def _notes_on_time(a: Study, b: Study) -> list[str]:
    """Return a note if one study ran completely before the other."""
    times = [study.runs[["started_at", "ended_at"]].stack().dropna() for study in (a, b)]
    for (first, before), (second, after) in permutations(zip("AB", times, strict=True)):
        if len(before) and len(after) and before.max() < after.min():
            return [
                f"{first} ended ({before.max():%Y-%m-%d %H:%M} UTC) before {second} began "
                f"({after.min():%Y-%m-%d %H:%M} UTC): the difference includes all other changes between "
                "these times"
            ]
    return []


@dataclass(frozen=True)
class _Runs:
    """The runs of A or B, with the logarithms of their throughputs, and their allocations' ids if shared."""

    label: str
    study: Study
    frame: pd.DataFrame
    assessment: Assessment

    @classmethod
    def of(cls, study: Study, label: str) -> _Runs:
        """Return the runs of a study.

        Raises:
            BenchError: no run has completed.
        """
        frames = measure(study)
        runs = frames.runs
        if not runs["measured"].any():
            raise BenchError(
                f"{study.folder.path}: nothing to compare: no run has completed "
                f"({state_counts(runs) or 'no run is planned'})",
                remedy="run it first: bench submit",
            )
        runs["log"] = np.log(runs["throughput_samples_per_sec"].where(runs["measured"]))
        # Job ids are unique per cluster only, so the study's folder is part of the id.
        shared = runs["allocation"].eq("pack") & runs["job_id"].notna()
        names = f"{study.folder.path.resolve()} " + runs["job_id"].astype("str")
        runs["allocation_id"] = names.where(shared)
        return cls(label, study, runs, assess(study, frames))

    def measured_in(self, cells: pd.Series) -> list[str]:
        """Return the ``run_id`` of the measured runs of some cells."""
        chosen = self.frame["measured"] & self.frame["cell_id"].isin(cells)
        return [str(run_id) for run_id in self.frame.loc[chosen, "run_id"]]

    def of_cells(self, cells: Sequence[str]) -> pd.DataFrame:
        """Return the runs of some cells; the column ``place`` is the index of the cell in ``cells``."""
        places = pd.Index(cells).get_indexer(pd.Index(self.frame["cell_id"]))
        return self.frame.assign(place=places)[places >= 0]


def _compare_runs(
    a: _Runs, b: _Runs, pairs: Sequence[tuple[str, str]], names: tuple[str, str]
) -> tuple[pd.DataFrame, LogRatios]:
    """Return one row per pair of cells, and the ratios of their throughputs.

    If a pair of cells has at least three pairs of runs with the same repeat in one allocation, only these
    runs are compared. Otherwise all runs are compared, unpaired.
    """
    size = len(pairs)
    runs = [own.of_cells([pair[at] for pair in pairs]) for at, own in enumerate((a, b))]
    measured = [own[own["measured"]] for own in runs]
    moments = [
        log_moments(own[_RATE].to_numpy(dtype=float), groups=own["place"].to_numpy(dtype=np.intp), size=size)
        for own in measured
    ]
    pairs_of_runs = _pairs_of_runs(*measured)
    pair_moments = _pair_moments(pairs_of_runs, size=size)
    use_pairs = pair_moments.n >= MIN_RUNS
    both = zip(paired(pair_moments), unpaired(*moments), strict=True)
    ratios = LogRatios(*(np.where(use_pairs, of_pairs, of_runs) for of_pairs, of_runs in both))
    rows = a.study.cells.set_index("cell_id").loc[[pair[0] for pair in pairs], list(_CELL)]
    rows = rows.reset_index(drop=True).assign(a=names[0], b=names[1])
    rows["cell_a"], rows["cell_b"] = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    rows["pairs"] = pd.array(np.where(use_pairs, pair_moments.n, np.nan), dtype="Int64")
    for side, own in zip("ab", moments, strict=True):
        of_pairs = pairs_of_runs.groupby("place")[f"log_{side}"].mean().reindex(range(size))
        rows[f"throughput_{side}"] = np.exp(np.where(use_pairs, of_pairs, own.mean))
    _add_counts(rows, runs)
    for side, one in (("a", a), ("b", b)):
        rows[f"not_valid_{side}"] = [one.assessment.invalid.get(cell, "") for cell in rows[f"cell_{side}"]]
    rows["missing"] = _missing_runs(rows, runs, (a.label, b.label))
    return rows, ratios


def _add_counts(rows: pd.DataFrame, runs: Sequence[pd.DataFrame]) -> None:
    """Add the runs of A and B, their outliers, and ``broken`` to ``rows``."""
    size = len(rows)
    rows["outliers"] = 0
    for side, own in zip("ab", runs, strict=True):
        measured = own[own["measured"]]
        places = measured["place"].to_numpy(dtype=np.intp)
        n = np.bincount(places, minlength=size)
        rows[f"n_{side}"] = n
        rows["outliers"] += np.bincount(places[measured["outlier"].to_numpy()], minlength=size)
    failed = runs[1].loc[runs[1]["state"] == RunState.FAILED, "place"]
    failed_in_b = np.bincount(failed.to_numpy(dtype=np.intp), minlength=size) > 0
    rows["broken"] = (rows["n_a"] > 0) & (rows["n_b"] == 0) & failed_in_b


def _pairs_of_runs(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Pair runs by allocation and repeat: ``log_a``, ``log_b``, and ``place`` of their pair of cells."""
    keys = ["place", "allocation_id", "repeat"]
    sides = [runs.loc[runs["allocation_id"].notna(), [*keys, "log"]] for runs in (a, b)]
    return sides[0].merge(sides[1], on=keys, suffixes=("_a", "_b"))


def _pair_moments(both: pd.DataFrame, *, size: int) -> LogMoments:
    """Return the moments of log(B / A) of paired runs, by pair of cells."""
    ratios = np.exp((both["log_b"] - both["log_a"]).to_numpy(dtype=float))
    return log_moments(ratios, groups=both["place"].to_numpy(dtype=np.intp), size=size)


def _missing_runs(rows: pd.DataFrame, runs: Sequence[pd.DataFrame], labels: tuple[str, str]) -> list[str]:
    """Name, for each pair of cells, the studies without a measured run, with the states of their runs."""
    texts: list[list[str]] = [[] for _ in range(len(rows))]
    for side, own, label in zip("ab", runs, labels, strict=True):
        for place in np.flatnonzero(rows[f"n_{side}"] == 0):
            of_cell = own[own["place"] == place]
            found = f" ({state_counts(of_cell)})" if len(of_cell) else ""
            texts[place].append(f"{label}: no measured run{found}")
    return ["; ".join(parts) for parts in texts]


def _judged(parts: Sequence[tuple[pd.DataFrame, LogRatios]], minimum_effect: float) -> pd.DataFrame:
    """Return all rows with verdicts, from (rows, ratios) of groups; p-values are adjusted over all groups."""
    ratios = joined([ratios for _, ratios in parts])
    rows = pd.concat([rows for rows, _ in parts], ignore_index=True)
    rows = pd.concat([rows, judge(ratios, minimum_effect=minimum_effect)], axis=1)
    fewest = rows[["n_a", "n_b"]].min(axis=1).to_numpy(dtype=float)
    pairs = rows["pairs"].to_numpy(dtype=float, na_value=np.nan)
    n: Floats = np.where(np.isnan(pairs), fewest, pairs)
    rows["needed"] = runs_needed(ratios, minimum_effect=minimum_effect, n=n)
    tested = int(rows["low"].notna().sum())
    rows["remark"] = [_remark(row, tested, minimum_effect) for row in rows.to_dict("records")]
    return rows[[name for name in COLUMNS if name in rows]]


def _with_changes(rows: pd.DataFrame, a: _Runs, b: _Runs) -> pd.DataFrame:
    """Add the part of the step and the cause that changed, for the cells that are faster or slower."""
    changed = rows["verdict"].isin([Verdict.FASTER, Verdict.SLOWER])
    found = dict.fromkeys(rows.index, Change())
    if changed.any():
        first = StepTimes(a.study, a.frame)
        second = first if a is b else StepTimes(b.study, b.frame)
        pairs = rows.loc[changed, ["cell_a", "cell_b"]].itertuples()
        found |= {place: change_between(first, second, one, other) for place, one, other in pairs}
    columns = ["part", "part_a_sec", "part_b_sec", "cause"]
    rows = rows.join(pd.DataFrame([*found.values()], index=rows.index).set_axis(columns, axis=1))
    texts = zip(rows["remark"], found.values(), strict=True)
    rows["remark"] = ["; ".join(filter(None, (remark, str(change)))) for remark, change in texts]
    return rows[list(COLUMNS)]


def _remark(row: dict[Any, Any], tested: int, minimum_effect: float) -> str:
    """Name what is not valid, explain a missing verdict, and mention unpaired runs and outliers."""
    sides = {"a": row["not_valid_a"], "b": row["not_valid_b"]}
    texts = [f"{side.upper()} is not valid: {reason}" for side, reason in sides.items() if reason]
    if sides["a"] == sides["b"] != "":
        texts = [f"A and B are not valid: {sides['a']}"]
    texts += [row["missing"]] if row["missing"] else []
    fewest, most = sorted((row["n_a"], row["n_b"]))
    if row["broken"]:
        texts.append("failed in B but completed in A: this counts as a regression")
    elif not math.isfinite(row["low"]) and not row["missing"]:
        texts.append(f"{count(fewest, 'run')} per side, but an interval needs {MIN_RUNS}")
    elif row["verdict"] == Verdict.UNKNOWN and not row["missing"]:
        texts.append(_why_unknown(row, tested, minimum_effect))
    if not pd.isna(row["pairs"]) and row["pairs"] < most:
        texts.append(f"{row['pairs']} interleaved pairs; unpaired runs are ignored")
    if row["outliers"]:
        texts.append(f"{count(row['outliers'], 'outlier')}, not excluded")
    return "; ".join(texts)


def _why_unknown(row: dict[Any, Any], tested: int, minimum_effect: float) -> str:
    least = short_percent(minimum_effect)
    excludes_one = row["low"] > 1 or row["high"] < 1
    if excludes_one and abs(math.log(row["ratio"])) >= math.log1p(minimum_effect):
        return f"the interval excludes 1, but with {tested} cells this may be chance"
    needed = (
        f"about {row['needed']:.0f} runs per side are needed" if row["needed"] < 1000 else "too much noise"
    )
    more = f"{needed} to detect a difference of {least}"
    return f"there is a change, but it may be smaller than {least}: {more}" if excludes_one else more
