"""The cells and runs of a table measured elsewhere, as the frames that a study has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from analysis.tables_in.columns import Header
from analysis.tables_in.read import Reader, Table, is_number
from analysis.text import clean, count, listed, one_line
from bench.study.layout import METRICS_COLUMNS, StudyFolder
from bench.study.ledger import RunState


def size_key(row: dict[Any, Any]) -> tuple[Any, ...]:
    """Return what makes two rows runs of one cell."""
    names = ("series", "gpus", "nodes", "gpus_per_node", "global_batch", "cell_id", "ddp")
    return tuple(row[name] for name in names)


def name_cells(rows: pd.DataFrame, reader: Reader) -> None:
    """Give each cell an id of its own: what the table calls it, else series, size and batch."""
    several = rows["series"].nunique() > 1
    sizes: dict[tuple[str, str], tuple[Any, ...]] = {}
    ids = []
    for row in rows.to_dict("records"):
        name = row["cell_id"] or _cell_name(row)
        known = sizes.setdefault((row["series"], name), size_key(row))
        if known != size_key(row):
            what = f"cell {one_line(name, limit=60)} has another size or batch than in an earlier row"
            reader.problem(row["line"], what, "give each configuration a name of its own")
        ids.append((row["series"], name))
    owners: dict[str, set[str]] = {}
    for series, name in ids:
        owners.setdefault(name, set()).add(series)
    rows["cell_id"] = [
        f"{series}-{name}" if several and len(owners[name]) > 1 else name for series, name in ids
    ]


def _cell_name(row: dict[Any, Any]) -> str:
    size = layout(row, times="x").replace(" ", "") or ranks(row)
    batch = f"-b{row['per_gpu_batch']:g}" if row["per_gpu_batch"] else ""
    return f"{size}{batch}{'-no-ddp' if row['ddp'] is False else ''}"


#: What tells apart rows that are read as one series and are a strong and a weak one.
REGIME_REMEDY = "if these rows are a strong and a weak series, tell them apart in a column mode or series"


def frames_of(rows: pd.DataFrame, *, labelled_by: str, rate_unit: str) -> Frames:
    """Return the rows as frames; the work of a step stands for the global batch."""
    cells = rows.drop_duplicates("cell_id")
    frame = pd.DataFrame(
        {
            "cell_id": cells["cell_id"].astype("str"),
            "launcher": cells["launcher"].astype("str"),
            "backend": cells["backend"].astype("str"),
            "nodes": cells["nodes"].fillna(1).astype("int64"),
            "gpus_per_node": cells["gpus_per_node"].astype("str"),
            "gpus": cells["gpus"].astype("int64"),
            "global_batch": cells["work"].astype(float),
            "per_gpu_batch": cells["per_gpu_batch"].astype(float),
            "device": "",
            "ddp": [value is not False for value in cells["ddp"]],
        }
    ).reset_index(drop=True)
    members = rows.drop_duplicates(["cell_id", "series"])[["cell_id", "series", "mode"]]
    members = members.astype("str").reset_index(drop=True)
    to_train = rows.loc[rows["to_train"].fillna(False).astype(bool), "series"]
    return Frames(
        frame,
        members,
        _runs(rows),
        labelled_by=labelled_by,
        regime_remedy=REGIME_REMEDY,
        to_train=frozenset(to_train),
        rate_unit=rate_unit,
    )


def _runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows as runs that completed; one without a value does not count, and says so."""
    missing = pd.DataFrame(None, index=range(len(rows)), columns=list(RUNS_COLUMNS), dtype=object)
    runs = missing.assign(
        run_id=[f"line-{line}" for line in rows["line"]],
        cell_id=rows["cell_id"].to_numpy(),
        repeat=rows.groupby("cell_id").cumcount().to_numpy() + 1,
        order=np.arange(1, len(rows) + 1),
        state=str(RunState.COMPLETED),
        failure_class="",
    )
    time = rows["time"].astype(float).to_numpy()
    runs["measured"] = np.isfinite(time)
    runs["reason"] = pd.Series(np.where(runs["measured"], "", "the row has no value"), dtype="str")
    runs["step_time_sec"] = time
    runs["throughput_samples_per_sec"] = rows["work"].astype(float).to_numpy() / time
    runs["rate"] = runs["throughput_samples_per_sec"]
    runs["outlier"] = outliers(runs["throughput_samples_per_sec"], by=runs["cell_id"])
    for name in ("run_id", "cell_id", "state"):
        runs[name] = runs[name].astype("str")
    for name in ("submitted_at", "started_at", "ended_at"):
        runs[name] = pd.to_datetime(runs[name], utc=True)
    for name in ("epochs", "samples", "steps", "window_s", "wall_s", "unit", *PARTS, "exposed", *TIMES):
        runs[name] = np.nan
    return runs.assign(parts_known=False)


