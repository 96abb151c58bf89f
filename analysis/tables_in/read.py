"""Read a CSV table of runs that were measured elsewhere; each row is a run.

The name of a column determines its meaning (its field). Names are compared in lower case with everything
except letters and digits replaced by underscores: ``Throughput (img/s)`` is ``throughput_img_s``. An
ambiguous name of a needed column is an error. Unknown columns are ignored with a remark. All problems of a
table are reported together, each with its line.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.text import clean, count, listed, number, one_line
from bench.errors import BenchError, InputError, Problem, missing_file

_COUNT = r"(?:n|num|no_of|number_of|total)_"
_ITEMS = "samples?|images?|imgs?|tokens?|toks?|sequences?|seqs?|sentences?|examples?|items?|words?|frames?"
_RATE = rf"(?:(?:{_ITEMS})_(?:per_)?(?:s|sec|second)|[tgp]?flops?(?:_s)?)"
_RANK = "(?:gpu|device|rank|accelerator)"
_STEP = "(?:step|iteration|iter|it)"

#: The fields, each with a pattern for the (normalized) names of columns that contain this field.
_PATTERNS = {
    "nodes": rf"(?:{_COUNT})?(?:nodes?|hosts?)|nnodes|node_count",
    "gpus": (
        rf"(?:{_COUNT})?(?:gpus?|ranks?|devices?|accelerators?|mpi_ranks?|processes|procs|cores)"
        "|ngpus?|nprocs?|world_size|gpu_count"
    ),
    "gpus_per_node": rf"(?:{_RANK}s?|tasks?)_per_node|{_RANK}s?_node",
    "global_batch": "global_batch(?:_size)?|total_batch(?:_size)?|gbs",
    "per_gpu_batch": (
        rf"per_{_RANK}_batch(?:_size)?|batch(?:_size)?_per_{_RANK}|batch(?:_size)?_{_RANK}|local_batch(?:_size)?"
    ),
    "throughput": rf"(?:(?:total|aggregate|system)_)?throughput(?:_{_RATE})?|{_RATE}",
    "throughput_per_gpu": (
        rf"throughput_per_{_RANK}(?:_{_RATE})?|(?:throughput_)?{_RATE}_(?:per_)?{_RANK}|(?:{_ITEMS})_(?:s_)?{_RANK}_s"
    ),
    "time": (
        "time(?:_s|_sec|_seconds)?|(?:step|iteration|iter)_time(?:_s|_sec|_seconds)?|"
        rf"time_per_{_STEP}(?:_s|_sec|_seconds)?|(?:s|secs?|seconds)_(?:per_)?{_STEP}"
    ),
    "time_ms": (rf"time_ms|(?:step|iteration|iter)_time_ms|time_per_{_STEP}_ms|step_ms|ms_(?:per_)?{_STEP}"),
    "steps_per_sec": "(?:its?|iters?|iterations?|steps?)_(?:per_)?(?:s|sec|second)",
    "time_to_train": (
        "(?:(?:time|minutes|hours)_to_(?:train|accuracy|target|quality|convergence)|ttt|tta)(?:_[a-z]+)?|"
        "minutes?|hours?|time_(?:min|mins|minutes|h|hours)"
    ),
    "mode": "mode|scaling|regime|scaling_mode",
    "series": "series",
    "repeat": "rep|repeat|repetition|replicate|trial|run|seed",
    "cell_id": "cell_id|cell",
    "backend": "backend",
    "launcher": "launcher",
    "ddp": "ddp",
}
_COMPILED = {field: re.compile(pattern) for field, pattern in _PATTERNS.items()}

#: Patterns for ambiguous names, each with a text about the two meanings and the name to use instead.
_AMBIGUOUS = {
    "batch(?:_size)?|bs|minibatch(?:_size)?|batchsize": (
        "could be the batch of all ranks or of one rank",
        "rename it to global_batch or per_gpu_batch",
    ),
    "(?:epoch|training|train|total|wall|run|elapsed|job)_?time(?:_[a-z]+)?|runtime(?:_[a-z]+)?|time_avg|"
    "walltime(?:_[a-z]+)?|elapsed(?:_[a-z]+)?|seconds|duration(?:_[a-z]+)?|time_per_epoch(?:_[a-z]+)?": (
        "could be the time of a fixed amount of work or the time to reach a target",
        "rename it to time_to_train; for a fixed amount of work, in total (strong scaling) or per rank (weak "
        "scaling), rename it to time",
    ),
}

#: Units of a throughput other than samples/s. The pattern matches a word in the name of the column.
_UNITS = {
    "images/s": "images?|imgs?",
    "tokens/s": "tokens?|toks?",
    "sequences/s": "sequences?|seqs?",
    "sentences/s": "sentences?",
    "words/s": "words?",
    "frames/s": "frames?",
}
#: Units smaller than a sample: the batch (samples) over a throughput in such a unit is not a time per step.
_PARTS_OF_SAMPLES = ("tokens/s", "words/s")
_MEASURES = ("throughput", "throughput_per_gpu", "time", "time_ms", "steps_per_sec", "time_to_train")
_MEASURE_REMEDY = (
    "rename one of these columns to throughput (samples/s of all ranks), throughput_per_gpu, "
    "time (s per step), time_ms, steps_per_sec or time_to_train"
)

_MAX_BYTES = 50_000_000
_SEPARATORS = ",;\t"
#: Maximum relative difference between a value and the same value computed from other columns. Tables contain
#: rounded values.
_TOLERANCE = 0.02
_MODES = {
    **{name: mode for mode in ("strong", "weak") for name in (mode, f"{mode} scaling")},
    **dict.fromkeys(("time to train", "time-to-train", "time_to_train"), "time to train"),
}
_YES_OR_NO = {
    **dict.fromkeys(("yes", "true", "1", "with", "on"), True),
    **dict.fromkeys(("no", "false", "0", "without", "off"), False),
}

#: Columns of :attr:`Table.rows`; None if the table does not give a value.
ROW_COLUMNS = (
    *("line", "nodes", "gpus", "gpus_per_node", "global_batch", "per_gpu_batch", "throughput", "time"),
    *("time_to_train", "mode", "series", "repeat", "cell_id", "backend", "launcher", "ddp"),
)


class TableProblems:
    """The problems found in a table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Problem] = []

    def add(self, line: int | None, message: str, remedy: str) -> None:
        """Add a problem."""
        self.found.append(Problem(str(self.path), line, message, remedy))

    def raise_if_any(self) -> None:
        """Raise an InputError with the first 20 problems, if there are any."""
        if self.found:
            raise InputError(self.found[:20])


