"""Convert a table measured elsewhere into the records of a study: series, cells and runs.

In a series without batch columns, the work of a step is unknown. A label then determines the scaling mode,
and work is counted in arbitrary units: one per step for strong scaling, one per replica and step for weak
scaling. Ratios do not depend on the unit. :meth:`TableStudy.scale` hides columns with such a unit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import CellRow, Member, RunRow, ScalingRow, grouped
from analysis.data.load import Study, TableSource
from analysis.data.names import layout, ranks
from analysis.stats.attempts import recorded
from analysis.stats.measured import Measured, add_outliers
from analysis.tables_in.grid import TableProblems
from analysis.tables_in.read import Table, TableRow
from analysis.text import one_line
from bench.study.layout import StudyFolder
from bench.study.ledger import RunState
from ddp_scaling_bench.records import METRICS_COLUMNS
from ddp_scaling_bench.units import count, listed, whole

_MODE_REMEDY = (
    "add a column global_batch or per_gpu_batch, or --mode strong (the same work at every size) "
    "or --mode weak (per rank)"
)
_THROUGHPUTS = ("throughput_samples_per_sec", "throughput_low", "throughput_high", "throughput_all")
#: The columns that a table does not determine, by what it counts, with and without batches.
_HIDDEN = {
    "samples": ((), ("step_time_sec",)),
    "tokens": (("step_time_sec",), ("step_time_sec",)),
    "steps": ((), _THROUGHPUTS),
    "": ((*_THROUGHPUTS, "step_time_sec"), (*_THROUGHPUTS, "step_time_sec")),
}


@dataclass(frozen=True)
class TableStudy:
    """A table converted to a study and its frames.

    ``hidden`` maps each series to the columns of the scaling table that the input does not determine.
    ``remarks`` are sentences about derived, ignored and assumed values.
    """

    study: Study
    frames: Measured
    hidden: Mapping[str, tuple[str, ...]]
    remarks: list[str]

    def scale(self, *, baseline: str | None = None) -> list[ScalingRow]:
        """Return the scaling table. Columns that the input does not determine are empty."""
        rows = scaling_table(self.frames, baseline=baseline)
        for row in rows:
            for name in self.hidden[row.series]:
                setattr(row, name, math.nan)
        return rows

    @property
    def shown(self) -> Measured:
        """The measurements for the report; values that the input does not determine are NaN."""
        hidden = {cell: {*self.hidden[series]} for cell, series, _ in self.frames.members}
        of_runs = {"throughput_samples_per_sec", "step_time_sec"}
        unknown = {cell: dict.fromkeys(names & of_runs, math.nan) for cell, names in hidden.items()}
        runs: list[Any] = [*self.frames.runs]
        return replace(self.frames, runs=[replace(run, **unknown[run.cell_id]) for run in runs])


def study_of_table(table: Table, *, mode: str | None, folder: Path) -> TableStudy:
    """Convert a table into a study.

    ``mode`` is for series whose columns do not determine the mode.

    Raises:
        InputError: series, batches or repeats of the rows are inconsistent.
    """
    problems = TableProblems(table.path)
    rows, remarks = [replace(row) for row in table.rows], [*table.remarks]
    if not {"gpus", "gpus_per_node"} & {*table.columns}:
        remarks.append("The table has no column gpus, so each node is counted as one rank")
    for row in rows:
        row.series = row.series or ("" if row.mode else one_line(table.path.stem, limit=80))
        row.series = one_line(", ".join(filter(None, (row.series, row.mode))), limit=160)
    if "repeat" in table.columns:
        _check_repeats(rows, problems)
    else:
        runs = Counter(map(_cell_key, rows))
        several = [
            f"{amount} rows with {count(key[1], 'rank')}" for key, amount in runs.items() if amount > 1
        ]
        if several:
            rows_text = listed(several, limit=6)
            remarks.append(f"Rows of one size and series were taken as repeats of one cell: {rows_text}")
    problems.raise_if_any()
    remarks += _separate_other_batches(rows, mode=mode)
    by_series = grouped(rows, lambda row: row.series)
    remarks += _set_modes(by_series, table, problems, mode=mode)
    problems.raise_if_any()
    _name_cells(rows, problems)
    problems.raise_if_any()
    hidden = {series: _complete(own, table.unit) for series, own in by_series.items()}
    frames = _frames(rows, labelled_by="option" if mode and "mode" not in table.columns else "table")
    source = f"{count(len(rows), 'row')} of {one_line(table.path.name)}, measured elsewhere"
    series = [
        {"series": name, "mode": own[0].mode, "batch": None, "label": name} for name, own in by_series.items()
    ]
    study = Study(
        folder=StudyFolder(folder),
        plan={"study": one_line(table.path.stem, limit=120), "series": series, "cells": []},
        cells={cell.cell_id: cell for cell in frames.cells},
        members=[*frames.members],
        runs=[*frames.runs],
        epochs=pd.DataFrame(columns=["run_id", "cell_id", *METRICS_COLUMNS]),
        remarks=[source, *remarks],
        table=TableSource(
            one_line(table.path.name),
            table.text,
            len(rows),
            mode,
            table.names,
            {row.cell_id: _settings(row) for row in rows},
        ),
    )
    return TableStudy(study, frames, hidden, remarks)


def _cell_key(row: TableRow) -> tuple[Any, ...]:
    """Return the values that identify the cell of a row: rows with equal values are runs of one cell."""
    return row.series, row.gpus, row.nodes, row.gpus_per_node, row.model_parallel, row.global_batch


def _check_repeats(rows: Sequence[TableRow], problems: TableProblems) -> None:
    first: dict[tuple[Any, ...], int] = {}
    for row in rows:
        line = first.setdefault((*_cell_key(row), row.repeat), row.line)
        if line != row.line:
            message = f"repeat {row.repeat!r} of this size is already in line {line}"
            problems.add(row.line, message, "give each repeat its own number, or add a column series")


def _settings(row: TableRow) -> dict[str, str]:
    """Return what two cells must agree in, or differ in alone, to be compared; unknown values are empty."""
    names = {"params": "parameters"}
    return {
        "nodes": layout(row),
        "world_size": str(row.gpus),
        "global_batch": whole(row.global_batch) if row.global_batch else "",
        "seq_len": whole(row.tokens_per_sample) if row.tokens_per_sample else "",
        "mode": row.mode,
        **{names.get(name, name): text for name, text in row.labels.items()},
    }


def _label(rows: Sequence[TableRow]) -> str:
    return next((row.mode for row in rows if row.mode), "")


def _separate_other_batches(rows: Sequence[TableRow], *, mode: str | None) -> list[str]:
    """Give a size with another batch than the rest of its series its own series; return remarks that name it.

    With this size, the series would be neither strong nor weak scaling, and no size would have an efficiency.
    Nothing changes if several sizes differ, or if it is unclear which size does.
    """
    remarks = []
    for series, own in grouped(rows, lambda row: row.series).items():
        totals = [row.global_batch or 0 for row in own]
        each = [round(total / row.replicas, 6) for total, row in zip(totals, own, strict=True)]
        if not all(totals) or 1 in (len(set(totals)), len(set(each))):
            continue
        found = {}
        for label, what, batches in (("strong", "global batch", totals), ("weak", "batch per rank", each)):
            counts = Counter(batches)
            usual = min(counts, key=lambda batch: (-counts[batch], batch))
            other = [row for row, batch in zip(own, batches, strict=True) if batch != usual]
            batch = next(batch for batch in batches if batch != usual)
            sizes = {row.gpus for row, batch in zip(own, batches, strict=True) if batch == usual}
            if len(set(map(_cell_key, other))) == 1 and len(sizes) > 1:
                found[label] = (other, what, batch, usual)
        if len(found) != 1 and (_label(own) or mode) not in found:
            continue
        other, what, batch, usual = found.get(_label(own) or str(mode)) or next(iter(found.values()))
        for row in other:
            row.series = one_line(f"{series}, {what} {whole(batch)}", limit=160)
        lines = listed([str(row.line) for row in other])
        remarks.append(
            f"{'Line' if len(other) == 1 else 'Lines'} {lines} ({ranks(other[0])}): the {what} is "
            f"{whole(batch)}, but {whole(usual)} in the rest of the series, so this size is not compared "
            "with the other sizes"
        )
    return remarks


def _set_modes(
    by_series: Mapping[str, Sequence[TableRow]], table: Table, problems: TableProblems, *, mode: str | None
) -> list[str]:
    """Set the mode of each series: its label, --mode or, if it does not matter, an assumption."""
    unknown, remarks = [], []
    for rows in by_series.values():
        label = _label(rows)
        without = [row for row in rows if row.global_batch is None]
        line = rows[0].line
        if label and mode and label != mode and len(without) == len(rows):
            message = f"the row says {label}, but --mode says {mode}"
            problems.add(line, message, "correct the row or omit --mode")
        if 0 < len(without) < len(rows):
            message = "the batch is missing, but other rows of the series have one"
            problems.add(without[0].line, message, "fill in the batch")
        elif without and not (label or mode):
            unknown.append(line)
            label = table.assumed_mode or ""
        for row in rows:
            row.mode = label or mode or ""
    what = "the table does not show whether this is strong or weak scaling"
    if unknown and table.assumed_mode is None:
        problems.add(unknown[0], what, _MODE_REMEDY)
    elif unknown:
        same = "Speedup and efficiency are the same in both"
        remarks.append(f"T{what[1:]}: {table.assumed_mode} is assumed. {same}; --mode states it")
    return remarks


def _complete(rows: Sequence[TableRow], unit: str) -> tuple[str, ...]:
    """Fill in the work and time of one series; return its columns for ``TableStudy.hidden``."""
    for row in rows:
        row.work = row.global_batch or (row.replicas if row.mode == "weak" else 1.0)
        rate = (row.rate or 0) / (1 if unit == "steps" else row.work)  # 0 also if a number underflows
        row.time = 1 / rate if rate and 1 / rate else math.nan
    without = rows[0].global_batch is None
    return (*_HIDDEN[unit][without], *(("global_batch", "per_gpu_batch") if without else ()))


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


def _frames(rows: Sequence[TableRow], *, labelled_by: str) -> Measured:
    """Convert the rows to records. ``global_batch`` is the work of a step, possibly in arbitrary units."""
    same = ("cell_id", "nodes", "gpus_per_node", "gpus", "model_parallel")
    cells = [
        CellRow(
            **{name: getattr(row, name) for name in same},
            global_batch=row.work,
            per_gpu_batch=row.per_gpu_batch or math.nan,
            tokens_per_sample=row.tokens_per_sample or math.nan,
        )
        for row, *_ in grouped(rows, lambda row: row.cell_id).values()
    ]
    members = [*dict.fromkeys(Member(row.cell_id, row.series, row.mode) for row in rows)]
    return Measured(cells, members, _runs(rows), labelled_by=labelled_by)


def _runs(rows: Sequence[TableRow]) -> list[RunRow]:
    """Convert each row to a completed run. A run without a value is not ``measured`` and has a reason."""
    in_line, of_cell = Counter(row.line for row in rows), Counter[str]()
    runs = []
    for place, row in enumerate(rows, 1):
        of_cell[row.cell_id] += 1
        measured, rate = math.isfinite(row.time), row.work / row.time
        run = RunRow(
            run_id=f"line-{row.line}" + f"-{place}" * (in_line[row.line] > 1),
            cell_id=row.cell_id,
            repeat=of_cell[row.cell_id],
            order=place,
            state=str(RunState.COMPLETED),
            facts=recorded("" if measured else "the row has no value"),
            measured=measured,
            step_time_sec=row.time,
            throughput_samples_per_sec=rate,
            rate=rate,
        )
        runs.append(run)
    add_outliers(runs)
    return runs
