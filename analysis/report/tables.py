"""Format the tables of a report: as CSV for programs, as Markdown and LaTeX, and as texts for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, get_type_hints

import pandas as pd

from analysis.causes.cells import CauseRow
from analysis.checks.slow_ranks import MeanTimes
from analysis.data.columns import (
    PAGE,
    PUBLISHED,
    TEXT,
    CellRow,
    Column,
    RunRow,
    ScalingRow,
    columns_of,
)
from analysis.data.csv_files import csv_text
from analysis.data.names import nodes_known
from analysis.report.words import WORDS
from analysis.stats.measured import outcome_text
from analysis.stats.rates import RATES, SAMPLES, RateUnit, rate_unit
from analysis.text import markdown, markdown_line, one_line
from bench.study.ledger import RunState
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.units import MISSING, capital, fraction, interval, known, number, percent, seconds

#: A LaTeX table with more rows is a longtable.
_PAGE_ROWS = 40

#: Number of rows of the table of all cells in the page's HTML; the page's script adds more, up to MAX_ROWS.
STATIC_ROWS = 100
MAX_ROWS = 10_000
MAX_RUNS_LISTED = 500
MAX_NODES_LISTED = 60

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
    return csv_text(pd.DataFrame({name: [_value(row, name) for row in table] for name in PUBLISHED}))


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
    frame = pd.DataFrame(
        {name: [(own.get(name) or attrgetter(name))(run) for run in attempts] for name in _RUNS_COLUMNS}
    )
    return csv_text(frame.astype({"attempt": "Int64", "exit_code": "Int64"}))


def _time_text(time: datetime | None) -> str | None:
    return f"{time:%Y-%m-%dT%H:%M:%S.%fZ}" if time else None


def causes_frame(causes: Iterable[CauseRow]) -> pd.DataFrame:
    """Return causes.csv: the rows of the divided losses with evidence and remedy in words.

    Shares are fractions of the cell's step time; those of a cell add up to its loss. ``share`` is empty for a
    cause whose time is not known. ``run_id`` is a run that shows the cause.
    """
    rows = [
        {name: getattr(one, name) for name in CAUSE_COLUMNS[:-2]}
        | {"cause": one.cause, "evidence": messages(one.evidence), "remedy": one.remedy}
        for one in causes
    ]
    return pd.DataFrame(rows, columns=list(CAUSE_COLUMNS)).astype({"rank": "Int64"})


def shown_columns(view: str, record: type = ScalingRow, *, unit: RateUnit = SAMPLES) -> dict[str, Column]:
    """Return the columns of a view for people, in order."""
    columns = columns_of(record).items()
    shown = {name: column for name, column in columns if column.heading and view in column.views}
    rate = shown.get(RATES[0])
    if rate and unit != SAMPLES:
        shown[RATES[0]] = rate._replace(heading=unit.name.capitalize(), unit=unit.name)
    return shown


def texts_of(rows: Sequence[ScalingRow], columns: Mapping[str, Column], view: str) -> list[list[str]]:
    """Format rows as texts; a value is followed by its interval if the view contains the interval's ends."""
    return [
        [
            f"{column.form(_value(row, name))} {_interval(row, column, view)}".strip()
            for name, column in columns.items()
        ]
        for row in rows
    ]


def _value(row: ScalingRow, name: str) -> Any:
    """Return a value of a row; tables measured elsewhere may lack the nodes."""
    return getattr(row, name) if name != "nodes" or nodes_known(row) else None


def _interval(row: ScalingRow, column: Column, view: str) -> str:
    ends = [f"{column.ends}_{end}" for end in ("low", "high") if column.ends]
    values = [getattr(row, name) for name in ends if view in columns_of(ScalingRow)[name].views]
    return f"[{', '.join(map(column.form, values))}]" if values and all(map(known, values)) else ""


def notes(table: Sequence[ScalingRow]) -> list[str]:
    """Return the notes under a table: formulas, baselines and abbreviations."""
    texts = []
    for mode in ("strong", "weak"):
        names = sorted({row.baseline for row in table if row.mode == mode} - {""})
        words = WORDS["modes"][mode]
        if names:
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            formula = words["formula"].replace("N₀", "N0").replace("·", " ")  # some LaTeX fonts lack them
            texts.append(
                f"{words['title']}: {formula}, {words['constant']} constant; "
                f"T: time per step; baseline N0: {shown}."
            )
    texts.append(
        "n: runs in the results; brackets: 95 % confidence intervals (Student's or Welch's t on the "
        "logarithms of the runs' values), given for three or more runs. "
        "LB: load balance, CommE: communication efficiency, CompS: computational scalability (POP). "
        f"Node-h: node-hours of one run. {MISSING}: not measured."
    )
    return texts


def _for_people(table: Sequence[ScalingRow]) -> tuple[list[ScalingRow], dict[str, Column]]:
    unit = rate_unit(table)
    return unit.rows(table), shown_columns(TEXT, unit=unit)