@dataclass(frozen=True)
class Header:
    """The columns of a table and their meanings.

    ``places`` and ``names`` map fields to the positions and names of their columns. ``unknown`` maps the
    names of all other columns to their positions. ``ambiguous`` maps ambiguous names to a text about their
    meanings and a remedy. ``duplicates`` lists fields with two columns: the field and both names.
    """

    places: dict[str, int]
    names: dict[str, str]
    unknown: dict[str, int]
    ambiguous: dict[str, tuple[str, str]]
    duplicates: list[tuple[str, str, str]]

    @property
    def rate_unit(self) -> str:
        """Unit of the throughput, from the name of its column, such as ``tokens/s``; else ``samples/s``."""
        name = self.names.get("throughput", self.names.get("throughput_per_gpu", ""))
        for word in _normalized(name).split("_"):
            if flops := re.fullmatch("([tgp]?)flops?", word):
                return f"{flops[1].upper()}FLOP/s"
            for unit, pattern in _UNITS.items():
                if re.fullmatch(pattern, word):
                    return unit
        return "samples/s"

    @property
    def counts_samples(self) -> bool:
        """True if the throughput and the batch have the same unit, such as samples."""
        return self.rate_unit not in _PARTS_OF_SAMPLES and not self.rate_unit.endswith("FLOP/s")


