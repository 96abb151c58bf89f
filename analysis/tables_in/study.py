"""Convert a table measured elsewhere into the DataFrames of a study: series, cells and runs.

In a series without batch columns, the work of a step is unknown. A label then determines the scaling mode,
and work is counted in arbitrary units: one per step for strong scaling, one per rank and step for weak
scaling. Ratios do not depend on the unit. :meth:`TableStudy.scale` hides columns with such a unit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import RUNS_COLUMNS, Study, TableSource
from analysis.data.names import layout, ranks
from analysis.stats.attempts import recorded
from analysis.stats.columns import PARTS, READINGS, CellRow, ScalingRow, grouped
from analysis.stats.decompose import TIMES
from analysis.stats.estimate import outliers
from analysis.stats.measured import Frames
from analysis.tables_in.read import Table, TableProblems, TableRow
from analysis.text import one_line
from bench.study.layout import StudyFolder
from bench.study.ledger import RunState
from ddp_scaling_bench.records import METRICS_COLUMNS
from ddp_scaling_bench.units import count, listed, whole

_MODE_REMEDY = (
    "add a column global_batch or per_gpu_batch, or give --mode strong (the same work at every size) "
    "or --mode weak (the same work per rank)"
)
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

    def scale(self, *, baseline: str | None = None) -> list[ScalingRow]:
        """Return the scaling table. Columns that the input does not determine are empty."""
        rows = scaling_table(self.frames, baseline=baseline)
        for row in rows:
            for name in self.hidden[row.series]:
                setattr(row, name, math.nan)
        return rows

    @property
    def shown(self) -> Frames:
        """The frames for the report; in ``runs``, values that the input does not determine are NaN."""
        series = dict(zip(self.frames.members["cell_id"], self.frames.members["series"], strict=True))
        hidden = [self.hidden[series[cell]] for cell in self.frames.runs["cell_id"]]
        names = ("throughput_samples_per_sec", "step_time_sec")
        runs = self.frames.runs
        masked = {name: runs[name].mask(np.array([name in own for own in hidden])) for name in names}
        return replace(self.frames, runs=runs.assign(**masked))


def study_of_table(table: Table, *, mode: str | None, folder: Path) -> TableStudy:
    """Convert a table into a study.

    ``mode`` is for series whose columns do not determine the mode.

    Raises:
        InputError: series, batches or repeats of the rows are inconsistent.
    """
    problems = TableProblems(table.path)
    rows = [replace(row) for row in table.rows]
    remarks = []
    if "gpus" not in table.columns and "gpus_per_node" not in table.columns:
        remarks.append("The table has no column gpus, so each node is counted as one rank")
    remarks += _assign_series(rows, table, problems)
    problems.raise_if_any()
    remarks += _separate_other_batches(rows, mode=mode)
    by_series = grouped(rows, lambda row: row.series)
    hidden = {series: _complete_series(own, problems, mode=mode) for series, own in by_series.items()}
    problems.raise_if_any()
    _name_cells(rows, problems)
    problems.raise_if_any()
    frames = _frames(rows, labelled_by="option" if mode and "mode" not in table.columns else "table")
    source = f"{count(len(rows), 'row')} of {one_line(table.path.name)}, measured elsewhere"
    study = Study(
        folder=StudyFolder(folder),
        plan=_plan(table, rows),
        cells=pd.DataFrame(map(vars, frames.cells)),
        members=frames.members,
        runs=frames.runs,
        epochs=pd.DataFrame(columns=["run_id", "cell_id", *METRICS_COLUMNS]),
        remarks=[source, *remarks],
        attempts=[None] * len(rows),
        measured=[None] * len(rows),
        table=TableSource(one_line(table.path.name), table.text, len(rows), mode),
    )
    return TableStudy(study, frames, hidden, remarks)


def _plan(table: Table, rows: Sequence[TableRow]) -> dict[str, Any]:
    modes = {row.series: row.mode for row in reversed(rows)}
    series = [
        {"series": name, "mode": modes[name], "batch": None, "label": name}
        for name in dict.fromkeys(row.series for row in rows)
    ]
    return {"study": one_line(table.path.stem, limit=120), "series": series, "cells": []}


def _cell_key(row: TableRow) -> tuple[Any, ...]:
    """Return the values that identify the cell of a row: rows with equal values are runs of one cell."""
    return row.series, row.gpus, row.nodes, row.gpus_per_node, row.global_batch


def _assign_series(rows: Sequence[TableRow], table: Table, problems: TableProblems) -> list[str]:
    """Set each row's series and check for duplicate repeats; return remarks on assumptions made."""
    for row in rows:
        row.series = _joined((row.series, row.mode)) or one_line(table.path.stem, limit=80)
    if "repeat" in table.columns:
        _check_repeats(rows, problems)
        return []
    runs = Counter(map(_cell_key, rows))
    several = [f"{amount} rows with {count(key[1], 'rank')}" for key, amount in runs.items() if amount > 1]
    if not several:
        return []
    return [f"Rows of one size and series were taken as repeats of one cell: {listed(several, limit=6)}"]


