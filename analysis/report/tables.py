"""Format the tables of a report: as CSV for programs, as Markdown and LaTeX, and as texts for the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pandas as pd

from analysis.checks.slow_ranks import RankMeans
from analysis.data.csv_files import csv_text
from analysis.data.names import layout, state_counts, state_name
from analysis.report.figures.drawing import Selection
from analysis.report.words import WORDS, ascii_formula
from analysis.stats.columns import COLUMNS, FURTHER_COLUMNS
from analysis.text import (
    MISSING,
    fraction,
    fractions,
    interval,
    known,
    markdown,
    markdown_line,
    number,
    one_line,
    seconds,
    whole,
)
from bench.study.ledger import RunState

#: A LaTeX table with more rows is a longtable.
_PAGE_ROWS = 40

#: Number of rows of the table of all cells in the page's HTML; the page's script adds more, up to MAX_ROWS.
STATIC_ROWS = 100
MAX_ROWS = 10_000
MAX_RUNS_LISTED = 500
MAX_NODES_LISTED = 60

#: The columns of the page's table that contain text.
_TEXT_COLUMNS = {"Cell", "State", "Remark"}
#: Columns that the page shows at every width, and those that it shows only on request.
_LEVELS = {
    "always": {"Cell", "State", "Efficiency", "Remark"},
    "further": {
        *("Per doubling", "LB", "CommE", "PE", "CompS", "GE", "Node-h"),
        *("MFU", "GPU (%)", "Energy (J)", "Validation loss"),
    },
}
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


def csv_table(table: pd.DataFrame) -> str:
    """Return the scaling table as CSV; a value that was not measured is an empty cell."""
    further = [name for name in FURTHER_COLUMNS if name in table]
    frame = table[[*COLUMNS, *further]].copy()
    # Tables measured elsewhere may lack the nodes.
    frame["nodes"] = frame["nodes"].astype("Int64").mask(frame["gpus_per_node"] == "")
    return csv_text(frame)


def runs_csv(attempts: pd.DataFrame) -> str:
    """Return the attempts of all planned runs with their state, reason and measurements as CSV.

    ``attempts`` is the result of :func:`analysis.stats.attempts.all_attempts`, as in the other functions.
    """
    columns = ["run_id", "cell_id", "repeat", "order", "attempt", "state", "failure_class", "reason"]
    columns += ["exit_code", "allocation", "allocation_id", "started_at", "ended_at"]
    columns += ["epochs", "samples", "steps", "window_s"]
    columns += ["throughput_samples_per_sec", "step_time_sec", "outlier", "disturbed"]
    columns += ["cause", "node_hours", "latest"]
    # Runs with one allocation_id ran on the same nodes, one after another: comparisons may pair them.
    frame = attempts.assign(allocation_id=attempts["job_id"])[columns].copy()
    for name in ("started_at", "ended_at"):
        frame[name] = frame[name].dt.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    frame["disturbed"] = ["; ".join(map(str, found or ())) for found in frame["disturbed"]]
    return csv_text(frame)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Format the scaling table as texts, with units in the headings."""
    columns: dict[str, list[str]] = {
        "Series": [one_line(v) for v in table["series"]],
        "Mode": [str(v) for v in table["mode"]],
        "Nodes": [
            str(nodes) if per_node else MISSING
            for nodes, per_node in zip(table["nodes"], table["gpus_per_node"], strict=True)
        ],
        "Ranks": [str(v) for v in table["gpus"]],
        "Batch": [whole(v) for v in table["global_batch"]],
        "Per rank": [whole(v) for v in table["per_gpu_batch"]],
        "n": [str(v) for v in table["n"]],
        "Samples/s": _with_interval(table, "throughput_samples_per_sec", "throughput", number),
        "Step (ms)": [number(1000 * v) for v in table["step_time_sec"]],
        "Speedup": [number(v, digits=3) for v in table["speedup"]],
        "Efficiency": _with_interval(table, "efficiency", "efficiency", fraction),
        "LB": [fraction(v) for v in table["load_balance"]],
        "CommE": [fraction(v) for v in table["comm_efficiency"]],
        "CompS": [fraction(v) for v in table["computational_scalability"]],
        "Node-h": [number(v, digits=3) for v in table["node_hours"]],
        "State": ["" if n else one_line(s) for n, s in zip(table["n"], table["state"], strict=True)],
    }
    return pd.DataFrame(columns, dtype="str")


def _with_interval(table: pd.DataFrame, name: str, bounds: str, form: Callable[[float], str]) -> list[str]:
    brackets = fractions if form is fraction else interval
    rows = zip(table[name], table[f"{bounds}_low"], table[f"{bounds}_high"], strict=True)
    return [f"{form(value)} {brackets(low, high)}".strip() for value, low, high in rows]