@dataclass
class Table:
    """A table: its rows and header, remarks on renamed columns, and the text of the file.

    ``rows`` has one row per run, with the columns :data:`ROW_COLUMNS` (of dtype object) and ``other``, a
    dict with the values of unknown columns. ``line`` is the line in the file, ``throughput`` is that of all
    ranks, ``time`` is in seconds per step, and ``ddp`` is a bool.
    """

    path: Path
    rows: pd.DataFrame
    header: Header
    remarks: list[str]
    text: str


def read_table(path: Path) -> Table:
    """Read a CSV file (separated by commas, semicolons or tabs).

    Raises:
        BenchError: the file cannot be read.
        InputError: the table has problems.
    """
    text = _read_text(path)
    problems = TableProblems(path)
    lines, header = _split(text, problems)
    problems.raise_if_any()
    _check_header(header, problems)
    problems.raise_if_any()
    rows = [_Row(problems, header, line, values).parsed() for line, values in lines]
    problems.raise_if_any()
    if not rows:
        raise BenchError(
            f"{path}: the table has a header but no rows", remedy="add one row per run or per size"
        )
    frame = pd.DataFrame(rows, columns=[*ROW_COLUMNS, "other"], dtype=object)
    return Table(path, frame, header, _remarks(header), text)


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


def _split(text: str, problems: TableProblems) -> tuple[list[tuple[int, list[str]]], Header]:
    """Return the rows with their line numbers, and the header; skip blank lines and comments (#).

    If the first row contains only numbers, the last comment before it is the header (``numpy.savetxt``).
    """
    rows: list[tuple[int, list[str]]] = []
    comment: list[tuple[int, list[str]]] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text), strict=True)
    line = 1
    try:
        for values in reader:
            values = [value.strip() for value in values]
            if any(values) and not values[0].startswith("#"):
                rows.append((line, values))
            elif any(values) and not rows:
                comment = [(line, [values[0].lstrip("# "), *values[1:]])]
            line = reader.line_num + 1
    except csv.Error as error:
        problems.add(reader.line_num, f"invalid CSV: {error}", "close each opening double quote")
        return [], read_header([])
    if not rows:
        raise BenchError(f"{problems.path}: the table is empty", remedy="begin with a line of column names")
    if all(map(is_number, rows[0][1])) and comment and len(comment[0][1]) == len(rows[0][1]):
        rows = comment + rows
    names = rows[0][1]
    for at, values in rows[1:]:
        if len(values) != len(names):
            message = f"{count(len(values), 'value')} instead of {len(names)}"
            problems.add(
                at, message, "give one value per column; enclose values that contain commas in double quotes"
            )
    return rows[1:], read_header([one_line(name, limit=80) for name in names])


def _separator(text: str) -> str:
    """Return the separator that splits the first two lines into the same number of values, at least two."""
    lines = [line[:4000] for line in text.splitlines() if line.strip() and not line.startswith("#")][:2]
    for separator in _SEPARATORS:
        widths = {len(values) for values in csv.reader(lines, delimiter=separator)}
        if len(widths) == 1 and max(widths) > 1:
            return separator
    return next((separator for separator in _SEPARATORS if lines and separator in lines[0]), ",")


