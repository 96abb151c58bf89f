"""Convert a table measured elsewhere into the DataFrames of a study: series, cells and runs.

In a series without batch columns, the work of a step is unknown. A label then determines the scaling mode,
and work is counted in arbitrary units: one per step for strong scaling, one per rank and step for weak
scaling. Ratios do not depend on the unit. :meth:`TableStudy.scale` hides columns with such a unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import RUNS_COLUMNS, Study
from analysis.data.names import layout, ranks
from analysis.stats.columns import PARTS, READINGS
from analysis.stats.decompose import TIMES
from analysis.stats.estimate import outliers
from analysis.stats.measured import Frames
from analysis.tables_in.read import Table, TableProblems
from analysis.text import clean, count, listed, one_line, whole
from bench.study.layout import METRICS_COLUMNS, StudyFolder
from bench.study.ledger import RunState

_MODE_REMEDY = (
    "add a column global_batch or per_gpu_batch, or give --mode strong (the same work at every size) "
    "or --mode weak (the same work per rank)"
)
_REGIME_REMEDY = "if these rows are a strong and a weak series, distinguish them by a column mode or series"
_THROUGHPUTS = ("throughput_samples_per_sec", "throughput_low", "throughput_high", "throughput_all")
_BATCHES = ("global_batch", "per_gpu_batch")


@dataclass(frozen=True)
class TableStudy:
    """A table converted to a study and its frames.

    ``hidden`` maps each series to the columns of the scaling table that the input does not determine.
    ``remarks`` are sentences about derived and assumed values.
    """

    study: Study
    frames: Frames
    hidden: dict[str, tuple[str, ...]]
    remarks: list[str]

    def scale(self, *, baseline: str | None = None) -> pd.DataFrame:
        """Return the scaling table. Columns that the input does not determine are empty."""
        rows = scaling_table(self.frames, baseline=baseline)
        for series, columns in self.hidden.items():
            own = rows["series"] == series
            for name in columns:
                rows[name] = rows[name].astype(float).mask(own)
        return rows

    @property
    def shown(self) -> Frames:
        """The frames for the report; in ``runs``, values that the input does not determine are NaN."""
        runs = self.frames.runs.copy()
        series = self.frames.members.set_index("cell_id")["series"]
        for name in ("throughput_samples_per_sec", "step_time_sec"):
            hidden_in = {own for own, columns in self.hidden.items() if name in columns}
            runs[name] = runs[name].mask(runs["cell_id"].map(series).isin(hidden_in))
        return replace(self.frames, runs=runs)


def study_of_table(table: Table, *, mode: str | None, folder: Path) -> TableStudy:
    """Convert a table into a study.

    ``mode`` is for series whose columns do not determine the mode.

    Raises:
        InputError: series, batches or repeats of the rows are inconsistent.
    """
    problems = TableProblems(table.path)
    rows = table.rows.copy()
    remarks = []
    if "gpus" not in table.columns and "gpus_per_node" not in table.columns:
        remarks.append("The table has no column gpus, so each node is counted as one rank")
    remarks += _assign_series(rows, table, problems)
    problems.raise_if_any()
    remarks += _separate_other_batches(rows, mode=mode)
    rows["work"] = None
    hidden = {}
    for series, own in rows.groupby("series", sort=False):
        hidden[str(series)] = _complete_series(rows, own, problems, mode=mode)
    problems.raise_if_any()
    _name_cells(rows, problems)
    problems.raise_if_any()
    frames = _frames(rows, labelled_by="--mode" if mode and "mode" not in table.columns else "the table")
    source = f"{count(len(rows), 'row')} of {one_line(table.path.name)}, measured elsewhere"
    study = Study(
        folder=StudyFolder(folder),
        plan=_plan(table, rows, mode=mode),
        cells=frames.cells,
        members=frames.members,
        runs=frames.runs,
        epochs=pd.DataFrame(columns=["run_id", "cell_id", *METRICS_COLUMNS]),
        remarks=[source, *remarks],
        attempts=[None] * len(rows),
    )
    return TableStudy(study, frames, hidden, remarks)


def _plan(table: Table, rows: pd.DataFrame, *, mode: str | None) -> dict[str, Any]:
    named = rows.drop_duplicates("series")
    return {
        "study": one_line(table.path.stem, limit=120),
        "series": [
            {"series": series, "mode": own_mode, "batch": None, "label": series}
            for series, own_mode in zip(named["series"], named["mode"], strict=True)
        ],
        "cells": [],
        "table": {"name": clean(table.path.name), "text": table.text, "rows": len(rows), "mode": mode},
    }


def _cell_key(row: dict[Any, Any]) -> tuple[Any, ...]:
    """Return the values that identify the cell of a row: rows with equal values are runs of one cell."""
    return tuple(row[name] for name in ("series", "gpus", "nodes", "gpus_per_node", "global_batch"))


def _assign_series(rows: pd.DataFrame, table: Table, problems: TableProblems) -> list[str]:
    """Set each row's series and check for duplicate repeats; return remarks on assumptions made."""
    names = [_joined(pair) for pair in zip(rows["series"], rows["mode"], strict=True)]
    rows["series"] = [name or one_line(table.path.stem, limit=80) for name in names]
    if "repeat" in table.columns:
        _check_repeats(rows, problems)
        return []
    runs = Counter(_cell_key(row) for row in rows.to_dict("records"))
    several = [f"{amount} rows with {count(key[1], 'rank')}" for key, amount in runs.items() if amount > 1]
    if not several:
        return []
    return [f"Rows of one size and series were taken as repeats of one cell: {listed(several, limit=6)}"]


