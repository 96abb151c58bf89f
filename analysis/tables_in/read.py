"""Read a table of runs that were measured elsewhere; each row is a run, or an epoch of one.

All problems of a table are reported together, each with its line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from statistics import harmonic_mean

from analysis.tables_in.grid import Grid, TableProblems, read_text, split
from analysis.tables_in.vocabulary import (
    COLUMNS,
    DISTINCT,
    LAYOUT,
    RATES,
    SIZES,
    TEXTS,
    Heading,
    has_decimal_comma,
    heading,
)
from analysis.text import one_line
from ddp_scaling_bench.units import listed, whole

_MODES = ("strong", "weak")


@dataclass(kw_only=True)
class TableRow:
    """One run of a table; ``line`` is its line in the file.

    ``gpus`` is 0 while it is not known. ``gpus_per_node`` is empty, and ``nodes`` 1, if the nodes are not
    known. ``rate`` is of all ranks. ``work`` is what a step does, in samples or in arbitrary units.
    ``labels`` are the values of the columns that distinguish series, by their names.
    """

    line: int
    series: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    mode: str = ""
    repeat: str = ""
    nodes: int
    gpus: int
    gpus_per_node: str
    model_parallel: int
    global_batch: float | None
    per_gpu_batch: float | None
    tokens_per_sample: float | None
    rate: float | None
    work: float = math.nan
    time: float = math.nan
    cell_id: str = ""

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return self.gpus // self.model_parallel


@dataclass
class Table:
    """A table with canonical columns.

    Attributes:
        columns: the canonical names of the columns that are read.
        unit: what ``rate`` counts per second: samples, tokens, steps, or empty if only ratios are known.
        assumed_mode: the mode of series with neither batches nor a label; None if efficiencies depend on it.
        text: the text of the file.
        names: the names of columns that the user gave by their meanings.
        remarks: sentences about what was ignored and assumed.
    """

    path: Path
    rows: list[TableRow]
    columns: list[str]
    unit: str
    assumed_mode: str | None
    text: str
    names: Mapping[str, str]
    remarks: list[str] = field(default_factory=list)


def read_table(path: Path, text: str | None = None, *, names: Mapping[str, str] | None = None) -> Table:
    """Read a table from a file, or from the ``text`` of one.

    ``names`` gives the names of columns by their meanings, such as ``{"throughput": "tok_s"}``.

    Raises:
        BenchError: the file cannot be read.
        InputError: the table has problems.
    """
    text, problems = read_text(path) if text is None else text, TableProblems(path)
    read = [_Columns(grid, names or {}) for grid in split(text, problems)]
    complete = [one for one in read if not one.lacks]
    columns = next(iter(complete), read[0])
    for other in complete[1:]:
        problems.add(other.grid.line, "a second table with sizes and rates", "keep one table per file")
    for message, remedy in columns.lacks:
        problems.add(columns.grid.line, message, remedy)
    problems.raise_if_any()
    rows = columns.rows(problems)
    problems.raise_if_any()
    found, remarks = columns.found, columns.remarks
    unit, assumed = RATES[columns.rate]
    if "samples_per_epoch" in found or (columns.rate == "tokens/s" and "tokens_per_sample" in found):
        unit = "samples"
    if "epoch" in found and len(runs := _runs(rows, found["epoch"].texts)) < len(rows):
        remarks.append("Rows that differ in the epoch alone are one run, whose epochs are averaged")
        rows = runs
    return Table(path, rows, [*found], unit, assumed, text, names or {}, remarks)


@dataclass(frozen=True)
class _Column:
    """A column of a grid: its name there, its meaning and its values."""

    name: str
    meaning: Heading
    texts: list[str]


class _Columns:
    """The columns of a grid: those with a meaning, settings that distinguish series, and ignored ones."""

    def __init__(self, grid: Grid, names: Mapping[str, str]) -> None:
        self.grid, self.names = grid, names
        mapped = {_plain(column): _mapped(meaning, column) for meaning, column in names.items()}
        self.found: dict[str, _Column] = {}
        rest: list[tuple[str, list[str]]] = []
        for place, name in enumerate(grid.names):
            texts = grid.column(place)
            meaning = mapped.get(_plain(name)) or heading(name)
            if not meaning and {text.lower() for text in texts} <= {*_MODES}:
                meaning = Heading("mode")
            if meaning and (meaning.column not in self.found or _plain(name) in mapped):
                self.found[meaning.column] = _Column(name, meaning, texts)
            else:
                rest.append((name, texts))
        rates = sorted(self.found.keys() & RATES.keys(), key=[*RATES].index)
        rates.sort(key=lambda rate: _plain(self.found[rate].name) not in mapped)
        self.rate = next(iter(rates), "")
        for unused in (*rates[1:], *(["samples_per_epoch"] if self.rate != "epoch_time" else [])):
            if unused in self.found:
                rest.append((self.found[unused].name, []))
                del self.found[unused]
        size = self.found.get("gpus") or self.found.get("nodes")
        self.settings = {name: texts for name, texts in rest if size and _separates(texts, size.texts)}
        self.ignored = [name for name, _ in rest if name not in self.settings]

    @property
    def lacks(self) -> list[tuple[str, str]]:
        """Why the grid is not a table of sizes and rates, each reason with a remedy."""
        found = []
        there = listed([repr(one_line(name, limit=40)) for name in self.grid.names])
        if not self.names and all(map(_is_number, self.grid.names)):
            what = "the first line has numbers, not names of columns"
            return [(what, "put a line of names above it, such as gpus,throughput")]
        of_name: dict[str, set[tuple[str, ...]]] = {}
        for place, name in enumerate(map(_plain, self.grid.names)):
            of_name.setdefault(name, set()).add(tuple(self.grid.column(place)))
        if twice := [name for name, columns in of_name.items() if len(columns) > 1 and heading(name)]:
            return [(f"two columns have the name {twice[0]!r}", "rename or remove one of them")]
        for meaning, column in self.names.items():
            if _plain(meaning) in map(_plain, self.grid.names) and heading(column) is not None:
                what = f"--map {meaning}={column}: the column comes second"
                return [(what, f"write --map {column}={meaning}")]
            if heading(meaning) is None:
                near = get_close_matches(meaning, COLUMNS, n=1, cutoff=0.85)
                hint = f"did you mean {near[0]}?" if near else f"names are {', '.join([*COLUMNS][:8])}, ..."
                found.append((f"--map {meaning}={column}: {meaning!r} has no meaning", hint))
            if _plain(column) not in map(_plain, self.grid.names):
                near = get_close_matches(column, self.grid.names, n=1, cutoff=0.75)
                hint = f"did you mean {near[0]}?" if near else f"give one of {there}"
                found.append((f"--map {meaning}={column}: there is no such column", hint))
        if found:
            return found
        if not self.rate and not {"gpus", "nodes"} & self.found.keys():
            what = f"no columns of sizes and of rates; there are {there}"
            hint = "name them: --map gpus=COLUMN --map throughput=COLUMN; remove lines that are no table"
            return [(what, hint)]
        if not self.rate:
            what = f"no column with a throughput or a time; there are {there}"
            others = ", ".join(name for name in RATES if name != "throughput")
            found.append((what, f"add one, or name it: --map throughput=COLUMN (or {others})"))
        if not {"gpus", "nodes"} & self.found.keys():
            found.append(
                (
                    f"no column with a size; there are {there}",
                    "add one (gpus or nodes), or name it: --map gpus=COLUMN",
                )
            )
        gpus, nodes = self.found.get("gpus"), self.found.get("nodes")
        is_clear = "gpus" in self.names or "gpus_per_node" in self.found
        if gpus and nodes and not is_clear and len({*gpus.texts}) == 1 < len({*nodes.texts}):
            name = one_line(gpus.name, limit=40)
            which = f"--map gpus_per_node={name} if it counts the ranks of a node, else --map gpus={name}"
            found.append((f"{name} has one value for several numbers of nodes", f"add {which}"))
        return found

    @property
    def remarks(self) -> list[str]:
        """Sentences about columns that are ignored or distinguish series."""
        ignored = listed([one_line(name, limit=40) or "one without a name" for name in self.ignored], limit=8)
        apart = listed([one_line(name, limit=40) for name in self.settings])
        found = [f"Ignored columns: {ignored} (--map NAME=COLUMN uses one)"] if ignored else []
        return [*found, f"Rows that differ in {apart} are different series"] if apart else found

    def rows(self, problems: TableProblems) -> list[TableRow]:
        """Return the rows with their numbers; add the problems of their values."""
        numbers = {name: own for name, own in self.found.items() if name not in TEXTS}
        every = (text for own in numbers.values() for text in own.texts)
        comma = has_decimal_comma(every, semicolons=self.grid.semicolons)
        labels = [*self._labels()]
        modes, repeats = (self.found.get(name) for name in ("mode", "repeat"))
        rows = []
        for place, (line, _) in enumerate(self.grid.rows):
            given: dict[str, float | None] = {}
            wrong: list[tuple[str, str]] = []
            for name, own in numbers.items():
                try:
                    given[name] = own.meaning.number(own.texts[place], decimal_comma=comma)
                except ValueError as error:
                    message = f"{name} {one_line(own.texts[place], limit=40)!r} is not {error}"
                    is_needed = name in SIZES or name in LAYOUT
                    other = "remove a row that is a sum" if is_needed else "leave the cell empty"
                    wrong.append((message, f"correct it, without a unit, or {other}"))
            mode = modes.texts[place].lower() if modes else ""
            if mode not in ("", *_MODES):
                wrong.append(
                    (f"mode {one_line(mode, limit=40)!r} is not strong or weak", "write one of these")
                )
            for message, remedy in wrong:
                problems.add(line, message, remedy)
            if not wrong:
                row = self._row(line, given, problems)
                row.labels = {name: texts[place] for name, texts in labels}
                own_name = ", ".join(_in_series(name, text) for name, text in row.labels.items() if text)
                row.series = one_line(own_name, limit=160)
                row.mode, row.repeat = mode, repeats.texts[place] if repeats else ""
                rows.append(row)
        return rows

    def _labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield names and values of the columns that together are the name of a series."""
        for name in DISTINCT:
            if (own := self.found.get(name)) and (name == "series" or len(set(own.texts)) > 1):
                yield name, own.texts
        for name, texts in self.settings.items():
            yield one_line(name, limit=40), texts

    def _row(self, line: int, given: Mapping[str, float | None], problems: TableProblems) -> TableRow:
        """Return a row with its ranks and rate and, if the row determines them, its nodes and batches."""
        nodes, gpus, per_node = (int(given.get(name) or 0) for name in SIZES)
        only_nodes = not {"gpus", "gpus_per_node"} & self.found.keys()
        if not gpus and nodes and (per_node or only_nodes):
            gpus = nodes * (per_node or 1)
        elif gpus and nodes and per_node and nodes * per_node != gpus:
            product = f"{nodes} nodes with {per_node} ranks each have {nodes * per_node} ranks"
            message = f"{product}, but the row has {gpus}"
            problems.add(line, message, "correct one of the three numbers")
        if not gpus:
            message = "the row does not give the number of ranks"
            problems.add(line, message, "fill in gpus, or nodes and gpus_per_node")
        elif nodes > gpus:
            remedy = "correct one, or add --map gpus_per_node=COLUMN if it counts the ranks of a node"
            problems.add(line, f"{gpus} ranks on {nodes} nodes leave nodes idle", remedy)
        if per_node and not nodes:
            nodes = math.ceil(gpus / per_node)
        model_parallel = math.prod(int(given.get(name) or 1) for name in LAYOUT)
        if gpus % model_parallel:
            message = f"{gpus} ranks are not a multiple of tp x pp x cp = {model_parallel} ranks per replica"
            problems.add(line, message, "correct one of the numbers")
        replicas, total, per_gpu = (
            gpus // model_parallel,
            given.get("global_batch"),
            given.get("per_gpu_batch"),
        )
        steps = total / (per_gpu * replicas) if total and per_gpu and replicas else 1
        if abs(steps - round(steps)) > 1e-9:
            ranks = "ranks" if model_parallel == 1 else "replicas"
            product = f"per_gpu_batch {whole(per_gpu)} x {replicas} {ranks}"
            message = f"global_batch {whole(total)} is not a multiple of {product}"
            problems.add(line, message, "correct one of the three numbers")
        rate, tokens = given.get(self.rate), given.get("tokens_per_sample")
        if rate is not None:
            rate *= gpus if self.found[self.rate].meaning.per_gpu else 1
            rate *= (given["samples_per_epoch"] or math.nan) if "samples_per_epoch" in given else 1
            rate /= tokens if tokens and self.rate == "tokens/s" else 1
        return TableRow(
            line=line,
            nodes=nodes or 1,
            gpus=gpus,
            gpus_per_node="1" if only_nodes else f"{gpus / nodes:g}" if nodes else "",
            model_parallel=model_parallel,
            global_batch=total or (per_gpu and per_gpu * replicas),
            per_gpu_batch=per_gpu or (total / replicas if total and replicas else None),
            tokens_per_sample=tokens or (1 if self.rate == "tokens/s" else None),
            rate=rate,
        )


