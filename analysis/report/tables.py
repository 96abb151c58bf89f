"""The scaling table as files: CSV for programs, Markdown and LaTeX for people."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from analysis.data.csv_files import csv_text
from analysis.stats.columns import COLUMNS, FURTHER_COLUMNS
from analysis.stats.scaling import AXES_COLUMNS
from analysis.text import (
    MISSING,
    capital,
    fraction,
    fractions,
    interval,
    markdown,
    markdown_line,
    number,
    one_line,
    whole,
)

#: Beyond this many rows a LaTeX table is a longtable.
_PAGE_ROWS = 40

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
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


def csv_table(table: pd.DataFrame) -> str:
    """Return the promised columns and those that follow as CSV; what was not measured is an empty cell."""
    further = [name for name in FURTHER_COLUMNS if name in table]
    frame = table[[*COLUMNS, *further]].copy()
    # A table measured elsewhere need not tell the nodes.
    frame["nodes"] = frame["nodes"].astype("Int64").mask(frame["gpus_per_node"] == "")
    return csv_text(frame)


def axes_csv(sizes: pd.DataFrame) -> str:
    """Return the sizes of :func:`analysis.stats.scaling.two_axes` as CSV."""
    return csv_text(sizes[list(AXES_COLUMNS)])


def runs_csv(runs: pd.DataFrame) -> str:
    """Return every planned run with its state, reason and what it measured, as CSV."""
    columns = ["run_id", "cell_id", "repeat", "order", "attempt", "state", "failure_class", "reason"]
    columns += ["exit_code", "allocation", "allocation_id", "started_at", "ended_at"]
    columns += ["epochs", "samples", "steps", "window_s"]
    columns += ["throughput_samples_per_sec", "step_time_sec", "outlier"]
    # Runs with one allocation_id ran on the same nodes, one after another: a comparison may pair them.
    frame = runs.assign(allocation_id=runs["job_id"])[columns].copy()
    for name in ("started_at", "ended_at"):
        frame[name] = frame[name].dt.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return csv_text(frame)


def readable(table: pd.DataFrame, *, rate_unit: str = "samples/s") -> pd.DataFrame:
    """Return the table as texts with units in the headings, for Markdown and LaTeX."""
    columns: dict[str, list[str]] = {
        "Series": [one_line(v) for v in table["series"]],
        "Mode": [str(v) for v in table["mode"]],
        "Nodes": [
            str(nodes) if each else MISSING
            for nodes, each in zip(table["nodes"], table["gpus_per_node"], strict=True)
        ],
        "Ranks": [str(v) for v in table["gpus"]],
        "Batch": [whole(v) for v in table["global_batch"]],
        "Per rank": [whole(v) for v in table["per_gpu_batch"]],
        "n": [str(v) for v in table["n"]],
        capital(rate_unit): _with_interval(table, "throughput_samples_per_sec", "throughput", number),
        "Step (ms)": [number(1000 * v) for v in table["step_time_sec"]],
        "Speedup": [number(v, digits=3) for v in table["speedup"]],
        "Efficiency": _with_interval(table, "efficiency", "efficiency", fraction),
        "LB": [fraction(v) for v in table["load_balance"]],
        "CommE": [fraction(v) for v in table["comm_efficiency"]],
        "CompS": [fraction(v) for v in table["computational_scalability"]],
        "Node-h": [number(v, digits=3) for v in table["node_hours"]],
        "State": [_state(n, s) for n, s in zip(table["n"], table["state"], strict=True)],
    }
    return pd.DataFrame(columns, dtype="str")


def _with_interval(table: pd.DataFrame, name: str, bounds: str, form: Callable[[float], str]) -> list[str]:
    rows = zip(table[name], table[f"{bounds}_low"], table[f"{bounds}_high"], strict=True)
    if form is fraction:
        return [f"{fraction(v)} {fractions(low, high)}".strip() for v, low, high in rows]
    return [f"{number(v)} {interval(low, high)}".strip() for v, low, high in rows]


def _state(n: int, state: str) -> str:
    return "" if n else one_line(state)


def notes(table: pd.DataFrame) -> list[str]:
    """Return what stands under a table: baselines, formulas, abbreviations, what is missing."""
    texts = []
    based = table[table["baseline"] != ""].drop_duplicates("series")
    for mode, formula in (
        ("strong", "S = T(N0)/T(N), E = S N0/N, global batch constant"),
        ("weak", "E = T(N0)/T(N), scaled speedup = E N/N0, batch per rank constant"),
    ):
        rows = based[based["mode"] == mode]
        if len(rows):
            names = sorted(set(rows["baseline"]))
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            texts.append(f"{mode.capitalize()} scaling: {formula}; T: time per step; baseline N0: {shown}.")
    texts.append(
        "n: completed runs; brackets: 95 % intervals, Student's and Welch's t on the logarithms of the "
        "runs, from three runs. LB: load balance, CommE: communication efficiency, CompS: computational "
        f"scalability (POP). Node-h: node-hours of one run. {MISSING}: not measured."
    )
    return texts


def markdown_table(table: pd.DataFrame, *, rate_unit: str = "samples/s") -> str:
    """Return the table as Markdown with its notes, and a list of what is missing."""
    frame = readable(table, rate_unit=rate_unit)
    lines = [markdown_line(list(frame.columns)), "|" + "---|" * len(frame.columns)]
    lines += [markdown_line(row) for row in frame.itertuples(index=False)]
    lines += ["", *(f"{markdown(note)}\n" for note in notes(table))]
    told = table[table["reason"] != ""].drop_duplicates(["cell_id", "reason"])
    lines += [
        f"- {markdown(cell)}: {markdown(one_line(reason))}"
        for cell, reason in zip(told["cell_id"], told["reason"], strict=True)
    ]
    return "\n".join(lines).rstrip() + "\n"


def latex_table(table: pd.DataFrame, *, rate_unit: str = "samples/s") -> str:
    """Return the table with its notes for LaTeX: booktabs, a longtable where it is long."""
    frame = readable(table, rate_unit=rate_unit)
    numeric = "ll" + "r" * (len(frame.columns) - 3) + "l"
    head = " & ".join(latex(name) for name in frame.columns) + r" \\"
    body = [" & ".join(latex(value) for value in row) + r" \\" for row in frame.itertuples(index=False)]
    foot = [latex(note) + r"\par" for note in notes(table)]
    if len(frame) > _PAGE_ROWS:
        lines = ["% needs \\usepackage{booktabs,longtable,textcomp}", rf"\begin{{longtable}}{{{numeric}}}"]
        lines += [
            r"\toprule",
            head,
            r"\midrule",
            r"\endhead",
            *body,
            r"\bottomrule",
            r"\end{longtable}",
            *foot,
        ]
    else:
        lines = ["% needs \\usepackage{booktabs,textcomp}", rf"\begin{{tabular}}{{{numeric}}}"]
        lines += [r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", "", *foot]
    return "\n".join(lines) + "\n"


def latex(text: str, *, limit: int = 300) -> str:
    """Return a text that LaTeX prints as it is; letters that pdfLaTeX's fonts lack become question marks."""
    return "".join(
        _LATEX.get(letter, letter if _printable(letter) else "?") for letter in one_line(text, limit=limit)
    )


def _printable(letter: str) -> bool:
    return letter.isascii() or (letter.isalpha() and ord(letter) < 0x180)
