"""The values of a swept setting side by side: the ratio of their throughputs at each size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes

from analysis.data.columns import grouped
from analysis.report.figures import lines as over_ranks
from analysis.report.figures.drawing import Drawing, figure
from analysis.report.results import Results
from analysis.text import one_line
from ddp_scaling_bench.units import fraction

#: Maximum number of settings with a figure.
_MOST = 6


@figure("comparison")
def comparison_figures(results: Results) -> Iterator[Drawing]:
    """Draw each setting that was compared at several sizes, but for ``data``, which has its own figure."""
    rows = [row for row in results.settings if row.gpus and row.setting != "data"]
    settings = grouped(rows, lambda row: (row.setting, one_line(row.other, limit=60)))
    several = {names: own for names, own in settings.items() if len({row.gpus for row in own}) > 1}
    for place, ((setting, other), own) in enumerate([*several.items()][:_MOST], 1):
        values = grouped(own, lambda row: one_line(row.value, limit=60))
        lines: over_ranks.Lines = {
            value: [
                over_ranks.Point(row.gpus or 0, row.judgement.ratio, row.judgement.low, row.judgement.high)
                for row in values[value]
            ]
            for value in [*values][: len(over_ranks.COLOURS)]
        }
        title = f"Throughput / that of {one_line(other, limit=24)}"
        axes = {"title": title, "text": fraction, "base": None, "device": results.device}
        scale = over_ranks.Scale.of([lines], **axes)
        yield Drawing(
            name=f"comparison-{place}",
            subject=f"Throughput by {setting}",
            topic="settings",
            **over_ranks.explain(lines, scale),
            left_out=[f"{len(lines)} of {len(values)} values drawn"] * (len(lines) < len(values)),
        ).draw(partial(_draw, lines=lines, scale=scale, other=other))


def _draw(axes: Axes, *, lines: over_ranks.Lines, scale: over_ranks.Scale, other: str) -> None:
    axes.axhline(1.0, label=other, **over_ranks.GUIDE_LINE)
    over_ranks.draw_lines(axes, lines=lines, scale=scale)
