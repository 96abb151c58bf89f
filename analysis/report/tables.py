"""Format the tables of a report: as CSV for programs, as Markdown and LaTeX, and as texts for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import zip_longest
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, get_type_hints

from analysis.causes.cells import CauseRow
from analysis.data.columns import (
    PAGE,
    PUBLISHED,
    TEXT,
    CellRow,
    Column,
    RunRow,
    ScalingRow,
    columns_of,
    distinct,
    grouped,
    table_of,
)
from analysis.data.csv_files import csv_text
from analysis.data.names import job_size, nodes_known
from analysis.decide import efficiency_text
from analysis.report.words import WORDS
from analysis.stats.rates import RATES, SAMPLES, RateUnit, rate_unit
from analysis.stats.scaling import GUIDE
from analysis.text import markdown, markdown_line, one_line
from bench.study.ledger import RunState
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.units import MISSING, capital, known, listed, number

#: A LaTeX table with more rows is a longtable.
_PAGE_ROWS = 40

#: Number of rows of the table of all cells in the page's HTML; the page's script adds more, up to MAX_ROWS.
STATIC_ROWS = 100
MAX_ROWS = 10_000
MAX_RUNS_LISTED = 500

#: Columns of report/causes.csv.
CAUSE_COLUMNS = (
    *("series", "cell_id", "cause", "share", "share_low", "share_high", "run_id", "node", "rank", "part"),
    *("evidence", "remedy"),
)
#: Maximum number of characters of the texts about runs in the page's data; runs.csv contains all texts.
_MAX_RUN_TEXTS = 1_000_000

#: A cell of the page's table: a text, or a text with a second line.
TableCell = str | tuple[str, str]

_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    # After the end of a row, LaTeX would read a bracket as an argument.
    "[": "{[}",
    "]": "{]}",
    "–": "--",
    "×": r"$\times$",
    "±": r"$\pm$",
    "≥": r"$\ge$",
    "…": r"\dots{}",
    "µ": r"$\mu$",
}


def latex(text: str, *, limit: int = 300) -> str:
    """Return a text that LaTeX prints as it is; characters that pdfLaTeX's fonts lack become ``?``."""
    # LaTeX joins two hyphens to a dash.
    parts = re.split(r"(?<=-)(?=-)", one_line(text, limit=limit))
    return "{}".join("".join(_LATEX.get(x, x if _printable(x) else "?") for x in part) for part in parts)


def _printable(letter: str) -> bool:
    return letter.isascii() or (letter.isalpha() and ord(letter) < 0x180)


# -- files ----------------------------------------------------------------------------


def csv_table(table: Sequence[ScalingRow]) -> str:
    """Return the scaling table as CSV; a value that was not measured is an empty cell."""
    return csv_text({name: [_value(row, name) for row in table] for name in PUBLISHED})


#: The columns of report/runs.csv; `allocation_id` is the job: runs of one job ran on the same nodes, one
#: after another, so that comparisons may pair them.
_RUNS_COLUMNS = (
    *("run_id", "cell_id", "repeat", "order", "attempt", "state", "failure_class", "reason", "exit_code"),
    *("allocation", "allocation_id", "started_at", "ended_at", "epochs", "samples", "steps", "window_s"),
    *("throughput_samples_per_sec", "step_time_sec", "outlier", "disturbed", "cause", "node_hours", "latest"),
)


def runs_csv(attempts: Sequence[RunRow]) -> str:
    """Return the attempts of all planned runs with their state, reason and measurements as CSV."""
    own: dict[str, Callable[[RunRow], Any]] = {
        "reason": lambda run: messages(run.facts),
        "allocation_id": lambda run: run.job_id,
        "started_at": lambda run: _time_text(run.started_at),
        "ended_at": lambda run: _time_text(run.ended_at),
        "step_time_sec": lambda run: math.nan if run.other_batch else run.step_time_sec,
        "disturbed": lambda run: messages(run.disturbed or ()),
    }
    return csv_text({name: [*map(own.get(name) or attrgetter(name), attempts)] for name in _RUNS_COLUMNS})


def _time_text(time: datetime | None) -> str | None:
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z") if time else None