def study_of(
    table: Table, rows: pd.DataFrame, frames: Frames, *, folder: Path, remarks: list[str], mode: str | None
) -> Study:
    """Return the table as a study without a plan, whose report goes into ``folder``."""
    named = rows.drop_duplicates("series")
    plan = {
        "study": one_line(table.path.stem, limit=120),
        "series": [
            {"series": series, "mode": mode, "batch": None, "label": series}
            for series, mode in zip(named["series"], named["mode"], strict=True)
        ],
        "cells": [],
        "table": {"name": clean(table.path.name), "text": table.text, "rows": len(rows), "mode": mode},
    }
    empty = pd.DataFrame(columns=["run_id", "cell_id", *METRICS_COLUMNS])
    told = [f"{count(len(rows), 'row')} of {one_line(table.path.name)}, measured elsewhere", *remarks]
    return Study(
        folder=StudyFolder(folder),
        plan=plan,
        cells=frames.cells,
        members=frames.members,
        runs=frames.runs,
        epochs=empty,
        remarks=told,
        attempts=[None] * len(rows),
    )


# A table measured elsewhere as a study: its series, cells and runs, and what it does not know.
#
# Where the table has no batch columns, the regime is the label's, and the work of a step is counted
# in units of its own: one per step for strong scaling, one per rank and step for weak. What
# that makes up (batches, and throughput or time, whichever was not given) is hidden again by
# :meth:`Foreign.scale`; ratios do not depend on it.

MODE_REMEDY = (
    "add a column global_batch or per_gpu_batch, or say it with --mode strong (the same work at every size) "
    "or --mode weak (the same work per rank)"
)


@dataclass(frozen=True)
class Foreign:
    """A table as a study.

    Attributes:
        study: its cells and runs, as if they had been planned.
        frames: what they measured.
        hidden: by series, the columns of the scaling table that the table does not know.
        remarks: what was derived, taken for granted or left out.
    """

    study: Study
    frames: Frames
    hidden: dict[str, tuple[str, ...]]
    remarks: list[str]

    def scale(self, *, baseline: str | None = None) -> pd.DataFrame:
        """Return the scaling table; columns that the table does not give are empty."""
        rows = scaling_table(self.frames, baseline=baseline)
        for series, columns in self.hidden.items():
            own = rows["series"] == series
            for name in columns:
                rows[name] = rows[name].astype(float).mask(own)
        return rows

    @property
    def shown(self) -> Frames:
        """The frames with what the table does not know left empty in the runs, too."""
        runs = self.frames.runs.copy()
        series = self.frames.members.set_index("cell_id")["series"]
        for name in ("throughput_samples_per_sec", "step_time_sec"):
            hides = {own for own, columns in self.hidden.items() if name in columns}
            runs[name] = runs[name].mask(runs["cell_id"].map(series).isin(hides))
        return replace(self.frames, runs=runs)


