"""The cells and runs of a table measured elsewhere, as the frames that a study has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.attempts import RUNS_COLUMNS
from analysis.decompose import PARTS, TIMES
from analysis.estimate import outliers
from analysis.foreign import Table
from analysis.foreign_lines import Reader
from analysis.load import Study
from analysis.measured import Frames
from analysis.sizes import layout, ranks
from analysis.wording import clean, count, one_line
from bench.layout import METRICS_COLUMNS, StudyFolder
from bench.ledger import RunState


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