def causes_csv(causes: Sequence[CauseRow]) -> str:
    """Return the divided losses as CSV, with evidence and remedy in words.

    Shares are fractions of the cell's step time; those of a cell add up to its loss. ``share`` is empty for a
    cause whose time is not known. ``run_id`` is a run that shows the cause.
    """
    evidence = [messages(one.evidence) for one in causes]
    return csv_text(table_of(causes, CAUSE_COLUMNS) | {"evidence": evidence}, digits=6)


def shown_columns(view: str, *, unit: RateUnit = SAMPLES) -> dict[str, Column]:
    """Return the columns of a view for people, in order."""
    columns = columns_of(ScalingRow).items()
    shown = {name: column for name, column in columns if column.heading and view in column.views}
    if unit != SAMPLES:
        shown[RATES[0]] = shown[RATES[0]]._replace(heading=unit.name.capitalize(), unit=unit.name)
    return shown


def _value(row: ScalingRow, name: str) -> Any:
    """Return a value of a row; tables measured elsewhere may lack the nodes."""
    return getattr(row, name) if name != "nodes" or nodes_known(row) else None


# -- papers ---------------------------------------------------------------------------


class TextTable(NamedTuple):
    """A narrow table: headings, the title (empty if it is alone) and the rows of each series, and notes."""

    headings: Sequence[str]
    series: Sequence[tuple[str, Sequence[Sequence[str]]]]
    notes: Sequence[str] = ()


def text_table(
    rows: Sequence[ScalingRow],
    titles: Mapping[str, str],
    *,
    device: str = "rank",
    limits: Sequence[str] = (),
    guide: float = GUIDE,
) -> TextTable:
    """Return the columns in which rows differ, as texts; what they share is in the notes.

    ``titles`` are those of the series. They state a constant batch, so only rows without a scaling mode have
    a column of it. ``device``, ``rank`` or ``GPU``, is what is counted. ``limits`` are letters of each row.
    No efficiency is rounded to the ``guide``.
    """
    unit = rate_unit(rows)
    columns, in_unit = shown_columns(TEXT, unit=unit), unit.rows(rows)
    texts = {name: [column.form(_value(row, name)) for row in in_unit] for name, column in columns.items()}
    texts["efficiency"] = [efficiency_text(row, guide=guide) for row in rows]
    runs = zip_longest(texts.pop("n"), limits, fillvalue="")
    texts["n"] = [f"{n} ({letters})" if letters else n for n, letters in runs]  # the last column
    if all(row.mode for row in rows):
        del texts["global_batch"]
    filled = {name: own for name, own in texts.items() if {*own} - {MISSING, ""}}
    shared = [name for name in ("nodes", "global_batch") if len({*filled.get(name, ())}) == 1 < len(rows)]
    headings = {name: column.heading for name, column in columns.items()}
    headings |= {"gpus": f"{capital(device)}s", "n": "Runs"}
    shown = [name for name in filled if name not in shared]
    lines = [(row.series, [filled[name][at] for name in shown]) for at, row in enumerate(rows)]
    series = [
        (titles.get(name, name), [own for _, own in rows])
        for name, rows in grouped(lines, itemgetter(0)).items()
    ]
    notes = [*_formulas(rows, titles, device), *(f"{headings[name]}: {filled[name][0]}." for name in shared)]
    if any(known(row.efficiency_low) for row in rows):
        notes.append(
            "Brackets: 95 % confidence interval over the runs (Student's or Welch's t on their logarithms)."
        )
    if any(limits):
        notes.append("Letters: see Limits.")
    if any(MISSING in filled[name] for name in shown):
        notes.append(f"{MISSING}: not measured.")
    alone = [("", own) for _, own in series] if len(series) == 1 else series
    return TextTable([headings[name] for name in shown], alone, notes)


def _formulas(rows: Sequence[ScalingRow], titles: Mapping[str, str], device: str) -> Iterator[str]:
    """Yield the formulas of each scaling mode with its baselines."""
    for mode in ("strong", "weak"):
        own = [row for row in rows if row.mode == mode and row.base]
        if own:
            words, series = WORDS["modes"][mode], distinct(row.series for row in own)
            title = titles.get(series[0], words["title"]) if len(series) == 1 else words["title"]
            formula = words["formula"].replace("N₀", "N0").replace("·", " ")  # some LaTeX fonts lack them
            bases = listed([*distinct(job_size(row.base, device) for row in own if row.base)], limit=4)
            time = f"T: time per step on N {device}s"
            yield f"{title}: {formula}, {words['constant']} constant; {time}; baseline N0: {bases}."


