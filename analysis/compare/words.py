"""A comparison as texts: a table for people, Markdown for a pull request, values for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.compare.contrast import Comparison
from analysis.compare.matching import Difference
from analysis.compare.verdicts import Verdict
from analysis.data.names import layout
from analysis.text import (
    MISSING,
    count,
    fraction,
    listed,
    markdown,
    markdown_line,
    number,
    plain,
    short_percent,
    whole,
)

HEADINGS = (
    *("cell", "ranks", "batch", "A samples/s", "B samples/s", "B/A", "95 % interval", "n"),
    *("verdict", "remark"),
)
NUMERIC = ("ranks", "batch", "A samples/s", "B samples/s", "B/A", "95 % interval", "n")
_SHOWN_CELLS = 8


def title(comparison: Comparison) -> str:
    """Return what is compared with what."""
    return f"B: {comparison.b} against A: {comparison.a}"


def table_rows(comparison: Comparison, *, changed_first: bool = False) -> list[list[str]]:
    """Return the texts of the table, in the order of :data:`HEADINGS`; rows in the plan's order.

    With ``changed_first``, cells that are faster, slower or broken come before the others.
    """
    cells = comparison.cells
    if changed_first:
        changed = cells["broken"] | cells["verdict"].isin([Verdict.FASTER, Verdict.SLOWER])
        cells = pd.concat([cells[changed], cells[~changed]])
    several = cells["b"].nunique() > 1
    return [_row(row, several) for row in cells.to_dict("records")]


def _row(row: dict[Any, Any], several: bool) -> list[str]:
    alone = f"{row['n_a']}" if row["n_a"] == row["n_b"] else f"{row['n_a']}, {row['n_b']}"
    with_interval = math.isfinite(row["low"])
    cell = row["cell_b"] if several else row["cell_a"]
    return [
        cell,
        f"{row['gpus']} ({layout(row, times='x')})",
        whole(row["global_batch"]),
        number(row["throughput_a"]),
        number(row["throughput_b"]),
        fraction(row["ratio"]),
        f"{fraction(row['low'])} to {fraction(row['high'])}" if with_interval else MISSING,
        alone if pd.isna(row["pairs"]) else count(int(row["pairs"]), "pair"),
        row["verdict"],
        row["remark"],
    ]


def conclusion(comparison: Comparison) -> str:
    """Return the counts of the verdicts, and what the exit code says."""
    counts = [f"{amount} {verdict}" for verdict, amount in comparison.counts.items() if amount]
    text = f"{count(len(comparison.cells), 'cell')} compared: {', '.join(counts)}"
    broken = int(comparison.cells["broken"].sum())
    if broken:
        text += f"; {broken} failed in B and completed in A"
    return text


def remarks(comparison: Comparison) -> list[str]:
    """Return how to read the verdicts, and what else a reader should know."""
    least = short_percent(comparison.minimum_effect)
    texts = [
        f"faster, slower: a change of at least {least} that chance explains in at most 5 % of comparisons, "
        f"however many cells; same: the whole interval within {least}."
    ]
    texts += [f"{note}." for note in comparison.notes]
    for name, cells in (("A", comparison.only_a), ("B", comparison.only_b)):
        if cells:
            texts.append(f"Only in {name}: {listed(cells, limit=_SHOWN_CELLS)}.")
    return texts


def differences(comparison: Comparison) -> list[Difference]:
    """Return settings first, then software, hardware and the rest."""
    return [*comparison.settings, *comparison.environment]


def markdown_report(comparison: Comparison) -> str:
    """Return the comparison as Markdown, for a pull request or an issue."""
    lines = [f"**{markdown(title(comparison))}.** {markdown(conclusion(comparison))}.", ""]
    lines += _markdown_table(HEADINGS, table_rows(comparison))
    found = differences(comparison)
    if found:
        lines += ["", "What differs as a whole:", ""]
        lines += _markdown_table(("", "A", "B"), [(one.what, one.a, one.b) for one in found])
    lines += ["", *(f"- {markdown(text)}" for text in remarks(comparison))]
    return "\n".join(lines) + "\n"


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_line(headings), "|" + "---|" * len(headings), *(markdown_line(row) for row in rows)]


def as_content(comparison: Comparison) -> dict[str, Any]:
    """Return what `bench compare --json` prints; what is not known is None."""
    cells = [
        {name: plain(value) for name, value in row.items()} for row in comparison.cells.to_dict("records")
    ]
    return {
        "a": comparison.a,
        "b": comparison.b,
        "minimum_effect": comparison.minimum_effect,
        "regression": comparison.regression,
        "counts": comparison.counts,
        "cells": cells,
        "only_a": comparison.only_a,
        "only_b": comparison.only_b,
        "differences": [{"what": one.what, "a": one.a, "b": one.b} for one in differences(comparison)],
        "notes": comparison.notes,
    }