def foreign_study(table: Table, *, mode: str | None, folder: Path) -> Foreign:
    """Return the table as a study that lies in ``folder``.

    Args:
        table: the rows.
        mode: ``strong`` or ``weak`` for series whose columns do not tell.
        folder: where its report goes.

    Raises:
        InputError: what the rows say of their series, batches or repeats cannot be.
    """
    reader = Reader(table.path)
    rows = table.rows.copy()
    remarks = [*table.remarks, *_tell_apart(rows, table, reader)]
    reader.stop_on_problems()
    rows["to_train"] = False
    rows["work"] = None
    hidden = {}
    for series, own in rows.groupby("series", sort=False):
        hidden[str(series)] = _settle(rows, own, reader, header=table.header, mode=mode)
    reader.stop_on_problems()
    name_cells(rows, reader)
    reader.stop_on_problems()
    unit = table.header.rate_unit
    if not table.header.counts_samples and _timed(table.rows).any():
        remarks.append(f"The time per step was used, and not the throughput in {unit}")
        unit = "samples/s"
    frames = frames_of(
        rows,
        labelled_by="--mode" if mode and "mode" not in table.header.places else "the table",
        rate_unit=unit,
    )
    study = study_of(table, rows, frames, folder=folder, remarks=remarks, mode=mode)
    return Foreign(study, frames, hidden, remarks)


# -- series and repeats ---------------------------------------------------------------


def _tell_apart(rows: pd.DataFrame, table: Table, reader: Reader) -> Iterator[str]:
    """Name each row's series and number its repeats; yield what was taken for granted."""
    has_repeats = "repeat" in table.header.places
    split = _name_series(rows, table)
    if split:
        yield f"Series were told apart by {listed(split)}"
    unused = [name for name in table.header.other if name not in split]
    if unused:
        yield f"Columns that were not used: {listed(unused, limit=30)}"
    if has_repeats:
        _refuse_repeated(rows, reader)
        return
    _refuse_unnamed(rows, unused, reader)
    runs = Counter(size_key(row) for row in rows.to_dict("records"))
    several = [f"{amount} of {key[1]}" for key, amount in runs.items() if amount > 1]
    if several:
        sizes = listed(several, limit=6)
        yield f"Rows of one size and series were taken as repeats of one cell ({sizes} ranks)"


def _name_series(rows: pd.DataFrame, table: Table) -> list[str]:
    """Name each row's series; return the text columns of no known name that were needed for it.

    Such a column is needed where rows of one size would otherwise be taken as repeats.
    """
    records = rows.to_dict("records")
    for row in records:
        row["series"] = _joined(row[name] for name in ("series", "mode", "backend", "launcher"))
    texts = [name for name in table.header.other if _is_text([row["other"][name] for row in records])]
    needed: list[str] = []
    if "repeat" not in table.header.places:
        groups: dict[tuple[Any, ...], list[dict[str, str]]] = {}
        for row in records:
            groups.setdefault(size_key(row), []).append(row["other"])
        needed = [
            name for name in texts if any(len({other[name] for other in own}) > 1 for own in groups.values())
        ]
    rows["series"] = [
        _joined([row["series"], *(row["other"][name] for name in needed)])
        or one_line(table.path.stem, limit=80)
        for row in records
    ]
    return needed


def _refuse_unnamed(rows: pd.DataFrame, unused: Sequence[str], reader: Reader) -> None:
    """Refuse a column of no known name that takes the same values at every size, one in each row.

    It tells configurations apart or numbers the runs: of the one no mean may be taken. What was
    measured does not recur like this.
    """
    groups: dict[tuple[Any, ...], list[dict[str, str]]] = {}
    for row in rows.to_dict("records"):
        groups.setdefault(size_key(row), []).append(row["other"])
    for name in unused:
        found = [sorted(other[name] for other in own) for own in groups.values()]
        crossed = len(found) > 1 and all(values == found[0] for values in found)
        if crossed and 1 < len(found[0]) == len(set(found[0])):
            values = listed(found[0], limit=4)
            what = f"the column {name!r} is {values} at every size, and could be a setting or a repeat"
            reader.problem(1, what, "call it series if it is a setting, and repeat if it numbers the runs")


def _joined(texts: Iterable[str | None]) -> str:
    return one_line(", ".join(text for text in texts if text), limit=160)


def _is_text(values: Sequence[str]) -> bool:
    # 85% and 3.9x are measured, too.
    return any(value and not is_number(value.rstrip("%x")) for value in values)