def _joined(texts: Iterable[str | None]) -> str:
    return one_line(", ".join(text for text in texts if text), limit=160)


def _check_repeats(rows: pd.DataFrame, problems: TableProblems) -> None:
    first: dict[tuple[Any, ...], int] = {}
    for row in rows.to_dict("records"):
        line = first.setdefault((*_cell_key(row), row["repeat"]), row["line"])
        if line != row["line"]:
            message = f"repeat {row['repeat']!r} of this size is already in line {line}"
            problems.add(row["line"], message, "give each repeat its own number, or add a column series")


def _separate_other_batches(rows: pd.DataFrame, *, mode: str | None) -> list[str]:
    """Give a size with another batch than the rest of its series its own series; return remarks that name it.

    With this size, the series would be neither strong nor weak scaling, and no size would have an efficiency.
    """
    remarks = []
    for series, own in rows.groupby("series", sort=False):
        if own["global_batch"].isna().any():
            continue
        label = next((value for value in own["mode"] if value), None) or mode
        if (found := _other_batch(own, label=label)) is None:
            continue
        other, what, batch, usual = found
        rows.loc[other.index, "series"] = one_line(f"{series}, {what} {whole(batch)}", limit=160)
        lines = listed([str(line) for line in other["line"]])
        remarks.append(
            f"{'Line' if len(other) == 1 else 'Lines'} {lines} ({ranks(other.iloc[0])}): the {what} is "
            f"{whole(batch)}, but {whole(usual)} in the rest of the series, so this size is not compared "
            "with the other sizes"
        )
    return remarks


def _other_batch(own: pd.DataFrame, *, label: str | None) -> tuple[pd.DataFrame, str, float, float] | None:
    """Return the rows of the size with another batch, the name of this batch, its value and the usual value.

    Return None if the batches are consistent, if several sizes differ, or if it is unclear which size does.
    """
    per_rank = own["global_batch"].astype(float) / own["gpus"].astype(float)
    batches = {"strong": own["global_batch"].astype(float), "weak": per_rank.round(6)}
    if any(batch.nunique() == 1 for batch in batches.values()):
        return None
    found = {}
    for mode, batch in batches.items():
        usual = batch.mode().iloc[0]
        other = own[batch != usual]
        is_one_size = len(other.drop_duplicates(["gpus", "nodes", "gpus_per_node", "global_batch"])) == 1
        if is_one_size and own.loc[batch == usual, "gpus"].nunique() > 1:
            what = "global batch" if mode == "strong" else "batch per rank"
            found[mode] = (other, what, float(batch[other.index[0]]), float(usual))
    if len(found) == 1:
        return next(iter(found.values()))
    return found.get(str(label))


