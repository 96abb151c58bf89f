"""The lines of a table measured elsewhere: its text, its separator, its rows by their line."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.tables_in.columns import MEASURES, Header, read_header
from analysis.text import clean, count, listed, number, one_line
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


# A table measured elsewhere: read with care, every problem told with its line.
#
# The columns are those of :mod:`analysis.tables_in.columns`; a row is one run. Nothing is guessed: the
# regime comes from the batch columns, or from a label where there are none, and what was derived or
# left out is told in :attr:`Table.remarks`.

#: How far a value may lie from what two others say of it: tables are rounded.
_AGREE = 0.02

_MODES = {
    **{name: mode for mode in ("strong", "weak") for name in (mode, f"{mode} scaling")},
    **dict.fromkeys(("time to train", "time-to-train", "time_to_train"), "time to train"),
}
_YES = {"yes", "true", "1", "with", "on"}
_NO = {"no", "false", "0", "without", "off"}
_COLUMN_REMEDY = (
    "name one of them throughput (samples/s of all ranks), throughput_per_gpu, time (s per step), time_ms, "
    "steps_per_sec or time_to_train"
)

#: The columns of :attr:`Table.rows`; what the table does not say is None.
ROW_COLUMNS = (
    *("line", "nodes", "gpus", "gpus_per_node", "global_batch", "per_gpu_batch", "throughput", "time"),
    *("time_to_train", "mode", "series", "repeat", "cell_id", "backend", "launcher", "ddp"),
)


@dataclass
class Table:
    """A table as it was read.

    Attributes:
        path: where it lies.
        rows: one row per run, :data:`ROW_COLUMNS` as objects: ``line`` is that of the file,
            ``throughput`` of all ranks, ``time`` in seconds per step, ``ddp`` a bool;
            beside them ``other``, the text columns of no known name.
        header: what the columns mean.
        remarks: what was derived or left out, in words.
        text: the file's content.
    """

    path: Path
    rows: pd.DataFrame
    header: Header
    remarks: list[str] = field(default_factory=list)
    text: str = ""


def read_table(path: Path) -> Table:
    """Return the rows of a CSV file (separated by commas, semicolons or tabs).

    Raises:
        BenchError: the file cannot be read.
        InputError: the table is wrong in one place or more.
    """
    text = text_of(path)
    reader = Reader(path)
    lines, header = split(text, reader)
    reader.stop_on_problems()
    _check_header(header, reader)
    reader.stop_on_problems()
    rows = [_row(reader, header, line, values) for line, values in lines]
    reader.stop_on_problems()
    if not rows:
        raise BenchError(
            f"{path}: the table has a header and no row", remedy="add one row per run or per size"
        )
    _tell_columns(header, reader)
    frame = pd.DataFrame(rows, columns=[*ROW_COLUMNS, "other"], dtype=object)
    return Table(path, frame, header, reader.remarks, text)


def _check_header(header: Header, reader: Reader) -> None:
    for field_, first, second in header.twice:
        told = f"the columns {first!r} and {second!r} both mean {field_}"
        reader.problem(1, told, "rename or remove one")
    names = listed([*header.names.values(), *header.other], limit=30)
    found = [measure for measure in MEASURES if measure in header.places]
    if not found:
        for name, (meaning, remedy) in header.ambiguous.items():
            if "time" in remedy:
                reader.problem(1, f"the column {name!r} {meaning}", remedy)
                return
        reader.problem(1, f"no column says how fast a size is (there are {names})", _COLUMN_REMEDY)
    if "gpus" not in header.places and "nodes" not in header.places:
        reader.problem(1, f"no column says how large a size is (there are {names})", "name one gpus or nodes")
    times = [header.names[name] for name in ("time", "time_ms", "steps_per_sec") if name in header.places]
    if len(times) > 1:
        reader.problem(1, f"the columns {listed(times)} all tell the time per step", "keep one of them")
    if "time_to_train" in header.places and len(found) > 1:
        told = f"{header.names['time_to_train']!r} cannot stand beside a throughput or a time per step"
        reader.problem(1, told, "make two tables")
    batches = {"global_batch", "per_gpu_batch"} & set(header.places)
    for name, (meaning, remedy) in header.ambiguous.items():
        if "batch" in remedy and not batches:
            reader.problem(1, f"the column {name!r} {meaning}", remedy)


def _tell_columns(header: Header, reader: Reader) -> None:
    renamed = [f"{name} as {field_}" for field_, name in header.names.items() if name != field_]
    if renamed:
        reader.remarks.append(f"Columns were read by their names: {listed(renamed, limit=20)}")
    if "gpus" not in header.places and "gpus_per_node" not in header.places:
        reader.remarks.append(
            "The table has no column gpus: N counts nodes, and what is called a rank is a node"
        )


def _row(reader: Reader, header: Header, line: int, values: list[str]) -> dict[str, Any]:
    def text(name: str) -> str:
        return clean(values[header.places[name]]) if name in header.places else ""

    def numeric(name: str, *, whole: bool = False) -> float | None:
        if not text(name):
            return None
        return _positive(reader, line, header.names[name], text(name), whole=whole)

    row: dict[str, Any] = dict.fromkeys(ROW_COLUMNS)
    row["line"] = line
    for name in ("nodes", "gpus", "gpus_per_node"):
        row[name] = numeric(name, whole=True)
    for name in ("global_batch", "per_gpu_batch", "throughput", "time", "time_to_train"):
        row[name] = numeric(name)
    if (milliseconds := numeric("time_ms")) is not None:
        row["time"] = milliseconds / 1000
    if (rate := numeric("steps_per_sec")) is not None:
        row["time"] = 1 / rate
    for name in ("series", "repeat", "cell_id", "backend", "launcher"):
        row[name] = text(name)
    row["mode"] = _choice(reader, header, line, "mode", text("mode"), _MODES)
    words = {**dict.fromkeys(_YES, True), **dict.fromkeys(_NO, False)}
    row["ddp"] = _choice(reader, header, line, "ddp", text("ddp"), words)
    row["other"] = {name: clean(values[place]) for name, place in header.other.items()}
    _complete_size(reader, header, row)
    _complete_throughput(reader, header, row, numeric("throughput_per_gpu"))
    _complete_batch(reader, header, row)
    return row


def _positive(reader: Reader, line: int, name: str, text: str, *, whole: bool) -> float | None:
    what = "a whole number of at least 1" if whole else "a number above 0"
    try:
        value = float(text)
    except ValueError:
        hint = "without thousands separators and units, with a decimal point"
        reader.problem(line, f"{name} {one_line(text, limit=40)!r} is not {what}", f"write it {hint}")
        return None
    if not math.isfinite(value) or value <= 0 or (whole and value != int(value)):
        told = f"{name} {one_line(text, limit=40)} is not {what}"
        reader.problem(line, told, "leave the cell empty if it was not measured")
        return None
    return value


def _choice(reader: Reader, header: Header, line: int, name: str, text: str, choices: dict[str, Any]) -> Any:
    if not text:
        return None
    if text.casefold() in choices:
        return choices[text.casefold()]
    told = f"{header.names[name]} {one_line(text, limit=40)!r} is not one of {', '.join(choices)}"
    reader.problem(line, told, "write one of these")
    return None


def _complete_size(reader: Reader, header: Header, row: dict[str, Any]) -> None:
    nodes, gpus, each = (None if row[n] is None else int(row[n]) for n in ("nodes", "gpus", "gpus_per_node"))
    line = row["line"]
    if gpus is None and nodes is not None:
        gpus = nodes * (each or 1)
        if each is None and {"gpus", "gpus_per_node"} & set(header.places):
            gpus = None
    if gpus is None:
        if not _noted(reader, line):
            told = "the row does not say how many ranks there are"
            reader.problem(line, told, "fill in gpus, or nodes and gpus_per_node")
        return
    if nodes is not None and each is not None and nodes * each != gpus:
        told = f"{nodes} nodes x {each} per node are {nodes * each} ranks, but the row says {gpus}"
        reader.problem(line, told, "correct one of the three")
    if nodes is not None and nodes > gpus:
        reader.problem(
            line, f"{gpus} ranks on {nodes} nodes leave nodes without any", "correct one of the two"
        )
    if each is not None and nodes is None:
        nodes = math.ceil(gpus / each)
    only_nodes = not {"gpus", "gpus_per_node"} & set(header.places)
    row["nodes"], row["gpus"] = nodes, gpus
    row["gpus_per_node"] = "1" if only_nodes else f"{gpus / nodes:g}" if nodes else ""


def _noted(reader: Reader, line: int) -> bool:
    return any(problem.line == line for problem in reader.problems)


def _complete_throughput(reader: Reader, header: Header, row: dict[str, Any], per_gpu: float | None) -> None:
    if per_gpu is None or row["gpus"] is None:
        return
    total = per_gpu * row["gpus"]
    given = row["throughput"]
    if given is not None and abs(total / given - 1) > _AGREE:
        told = (
            f"{header.names['throughput_per_gpu']} {number(per_gpu)} x {row['gpus']} ranks "
            f"is {number(total)}, "
            f"but {header.names['throughput']} is {number(given)}"
        )
        reader.problem(row["line"], told, "correct one of the two, or remove the column")
    row["throughput"] = given or total


def _complete_batch(reader: Reader, header: Header, row: dict[str, Any]) -> None:
    """Fill in the batch that is not given, and check what is said twice."""
    gpus, whole, each = row["gpus"], row["global_batch"], row["per_gpu_batch"]
    if gpus is None:
        return
    if whole and each and abs(whole / (each * gpus) - round(whole / (each * gpus))) > 1e-9:
        told = f"global_batch {number(whole)} is no multiple of per_gpu_batch {number(each)} x {gpus} ranks"
        reader.problem(row["line"], told, "correct one of the three")
    if whole is None and each is not None:
        row["global_batch"] = whole = each * gpus
    if each is None and whole is not None:
        row["per_gpu_batch"] = whole / gpus
    if whole and row["time"] and row["throughput"] and header.counts_samples:
        expected = whole / row["time"]
        if abs(expected / row["throughput"] - 1) > _AGREE:
            told = (
                f"{number(whole)} samples in {number(row['time'])} s are {number(expected)} samples/s, "
                f"but {header.names.get('throughput', 'the throughput')} is {number(row['throughput'])}"
            )
            reader.problem(row["line"], told, "correct one of the three, or remove the column")