def markdown_table(table: Sequence[ScalingRow]) -> str:
    """Return the scaling table as Markdown, with notes and the reasons of missing runs."""
    table, columns = _for_people(table)
    lines = [markdown_line([column.heading for column in columns.values()]), "|" + "---|" * len(columns)]
    lines += [markdown_line(texts) for texts in texts_of(table, columns, TEXT)]
    lines += ["", *(f"{markdown(note)}\n" for note in notes(table))]
    reasons = dict.fromkeys((row.cell_id, row.reason) for row in table if row.reason)
    lines += [f"- {markdown(cell)}: {markdown(one_line(reason))}" for cell, reason in reasons]
    return "\n".join(lines).rstrip() + "\n"


def latex_table(table: Sequence[ScalingRow]) -> str:
    """Return the scaling table with its notes as a LaTeX tabular or, if it is long, as a longtable."""
    table, columns = _for_people(table)
    align = "".join("r" if _is_numeric(name) else "l" for name in columns)
    head = " & ".join(latex(column.heading) for column in columns.values()) + r" \\"
    body = [" & ".join(map(latex, texts)) + r" \\" for texts in texts_of(table, columns, TEXT)]
    foot = [latex(note) + r"\par" for note in notes(table)]
    if len(table) > _PAGE_ROWS:
        lines = ["% needs \\usepackage{booktabs,longtable,textcomp}", rf"\begin{{longtable}}{{{align}}}"]
        lines += [r"\toprule", head, r"\midrule", r"\endhead", *body]
        lines += [r"\bottomrule", r"\end{longtable}", *foot]
    else:
        lines = ["% needs \\usepackage{booktabs,textcomp}", rf"\begin{{tabular}}{{{align}}}"]
        lines += [r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", "", *foot]
    return "\n".join(lines) + "\n"


def _is_numeric(name: str) -> bool:
    return get_type_hints(ScalingRow)[name] is not str


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
    return [
        {
            "key": name,
            "name": column.heading,
            "help": f"{capital(column.meaning)}{', with its 95 % interval' if column.ends else ''}",
            "numeric": _is_numeric(name),
            "level": column.level,
        }
        for name, column in columns.items()
    ]


def cell_rows(rows: Sequence[ScalingRow], columns: Mapping[str, Column]) -> list[list[TableCell]]:
    """Return the table of all cells: rows of texts, with the ``columns`` of :func:`page_columns`."""
    shown = rate_unit(rows).rows(rows)
    return [[_page_cell(row, name, column) for name, column in columns.items()] for row in shown]


def _page_cell(row: ScalingRow, name: str, column: Column) -> TableCell:
    text = column.form(_value(row, name))
    below = column.below(row) if column.below else _interval(row, column, PAGE)
    return (text, below) if below else text


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
            rate = f"{number(value)} {unit.name}"
        rows.append(
            [numbers[run.cell_id], shared, run.run_id[shared:], run.attempt or 0, *texts, rate, *evidence]
        )
    return {"texts": list(numbers), "runs": rows}


def runs_context(attempts: Sequence[RunRow]) -> dict[str, Any]:
    """Return the rows of attempts that do not count, have a reason or are outliers; and labelled numbers.

    The attempts that do not count come first.
    """
    repeated = not all(run.latest for run in attempts)
    notable = [run for run in attempts if not run.measured or run.facts or run.outlier]
    notable.sort(key=lambda run: run.measured)
    hours = [run.node_hours for run in attempts if known(run.node_hours)]
    lost = sum(run.node_hours for run in attempts if not run.measured and known(run.node_hours))
    failed, outliers = (
        sum(run.state == RunState.FAILED for run in attempts),
        sum(run.outlier for run in attempts),
    )
    facts = {
        "failed": f"{failed:,} of {sum(run.attempt is not None for run in attempts):,}" if repeated else "",
        "lost": f"{number(lost, digits=3)} of {number(sum(hours), digits=3)}" if lost else "",
        "outliers": f"{outliers:,}" if outliers else "",
    }
    return {
        "facts": [(WORDS["run_facts"][name], text) for name, text in facts.items() if text],
        "listed": list(map(_run_row, notable[:MAX_RUNS_LISTED])),
        "left_out": max(0, len(notable) - MAX_RUNS_LISTED),
    }


def _run_row(run: RunRow) -> list[str]:
    reasons = [one_line(messages(run.facts), limit=400)]
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


def node_row(node: MeanTimes) -> tuple[bool, list[str]]:
    """Return whether a host is late, and the texts of its row."""
    texts = [one_line(node.host, limit=80), one_line(node.cell_id, limit=120), str(node.ranks), str(node.n)]
    beyond = percent(node.beyond, decimals=1)
    return node.late, [
        *texts,
        *map(seconds, (node.useful, node.data)),
        beyond,
        *map(seconds, (node.wait, node.step)),
    ]


def grid_row(size: ScalingRow) -> list[str]:
    """Return the texts of a row of the table of nodes and ranks per node."""
    bounds = interval(size.efficiency_low, size.efficiency_high, digits=3)
    return [
        *map(str, (size.gpus_per_node, size.nodes, size.gpus)),
        number(size.speedup, digits=3),
        f"{fraction(size.efficiency)} {bounds}".strip(),
        fraction(size.efficiency_within_node),
        MISSING if size.nodes == 1 else fraction(size.efficiency_over_nodes),
        one_line(size.reason, limit=160) or ("" if size.n else outcome_text(size.state)),
    ]