def _joined(texts: Iterable[str | None]) -> str:
    return one_line(", ".join(text for text in texts if text), limit=160)


def _check_repeats(rows: Iterable[TableRow], problems: TableProblems) -> None:
    first: dict[tuple[Any, ...], int] = {}
    for row in rows:
        line = first.setdefault((*_cell_key(row), row.repeat), row.line)
        if line != row.line:
            message = f"repeat {row.repeat!r} of this size is already in line {line}"
            problems.add(row.line, message, "give each repeat its own number, or add a column series")


def _separate_other_batches(rows: Sequence[TableRow], *, mode: str | None) -> list[str]:
    """Give a size with another batch than the rest of its series its own series; return remarks that name it.

    With this size, the series would be neither strong nor weak scaling, and no size would have an efficiency.
    """
    remarks = []
    for series, own in grouped(rows, lambda row: row.series).items():
        if (found := _other_batch(own, label=_label(own) or mode)) is None:
            continue
        other, what, batch, usual = found
        for row in other:
            row.series = one_line(f"{series}, {what} {whole(batch)}", limit=160)
        lines = listed([str(row.line) for row in other])
        remarks.append(
            f"{'Line' if len(other) == 1 else 'Lines'} {lines} ({ranks(other[0])}): the {what} is "
            f"{whole(batch)}, but {whole(usual)} in the rest of the series, so this size is not compared "
            "with the other sizes"
        )
    return remarks


def _label(rows: Iterable[TableRow]) -> str | None:
    return next((row.mode for row in rows if row.mode), None)


def _other_batch(
    rows: Sequence[TableRow], *, label: str | None
) -> tuple[list[TableRow], str, float, float] | None:
    """Return the rows of the size with another batch, the name of this batch, its value and the usual value.

    Return None if the batches are consistent or not known, if several sizes differ, or if it is unclear which
    size does.
    """
    totals = [row.global_batch for row in rows if row.global_batch]
    batches = {
        "strong": totals,
        "weak": [round(total / row.gpus, 6) for total, row in zip(totals, rows, strict=False)],
    }
    if len(totals) < len(rows) or any(len(set(batch)) == 1 for batch in batches.values()):
        return None
    found = {}
    for mode, batch in batches.items():
        usual = min(batch, key=lambda value: (-batch.count(value), value))
        others = [place for place, value in enumerate(batch) if value != usual]
        other = [rows[place] for place in others]
        sizes = {row.gpus for row, value in zip(rows, batch, strict=True) if value == usual}
        if len(set(map(_cell_key, other))) == 1 and len(sizes) > 1:
            what = "global batch" if mode == "strong" else "batch per rank"
            found[mode] = (other, what, batch[others[0]], usual)
    if len(found) == 1:
        return next(iter(found.values()))
    return found.get(str(label))


