"""Read thousands of small CSV files with the same header into one frame, and write columns as CSV.

``pandas.read_csv`` has a fixed cost of milliseconds per file. Arrow therefore parses together all files that
have exactly the expected form. Any other file (another header, an incomplete last line, a value that is not
a number) is parsed row by row, and its problems are described.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv as arrow_csv

from analysis.text import clean, one_line
from ddp_scaling_bench.files import read_bytes
from ddp_scaling_bench.records import R, TableRow, columns_of, missing_columns, text_columns
from ddp_scaling_bench.units import listed

#: Arrow parses portions of about this many bytes, to limit memory. If a portion contains a value that is not
#: a number, only the files of this portion are parsed row by row.
_PORTION_BYTES = 1 << 22
_MAX_REMARKS = 3
#: A spreadsheet treats a text as a formula if the text begins with one of these characters.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass
class Loaded:
    """The rows of many files. The column ``file`` and the keys of ``problems`` are indexes of the paths."""

    rows: pd.DataFrame
    problems: dict[int, str] = field(default_factory=dict)


def read_csvs(paths: Sequence[str], record: type[TableRow]) -> Loaded:
    """Return the rows of all files in the order of ``paths``, with the columns of ``record``.

    Columns are float64 (an empty cell is NaN), except for those of text. A file or line that cannot be read
    adds a problem and no row.
    """
    reader = _Reader(paths, record)
    for index in range(len(paths)):
        reader.read(index)
    return reader.loaded()


def rows_of(frame: pd.DataFrame, record: type[R]) -> list[R]:
    """Return the rows of a frame as records, whose columns the frame contains."""
    columns = frame.to_dict("list")
    return [record(*row) for row in zip(*(columns[name] for name in columns_of(record)), strict=True)]


class _Reader:
    def __init__(self, paths: Sequence[str], record: type[TableRow]) -> None:
        self.paths = paths
        self.record = record
        self.columns = columns_of(record)
        self.text = text_columns(record)
        self.header = ",".join(self.columns).encode() + b"\n"
        types = {name: pa.string() if name in self.text else pa.float64() for name in self.columns}
        self.convert = arrow_csv.ConvertOptions(
            column_types=types,
            null_values=[""],
        )
        #: Files in the expected form that are not yet parsed: index, bytes below their header, rows.
        self.pending: list[tuple[int, bytes, int]] = []
        self.pending_bytes = 0
        self.frames: list[pd.DataFrame] = []
        #: The rows of files in another form, and the files of these rows.
        self.other_rows: list[list[str | float]] = []
        self.other_files: list[int] = []
        self.problems: dict[int, str] = {}

    def read(self, index: int) -> None:
        try:
            data = read_bytes(self.paths[index])
        except FileNotFoundError:
            self.problems[index] = f"{self._name(index)} is missing"
            return
        except OSError as error:
            self.problems[index] = f"{self._name(index)} cannot be read: {error.strerror}"
            return
        count = self._plain_rows(data)
        if count is None:
            self._read_row_by_row(index, data)
            return
        if self.pending_bytes > _PORTION_BYTES:
            self._parse_pending()
        if count:
            self.pending.append((index, data[len(self.header) :], count))
            self.pending_bytes += len(data)

    def loaded(self) -> Loaded:
        self._parse_pending()
        files = np.array(self.other_files, dtype=np.int64)
        others = pd.DataFrame({"file": files, **self._typed(self.other_rows)})
        frames = [frame for frame in (*self.frames, others) if len(frame)]
        rows = pd.concat(frames, ignore_index=True) if frames else others
        if len(frames) > 1:
            rows = rows.sort_values("file", kind="stable", ignore_index=True)
        return Loaded(rows, self.problems)

    def _plain_rows(self, data: bytes) -> int | None:
        """Return the number of rows of a file that has exactly the expected form, else None."""
        lines = data.count(b"\n")
        if not data.startswith(self.header) or not data.endswith(b"\n"):
            return None
        if data.count(b",") != lines * (len(self.columns) - 1):
            return None
        if b'"' in data or b"\r" in data or b"\n\n" in data or b"\0" in data:
            return None
        return lines - 1

    def _parse_pending(self) -> None:
        if not self.pending:
            return
        files, bodies, counts = zip(*self.pending, strict=True)
        self.pending, self.pending_bytes = [], 0
        try:
            source = pa.BufferReader(self.header + b"".join(bodies))
            table = arrow_csv.read_csv(source, convert_options=self.convert)
        except pa.ArrowInvalid:
            table = None
        if table is None or table.num_rows != sum(counts):
            for index, body in zip(files, bodies, strict=True):
                self._read_row_by_row(index, self.header + body)
            return
        frame = table.to_pandas()
        frame.insert(0, "file", np.repeat(np.array(files, dtype=np.int64), counts))
        self.frames.append(frame)

    def _read_row_by_row(self, index: int, data: bytes) -> None:
        rows, remarks = _parse_rows(data, self.record)
        if remarks:
            self.problems[index] = f"{self._name(index)}: {'; '.join(remarks)}"
        self.other_rows += rows
        self.other_files += [index] * len(rows)

    def _name(self, index: int) -> str:
        return self.paths[index].rpartition("/")[2]

    def _typed(self, rows: list[list[str | float]]) -> dict[str, pd.Series]:
        columns = zip(*rows, strict=True) if rows else ([] for _ in self.columns)
        return {
            name: pd.Series(list(values), dtype="str" if name in self.text else "float64")
            for name, values in zip(self.columns, columns, strict=True)
        }


def _parse_rows(data: bytes, record: type[TableRow]) -> tuple[list[list[str | float]], list[str]]:
    """Return the readable rows of a file, and remarks about its other rows."""
    columns, text = columns_of(record), text_columns(record)
    content = data.decode("utf-8-sig", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    remarks: list[str] = []
    if not content:
        return [], ["the file is empty"]
    if not content.endswith("\n"):
        content = content[: content.rfind("\n") + 1]
        remarks.append("the last line is incomplete and was left out")
    reader = csv.reader(io.StringIO(content, newline=""))
    rows: list[list[str | float]] = []
    try:
        header = next(reader, [])
        places = [header.index(name) if name in header else None for name in columns]
        if places[0] is None:
            shown = one_line(",".join(header), limit=60)
            return [], [*remarks, f"the header {shown!r} is that of another table"]
        if absent := missing_columns(record, header):
            remarks.append(f"lacks the {'column' if len(absent) == 1 else 'columns'} {listed(absent)}")
        for line in reader:
            if len(line) == len(header):
                values = ["" if place is None else line[place] for place in places]
                rows.append(
                    [
                        value if name in text else _number(value, name, reader.line_num, remarks)
                        for name, value in zip(columns, values, strict=True)
                    ]
                )
            elif line:
                remarks.append(f"line {reader.line_num} has {len(line)} values instead of {len(header)}")
    except csv.Error as error:
        remarks.append(f"line {reader.line_num}: {error}")
    more = len(remarks) - _MAX_REMARKS
    return rows, remarks if more <= 0 else [*remarks[:_MAX_REMARKS], f"and {more} more such lines"]


def _number(value: str, name: str, line: int, remarks: list[str]) -> float:
    try:
        return float(value) if value.strip() else math.nan
    except ValueError:
        remarks.append(f"line {line}: {name} {one_line(value, limit=30)!r} is not a number")
        return math.nan


def csv_text(columns: Mapping[str, Sequence[Any]], *, digits: int = 12) -> str:
    """Return columns as CSV: missing values are empty cells; texts that start like a formula are escaped.

    ``digits`` is the number of significant digits.
    """
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(_cells(own, digits) for own in columns.values()), strict=True))
    return target.getvalue()


def _cells(values: Sequence[Any], digits: int) -> list[Any]:
    """Return the values of a column as they are written; many texts of a column are equal."""
    form, text = f".{digits}g", cache(_text)
    return [
        ("" if math.isnan(one) else format(one, form))
        if isinstance(one, float)
        else text(one)
        if isinstance(one, str)
        else one
        for one in values
    ]


def _text(value: str) -> str:
    text = clean(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
