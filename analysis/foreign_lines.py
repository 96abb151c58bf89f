"""The lines of a table measured elsewhere: its text, its separator, its rows by their line."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from analysis.foreign_columns import Header, read_header
from analysis.wording import count, one_line
from bench.errors import BenchError, InputError, Problem, missing_file

MAX_BYTES = 50_000_000
_SEPARATORS = ",;\t"


class Reader:
    """Reads one table; gathers all its problems before it gives up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self.remarks: list[str] = []

    def problem(self, line: int | None, message: str, remedy: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(str(self.path), line, message, remedy))

    def stop_on_problems(self) -> None:
        """Raise what was found so far.

        Raises:
            InputError: there is something.
        """
        if self.problems:
            raise InputError(self.problems[:20])


def text_of(path: Path) -> str:
    """Return the text of a table in UTF-8.

    Raises:
        BenchError: the file cannot be read, or is too large.
        InputError: it is not UTF-8.
    """
    if not path.is_file():
        raise missing_file(path, what="the table", remedy="give a CSV file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise BenchError(f"{path}: {len(data):,} bytes are more than the {MAX_BYTES:,} of a table of runs")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        problem = Problem(str(path), line, "the text is not UTF-8", "save it as UTF-8")
        raise InputError([problem]) from None


def split(text: str, reader: Reader) -> tuple[list[tuple[int, list[str]]], Header]:
    """Return the numbered rows and the header; blank lines and those that begin with # are left out.

    Where the first row is numbers, the header is the comment before it, as ``numpy.savetxt`` writes it.
    """
    rows: list[tuple[int, list[str]]] = []
    comment: list[tuple[int, list[str]]] = []
    source = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text), strict=True)
    line = 1
    try:
        for values in source:
            values = [value.strip() for value in values]
            if any(values) and not values[0].startswith("#"):
                rows.append((line, values))
            elif any(values) and not rows:
                comment = [(line, [values[0].lstrip("# "), *values[1:]])]
            line = source.line_num + 1
    except csv.Error as error:
        reader.problem(source.line_num, f"not CSV: {error}", "quote texts with double quotes, in pairs")
        return [], read_header([])
    if not rows:
        raise BenchError(f"{reader.path}: the table is empty", remedy="begin with a line of column names")
    if all(map(is_number, rows[0][1])) and comment and len(comment[0][1]) == len(rows[0][1]):
        rows = comment + rows
    names = rows[0][1]
    for number_, values in rows[1:]:
        if len(values) != len(names):
            told = f"{count(len(values), 'value')} instead of {len(names)}"
            reader.problem(
                number_, told, "give every row as many as the header has; quote values with commas"
            )
    return rows[1:], read_header([one_line(name, limit=80) for name in names])


def _separator(text: str) -> str:
    """Return what parts the values: it gives the first two lines as many, and more than one."""
    told = [line[:4000] for line in text.splitlines() if line.strip() and not line.startswith("#")][:2]
    for mark in _SEPARATORS:
        widths = {len(values) for values in csv.reader(told, delimiter=mark)}
        if len(widths) == 1 and max(widths) > 1:
            return mark
    return next((mark for mark in _SEPARATORS if told and mark in told[0]), ",")


def is_number(text: str) -> bool:
    """Return whether a value is a number as it stands, without a unit."""
    try:
        float(text)
    except ValueError:
        return False
    return True