def markdown_rows(table: TextTable, *, align: str = "---:") -> str:
    """Return a table in Markdown, without its notes."""
    width = len(table.headings)
    lines = [markdown_line(table.headings), f"|{f'{align}|' * width}"]
    for title, rows in table.series:
        lines += [markdown_line([title, *[""] * (width - 1)])] * bool(title) + list(map(markdown_line, rows))
    return "\n".join(lines)


def markdown_table(table: TextTable, rows: Sequence[ScalingRow] = ()) -> str:
    """Return a table in Markdown with its notes, and the remarks on the cells of ``rows``."""
    lines = [markdown_rows(table), "", *(f"{markdown(note)}\n" for note in table.notes)]
    reasons = dict.fromkeys((row.cell_id, row.reason) for row in rows if row.reason)
    lines += [f"- {markdown(cell)}: {markdown(one_line(reason))}" for cell, reason in reasons]
    return "\n".join(lines).rstrip() + "\n"


def latex_rows(table: TextTable, *, align: str = "", kind: str = "tabular") -> str:
    """Return a table as a LaTeX tabular or longtable, without its notes."""
    width = len(table.headings)
    body = []
    for title, rows in table.series:
        body += [rf"\multicolumn{{{width}}}{{@{{}}l}}{{{latex(title)}}} \\"] * bool(title)
        body += [" & ".join(map(latex, texts)) + r" \\" for texts in rows]
    return "\n".join(
        [
            rf"\begin{{{kind}}}{{@{{}}{align or 'r' * width}@{{}}}}",
            r"\toprule",
            " & ".join(map(latex, table.headings)) + r" \\",
            r"\midrule",
            *[r"\endhead"] * (kind == "longtable"),
            *body,
            r"\bottomrule",
            rf"\end{{{kind}}}",
        ]
    )


def latex_table(table: TextTable) -> str:
    """Return a table in LaTeX with its notes; a long one goes over several pages."""
    kind = "longtable" if sum(len(rows) for _, rows in table.series) > _PAGE_ROWS else "tabular"
    notes = [latex(note) + r"\par" for note in table.notes]
    head = "% needs \\usepackage{booktabs,longtable,textcomp}"
    # It also fits the column of a page with two.
    rows = rf"{{\footnotesize\setlength{{\tabcolsep}}{{2.5pt}}{latex_rows(table, kind=kind)}}}"
    return "\n".join([head, rows, "", *notes]) + "\n"


# -- the page -------------------------------------------------------------------------


def page_columns(rows: Sequence[ScalingRow]) -> dict[str, Column]:
    """Return the columns of the page's table: those that are always shown come first.

    A further column without a value in any row is left out.
    """
    levels = ("always", "wide", "further")
    columns = shown_columns(PAGE, unit=rate_unit(rows))
    shown = sorted(columns.items(), key=lambda item: levels.index(item[1].level))
    return {
        name: column
        for name, column in shown
        if column.level != "further" or any(known(_value(row, name)) for row in rows)
    }


