"""The parts of the step as shares of its time, and the time of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from analysis.data.columns import ScalingRow, by_series
from analysis.data.names import ranks, with_layout
from analysis.report.figures.bars import PARTS, Bars
from analysis.report.figures.drawing import Drawing, by_mode, figure, select
from analysis.report.results import Results
from analysis.report.words import CAPTIONS
from analysis.text import one_line
from ddp_scaling_bench.units import count, known, percent, seconds

_STEP_PARTS = {name: part for name, part in PARTS.items() if name != "compute"}


def split(row: ScalingRow) -> dict[str, float]:
    """Return the seconds of each part of a row's step, by its name in ``PARTS``; empty if one is unknown.

    ``other`` may be slightly negative, because timers overlap by microseconds; it is drawn as 0. If waiting
    is not known, ``transfer`` contains all exposed communication.
    """
    parts = {name: float(getattr(row, name)) for name in _STEP_PARTS}
    parts |= {} if known(row.transfer) else {"transfer": row.exposed}
    parts |= {} if known(row.wait) else {"wait": 0.0}
    if not all(map(known, parts.values())) or not any(value > 0 for value in parts.values()):
        return {}
    return {name: max(value, 0.0) for name, value in parts.items()}


@figure("shares")
def parts_figures(results: Results) -> Iterator[Drawing]:
    """Draw a bar per size, series by series, for each mode."""
    for suffix, rows in by_mode(results.rows):
        divided = [row for row in rows if split(row)]
        if not divided:
            continue
        selection = select(divided, results.parts, bars=True)
        labels, names = selection.labels, Counter((row.series, row.gpus) for row in selection.rows)
        bars = Bars(0.72 if len(names) == len(selection.rows) else 1.0)
        for series, own in by_series(selection.rows).items():
            if len(labels) > 1:
                bars.add_heading(one_line(labels[series], limit=48))
            for row in own:
                parts = split(row)
                total = sum(parts.values())
                name = with_layout(row) if names[series, row.gpus] > 1 else ranks(row)
                bars.add(name, {part: value / total for part, value in parts.items()}, seconds(total))
        largest = max(selection.rows, key=lambda row: row.gpus)
        parts = split(largest)
        exposed = percent((parts["transfer"] + parts["wait"]) / sum(parts.values()))
        drawn = f"Stacked bars of {count(len(selection.rows), 'cell')}"
        drawing = Drawing(
            **selection.texts,
            name=f"shares-{suffix}",
            subject="Parts of the step",
            topic="parts",
            description=f"{drawn}. At {ranks(largest)} {exposed} of the step is exposed communication.",
            caption=CAPTIONS["parts"],
        )
        panel = partial(_draw, bars=bars)
        yield drawing.draw(panel, height_in=bars.height_in + 0.33, left_in=bars.left_in, bottom_in=0.25)


def _draw(axes: Axes, *, bars: Bars) -> None:
    bars.draw(axes, _STEP_PARTS)
    axes.set(xlim=(0, 1.22), xticks=[0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.spines["bottom"].set_bounds(0, 1)
