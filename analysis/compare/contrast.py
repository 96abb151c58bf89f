"""The runs of both sides of a comparison, and what each pair of cells says before it is judged."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.changes import environment_changes, time_apart
from analysis.compare.matching import Difference, match_studies, match_within
from analysis.compare.verdicts import (
    MINIMUM_EFFECT,
    Contrast,
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

#: What a matched pair takes from its cell of A.
_CELL = ("nodes", "gpus_per_node", "gpus", "global_batch", "per_gpu_batch", "launcher", "backend")


@dataclass(frozen=True)
class Side:
    """The runs of one side."""

    called: str
    study: Study
    runs: pd.DataFrame

    @classmethod
    def of(cls, study: Study, called: str) -> Side:
        """Return the runs of a study with their log throughputs and shared allocations."""
        runs = measure(study).runs
        runs["log"] = np.log(runs["throughput_samples_per_sec"].where(runs["measured"]))
        runs["allocation_id"] = _allocations(study, runs)
        return cls(called, study, runs)

    def refuse_empty(self) -> None:
        """Raise a BenchError where no run counts."""
        if not self.runs["measured"].any():
            found = state_counts(self.runs) or "no run is planned"
            raise BenchError(
                f"{self.study.folder.path}: nothing to compare: no run has completed ({found})",
                remedy="run it first: bench submit",
            )

    def runs_of(self, cells: pd.Series) -> list[str]:
        """Return the ``run_id`` of the runs of some cells that count."""
        chosen = self.runs["measured"] & self.runs["cell_id"].isin(cells)
        return [str(run_id) for run_id in self.runs.loc[chosen, "run_id"]]

    def placed(self, cells: Sequence[str]) -> pd.DataFrame:
        """Return the runs of some cells with ``place``, that of their cell among ``cells``."""
        places = pd.Index(cells).get_indexer(pd.Index(self.runs["cell_id"]))
        return self.runs.assign(place=places)[places >= 0]


def _allocations(study: Study, runs: pd.DataFrame) -> pd.Series:
    """Return for each run the allocation that it shared with others; missing for a job of its own.

    Jobs are counted anew on every cluster: the study's folder is part of the name.
    """
    shared = runs["allocation"].eq("pack") & runs["job_id"].notna()
    return (f"{study.folder.path.resolve()} " + runs["job_id"].astype("str")).where(shared)


@dataclass(frozen=True)
class Part:
    """The pairs of cells of one comparison with what their runs say."""

    rows: pd.DataFrame
    contrast: Contrast


def contrast(a: Side, b: Side, pairs: Sequence[tuple[str, str]], names: tuple[str, str]) -> Part:
    """Return the pairs of cells with the contrasts of their runs.

    Runs of equal repeat that shared an allocation are pairs, from three such pairs on; else all
    runs count, unpaired.
    """
    size = len(pairs)
    placed = [side.placed([pair[at] for pair in pairs]) for at, side in enumerate((a, b))]
    counted = [runs[runs["measured"]] for runs in placed]
    moments = [
        log_moments(_rates(runs), groups=runs["place"].to_numpy(dtype=np.intp), size=size) for runs in counted
    ]
    together = _interleaved(*counted, size=size)
    as_pairs = together.n >= MIN_RUNS
    apart, as_one = unpaired(*moments), paired(together)
    found = Contrast(
        *(
            np.where(as_pairs, getattr(as_one, name), getattr(apart, name))
            for name in ("centre", "error", "freedom")
        )
    )
    rows = a.study.cells.set_index("cell_id").loc[[pair[0] for pair in pairs], list(_CELL)]
    rows = rows.reset_index(drop=True).assign(a=names[0], b=names[1])
    rows["cell_a"], rows["cell_b"] = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    rows["pairs"] = pd.array(np.where(as_pairs, together.n, np.nan), dtype="Int64")
    _add_counts(rows, placed)
    rows["missing"] = _missing(rows, placed, (a.called, b.called))
    return Part(rows, found)


def _rates(runs: pd.DataFrame) -> Floats:
    return runs["throughput_samples_per_sec"].to_numpy(dtype=float)


def _add_counts(rows: pd.DataFrame, placed: Sequence[pd.DataFrame]) -> None:
    """Add by side n and throughput (harmonic mean); outliers on both; and whether B failed alone."""
    size = len(rows)
    rows["outliers"] = 0
    for side, runs in zip("ab", placed, strict=True):
        counted = runs[runs["measured"]]
        places = counted["place"].to_numpy(dtype=np.intp)
        n = np.bincount(places, minlength=size)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows[f"throughput_{side}"] = n / np.bincount(places, weights=1 / _rates(counted), minlength=size)
        rows[f"n_{side}"] = n
        rows["outliers"] += np.bincount(places[counted["outlier"].to_numpy()], minlength=size)
    failed = placed[1].loc[placed[1]["state"] == RunState.FAILED, "place"]
    broken = np.bincount(failed.to_numpy(dtype=np.intp), minlength=size) > 0
    rows["broken"] = (rows["n_a"] > 0) & (rows["n_b"] == 0) & broken


def _interleaved(a: pd.DataFrame, b: pd.DataFrame, *, size: int) -> LogMoments:
    """Return the moments of the ratios B / A of runs of equal repeat in one allocation, by place."""
    keys = ["place", "allocation_id", "repeat"]
    sides = [runs.loc[runs["allocation_id"].notna(), [*keys, "log"]] for runs in (a, b)]
    both = sides[0].merge(sides[1], on=keys, suffixes=("_a", "_b"))
    ratios = np.exp((both["log_b"] - both["log_a"]).to_numpy(dtype=float))
    return log_moments(ratios, groups=both["place"].to_numpy(dtype=np.intp), size=size)


def _missing(rows: pd.DataFrame, placed: Sequence[pd.DataFrame], called: tuple[str, str]) -> list[str]:
    """Return in words which side has no run that counts, and what became of its runs."""
    words: list[list[str]] = [[] for _ in range(len(rows))]
    for side, runs, name in zip("ab", placed, called, strict=True):
        for place in np.flatnonzero(rows[f"n_{side}"] == 0):
            own = runs[runs["place"] == place]
            words[place].append(f"{name}: no run counts" + (f" ({state_counts(own)})" if len(own) else ""))
    return ["; ".join(one) for one in words]


# Compare throughputs cell by cell: two studies, or the values of one setting within a study.
#
# See :mod:`analysis.compare.matching` for which cells are compared and :mod:`analysis.compare.verdicts` for
# what is said of them. Ratios are B over A, and never averaged over cells.

#: One row per matched pair of cells.
COLUMNS = (
    *("a", "b", "cell_a", "cell_b", "nodes", "gpus_per_node", "gpus", "global_batch", "per_gpu_batch"),
    *("launcher", "backend", "n_a", "n_b", "pairs", "throughput_a", "throughput_b"),
    *("ratio", "low", "high", "p_slower", "p_faster", "verdict", "broken", "remark"),
)


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        a: what A is, in words.
        b: what B is; with several values of a setting, all of them.
        minimum_effect: the least relative change that is worth a verdict.
        cells: one row per pair of cells, :data:`COLUMNS`. Throughputs are samples/s (harmonic means),
            ``ratio`` is B over A with its 95 % interval, ``pairs`` the pairs of interleaved runs
            (None where runs are no pairs), ``broken`` that B failed where A completed.
        only_a: cells of A alone.
        only_b: cells of B alone.
        settings: settings that differ as a whole.
        environment: software, hardware, hosts and variables that differ.
        notes: what a reader should know.
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
        """How many cells got each verdict."""
        found = self.cells["verdict"].value_counts()
        return {str(verdict): int(found.get(str(verdict), 0)) for verdict in Verdict}

    @property
    def regression(self) -> bool:
        """Whether any cell is slower in B, or failed in B where A completed."""
        return bool((self.cells["verdict"] == Verdict.SLOWER).any() or self.cells["broken"].any())


def compare_studies(
    a: Study, b: Study, *, minimum_effect: float = MINIMUM_EFFECT, ignore: Collection[str] = ()
) -> Comparison:
    """Compare study B with study A, cell by cell.

    Raises:
        BenchError: both are the same folder, no cells match, or one has no run that counts.
    """
    if a.folder.path.resolve() == b.folder.path.resolve():
        raise BenchError(
            f"{a.folder.path} and {b.folder.path} are the same study",
            remedy="give two studies, or compare within one: --by KEY",
        )
    matching = match_studies(a, b, ignore=ignore)
    side_a, side_b = Side.of(a, "A"), Side.of(b, "B")
    for side in (side_a, side_b):
        side.refuse_empty()
    name_a, name_b = (a.name, b.name) if a.name != b.name else (str(a.folder.path), str(b.folder.path))
    cells = _judged([contrast(side_a, side_b, matching.pairs, (name_a, name_b))], minimum_effect)
    runs = [side.runs_of(cells[f"cell_{at}"]) for side, at in ((side_a, "a"), (side_b, "b"))]
    apart = time_apart(a, b)
    return Comparison(
        a=name_a,
        b=name_b,
        minimum_effect=minimum_effect,
        cells=cells,
        only_a=matching.only_a,
        only_b=matching.only_b,
        settings=matching.changes,
        environment=environment_changes(a, b, runs_a=runs[0], runs_b=runs[1]),
        notes=[apart] if apart else [],
    )


def compare_within(
    study: Study, *, key: str, base: str | None = None, minimum_effect: float = MINIMUM_EFFECT
) -> Comparison:
    """Compare the cells of one study that differ in ``key`` alone: every value with the base.

    Raises:
        BenchError: ``key`` does not vary in the study, or is a size; there is no such base; no
            run counts.
    """
    matchings = match_within(study, key=key, base=base)
    side = Side.of(study, "the study")
    side.refuse_empty()
    parts = [contrast(side, side, matching.pairs, (first, value)) for first, value, matching in matchings]
    if not any(matching.pairs for _, _, matching in matchings):
        raise BenchError(
            f"--by {key}: no two cells of study {study.name} differ in {key} alone",
            remedy="plan an axis of its values, so that everything else stays the same",
        )
    first, values = matchings[0][0], ", ".join(value for _, value, _ in matchings)
    return Comparison(
        a=f"{key} {first}",
        b=f"{key} {values}",
        minimum_effect=minimum_effect,
        cells=_judged(parts, minimum_effect),
        only_a=_in_all([matching.only_a for _, _, matching in matchings]),
        only_b=[cell for _, _, matching in matchings for cell in matching.only_b],
    )


def _in_all(lists: Sequence[Sequence[str]]) -> list[str]:
    return [cell for cell in lists[0] if all(cell in other for other in lists[1:])]


def _judged(parts: Sequence[Part], minimum_effect: float) -> pd.DataFrame:
    """Return the rows of all parts, judged as one family."""
    found = joined([part.contrast for part in parts])
    rows = pd.concat([part.rows for part in parts], ignore_index=True)
    rows = pd.concat([rows, judge(found, minimum_effect=minimum_effect)], axis=1)
    fewest = rows[["n_a", "n_b"]].min(axis=1).to_numpy(dtype=float)
    pairs = rows["pairs"].to_numpy(dtype=float, na_value=np.nan)
    n: Floats = np.where(np.isnan(pairs), fewest, pairs)
    rows["needed"] = runs_needed(found, minimum_effect=minimum_effect, n=n)
    tested = int(rows["low"].notna().sum())
    rows["remark"] = [_remark(row, tested, minimum_effect) for row in rows.to_dict("records")]
    return rows[list(COLUMNS)]


def _remark(row: dict[Any, Any], tested: int, minimum_effect: float) -> str:
    """Return why nothing can be told, and what to know of what is told."""
    words = [row["missing"]] if row["missing"] else []
    fewest, most = sorted((row["n_a"], row["n_b"]))
    if row["broken"]:
        words.append("A completed: this counts as a regression")
    elif not math.isfinite(row["low"]) and not row["missing"]:
        words.append(f"{count(fewest, 'run')} on a side: an interval needs {MIN_RUNS}")
    elif row["verdict"] == Verdict.UNKNOWN and not row["missing"]:
        words.append(_why_unknown(row, tested, minimum_effect))
    if not pd.isna(row["pairs"]) and row["pairs"] < most:
        words.append(f"{row['pairs']} interleaved pairs; runs without a partner take no part")
    if row["outliers"]:
        words.append(f"{count(row['outliers'], 'outlier')}, counted")
    return "; ".join(words)


def _why_unknown(row: dict[Any, Any], tested: int, minimum_effect: float) -> str:
    least = short_percent(minimum_effect)
    clear = row["low"] > 1 or row["high"] < 1
    if clear and abs(math.log(row["ratio"])) >= math.log1p(minimum_effect):
        return f"clear of 1 by itself, but of {tested} cells one may be so by chance"
    needed = row["needed"]
    more = f"about {needed:.0f} runs a side would tell {least}" if needed < 1000 else f"too noisy for {least}"
    return f"a change, but perhaps less than {least}: {more}" if clear else more
