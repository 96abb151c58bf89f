"""The runs of both sides of a comparison, and what each pair of cells says before it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.estimate import MIN_RUNS, Floats, LogMoments, log_moments
from analysis.listing import states
from analysis.load import Study
from analysis.measured import measure
from analysis.verdicts import Contrast, paired, unpaired
from bench.errors import BenchError
from bench.ledger import RunState

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
            found = states(self.runs) or "no run is planned"
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
            words[place].append(f"{name}: no run counts" + (f" ({states(own)})" if len(own) else ""))
    return ["; ".join(one) for one in words]