def notes(table: pd.DataFrame) -> list[str]:
    """Return the notes under a table: formulas, baselines and abbreviations."""
    texts = []
    based = table[table["baseline"] != ""].drop_duplicates("series")
    for mode in ("strong", "weak"):
        rows, words = based[based["mode"] == mode], WORDS["modes"][mode]
        if len(rows):
            names = sorted(set(rows["baseline"]))
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            texts.append(
                f"{words['title']}: {ascii_formula(words['formula'])}, {words['constant']} constant; "
                f"T: time per step; baseline N0: {shown}."
            )
    texts.append(
        "n: runs in the results; brackets: 95 % confidence intervals (Student's or Welch's t on the "
        "logarithms of the runs' values), given for three or more runs. "
        "LB: load balance, CommE: communication efficiency, CompS: computational scalability (POP). "
        f"Node-h: node-hours of one run. {MISSING}: not measured."
    )
    return texts


def markdown_table(table: pd.DataFrame) -> str:
    """Return the scaling table as Markdown, with notes and the reasons of missing runs."""
    frame = readable(table)
    lines = [markdown_line(list(frame.columns)), "|" + "---|" * len(frame.columns)]
    lines += [markdown_line(row) for row in frame.itertuples(index=False)]
    lines += ["", *(f"{markdown(note)}\n" for note in notes(table))]
    reasons = table[table["reason"] != ""].drop_duplicates(["cell_id", "reason"])
    lines += [
        f"- {markdown(cell)}: {markdown(one_line(reason))}"
        for cell, reason in zip(reasons["cell_id"], reasons["reason"], strict=True)
    ]
    return "\n".join(lines).rstrip() + "\n"


