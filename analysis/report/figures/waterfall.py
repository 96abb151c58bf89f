"""From the ideal to the measured step: how the causes of a loss add up, at the recommended size."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis.causes.divide import NOT_EXPLAINED, WHOLE
from analysis.causes.table import rest_parts
from analysis.data.columns import ScalingRow, by_series, part_title
from analysis.data.names import ranks, widest_series
from analysis.report.figures.bars import add_text, name_bars
from analysis.report.figures.drawing import Colour, Drawing, figure
from analysis.report.results import Results
from analysis.report.words import CAPTIONS
from analysis.text import one_line
from ddp_scaling_bench.units import percent, seconds

#: Maximum number of series in the section "Why".
MAX_SERIES = 4
#: Smaller shares of the step have no bar.
_SMALLEST_BAR = 0.002
_LEFT_IN, _ROW_IN = 1.4, 0.26


def explained_sizes(results: Results) -> list[ScalingRow]:
    """Return a size of each of the series with the most sizes: the recommended one.

    Without one, it is the largest size with valid values, or else the largest size.
    """
    divided = [row for row in results.rows if row.place in results.divisions]
    own = by_series(divided)

    def merit(row: ScalingRow) -> tuple[bool, bool, int]:
        return results.verdicts[row.place].recommended, not results.error_of(row), row.gpus

    return [max(reversed(own[name]), key=merit) for name in widest_series(divided, limit=MAX_SERIES)]


@figure("why")
def waterfalls(results: Results) -> Iterator[Drawing]:
    """Draw the waterfall of each size whose values are valid."""
    for place, row in enumerate(explained_sizes(results), 1):
        if not results.error_of(row):
            yield waterfall(results, row, name=f"why-{place}")


def waterfall(results: Results, row: ScalingRow, *, name: str) -> Drawing:
    """Draw the ideal step, a bar per cause that begins where the one above it ends, and the measured step."""
    division, step_s = results.divisions[row.place], row.step_time_sec
    bars: list[tuple[str, Colour, float]] = []
    for one in division.rows:
        shares = [(one.title, one.share)]
        if one.cause == NOT_EXPLAINED and division.rests and WHOLE not in division.rests:
            shares = [(part_title(part.part), part.share) for part in rest_parts(division)]
        colour = Colour.OLIVE if one.is_rest else Colour.WINE
        bars += [(title, colour, share) for title, share in shares if abs(share) >= _SMALLEST_BAR]
    texts = [f"{title} {percent(share)}" for title, _, share in bars]
    ideal = 1 - division.loss
    bars = [("ideal step", Colour.BLUE, ideal), *bars, ("measured step", Colour.BLUE, 1.0)]
    last = len(bars) - 1

    def draw(axes: Axes) -> None:
        start = 0.0
        for place, (_, colour, share) in enumerate(bars):
            left = start if 0 < place < last else 0.0
            style: dict[str, Any] = {
                "height": 0.72,
                "color": colour,
                "edgecolor": Colour.SURFACE,
                "linewidth": 0.5,
            }
            axes.barh(place, share * step_s, left=left * step_s, **style)
            text = f"{seconds(share * step_s)}, {percent(share)}" if share > 0 else percent(share)
            add_text(axes, (max(left, left + share) * step_s, place), text, right_pt=2)
            start = left + share
        titles = [textwrap.fill(one_line(title, limit=44), 23) for title, _, _ in bars]
        name_bars(axes, dict(enumerate(titles)))
        axes.set_ylim(last + 0.6, -0.6)
        # Leave room for the text after the longest bar.
        axes.set_xlim(min(0.0, *(share for _, _, share in bars)) * step_s, 1.75 * step_s)
        axes.xaxis.set_major_locator(MaxNLocator(2))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value) if value > 0 else "0"))
        axes.set_xlabel("Time per step")

    return Drawing(
        name=name,
        subject=f"From the ideal to the measured step, {ranks(row)}",
        topic="why",
        series=results.titles.get(row.series, row.series),
        description=f"Waterfall: ideal step {percent(ideal)}, {', '.join(texts)}.",
        caption=CAPTIONS["why"],
    ).draw(draw, height_in=_ROW_IN * len(bars) + 0.5, left_in=_LEFT_IN)
