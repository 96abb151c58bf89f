"""Convert a table measured elsewhere into the DataFrames of a study: series, cells and runs.

In a series without batch columns, the work of a step is unknown. A label then determines the scaling mode,
and work is counted in arbitrary units: one per step for strong scaling, one per rank and step for weak
scaling. Ratios do not depend on the unit. :meth:`TableStudy.scale` hides columns with such a unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import RUNS_COLUMNS, Study
from analysis.data.names import layout, ranks
from analysis.stats.columns import PARTS
from analysis.stats.decompose import TIMES
from analysis.stats.estimate import outliers
from analysis.stats.measured import Frames
from analysis.tables_in.read import Header, Table, TableProblems, is_number
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
    ``remarks`` are sentences about derived, assumed and ignored values.
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
    remarks = [*table.remarks, *_assign_series(rows, table, problems)]
    problems.raise_if_any()
    remarks += _separate_other_batches(rows, mode=mode)
    rows["to_train"] = False
    rows["work"] = None
    hidden = {}
    for series, own in rows.groupby("series", sort=False):
        hidden[str(series)] = _complete_series(rows, own, problems, header=table.header, mode=mode)
    problems.raise_if_any()
    _name_cells(rows, problems)
    problems.raise_if_any()
    unit = table.header.rate_unit
    if not table.header.counts_samples and table.rows[["global_batch", "time"]].notna().all(axis=1).any():
        remarks.append(f"The time per step was used instead of the throughput in {unit}")
        unit = "samples/s"
    labelled_by = "--mode" if mode and "mode" not in table.header.places else "the table"
    frames = _frames(rows, labelled_by=labelled_by, rate_unit=unit)
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
    names = ("series", "gpus", "nodes", "gpus_per_node", "global_batch", "cell_id", "ddp")
    return tuple(row[name] for name in names)


def _assign_series(rows: pd.DataFrame, table: Table, problems: TableProblems) -> list[str]:
    """Set each row's series and check for duplicate repeats; return remarks on assumptions made."""
    remarks, used = [], _name_series(rows, table)
    if used:
        remarks.append(f"Series were distinguished by {listed(used)}")
    unused = [name for name in table.header.unknown if name not in used]
    if unused:
        remarks.append(f"Columns that were not used: {listed(unused, limit=30)}")
    if "repeat" in table.header.places:
        _check_repeats(rows, problems)
        return remarks
    _check_unused_columns(rows, unused, problems)
    runs = Counter(_cell_key(row) for row in rows.to_dict("records"))
    several = [f"{amount} rows with {count(key[1], 'rank')}" for key, amount in runs.items() if amount > 1]
    if several:
        sizes = listed(several, limit=6)
        remarks.append(f"Rows of one size and series were taken as repeats of one cell: {sizes}")
    return remarks


def _name_series(rows: pd.DataFrame, table: Table) -> list[str]:
    """Set the series of each row; return the names of the unknown columns that distinguish series.

    An unknown column distinguishes series if it contains texts that differ between rows which would otherwise
    be repeats of one cell.
    """
    records = rows.to_dict("records")
    for row in records:
        row["series"] = _joined(row[name] for name in ("series", "mode", "backend", "launcher"))
    needed: list[str] = []
    if "repeat" not in table.header.places:
        cells = _other_values_by_cell(records)
        needed = [
            name
            for name in table.header.unknown
            # Values such as 85% and 3.9x are measurements, so they do not distinguish series.
            if any(row["other"][name] and not is_number(row["other"][name].rstrip("%x")) for row in records)
            and any(len({other[name] for other in own}) > 1 for own in cells)
        ]
    rows["series"] = [
        _joined([row["series"], *(row["other"][name] for name in needed)])
        or one_line(table.path.stem, limit=80)
        for row in records
    ]
    return needed


def _other_values_by_cell(records: Iterable[dict[Any, Any]]) -> list[list[dict[str, str]]]:
    cells: dict[tuple[Any, ...], list[dict[str, str]]] = {}
    for row in records:
        cells.setdefault(_cell_key(row), []).append(row["other"])
    return list(cells.values())


def _joined(texts: Iterable[str | None]) -> str:
    return one_line(", ".join(text for text in texts if text), limit=160)


def _check_unused_columns(rows: pd.DataFrame, unused: Sequence[str], problems: TableProblems) -> None:
    """Add a problem for each unknown column that has the same distinct values at every size.

    Such a column is either the number of a repeat or a setting, and rows with different settings must not be
    averaged. Measured values do not recur in this way.
    """
    cells = _other_values_by_cell(rows.to_dict("records"))
    for name in unused:
        found = [sorted(other[name] for other in own) for own in cells]
        crossed = len(found) > 1 and all(values == found[0] for values in found)
        if crossed and 1 < len(found[0]) == len(set(found[0])):
            values = listed(found[0], limit=4)
            message = (
                f"the column {name!r} has the values {values} at every size: "
                "it is a setting or the number of a repeat"
            )
            remedy = "rename it to series if it is a setting, or to repeat if it numbers the runs"
            problems.add(1, message, remedy)


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
        if own["global_batch"].isna().any() or own["time_to_train"].notna().any():
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
    rows: pd.DataFrame, own: pd.DataFrame, problems: TableProblems, *, header: Header, mode: str | None
) -> tuple[str, ...]:
    """Fill in the mode, work and time of one series; return its columns for ``TableStudy.hidden``."""
    label = next((value for value in own["mode"] if value), None)
    has_batch = own["global_batch"].notna()
    line = int(own["line"].iloc[0])
    if label and mode and label != mode and not has_batch.any():
        problems.add(line, f"the row says {label}, but --mode says {mode}", "correct the row or omit --mode")
    label = label or mode
    rows.loc[own.index, "mode"] = label or ""
    if label == "time to train" or own["time_to_train"].notna().any():
        return _complete_time_to_train(rows, own)
    if has_batch.all():
        return _complete_with_batch(rows, own, counts_samples=header.counts_samples)
    if has_batch.any():
        line = int(own.loc[~has_batch, "line"].iloc[0])
        problems.add(line, "the batch is missing, but other rows of the series have one", "fill in the batch")
    elif label is None:
        problems.add(line, "the table does not show whether this is strong or weak scaling", _MODE_REMEDY)
    else:
        return _complete_without_batch(rows, own, problems, weak=label == "weak")
    return ()