def _refuse_repeated(rows: pd.DataFrame, reader: Reader) -> None:
    """Refuse a repeat that a row of the same size and series has already."""
    first: dict[tuple[Any, ...], int] = {}
    for row in rows.to_dict("records"):
        line = first.setdefault((*size_key(row), row["repeat"]), row["line"])
        if line != row["line"]:
            what = f"repeat {row['repeat']!r} of this size stands in line {line} already"
            reader.problem(row["line"], what, "number the repeats, or name the series in a column series")


# -- regime ---------------------------------------------------------------------------


def _timed(rows: pd.DataFrame) -> pd.Series:
    """Return which rows tell both their batch and their time per step."""
    return rows["global_batch"].notna() & rows["time"].notna()


def _settle(
    rows: pd.DataFrame, own: pd.DataFrame, reader: Reader, *, header: Header, mode: str | None
) -> tuple[str, ...]:
    """Fill in the label, the work and the time of one series; return what stays hidden."""
    label = next((value for value in own["mode"] if value), None)
    has_batch = own["global_batch"].notna()
    if label and mode and label != mode and not has_batch.any():
        line = int(own["line"].iloc[0])
        reader.problem(line, f"the row says {label}, but --mode says {mode}", "leave one of the two out")
    label = label or mode
    rows.loc[own.index, "mode"] = label or ""
    if label == "time to train" or own["time_to_train"].notna().any():
        return _settle_time_to_train(rows, own)
    if has_batch.any() and not has_batch.all():
        line = int(own.loc[~has_batch, "line"].iloc[0])
        reader.problem(line, "the batch is missing, while other rows of the series have one", "fill it in")
        return ()
    if has_batch.all():
        return _settle_with_batch(rows, own, counts_samples=header.counts_samples)
    if label is None:
        line = int(own["line"].iloc[0])
        what = "nothing tells whether this is strong or weak scaling"
        reader.problem(line, what, MODE_REMEDY)
        return ()
    return _settle_without_batch(rows, own, reader, label=label)


def _settle_time_to_train(rows: pd.DataFrame, own: pd.DataFrame) -> tuple[str, ...]:
    rows.loc[own.index, "to_train"] = True
    rows.loc[own.index, "time"] = own["time_to_train"].fillna(own["time"])
    rows.loc[own.index, "mode"] = ""
    had = own["global_batch"].notna().all()
    rows.loc[own.index, "work"] = 1.0
    throughput = ("throughput_samples_per_sec", "throughput_low", "throughput_high", "step_time_sec")
    return throughput if had else (*throughput, "global_batch", "per_gpu_batch")


def _settle_with_batch(rows: pd.DataFrame, own: pd.DataFrame, *, counts_samples: bool) -> tuple[str, ...]:
    rows.loc[own.index, "work"] = own["global_batch"]
    if not counts_samples and own["time"].notna().any():
        return ()
    from_rate = own["global_batch"].astype(float) / own["throughput"].astype(float)
    rows.loc[own.index, "time"] = own["time"].astype(float).fillna(from_rate)
    # A batch of samples over tokens/s is no time.
    return () if counts_samples else ("step_time_sec",)


def _settle_without_batch(
    rows: pd.DataFrame, own: pd.DataFrame, reader: Reader, *, label: str
) -> tuple[str, ...]:
    work = own["gpus"].astype(float) if label == "weak" else pd.Series(1.0, index=own.index)
    rows.loc[own.index, "work"] = work
    batches = ("global_batch", "per_gpu_batch")
    measured = own[own["time"].notna() | own["throughput"].notna()]
    if measured["throughput"].notna().all():
        rows.loc[own.index, "time"] = work / own["throughput"].astype(float)
        return (*batches, "step_time_sec")
    if not measured["time"].notna().all():
        line = int(measured.loc[measured["time"].isna(), "line"].iloc[0])
        what = "this row has a throughput and others of its series a time, and without a batch"
        reader.problem(line, f"{what} they cannot be compared", "give one of the two everywhere, or a batch")
    return (*batches, "throughput_samples_per_sec", "throughput_low", "throughput_high")