def _in_series(name: str, text: str) -> str:
    """Return a value as a part of the name of a series; a number needs the name of its column."""
    is_number = text[0].isdigit() and name not in DISTINCT
    return f"{name} {text}" if name in LAYOUT or is_number else text


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


def _plain(name: str) -> str:
    return " ".join(name.split()).lower()


def _mapped(meaning: str, column: str) -> Heading | None:
    """Return the meaning that the user gives a column; the name of a column can say that it counts tokens."""
    own, asked = heading(column), heading(meaning)
    return own if own and asked and asked.column == "throughput" and own.column in RATES else asked


def _separates(values: Sequence[str], sizes: Sequence[str]) -> bool:
    """Return whether the values of a column without a meaning, such as the strategy, distinguish series.

    Every value belongs to several sizes, or values that are no numbers differ within a size.
    """
    if not values or "" in values or len(set(values)) == 1:
        return False
    pairs = set(zip(values, sizes, strict=True))
    several = [amount > 1 for amount in Counter(value for value, _ in pairs).values()]
    differ = len(pairs) > len(set(sizes)) and not any(text[0].isdigit() for text in values)
    return all(several) or (any(several) and differ)


def _runs(rows: Sequence[TableRow], epochs: Sequence[str]) -> list[TableRow]:
    """Return one row per run: its epochs are no repeats. The rate of a run is the harmonic mean of theirs."""
    seen: Counter[tuple[object, ...]] = Counter()
    runs: dict[tuple[object, ...], list[TableRow]] = {}
    for row, epoch in zip(rows, epochs, strict=True):
        cell = row.series, row.mode, row.repeat, row.nodes, row.gpus, row.global_batch
        seen[cell, epoch] += 1
        runs.setdefault((cell, seen[cell, epoch]), []).append(row)
    rates = [[row.rate for row in own if row.rate is not None] for own in runs.values()]
    return [
        replace(own[0], rate=harmonic_mean(known) if known else None)
        for own, known in zip(runs.values(), rates, strict=True)
    ]