def is_number(text: str) -> bool:
    """Return whether a text is a number without a unit."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _normalized(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.casefold().replace("#", "n ")).strip("_")


def read_header(columns: list[str]) -> Header:
    """Determine the meaning of each column from its name; ``columns`` are all names in order."""
    header = Header({}, {}, {}, {}, [])
    for place, name in enumerate(columns):
        normalized = _normalized(name)
        field = next((field for field, pattern in _COMPILED.items() if pattern.fullmatch(normalized)), None)
        if field in header.places:
            assert field is not None
            header.duplicates.append((field, header.names[field], name))
        elif field:
            header.places[field], header.names[field] = place, name
        else:
            meaning = next(
                (m for pattern, m in _AMBIGUOUS.items() if re.fullmatch(pattern, normalized)), None
            )
            if meaning:
                header.ambiguous[name] = meaning
            header.unknown[name] = place
    return header


def _check_header(header: Header, problems: TableProblems) -> None:
    for field, first, second in header.duplicates:
        message = f"the columns {first!r} and {second!r} both mean {field}"
        problems.add(1, message, "rename or remove one of them")
    names = listed([*header.names.values(), *header.unknown], limit=30)
    found = [measure for measure in _MEASURES if measure in header.places]
    if not found:
        for name, (meaning, remedy) in header.ambiguous.items():
            if "time" in remedy:
                problems.add(1, f"the column {name!r} {meaning}", remedy)
                return
        problems.add(1, f"no column contains a throughput or a time (columns: {names})", _MEASURE_REMEDY)
    if "gpus" not in header.places and "nodes" not in header.places:
        message = f"no column contains ranks or nodes (columns: {names})"
        problems.add(1, message, "rename one of these columns to gpus or nodes")
    times = [header.names[name] for name in ("time", "time_ms", "steps_per_sec") if name in header.places]
    if len(times) > 1:
        problems.add(1, f"the columns {listed(times)} all contain the time per step", "keep one of them")
    if "time_to_train" in header.places and len(found) > 1:
        name = repr(header.names["time_to_train"])
        problems.add(1, f"{name} cannot be combined with a throughput or a time", "use two tables")
    if not {"global_batch", "per_gpu_batch"} & set(header.places):
        for name, (meaning, remedy) in header.ambiguous.items():
            if "batch" in remedy:
                problems.add(1, f"the column {name!r} {meaning}", remedy)


def _remarks(header: Header) -> list[str]:
    remarks = []
    renamed = [f"{name} as {field}" for field, name in header.names.items() if name != field]
    if renamed:
        remarks.append(f"Columns were identified by name: {listed(renamed, limit=20)}")
    if "gpus" not in header.places and "gpus_per_node" not in header.places:
        remarks.append("The table has no column gpus, so each node is counted as one rank")
    return remarks


class _Row:
    """Parser of one row of a table."""

    def __init__(self, problems: TableProblems, header: Header, line: int, values: list[str]) -> None:
        self._problems, self._header, self._line, self._values = problems, header, line, values

    def parsed(self) -> dict[str, Any]:
        """Return a dict with the keys :data:`ROW_COLUMNS` and ``other``.

        Mistakes in the row are added to the problems of the table.
        """
        row: dict[str, Any] = dict.fromkeys(ROW_COLUMNS)
        row["line"] = self._line
        for name in ("nodes", "gpus", "gpus_per_node"):
            row[name] = self._number(name, whole=True)
        for name in ("global_batch", "per_gpu_batch", "throughput", "time", "time_to_train"):
            row[name] = self._number(name)
        if (milliseconds := self._number("time_ms")) is not None:
            row["time"] = milliseconds / 1000
        if (rate := self._number("steps_per_sec")) is not None:
            row["time"] = 1 / rate
        for name in ("series", "repeat", "cell_id", "backend", "launcher"):
            row[name] = self._text(name)
        row["mode"] = self._choice("mode", _MODES)
        row["ddp"] = self._choice("ddp", _YES_OR_NO)
        row["other"] = {name: clean(self._values[at]) for name, at in self._header.unknown.items()}
        self._complete_size(row)
        self._complete_throughput(row)
        self._complete_batch(row)
        return row

    def _problem(self, message: str, remedy: str) -> None:
        self._problems.add(self._line, message, remedy)

    def _text(self, name: str) -> str:
        return clean(self._values[self._header.places[name]]) if name in self._header.places else ""

    def _number(self, name: str, *, whole: bool = False) -> float | None:
        text = self._text(name)
        if not text:
            return None
        kind = "a whole number of at least 1" if whole else "a number above 0"
        name, shown = self._header.names[name], one_line(text, limit=40)
        if not is_number(text):
            remedy = "write it without thousands separators and units, with a decimal point"
            self._problem(f"{name} {shown!r} is not {kind}", remedy)
            return None
        value = float(text)
        if not math.isfinite(value) or value <= 0 or (whole and value != int(value)):
            self._problem(f"{name} {shown} is not {kind}", "leave the cell empty if it was not measured")
            return None
        return value

    def _choice(self, name: str, choices: dict[str, Any]) -> Any:
        text = self._text(name)
        if text and text.casefold() not in choices:
            shown = f"{self._header.names[name]} {one_line(text, limit=40)!r}"
            self._problem(f"{shown} is not one of {', '.join(choices)}", "write one of these")
        return choices.get(text.casefold())

    def _complete_size(self, row: dict[str, Any]) -> None:
        sizes = ("nodes", "gpus", "gpus_per_node")
        nodes, gpus, per_node = (None if row[name] is None else int(row[name]) for name in sizes)
        only_nodes = not {"gpus", "gpus_per_node"} & set(self._header.places)
        if gpus is None and nodes is not None and (per_node is not None or only_nodes):
            gpus = nodes * (per_node or 1)
        if gpus is None:
            if not any(problem.line == self._line for problem in self._problems.found):
                remedy = "fill in gpus, or nodes and gpus_per_node"
                self._problem("the row does not give the number of ranks", remedy)
            return
        if nodes is not None and per_node is not None and nodes * per_node != gpus:
            total = nodes * per_node
            message = f"{nodes} nodes with {per_node} ranks each have {total} ranks, but the row has {gpus}"
            self._problem(message, "correct one of the three numbers")
        if nodes is not None and nodes > gpus:
            self._problem(f"{gpus} ranks on {nodes} nodes leave nodes idle", "correct one of the two numbers")
        if per_node is not None and nodes is None:
            nodes = math.ceil(gpus / per_node)
        row["nodes"], row["gpus"] = nodes, gpus
        row["gpus_per_node"] = "1" if only_nodes else f"{gpus / nodes:g}" if nodes else ""

    def _complete_throughput(self, row: dict[str, Any]) -> None:
        per_gpu, given, names = self._number("throughput_per_gpu"), row["throughput"], self._header.names
        if per_gpu is None or row["gpus"] is None:
            return
        total = per_gpu * row["gpus"]
        if given is not None and abs(total / given - 1) > _TOLERANCE:
            self._problem(
                f"{names['throughput_per_gpu']} {number(per_gpu)} x {row['gpus']} ranks is {number(total)}, "
                f"but {names['throughput']} is {number(given)}",
                "correct one of the two, or remove the column",
            )
        row["throughput"] = given or total

    def _complete_batch(self, row: dict[str, Any]) -> None:
        """Compute a missing global batch or batch per rank from the other one; check given ones."""
        gpus, total, per_gpu = row["gpus"], row["global_batch"], row["per_gpu_batch"]
        if gpus is None:
            return
        if total and per_gpu and abs(total / (per_gpu * gpus) - round(total / (per_gpu * gpus))) > 1e-9:
            product = f"per_gpu_batch {number(per_gpu)} x {gpus} ranks"
            self._problem(
                f"global_batch {number(total)} is not a multiple of {product}",
                "correct one of the three numbers",
            )
        if total is None and per_gpu is not None:
            row["global_batch"] = total = per_gpu * gpus
        if per_gpu is None and total is not None:
            row["per_gpu_batch"] = total / gpus
        if total and row["time"] and row["throughput"] and self._header.counts_samples:
            expected = total / row["time"]
            if abs(expected / row["throughput"] - 1) > _TOLERANCE:
                self._problem(
                    f"{number(total)} samples in {number(row['time'])} s are {number(expected)} samples/s, "
                    f"but {self._header.names.get('throughput', 'the throughput')} is "
                    f"{number(row['throughput'])}",
                    "correct one of the three, or remove the column",
                )