def _complete_series(
    rows: pd.DataFrame, own: pd.DataFrame, problems: TableProblems, *, mode: str | None
) -> tuple[str, ...]:
    """Fill in the mode, work and time of one series; return its columns for ``TableStudy.hidden``."""
    label = next((value for value in own["mode"] if value), None)
    has_batch = own["global_batch"].notna()
    line = int(own["line"].iloc[0])
    if label and mode and label != mode and not has_batch.any():
        problems.add(line, f"the row says {label}, but --mode says {mode}", "correct the row or omit --mode")
    label = label or mode
    rows.loc[own.index, "mode"] = label or ""
    hidden: tuple[str, ...] = ()
    if has_batch.all():
        work = own["global_batch"].astype(float)
    elif has_batch.any():
        line = int(own.loc[~has_batch, "line"].iloc[0])
        problems.add(line, "the batch is missing, but other rows of the series have one", "fill in the batch")
        return ()
    elif label is None:
        problems.add(line, "the table does not show whether this is strong or weak scaling", _MODE_REMEDY)
        return ()
    else:
        work = own["gpus"].astype(float) if label == "weak" else pd.Series(1.0, index=own.index)
        hidden = (*_BATCHES, *(_THROUGHPUTS if own["time"].notna().any() else ("step_time_sec",)))
    rows.loc[own.index, "work"] = work
    rows.loc[own.index, "time"] = own["time"].astype(float).fillna(work / own["throughput"].astype(float))
    return hidden


def _name_cells(rows: pd.DataFrame, problems: TableProblems) -> None:
    """Set unique cell ids, made of size and batch, and of the series if several have this size and batch."""
    keys: dict[tuple[str, str], tuple[Any, ...]] = {}
    ids = []
    for row in rows.to_dict("records"):
        size = layout(row, times="x").replace(" ", "") or ranks(row)
        batch = f"-b{row['per_gpu_batch']:g}" if row["per_gpu_batch"] else ""
        name = f"{size}{batch}"
        if keys.setdefault((row["series"], name), _cell_key(row)) != _cell_key(row):
            message = "the row has the size and batch per rank of an earlier row, but another global batch"
            problems.add(row["line"], message, "distinguish them by a column series")
        ids.append((row["series"], name))
    series_with = Counter(name for _, name in set(ids))
    rows["cell_id"] = [f"{series}-{name}" if series_with[name] > 1 else name for series, name in ids]


def _frames(rows: pd.DataFrame, *, labelled_by: str) -> Frames:
    """Convert the rows to frames. ``global_batch`` is the work of a step, possibly in arbitrary units."""
    cells = rows.drop_duplicates("cell_id").reset_index(drop=True)
    cells = cells.assign(nodes=cells["nodes"].fillna(1), global_batch=cells["work"])
    cells[["launcher", "backend", "device"]] = ""
    types = {
        **dict.fromkeys(("cell_id", "launcher", "backend", "gpus_per_node"), "str"),
        **dict.fromkeys(("nodes", "gpus"), "int64"),
        **dict.fromkeys(_BATCHES, "float64"),
    }
    members = rows.drop_duplicates(["cell_id", "series"])[["cell_id", "series", "mode"]]
    return Frames(
        cells[[*types, "device"]].astype(types),
        members.astype("str").reset_index(drop=True),
        _runs(rows),
        labelled_by=labelled_by,
        regime_remedy=_REGIME_REMEDY,
    )


def _runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Convert each row to a completed run. A run without a value is not ``measured`` and has a reason."""
    empty = pd.DataFrame(None, index=range(len(rows)), columns=list(RUNS_COLUMNS), dtype=object)
    time = rows["time"].astype(float).to_numpy()
    runs = empty.assign(
        run_id=[f"line-{line}" for line in rows["line"]],
        cell_id=rows["cell_id"].to_numpy(),
        repeat=rows.groupby("cell_id").cumcount().to_numpy() + 1,
        order=np.arange(1, len(rows) + 1),
        state=str(RunState.COMPLETED),
        failure_class="",
        measured=np.isfinite(time),
        reason=pd.Series(np.where(np.isfinite(time), "", "the row has no value"), dtype="str"),
        step_time_sec=time,
        throughput_samples_per_sec=rows["work"].astype(float).to_numpy() / time,
    )
    runs["rate"] = runs["throughput_samples_per_sec"]
    runs["outlier"] = outliers(runs["throughput_samples_per_sec"], by=runs["cell_id"])
    for name in ("run_id", "cell_id", "state"):
        runs[name] = runs[name].astype("str")
    for name in ("started_at", "ended_at"):
        runs[name] = pd.to_datetime(runs[name], utc=True)
    for name in (
        "epochs",
        "samples",
        "steps",
        "window_s",
        "wall_s",
        "unit",
        *PARTS,
        "exposed",
        *TIMES,
        *READINGS,
    ):
        runs[name] = np.nan
    return runs.assign(parts_known=False, left_out=False, disturbed=None)