def _complete_time_to_train(rows: pd.DataFrame, own: pd.DataFrame) -> tuple[str, ...]:
    rows.loc[own.index, "to_train"] = True
    rows.loc[own.index, "time"] = own["time_to_train"].fillna(own["time"])
    rows.loc[own.index, "mode"] = ""
    rows.loc[own.index, "work"] = 1.0
    hidden = (*_THROUGHPUTS, "step_time_sec")
    return hidden if own["global_batch"].notna().all() else (*hidden, *_BATCHES)


def _complete_with_batch(rows: pd.DataFrame, own: pd.DataFrame, *, counts_samples: bool) -> tuple[str, ...]:
    rows.loc[own.index, "work"] = own["global_batch"]
    if not counts_samples and own["time"].notna().any():
        return ()
    from_rate = own["global_batch"].astype(float) / own["throughput"].astype(float)
    rows.loc[own.index, "time"] = own["time"].astype(float).fillna(from_rate)
    # A batch of samples divided by tokens/s is not a time.
    return () if counts_samples else ("step_time_sec",)


def _complete_without_batch(
    rows: pd.DataFrame, own: pd.DataFrame, problems: TableProblems, *, weak: bool
) -> tuple[str, ...]:
    work = own["gpus"].astype(float) if weak else pd.Series(1.0, index=own.index)
    rows.loc[own.index, "work"] = work
    measured = own[own["time"].notna() | own["throughput"].notna()]
    if measured["throughput"].notna().all():
        rows.loc[own.index, "time"] = work / own["throughput"].astype(float)
        return (*_BATCHES, "step_time_sec")
    if not measured["time"].notna().all():
        line = int(measured.loc[measured["time"].isna(), "line"].iloc[0])
        message = "this row has a throughput, but other rows of its series have a time and no batch"
        problems.add(
            line,
            message,
            "use the same measure in every row of the series (time or throughput), "
            "or add the column global_batch",
        )
    return (*_BATCHES, *_THROUGHPUTS)


def _name_cells(rows: pd.DataFrame, problems: TableProblems) -> None:
    """Set unique cell ids: the name in the table, or a name made of series, size and batch."""
    keys: dict[tuple[str, str], tuple[Any, ...]] = {}
    ids = []
    for row in rows.to_dict("records"):
        size = layout(row, times="x").replace(" ", "") or ranks(row)
        batch = f"-b{row['per_gpu_batch']:g}" if row["per_gpu_batch"] else ""
        name = row["cell_id"] or f"{size}{batch}{'-no-ddp' if row['ddp'] is False else ''}"
        if keys.setdefault((row["series"], name), _cell_key(row)) != _cell_key(row):
            message = f"cell {one_line(name, limit=60)} has a different size or batch than in an earlier row"
            problems.add(row["line"], message, "give each configuration its own name")
        ids.append((row["series"], name))
    series_with = Counter(name for _, name in set(ids))
    rows["cell_id"] = [f"{series}-{name}" if series_with[name] > 1 else name for series, name in ids]


def _frames(rows: pd.DataFrame, *, labelled_by: str, rate_unit: str) -> Frames:
    """Convert the rows to frames. ``global_batch`` is the work of a step, possibly in arbitrary units."""
    cells = rows.drop_duplicates("cell_id").reset_index(drop=True)
    cells = cells.assign(nodes=cells["nodes"].fillna(1), global_batch=cells["work"], device="")
    cells["ddp"] = [value is not False for value in cells["ddp"]]
    types = {
        **dict.fromkeys(("cell_id", "launcher", "backend", "gpus_per_node"), "str"),
        **dict.fromkeys(("nodes", "gpus"), "int64"),
        **dict.fromkeys(_BATCHES, "float64"),
    }
    members = rows.drop_duplicates(["cell_id", "series"])[["cell_id", "series", "mode"]]
    return Frames(
        cells[[*types, "device", "ddp"]].astype(types),
        members.astype("str").reset_index(drop=True),
        _runs(rows),
        labelled_by=labelled_by,
        regime_remedy=_REGIME_REMEDY,
        to_train=frozenset(rows.loc[rows["to_train"].fillna(False).astype(bool), "series"]),
        rate_unit=rate_unit,
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
    for name in ("submitted_at", "started_at", "ended_at"):
        runs[name] = pd.to_datetime(runs[name], utc=True)
    for name in ("epochs", "samples", "steps", "window_s", "wall_s", "unit", *PARTS, "exposed", *TIMES):
        runs[name] = np.nan
    return runs.assign(parts_known=False, left_out=False, disturbed=None)
