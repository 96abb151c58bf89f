"""Split the text of a table into cells: CSV, TSV, semicolons, columns of blanks, or Markdown."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.tables_in.vocabulary import size_column
from analysis.text import one_line
from ddp_scaling_bench.errors import BenchError, InputError, Problem, missing_file
from ddp_scaling_bench.files import is_binary
from ddp_scaling_bench.units import count, listed

_MAX_BYTES = 50_000_000
_MARKDOWN_RULE = re.compile(r"\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?)?")
_PIPE = re.compile(r"(?<!\\)\|")
_MARKUP = re.compile(r"[*`]+")


class TableProblems:
    """The problems found in a table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Problem] = []

    def add(self, line: int, message: str, remedy: str) -> None:
        """Add a problem."""
        self.found.append(Problem(str(self.path), line, message, remedy))

    def raise_if_any(self) -> None:
        """Raise an InputError with the first 20 different problems, if there are any."""
        if self.found:
            alike: dict[tuple[str, str], list[Problem]] = {}
            for one in sorted(self.found, key=lambda one: one.line or 0):
                alike.setdefault((one.message, one.remedy), []).append(one)
            raise InputError([_with_lines(own) for own in alike.values()][:20])


def _with_lines(alike: Sequence[Problem]) -> Problem:
    """Return the first of some equal problems, with the lines of the others."""
    first, *others = alike
    lines = listed([str(one.line) for one in others], limit=3)
    return replace(first, message=f"{first.message} (also in line {lines})") if others else first


@dataclass
class Grid:
    """The cells of a table.

    Attributes:
        line: the line of the names.
        names: the names of the columns.
        rows: the line and the values of each row, as many values as names.
        semicolons: whether semicolons separate the values, so that a comma is a decimal comma.
    """

    line: int
    names: list[str]
    rows: list[tuple[int, list[str]]]
    semicolons: bool = False

    def column(self, place: int) -> list[str]:
        """Return the values of a column."""
        return [values[place] for _, values in self.rows]


def read_text(path: Path) -> str:
    """Return the text of a table.

    Raises:
        BenchError: the file cannot be read.
    """
    if not path.is_file():
        raise missing_file(path, what="the table", remedy="give a file with a table")
    try:
        data = path.read_bytes()
    except OSError as error:
        remedy = "change its access rights, or give a copy that you can read"
        raise BenchError(f"{path}: cannot be read: {error.strerror}", remedy=remedy) from None
    if len(data) > _MAX_BYTES:
        raise BenchError(f"{path}: {len(data):,} bytes exceed the maximum of {_MAX_BYTES:,} for a table")
    if is_binary(data[:8192]):
        remedy = "save the table as CSV in the program that wrote it"
        raise BenchError(f"{path} is a binary file, not a table", remedy=remedy)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        problem = Problem(str(path), line, "the text is not UTF-8", "save it as UTF-8")
        raise InputError([problem]) from None


def split(text: str, problems: TableProblems) -> list[Grid]:
    """Return the tables in a text: all of a Markdown document, else one.

    Raises:
        BenchError: there is no table.
        InputError: rows have more values than there are names.
    """
    lines = text.splitlines()
    rules = [place for place, line in enumerate(lines) if place and _MARKDOWN_RULE.fullmatch(line.strip())]
    if not rules and problems.path.suffix == ".md" and text.strip() and not re.search("[,;\t]", text):
        remedy = "write |---|---| below the names of its columns, and one row per run or per size"
        raise BenchError(f"{problems.path}: there is no Markdown table in it", remedy=remedy)
    if rules:
        parts = [(list(_markdown_rows(lines, rule)), False) for rule in rules]
    else:
        parts = [_delimited_rows(lines, problems.path)]
    found = [_grid(rows, problems, semicolons=semicolons) for rows, semicolons in parts]
    problems.raise_if_any()
    return [_upright(grid) for grid in found]


def _markdown_rows(lines: Sequence[str], rule: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of each row of the table with its rule at the place ``rule``."""
    yield rule, _markdown_cells(lines[rule - 1])
    for place in range(rule + 1, len(lines)):
        if "|" not in lines[place]:
            return
        yield place + 1, _markdown_cells(lines[place])


def _markdown_cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [_MARKUP.sub("", cell.replace("\\|", "|")) for cell in _PIPE.split(inner)]


def _delimited_rows(lines: list[str], path: Path) -> tuple[list[tuple[int, list[str]]], bool]:
    """Return the line and the cells of each row, and whether semicolons separate them."""
    # A heading or a comment above the names.
    skipped = next((n for n, line in enumerate(lines) if line.strip() and not line.startswith("# ")), None)
    if skipped is None:
        raise BenchError(f"{path}: the table is empty", remedy="begin with a line of column names")
    separator = next((one for one in "\t;," if one in lines[skipped]), "")
    if not separator:
        pairs = enumerate(lines[skipped:], skipped + 1)
        cells = [(line, re.split(r"\t\s*|\s{2,}", text.strip())) for line, text in pairs]
        if len(cells[0][1]) == 1:
            remedy = (
                "put a comma, a tab or two blanks between them, and remove other lines above them; "
                f"for a log: bench doctor {path}"
            )
            raise BenchError(f"{path}:{skipped + 1}: nothing separates names of columns", remedy=remedy)
        return cells, False
    reader = csv.reader(lines[skipped:], delimiter=separator, skipinitialspace=separator != "\t", strict=True)
    rows, line = [], skipped + 1
    try:
        for values in reader:
            rows.append((line, values))
            line = skipped + reader.line_num + 1
    except csv.Error:
        what = "a double quote is not closed, or text follows it"
        raise BenchError(f"{path}:{line}: {what}", remedy='write each value in quotes as "VALUE"') from None
    return rows, separator == ";"


def _grid(rows: list[tuple[int, list[str]]], problems: TableProblems, *, semicolons: bool) -> Grid:
    trimmed = [(line, [value.strip() for value in values]) for line, values in rows]
    filled = [(line, values) for line, values in trimmed if any(values)]
    if len(filled) < 2:
        remedy = "add one row per run or per size"
        raise BenchError(f"{problems.path}: the table has a header but no rows", remedy=remedy)
    (line, names), *body = filled
    for place, values in body:
        if any(values[len(names) :]):
            message = f"the row has {count(len(values), 'value')}, but there are {count(len(names), 'name')}"
            remedy = "give one value per column; put values with commas into double quotes"
            problems.add(place, message, remedy)
    width = len(names)
    return Grid(line, names, [(n, (own + [""] * width)[:width]) for n, own in body], semicolons)


def _upright(grid: Grid) -> Grid:
    """Turn a table whose sizes are names of columns: one row per size."""
    sizes = [size_column(name) for name in grid.names[1:]]
    if len(sizes) < 2 or None in sizes:
        return grid
    first = next((size for size in sizes if size), grid.names[0])
    names = [first, *(one_line(values[0], limit=80) for _, values in grid.rows)]
    columns = range(1, len(grid.names))
    rows = [(grid.line, [grid.names[n], *(values[n] for _, values in grid.rows)]) for n in columns]
    return Grid(grid.line, names, rows, grid.semicolons)
