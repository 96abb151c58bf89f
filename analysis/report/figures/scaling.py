"""Efficiency, speedup and throughput over ranks, for each scaling mode; the axes of all modes are equal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from matplotlib.axes import Axes

from analysis.checks.scaling_table import error_of
from analysis.data.columns import ScalingRow, by_series, grouped
from analysis.report.figures import lines as over_ranks
from analysis.report.figures.drawing import MAX_SERIES, Drawing, Selection, by_mode, figure, select
from analysis.report.results import Results
from analysis.report.words import mode_title
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.rates import rate_unit
from analysis.stats.scaling import GUIDE
from ddp_scaling_bench.units import fraction, known, number


class Curve(NamedTuple):
    """A column of the scaling table with its interval, and the base of its axis if that is logarithmic."""

    name: str
    column: str
    base: int | None


EFFICIENCY, SPEEDUP = Curve("efficiency", "efficiency", None), Curve("speedup", "speedup", 2)
THROUGHPUT = Curve("throughput", "throughput_samples_per_sec", 10)


class _Panel(NamedTuple):
    """A curve of one mode."""

    curve: Curve
    selection: Selection
    lines: over_ranks.Lines
    looks: Sequence[int]
    left_out: Sequence[str]
    without: str
    scale: over_ranks.Scale
    guide: float = GUIDE

    def draw(self, axes: Axes) -> None:
        """Draw the lines, perfect scaling through the measured baseline, and the guide of the efficiency."""
        over_ranks.draw_lines(axes, lines=self.lines, scale=self.scale, looks=self.looks)
        valid = [point for point in over_ranks.points_of(self.lines) if point.valid]
        if self.curve is EFFICIENCY:
            axes.axhline(1.0, label="ideal", **over_ranks.IDEAL)
            axes.axhline(self.guide, label=f"guide {self.guide}", **over_ranks.GUIDE_LINE)
            return
        largest = max((point.gpus for point in valid), default=0)
        for start, value in dict.fromkeys((one.gpus, one.value) for one in valid if one.is_base):
            if largest > start:
                ends = [value, value * largest / start]
                axes.plot([start, largest], ends, label="ideal", **over_ranks.IDEAL)

    def narrow(self) -> _Panel:
        """Return the panel with fewer ticks and, for efficiencies, the mode of its row."""
        mode = f"{mode_title(self.selection.texts['mode'])}\n" * (self.curve is EFFICIENCY)
        return self._replace(scale=replace(self.scale, title=f"{mode}{self.scale.title}", ticks=4))

    def drawing(self, name: str) -> Drawing:
        """Return the finished figure."""
        texts = self.selection.texts | over_ranks.explain(self.lines, self.scale, without=self.without)
        texts["left_out"] = [*texts["left_out"], *self.left_out]
        drawing = Drawing(name=name, subject=self.curve.name.capitalize(), topic="scaling", **texts)
        return drawing.draw(self.draw, left_in=self.scale.left_in)


@figure("efficiency")
def efficiency_figures(results: Results) -> Iterator[Drawing]:
    """Draw the efficiencies of each mode."""
    return _drawings(EFFICIENCY, results)


@figure("speedup")
def speedup_figures(results: Results) -> Iterator[Drawing]:
    """Draw the speedups of each mode."""
    return _drawings(SPEEDUP, results)


@figure("throughput")
def throughput_figures(results: Results) -> Iterator[Drawing]:
    """Draw the throughputs of each mode."""
    return _drawings(THROUGHPUT, results)


def _drawings(curve: Curve, results: Results) -> Iterator[Drawing]:
    for suffix, panel in _panels_of_modes(curve, results):
        yield panel.drawing(f"{curve.name}-{suffix}")


@figure("scaling", is_long=True)
def paper_figure(results: Results) -> Iterator[Drawing]:
    """Draw, for a paper, all curves of the modes that have them in one figure."""
    curves = (EFFICIENCY, SPEEDUP, THROUGHPUT)
    every = [panel for curve in curves for _, panel in _panels_of_modes(curve, results)]
    by_modes = grouped(every, lambda panel: panel.selection.texts["mode"])
    whole = [panel for own in by_modes.values() if len(own) == 3 for panel in own]
    if whole:
        texts = [over_ranks.explain(panel.lines, panel.scale)["description"] for panel in whole]
        subject = "Efficiency, speedup and throughput"
        drawing = Drawing(name="scaling", subject=subject, topic="", description=" ".join(texts))
        left_in = 0.15 + max(panel.scale.left_in for panel in whole)
        yield drawing.draw(
            *(panel.narrow().draw for panel in whole), columns=3, height_in=2.0, left_in=left_in
        )


def _panels_of_modes(curve: Curve, results: Results) -> Iterator[tuple[str, _Panel]]:
    """Yield the curve of each mode, with the suffix of the mode's figures."""
    rows = {}
    for suffix, own in by_mode(results.rows):
        drawn = [row for row in own if known(getattr(row, curve.column))]
        if drawn and (curve is THROUGHPUT or len({row.gpus for row in drawn}) > 1):
            rows[suffix] = drawn
    yield from zip(rows, _panels(curve, rows.values(), results), strict=True)


