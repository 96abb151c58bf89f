"""Read a CSV table of runs that were measured elsewhere; each row is a run.

All problems of a table are reported together, each with its line.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.text import clean, one_line
from ddp_scaling_bench.errors import BenchError, InputError, Problem, missing_file
from ddp_scaling_bench.units import number

#: The columns that a table can have. ``throughput`` is in samples/s of all ranks, ``time`` in s per step;
#: with ``tokens_per_sample``, people read rates in tokens/s.
COLUMNS = (
    *("nodes", "gpus", "gpus_per_node", "global_batch", "per_gpu_batch", "throughput", "time"),
    *("tokens_per_sample", "mode", "series", "repeat"),
)
_WHOLE_NUMBERS = ("nodes", "gpus", "gpus_per_node")
_TEXTS = ("mode", "series", "repeat")
_MAX_BYTES = 50_000_000


class TableProblems:
    """The problems found in a table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Problem] = []

    def add(self, line: int, message: str, remedy: str) -> None:
        """Add a problem."""
        self.found.append(Problem(str(self.path), line, message, remedy))

    def raise_if_any(self) -> None:
        """Raise an InputError with the first 20 problems, if there are any."""
        if self.found:
            raise InputError(sorted(self.found, key=lambda one: one.line or 0)[:20])


@dataclass(kw_only=True)
class TableRow:
    """One run of a table; ``line`` is its line in the file.

    ``gpus`` is 0 while it is not known. ``gpus_per_node`` is empty, and ``nodes`` 1, if the nodes are not
    known. ``work`` is the number of samples per step, possibly in arbitrary units.
    """

    line: int
    series: str
    mode: str
    repeat: str
    nodes: int
    gpus: int
    gpus_per_node: str
    global_batch: float | None
    per_gpu_batch: float | None
    throughput: float | None
    time: float | None
    tokens_per_sample: float | None
    work: float = math.nan
    cell_id: str = ""


@dataclass
class Table:
    """A table: its rows, the names of its columns, and the text of the file."""

    path: Path
    rows: list[TableRow]
    columns: list[str]
    text: str


