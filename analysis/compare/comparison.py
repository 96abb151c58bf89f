"""Compare throughputs cell by cell: of two studies, or of the values of one setting within a study.

:mod:`analysis.compare.matching` selects the cells and :mod:`analysis.compare.verdicts` judges the ratios.
Ratios are B over A and are never averaged over cells.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.changes import Change, StepTimes, change_between
from analysis.compare.matching import Difference, environment_differences, match_studies, match_within
from analysis.compare.verdicts import (
    MINIMUM_EFFECT,
    LogRatios,
    Verdict,
    joined,
    judge,
    paired,
    runs_needed,
    unpaired,
)
from analysis.data.load import Study
from analysis.data.names import state_counts
from analysis.stats.estimate import MIN_RUNS, Floats, LogMoments, log_moments
from analysis.stats.measured import measure
from analysis.text import count, short_percent
from bench.errors import BenchError
from bench.study.ledger import RunState

_RATE = "throughput_samples_per_sec"
#: Columns of :attr:`Comparison.cells`, taken from the cell of A.
_CELL = ("nodes", "gpus_per_node", "gpus", "global_batch", "per_gpu_batch", "launcher", "backend")
#: Columns of :attr:`Comparison.cells`: one row per matched pair of cells.
COLUMNS = (
    *("a", "b", "cell_a", "cell_b", *_CELL, "n_a", "n_b", "pairs", "throughput_a", "throughput_b"),
    *("ratio", "low", "high", "p_slower", "p_faster", "verdict", "broken", "remark"),
    *("part", "part_a_sec", "part_b_sec", "cause"),
)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing throughputs cell by cell.

    Attributes:
        a: name of A.
        b: name of B; within one study, the compared setting with all values other than that of A.
        minimum_effect: a smaller relative change is not called faster or slower.
        cells: one row per pair of cells, :data:`COLUMNS`. Throughputs are samples/s (geometric means over the
            compared runs). ``ratio`` is B over A of these means, ``low`` and ``high`` its 95 % interval. For
            cells that are faster or slower, ``part`` is the part of the step that changed most, with its
            times in A and B, and ``cause`` the cause that did. ``pairs`` is the number of
            interleaved pairs of runs, missing if runs are unpaired. ``broken`` marks cells that completed in
            A and failed in B.
        only_a: unmatched cells of A.
        only_b: unmatched cells of B.
        settings: settings that differ between A and B as a whole.
        environment: differences in software, hardware, hosts and variables.
        notes: remarks for the reader.
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
        """True if the data cannot tell for some cell whether it is slower."""
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
    """The runs of A or B, with the logarithm of each throughput and the id of a shared allocation."""

    label: str
    study: Study
    frame: pd.DataFrame

    @classmethod
    def of(cls, study: Study, label: str) -> _Runs:
        """Return the runs of a study.

        Raises:
            BenchError: no run has completed.
        """
        runs = measure(study).runs
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
        return cls(label, study, runs)

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
    """Return the paired runs (same allocation and repeat) as ``place``, ``log_a`` and ``log_b``."""
    keys = ["place", "allocation_id", "repeat"]
    sides = [runs.loc[runs["allocation_id"].notna(), [*keys, "log"]] for runs in (a, b)]
    return sides[0].merge(sides[1], on=keys, suffixes=("_a", "_b"))


def _pair_moments(both: pd.DataFrame, *, size: int) -> LogMoments:
    """Return the moments of log(B / A) of paired runs, by pair of cells."""
    ratios = np.exp((both["log_b"] - both["log_a"]).to_numpy(dtype=float))
    return log_moments(ratios, groups=both["place"].to_numpy(dtype=np.intp), size=size)


def _missing_runs(rows: pd.DataFrame, runs: Sequence[pd.DataFrame], labels: tuple[str, str]) -> list[str]:
    """Return a text per pair of cells: which of A and B has no measured run, with its runs' states."""
    texts: list[list[str]] = [[] for _ in range(len(rows))]
    for side, own, label in zip("ab", runs, labels, strict=True):
        for place in np.flatnonzero(rows[f"n_{side}"] == 0):
            of_cell = own[own["place"] == place]
            found = f" ({state_counts(of_cell)})" if len(of_cell) else ""
            texts[place].append(f"{label}: no measured run{found}")
    return ["; ".join(parts) for parts in texts]


def _judged(parts: Sequence[tuple[pd.DataFrame, LogRatios]], minimum_effect: float) -> pd.DataFrame:
    """Return the rows of all parts with verdicts; p-values are adjusted over the ratios of all parts."""
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
    """Explain a missing verdict, and mention unpaired runs and outliers."""
    texts = [row["missing"]] if row["missing"] else []
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