def efficiency_figure(results: Results, rows: Sequence[ScalingRow], *, guide: float) -> Drawing:
    """Draw the efficiencies of ``rows``, which have one mode, as the figure of the proposal."""
    (panel,) = _panels(EFFICIENCY, [rows], results)
    return panel._replace(guide=guide).drawing("proposal")


def _panels(curve: Curve, modes: Collection[Sequence[ScalingRow]], results: Results) -> list[_Panel]:
    """Return the panels of a curve, with the rows of a mode in each."""
    unit, relative = rate_unit(results.rows), curve is not THROUGHPUT
    panels = []
    for rows in modes:
        selection = select(rows if relative else unit.rows(rows), results.parts)
        points = {row.place: point_of(curve, row, results) for row in selection.rows}
        lines = {
            label: [points[row.place] for row in selection.rows if row.series == series]
            for series, label in selection.labels.items()
        }
        # By definition, the baseline's efficiency and speedup have no interval.
        lacking = [
            row for row in selection.rows if points[row.place].valid and not (relative and row.is_base)
        ]
        few = "few_of_baseline" if relative and any(row.n >= MIN_RUNS for row in lacking) else "no_intervals"
        drawn, left_out = over_ranks.without_many_runs(lines)
        # A series has one look in all figures of its mode.
        every = [*by_series(row for row in results.rows if row.mode == rows[0].mode and row.n)]
        own = every if len(every) <= MAX_SERIES else [*selection.labels]
        looks = [own.index(series) for series in selection.labels]
        panels.append((selection, drawn, looks, left_out, few if lacking else ""))
    if not panels:
        return []
    title = curve.name.capitalize() + ("" if relative else f" ({unit.name})")
    text = fraction if curve is EFFICIENCY else number
    axes = {"title": title, "text": text, "base": curve.base, "device": results.device}
    scale = over_ranks.Scale.of((lines for _, lines, *_ in panels), **axes)
    return [_Panel(curve, *panel, scale) for panel in panels]


def point_of(curve: Curve, row: ScalingRow, results: Results) -> over_ranks.Point:
    """Return the value of a row; it is not valid if the row, or the baseline to which it refers, is not."""
    value = getattr(row, curve.column)
    low, high = (getattr(row, f"{curve.name}_{end}") for end in ("low", "high"))
    base = None if curve is THROUGHPUT else row.base
    valid = error_of(row, base, results.invalid) is None
    runs = [value * run.rate / row.rate for run in results.frames.measured_in(row.cell_id)] if valid else ()
    return over_ranks.Point.of(row, value, low=low, high=high, runs=runs, valid=valid)