def cell_columns(columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """Return ``key, name, help, numeric`` and the CSS class ``level`` of each column of :func:`cell_rows`."""
    types = get_type_hints(ScalingRow)
    return [
        {
            "key": name,
            "name": column.heading,
            "help": f"{capital(column.meaning)}{', with its 95 % interval' if column.ends else ''}",
            "numeric": types[name] is not str,
            "level": column.level,
        }
        for name, column in columns.items()
    ]


def cell_rows(rows: Sequence[ScalingRow], columns: Mapping[str, Column]) -> list[list[TableCell]]:
    """Return the table of all cells: rows of texts, with the ``columns`` of :func:`page_columns`."""
    shown = rate_unit(rows).rows(rows)
    return [[_page_cell(row, name, column) for name, column in columns.items()] for row in shown]


def _page_cell(row: ScalingRow, name: str, column: Column) -> TableCell:
    value = _value(row, name)
    text = column.form(value) if name != "verdict" else WORDS["verdicts"].get(value, value)
    below = column.below(row) if column.below else _interval(row, column) if column.ends else ""
    return (text, below) if below else text


def _interval(row: ScalingRow, column: Column) -> str:
    ends = [getattr(row, f"{column.ends}_{end}") for end in ("low", "high")]
    return f"[{', '.join(map(column.form, ends))}]" if all(map(known, ends)) else ""


def run_data(attempts: Sequence[RunRow], cells: Sequence[CellRow] = ()) -> dict[str, Any]:
    """Return ``texts`` and ``runs`` for the page's script, which shows the attempts of the runs of a cell.

    Each attempt is a list: name of the cell; length of the prefix that the names of cell and run share; rest
    of the run's name; attempt; state; failure class; reason; throughput; evidence. Most texts in it are
    replaced by their positions in ``texts``.
    """
    numbers: dict[str, int] = {}
    size = 0

    def add(value: Any, limit: int = 300) -> int:
        nonlocal size
        text = one_line(value, limit=limit) if isinstance(value, str) else ""
        if text not in numbers and size > _MAX_RUN_TEXTS:
            text = "see runs.csv"
        size += 0 if text in numbers else len(text)
        return numbers.setdefault(text, len(numbers))

    rows, unit, by_id = [], rate_unit(cells), {cell.cell_id: cell for cell in cells}
    for run in attempts[:MAX_ROWS]:
        shared = len(run.cell_id) if run.run_id.startswith(run.cell_id) else 0
        numbers.setdefault(run.cell_id, len(numbers))
        texts = [add(run.state), add(run.failure_class), add(messages(run.facts), 400)]
        evidence = [add(text) for text in run.evidence]
        rate = ""
        if known(run.rate):
            value = unit.of(run.rate, by_id[run.cell_id]) if unit != SAMPLES else run.rate
            rate = number(value)
        rows.append(
            [numbers[run.cell_id], shared, run.run_id[shared:], run.attempt or 0, *texts, rate, *evidence]
        )
    return {"texts": list(numbers), "runs": rows, "unit": unit.name}


def runs_context(attempts: Sequence[RunRow], *, study: str) -> dict[str, Any]:
    """Return the rows of attempts that do not count, have a reason or are outliers; and labelled numbers.

    The attempts that do not count come first.
    """
    repeated = not all(run.latest for run in attempts)
    notable = [run for run in attempts if not run.measured or run.facts or run.outlier]
    notable.sort(key=lambda run: run.measured)
    hours = [run.node_hours for run in attempts if known(run.node_hours)]
    lost = sum(run.node_hours for run in attempts if not run.measured and known(run.node_hours))
    failed = sum(run.state == RunState.FAILED for run in attempts)
    outliers = sum(run.outlier for run in attempts)
    facts = {
        "failed": f"{failed:,} of {sum(run.attempt is not None for run in attempts):,}" if repeated else "",
        "lost": f"{number(lost, digits=3)} of {number(sum(hours), digits=3)}" if lost else "",
        "outliers": f"{outliers:,}" if outliers else "",
    }
    return {
        "facts": [(WORDS["run_facts"][name], text) for name, text in facts.items() if text],
        "listed": [_run_row(run, study) for run in notable[:MAX_RUNS_LISTED]],
        "left_out": max(0, len(notable) - MAX_RUNS_LISTED),
    }


def _run_row(run: RunRow, study: str) -> list[str]:
    reasons = [one_line(messages(run.facts), limit=400)]
    if run.state == RunState.FAILED:
        reasons.append(f"what to do: bench doctor {study}/{run.run_id}")
    if run.outlier:
        reasons.append("outlier, counted: |x − median| / MAD above 14.8")
    planned = RunState.PLANNED.words if run.state == RunState.PLANNED else MISSING
    return [
        run.run_id,
        MISSING if run.attempt is None else str(run.attempt),
        run.state,
        run.failure_class or MISSING,
        "yes" if run.measured else "no",
        MISSING if run.measured else number(run.node_hours, digits=3),
        "; ".join(filter(None, reasons)) or planned,
    ]
