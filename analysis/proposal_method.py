"""How the runs of a proposal's scaling section were measured, with which settings, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.document import Block, Bullets, Heading, Paragraph, Table
from analysis.environment import Environment
from analysis.load import Study
from analysis.matching import spelled
from analysis.sizes import job_size
from analysis.summary import certainty
from analysis.wording import count, one_line

#: Options of the workload that decide what is computed, and how.
_SETTINGS = (
    *("model", "parameters", "seq_len", "image_size", "precision", "optimizer", "grad_accum"),
    *("bucket_cap_mb", "activation_checkpointing", "compile", "data", "num_workers", "checkpoint"),
)
_FACTS = ("Device", "PyTorch", "CUDA", "NCCL", "Network", "Interface", "Threads per rank")


def method(study: Study, rows: pd.DataFrame) -> list[Block]:
    """Return how the runs were measured, input and output included."""
    cells = study.plan.get("cells") or []
    workload = (cells[0].get("workload") or {}) if cells else {}
    heading = Heading("How it was measured")
    intervals = (
        f"{certainty(rows)} Intervals: 95 %, Welch's t on the logarithms of the runs' throughputs, "
        "from three runs on."
    )
    if not workload:
        return [
            heading,
            Paragraph(f"The figures were measured elsewhere and taken from a table. {intervals}"),
        ]
    windows = ""
    if workload.get("steps_per_epoch") and workload.get("epochs"):
        windows = (
            f"Each run times {count(int(workload['epochs']), 'window')} of "
            f"{count(int(workload['steps_per_epoch']), 'step')} after a warm-up, not instrumented. "
        )
    text = f"{windows}The unit is the run; repeats are spread over a seeded random order. {intervals}"
    return [heading, Paragraph(text), Paragraph(_input_output(workload))]


def _input_output(workload: Mapping[str, Any]) -> str:
    data = workload.get("data")
    if data in (None, "synthetic"):
        text = "Input: synthetic batches, drawn anew for each step; reading from storage is not included."
    else:
        workers = count(int(workload.get("num_workers") or 0), "loading process", "loading processes")
        text = f"Input: {one_line(data, limit=120)}, by {workers} a rank."
    if workload.get("checkpoint"):
        return f"{text} Output: a checkpoint after each window, timed apart from it."
    return f"{text} Output: no checkpoints were written."


def settings(study: Study, largest: str, environment: Environment) -> list[Block]:
    """Return the settings of the cell ``largest`` and what it ran on; nothing for a table."""
    cells = study.plan.get("cells") or []
    cell = next((cell for cell in cells if cell["cell_id"] == largest), None)
    if cell is None:
        return []
    workload = cell.get("workload") or {}
    found = [(name, spelled(workload[name])) for name in _SETTINGS if workload.get(name) is not None]
    found += [("backend", spelled(cell.get("backend"))), ("launcher", spelled(cell.get("launcher")))]
    found += [(one_line(k, limit=60), one_line(v, limit=80)) for k, v in (cell.get("env") or {}).items()]
    found += [(label, one_line(value, limit=80)) for label, value in environment.facts if label in _FACTS]
    rows = [[name, value] for name, value in found]
    return [
        Heading("Settings"),
        Table("Settings of the runs.", ("Setting", "Value"), rows, text_columns=(0, 1)),
    ]


def missing(rows: pd.DataFrame) -> list[Block]:
    """Return the planned cells without a number, with their reasons: none is left out silently."""
    lacking = rows[rows["n"] == 0].drop_duplicates("cell_id")
    if not len(lacking):
        return []
    items = [
        f"{row['cell_id']} ({job_size(row)}): {one_line(row['reason'], limit=160) or row['state']}."
        for row in lacking.head(20).to_dict("records")
    ]
    if len(lacking) > len(items):
        items.append(f"and {count(len(lacking) - len(items), 'more cell')}.")
    return [Heading("Planned and not measured"), Bullets(items)]
