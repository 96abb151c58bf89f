"""Format a comparison as a table, as Markdown for a pull request, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.compare.comparison import ComparedCell, Comparison
from analysis.data.columns import columns_of
from analysis.data.names import layout
from analysis.stats.rates import RateUnit, rate_unit
from analysis.text import markdown, markdown_line, plain
from ddp_scaling_bench.units import MISSING, count, fraction, known, listed, number, short_percent, whole

_MAX_LISTED_CELLS = 8


def title(comparison: Comparison) -> str:
    """Return the title of a comparison in the form ``B: NAME against A: NAME``."""
    return f"B: {comparison.b} against A: {comparison.a}"


def headings(comparison: Comparison) -> list[str]:
    """Return the headings of the table, and the unit of the rates of A and B."""
    unit = rate_unit(comparison.cells).name
    rates = [f"{side} {unit}" for side in ("A", "B")]
    return ["cell", "ranks", "batch", *rates, "B/A", "95 % interval", "n", "verdict", "remark"]


def table_rows(comparison: Comparison, *, changed_first: bool = False) -> list[list[str]]:
    """Return the rows of the table, with the columns of :func:`headings`, in the order of the plan.

    With ``changed_first``, cells that are faster, slower or broken (failed only in B) come first.
    """
    cells = comparison.cells
    if changed_first:
        cells = sorted(cells, key=lambda row: not (row.broken or row.changed))
    several_values = len({row.b for row in cells}) > 1
    unit = rate_unit(cells)
    return [_row(row, row.cell_b if several_values else row.cell_a, unit) for row in cells]


def _row(row: ComparedCell, cell: str, unit: RateUnit) -> list[str]:
    runs = f"{row.n_a}" if row.n_a == row.n_b else f"{row.n_a}, {row.n_b}"
    return [
        cell,
        f"{row.gpus} ({layout(row, times='x')})",
        whole(row.global_batch),
        number(unit.of(row.throughput_a, row)),
        number(unit.of(row.throughput_b, row)),
        fraction(row.ratio),
        f"{fraction(row.low)} to {fraction(row.high)}" if known(row.low) else MISSING,
        count(row.pairs, "pair") if row.pairs else runs,
        row.verdict,
        row.remark,
    ]


def conclusion(comparison: Comparison) -> str:
    """Return a clause with the number of cells with each verdict, and of cells that failed only in B."""
    counts = [f"{amount} {verdict}" for verdict, amount in comparison.counts.items() if amount]
    text = f"{count(len(comparison.cells), 'cell')} compared: {', '.join(counts)}"
    broken = sum(cell.broken for cell in comparison.cells)
    return f"{text}; {broken} failed in B and completed in A" if broken else text


def remarks(comparison: Comparison) -> list[str]:
    """Explain the verdicts, and list the notes and the unmatched cells."""
    least = short_percent(comparison.minimum_effect)
    texts = [
        "B/A: the ratio of geometric means over runs, or the geometric mean of pairwise ratios. faster, "
        f"slower: a change of at least {least}. Without real changes, at most 5 % of comparisons show "
        f"such a verdict by chance, for any number of cells. same: the whole interval is within ±{least}."
    ]
    texts += [f"{note}." for note in comparison.notes]
    for name, cells in (("A", comparison.only_a), ("B", comparison.only_b)):
        if cells:
            texts.append(f"Only in {name}: {listed(cells, limit=_MAX_LISTED_CELLS)}.")
    return texts


def difference_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the quantities that differ between A and B, with the values in A and in B."""
    return [(one.what, one.text(0), one.text(1)) for one in comparison.differences]


def markdown_report(comparison: Comparison) -> str:
    """Return the comparison as Markdown, for a pull request or an issue."""
    lines = [f"**{markdown(title(comparison))}.** {markdown(conclusion(comparison))}.", ""]
    lines += _markdown_table(headings(comparison), table_rows(comparison))
    if found := difference_rows(comparison):
        lines += ["", "Differences between A and B as a whole:", ""]
        lines += _markdown_table(("", "A", "B"), found)
    lines += ["", *(f"- {markdown(text)}" for text in remarks(comparison))]
    return "\n".join(lines) + "\n"


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_line(headings), "|" + "---|" * len(headings), *(markdown_line(row) for row in rows)]


def as_content(comparison: Comparison) -> dict[str, Any]:
    """Return the output of `bench compare --json`; unknown values are None."""
    names = columns_of(ComparedCell)
    return {
        "a": comparison.a,
        "b": comparison.b,
        "minimum_effect": comparison.minimum_effect,
        "regression": comparison.regression,
        "counts": comparison.counts,
        "cells": [{name: plain(getattr(row, name)) for name in names} for row in comparison.cells],
        "only_a": comparison.only_a,
        "only_b": comparison.only_b,
        "differences": [
            dict(zip(("what", "a", "b"), row, strict=True)) for row in difference_rows(comparison)
        ],
        "notes": comparison.notes,
        "validity": {side: [fact.as_json() for fact in facts] for side, facts in comparison.validity.items()},
    }