def read_table(path: Path, text: str | None = None) -> Table:
    """Read a CSV file, or the ``text`` of one.

    Raises:
        BenchError: the file cannot be read.
        InputError: the table has problems.
    """
    text = _read_text(path) if text is None else text
    problems = TableProblems(path)
    frame = _parse(path, text)
    columns = [str(name) for name in frame]
    _check_columns(columns, problems)
    problems.raise_if_any()
    frame = frame.reindex(columns=list(COLUMNS)).astype(object)
    for name in COLUMNS:
        frame[name] = frame[name].fillna("").map(clean) if name in _TEXTS else _numbers(frame[name], problems)
    for line, mode in frame["mode"].items():
        if mode not in ("", "strong", "weak"):
            message = f"mode {one_line(mode, limit=40)!r} is not strong or weak"
            problems.add(int(str(line)), message, "write one of these")
    problems.raise_if_any()
    frame = frame.astype(object).where(frame.notna(), None)
    rows = []
    for values in frame.assign(line=frame.index).to_dict("records"):
        row = _with_size(values, columns, problems)
        _complete_batch(row, problems)
        rows.append(row)
    problems.raise_if_any()
    return Table(path, rows, columns, text)


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise missing_file(path, what="the table", remedy="give a CSV file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise BenchError(f"{path}: {len(data):,} bytes exceed the maximum of {_MAX_BYTES:,} for a table")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        problem = Problem(str(path), line, "the text is not UTF-8", "save it as UTF-8")
        raise InputError([problem]) from None


def _parse(path: Path, text: str) -> pd.DataFrame:
    """Return the texts of a table. The index is the line in the file; blank lines are left out."""
    if not text.strip():
        raise BenchError(f"{path}: the table is empty", remedy="begin with a line of column names")
    remedy = "give one value per column; enclose values that contain commas in double quotes"
    try:
        frame = pd.read_csv(
            io.StringIO(text), dtype=str, skip_blank_lines=False, keep_default_na=False, na_values=[""]
        )
    except pd.errors.ParserError as error:
        raise BenchError(f"{path}: {one_line(error, limit=200)}", remedy=remedy) from None
    if not isinstance(frame.index, pd.RangeIndex):
        raise BenchError(f"{path}: the rows have more values than the first line has names", remedy=remedy)
    frame.index += 2
    frame = frame.dropna(how="all")
    if not len(frame):
        raise BenchError(
            f"{path}: the table has a header but no rows", remedy="add one row per run or per size"
        )
    return frame


def _check_columns(columns: list[str], problems: TableProblems) -> None:
    for name in columns:
        if name not in COLUMNS:
            remedy = f"rename or remove it; the columns of a table are {', '.join(COLUMNS)}"
            problems.add(1, f"the column {one_line(name, limit=80)!r} is not known", remedy)
    given = [name for name in ("throughput", "time") if name in columns]
    if len(given) != 1:
        message = "both columns throughput and time" if given else "no column throughput or time"
        problems.add(1, message, "give throughput (samples/s of all ranks) or time (s per step)")
    if "gpus" not in columns and "nodes" not in columns:
        problems.add(1, "no column gpus or nodes", "give the number of ranks in a column gpus")


def _numbers(values: pd.Series, problems: TableProblems) -> pd.Series:
    """Return the numbers of a column; NaN if the cell is empty."""
    found = pd.to_numeric(values, errors="coerce")
    valid = (found > 0) & np.isfinite(found)
    kind = "a number above 0"
    if values.name in _WHOLE_NUMBERS:
        valid &= found == found.round()
        kind = "a whole number of at least 1"
    for line, text in values[values.notna() & ~valid].items():
        remedy = "write it without units and thousands separators, or leave the cell empty"
        message = f"{values.name} {one_line(text, limit=40)!r} is not {kind}"
        problems.add(int(str(line)), message, remedy)
    return found


def _with_size(values: dict[Any, Any], columns: list[str], problems: TableProblems) -> TableRow:
    """Return a row with its ranks and, if the row determines them, its nodes."""
    line = values["line"]
    nodes, gpus, per_node = (int(value) if (value := values.pop(name)) else 0 for name in _WHOLE_NUMBERS)
    only_nodes = not {"gpus", "gpus_per_node"} & set(columns)
    if not gpus and nodes and (per_node or only_nodes):
        gpus = nodes * (per_node or 1)
    if not gpus:
        message = "the row does not give the number of ranks"
        problems.add(line, message, "fill in gpus, or nodes and gpus_per_node")
    elif nodes and per_node and nodes * per_node != gpus:
        total = nodes * per_node
        message = f"{nodes} nodes with {per_node} ranks each have {total} ranks, but the row has {gpus}"
        problems.add(line, message, "correct one of the three numbers")
    if gpus and nodes > gpus:
        message = f"{gpus} ranks on {nodes} nodes leave nodes idle"
        problems.add(line, message, "correct one of the two numbers")
    if per_node and not nodes:
        nodes = math.ceil(gpus / per_node)
    shape = "1" if only_nodes else f"{gpus / nodes:g}" if nodes else ""
    return TableRow(**values, nodes=nodes or 1, gpus=gpus, gpus_per_node=shape)


def _complete_batch(row: TableRow, problems: TableProblems) -> None:
    """Compute a missing global batch or batch per rank from the other one; check given ones."""
    gpus, total, per_gpu = row.gpus, row.global_batch, row.per_gpu_batch
    if not gpus:
        return
    if total and per_gpu and abs(total / (per_gpu * gpus) - round(total / (per_gpu * gpus))) > 1e-9:
        product = f"per_gpu_batch {number(per_gpu)} x {gpus} ranks"
        message = f"global_batch {number(total)} is not a multiple of {product}"
        problems.add(row.line, message, "correct one of the three numbers")
    if total is None and per_gpu is not None:
        row.global_batch = per_gpu * gpus
    if per_gpu is None and total is not None:
        row.per_gpu_batch = total / gpus