def latex_table(table: pd.DataFrame) -> str:
    """Return the scaling table with its notes as a LaTeX tabular or, if it is long, as a longtable."""
    frame = readable(table)
    numeric = "ll" + "r" * (len(frame.columns) - 3) + "l"
    head = " & ".join(latex(name) for name in frame.columns) + r" \\"
    body = [" & ".join(latex(value) for value in row) + r" \\" for row in frame.itertuples(index=False)]
    foot = [latex(note) + r"\par" for note in notes(table)]
    if len(frame) > _PAGE_ROWS:
        lines = ["% needs \\usepackage{booktabs,longtable,textcomp}", rf"\begin{{longtable}}{{{numeric}}}"]
        lines += [r"\toprule", head, r"\midrule", r"\endhead", *body]
        lines += [r"\bottomrule", r"\end{longtable}", *foot]
    else:
        lines = ["% needs \\usepackage{booktabs,textcomp}", rf"\begin{{tabular}}{{{numeric}}}"]
        lines += [r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", "", *foot]
    return "\n".join(lines) + "\n"


# -- the page -------------------------------------------------------------------------


def cell_columns() -> list[dict[str, Any]]:
    """Return ``name, help, numeric`` and the CSS class ``level`` of each column of :func:`cell_rows`."""
    return [
        {
            "name": name,
            "help": text,
            "numeric": name not in _TEXT_COLUMNS,
            "level": next((level for level, names in _LEVELS.items() if name in names), "wide"),
        }
        for name, text in WORDS["cell_columns"].items()
    ]


def cell_rows(rows: pd.DataFrame, *, labels: dict[str, str]) -> list[list[TableCell]]:
    """Return the table of all cells: rows of texts, with the columns of :func:`cell_columns`."""
    return [_cell_row(row, labels) for row in rows.to_dict("records")]


def _cell_row(row: dict[Any, Any], labels: dict[str, str]) -> list[TableCell]:
    per_rank, smaller = row["per_gpu_batch"], row["incremental_from"]
    throughput = interval(row["throughput_low"], row["throughput_high"])
    series = ", ".join(dict.fromkeys(filter(None, (labels[row["series"]], row["mode"]))))
    return [
        _two_lines(row["cell_id"], series),
        row["state"],
        _two_lines(fraction(row["efficiency"]), fractions(row["efficiency_low"], row["efficiency_high"])),
        one_line(row["reason"], limit=240),
        _two_lines(whole(row["gpus"]), layout(row)),
        _two_lines(whole(row["global_batch"]), f"{whole(per_rank)} per rank" if known(per_rank) else ""),
        _two_lines(str(row["n"]), f"of {row['runs']}" if row["n"] < row["runs"] else ""),
        _two_lines(number(row["throughput_samples_per_sec"]), throughput),
        number(1000 * row["step_time_sec"]),
        _two_lines(
            number(row["speedup"], digits=3), interval(row["speedup_low"], row["speedup_high"], digits=3)
        ),
        _two_lines(
            fraction(row["incremental_efficiency"]), f"from {whole(smaller)}" if known(smaller) else ""
        ),
        fraction(row["load_balance"]),
        fraction(row["comm_efficiency"]),
        fraction(row["pop_parallel_efficiency"]),
        fraction(row["computational_scalability"]),
        fraction(row["global_efficiency"]),
        number(row["node_hours"], digits=3),
        fraction(row["mfu"]),
        number(row["gpu_util"], digits=3),
        number(row["energy_joules"]),
        number(row["val_loss"]),
    ]


def _two_lines(text: str, below: str) -> TableCell:
    return (text, below) if below else text


def run_data(attempts: pd.DataFrame) -> dict[str, Any]:
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

    names = ["run_id", "cell_id", "attempt", "state", "failure_class", "reason", "rate", "evidence"]
    rows = []
    run: Any
    for run in attempts.head(MAX_ROWS)[names].itertuples(index=False):
        shared = len(run.cell_id) if run.run_id.startswith(run.cell_id) else 0
        numbers.setdefault(run.cell_id, len(numbers))
        attempt = 0 if pd.isna(run.attempt) else int(run.attempt)
        texts = [add(run.state), add(run.failure_class), add(run.reason, 400)]
        evidence = [add(text) for text in (run.evidence if isinstance(run.evidence, tuple) else ())]
        rate = number(run.rate) if known(run.rate) else ""
        rows.append([numbers[run.cell_id], shared, run.run_id[shared:], attempt, *texts, rate, *evidence])
    return {"texts": list(numbers), "runs": rows}


def runs_context(attempts: pd.DataFrame) -> dict[str, Any]:
    """Return the rows of attempts that do not count, have a reason or are outliers; and several numbers.

    The attempts that do not count come first. ``missing`` and ``states`` are about the latest attempts.
    """
    runs = attempts[attempts["latest"]]
    notable = attempts[~attempts["measured"] | (attempts["reason"] != "") | attempts["outlier"]]
    notable = notable.sort_values("measured", kind="stable")
    shown = notable.head(MAX_RUNS_LISTED)
    names = ["run_id", "attempt", "state", "failure_class", "reason", "measured", "outlier", "node_hours"]
    lost = attempts.loc[~attempts["measured"], "node_hours"].sum()
    return {
        "failed": int((attempts["state"] == RunState.FAILED).sum()),
        "repeated": len(attempts) - len(runs),
        "attempts": int(attempts["attempt"].notna().sum()),
        "lost": number(lost, digits=3) if lost else "",
        "node_hours": number(attempts["node_hours"].sum(), digits=3),
        "listed": [_run_row(record) for record in shown[names].to_dict("records")],
        "left_out": len(notable) - len(shown),
        "missing": int((~runs["measured"]).sum()),
        "states": state_counts(runs[~runs["measured"]]),
        "total": len(runs),
        "outliers": int(runs["outlier"].sum()),
    }


def _run_row(record: dict[Any, Any]) -> list[str]:
    reasons = [one_line(record["reason"], limit=400)]
    if record["outlier"]:
        reasons.append("outlier, far from the other runs of the cell: flagged, but still counted")
    failure = record["failure_class"]
    planned = state_name(RunState.PLANNED) if record["state"] == RunState.PLANNED else MISSING
    return [
        record["run_id"],
        MISSING if pd.isna(record["attempt"]) else str(record["attempt"]),
        record["state"],
        failure if isinstance(failure, str) and failure else MISSING,
        "yes" if record["measured"] else "no",
        MISSING if record["measured"] else number(record["node_hours"], digits=3),
        "; ".join(filter(None, reasons)) or planned,
    ]


def node_rows(means: RankMeans) -> list[tuple[bool, list[str]]]:
    """Return, for at most ``MAX_NODES_LISTED`` hosts, whether the host is late and the texts of its row."""
    return [
        (
            row["late"],
            [
                one_line(row["host"], limit=80),
                one_line(row["cell_id"], limit=120),
                str(row["ranks"]),
                str(row["n"]),
                seconds(row["useful"]),
                seconds(row["data"]),
                f"{round(100 * row['beyond'], 1) + 0.0:g} %",
                seconds(row["wait"]),
                seconds(row["step"]),
            ],
        )
        for row in means.by_host.head(MAX_NODES_LISTED).to_dict("records")
    ]


def grid_tables(grid: Selection) -> list[tuple[str, list[list[str]]]]:
    """Return, for each series, its name and the rows of its table of nodes and ranks per node."""
    return [
        (label, [_grid_row(row) for row in grid.rows[grid.rows["series"] == series].to_dict("records")])
        for series, label in grid.labels.items()
    ]


def _grid_row(row: dict[Any, Any]) -> list[str]:
    bounds = interval(row["efficiency_low"], row["efficiency_high"], digits=3)
    over = MISSING if row["nodes"] == 1 else fraction(row["efficiency_over_nodes"])
    return [
        *(str(row[name]) for name in ("gpus_per_node", "nodes", "gpus")),
        number(row["speedup"], digits=3),
        f"{fraction(row['efficiency'])} {bounds}".strip(),
        fraction(row["efficiency_within_node"]),
        over,
        one_line(row["reason"], limit=160) or ("" if row["n"] else state_name(row["state"])),
    ]