def _complete_series(
    rows: Sequence[TableRow], problems: TableProblems, *, mode: str | None
) -> tuple[str, ...]:
    """Fill in the mode, work and time of one series; return its columns for ``TableStudy.hidden``."""
    label = _label(rows)
    without = [row for row in rows if row.global_batch is None]
    line = rows[0].line
    if label and mode and label != mode and len(without) == len(rows):
        problems.add(line, f"the row says {label}, but --mode says {mode}", "correct the row or omit --mode")
    label = label or mode
    hidden: tuple[str, ...] = ()
    if 0 < len(without) < len(rows):
        message = "the batch is missing, but other rows of the series have one"
        problems.add(without[0].line, message, "fill in the batch")
        return ()
    if without and label is None:
        problems.add(line, "the table does not show whether this is strong or weak scaling", _MODE_REMEDY)
        return ()
    if without:
        has_time = any(row.time is not None for row in rows)
        hidden = (*_BATCHES, *(_THROUGHPUTS if has_time else ("step_time_sec",)))
    for row in rows:
        row.mode = label or ""
        row.work = row.global_batch or (row.gpus if label == "weak" else 1.0)
        if row.time is None:
            row.time = (row.work / row.throughput if row.throughput else 0) or math.nan  # 0: an underflow
    return hidden


def _name_cells(rows: Sequence[TableRow], problems: TableProblems) -> None:
    """Set unique cell ids, made of size and batch, and of the series if several have this size and batch."""
    keys: dict[tuple[str, str], tuple[Any, ...]] = {}
    for row in rows:
        size = layout(row, times="x").replace(" ", "") or ranks(row)
        row.cell_id = f"{size}-b{row.per_gpu_batch:g}" if row.per_gpu_batch else size
        if keys.setdefault((row.series, row.cell_id), _cell_key(row)) != _cell_key(row):
            message = "the row has the size and batch per rank of an earlier row, but another global batch"
            problems.add(row.line, message, "distinguish them by a column series")
    series_with = Counter(name for _, name in keys)
    for row in rows:
        if series_with[row.cell_id] > 1:
            row.cell_id = f"{row.series}-{row.cell_id}"


def _frames(rows: Sequence[TableRow], *, labelled_by: str) -> Frames:
    """Convert the rows to frames. ``global_batch`` is the work of a step, possibly in arbitrary units."""
    cells = [
        CellRow(
            **{name: getattr(row, name) for name in ("cell_id", "nodes", "gpus_per_node", "gpus")},
            launcher="",
            backend="",
            device="",
            global_batch=row.work,
            per_gpu_batch=row.per_gpu_batch or math.nan,
            tokens_per_sample=row.tokens_per_sample or math.nan,
            ddp=True,
            swept=None,
        )
        for row, *_ in grouped(rows, lambda row: row.cell_id).values()
    ]
    members = dict.fromkeys((row.cell_id, row.series, row.mode) for row in rows)
    return Frames(
        cells,
        pd.DataFrame(list(members), columns=["cell_id", "series", "mode"], dtype="str"),
        _runs(rows),
        labelled_by=labelled_by,
    )


def _runs(rows: Sequence[TableRow]) -> pd.DataFrame:
    """Convert each row to a completed run. A run without a value is not ``measured`` and has a reason."""
    cells = pd.Series([row.cell_id for row in rows], dtype="str")
    times = pd.Series([row.time for row in rows], dtype=float)
    rates = pd.Series([row.work for row in rows], dtype=float) / times
    measured = np.isfinite(times)
    unknown = (
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
    )
    known = {
        "run_id": pd.Series([f"line-{row.line}" for row in rows], dtype="str"),
        "cell_id": cells,
        "repeat": cells.groupby(cells).cumcount() + 1,
        "order": np.arange(1, len(rows) + 1),
        "state": pd.Series(str(RunState.COMPLETED), index=cells.index, dtype="str"),
        "failure_class": "",
        "disturbed": None,
        "facts": [recorded("" if is_measured else "the row has no value") for is_measured in measured],
        "measured": measured,
        "step_time_sec": times,
        "throughput_samples_per_sec": rates,
        "rate": rates,
        "outlier": outliers(rates, by=cells),
        **dict.fromkeys(("started_at", "ended_at"), pd.Series(pd.NaT, cells.index).dt.tz_localize("UTC")),
        **dict.fromkeys(unknown, np.nan),
        **dict.fromkeys(("parts_known", "left_out"), False),
    }
    empty = pd.DataFrame(None, index=cells.index, columns=list(RUNS_COLUMNS), dtype=object)
    return empty.assign(**known)
