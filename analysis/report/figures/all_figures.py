"""Draw all figures of a report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from analysis.data.columns import RunRow, ScalingRow, grouped
from analysis.report.figures.bars import ranks_figure, split, split_figure
from analysis.report.figures.curves import (
    EFFICIENCY,
    SPEEDUP,
    THROUGHPUT,
    curve_figure,
)
from analysis.report.figures.drawing import Drawing, select
from analysis.report.figures.waterfall import MAX_SERIES
from ddp_scaling_bench.units import known

if TYPE_CHECKING:
    from analysis.report.results import Results

MODES = ("strong", "weak", "")


def scaling_figures(
    table: Sequence[ScalingRow],
    runs: Sequence[RunRow],
    *,
    parts: dict[str, dict[str, str]],
    invalid: Collection[str] = (),
) -> Iterator[Drawing]:
    """Yield the figures of the scaling table: curves and parts of the step of each mode.

    The curves mark the cells whose values, or those of their baseline, are ``invalid``.
    """
    rates = _rates(runs)
    for mode in MODES:
        rows = [row for row in table if row.mode == mode and row.n]
        if not rows:
            continue
        for curve in (EFFICIENCY, SPEEDUP, THROUGHPUT):
            drawn = [row for row in rows if known(curve.value(row))]
            if drawn and (curve is THROUGHPUT or len({row.gpus for row in drawn}) > 1):
                yield curve_figure(curve, select(drawn, mode, parts), rates, invalid)
        if divided := [row for row in rows if split(row)]:
            selection = select(divided, mode, parts, bars=True)
            yield split_figure(selection)
            yield split_figure(selection, shares=True)


def efficiency_figure(results: Results, rows: Sequence[ScalingRow]) -> Drawing:
    """Draw the efficiencies of ``rows``, which have one mode, as the figure of the proposal."""
    selection, rates = select(rows, rows[0].mode, results.parts), _rates(results.frames.runs)
    return replace(curve_figure(EFFICIENCY, selection, rates, results.invalid), name="proposal")


def _rates(runs: Iterable[RunRow]) -> dict[str, list[float]]:
    """Return the throughputs of the measured runs of each cell."""
    own = grouped((run for run in runs if run.measured), lambda run: run.cell_id)
    return {cell: [run.rate for run in runs] for cell, runs in own.items()}


def all_names() -> list[str]:
    """Return the names of all figures that a report can have."""
    kinds = (SPEEDUP.kind, EFFICIENCY.kind, THROUGHPUT.kind, "step", "shares")
    why = [f"why-{place}" for place in range(1, MAX_SERIES + 1)]
    return [*(f"{kind}-{mode or 'other'}" for kind in kinds for mode in MODES), "ranks", *why]


def detail_figures(results: Results) -> list[Drawing]:
    """Draw the figure of ranks.csv, if a run has this file."""
    if results.ranks is None:
        return []
    balance = {row.cell_id: row.load_balance for row in results.rows}
    return [ranks_figure(results.ranks, balance=balance)]
