"""The figure that compares the step with the ideal one."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.causes.cells import CellDivision
from analysis.causes.divide import NOT_EXPLAINED, WHOLE
from analysis.causes.table import rest_parts
from analysis.data.columns import ScalingRow, part_title
from analysis.data.names import ranks
from analysis.report.figures.bars import draw_part
from analysis.report.figures.drawing import Colour, Draft, Drawing, Part, finish
from analysis.report.words import CAPTIONS
from analysis.text import one_line
from ddp_scaling_bench.units import percent, seconds

#: Maximum number of series in the section "Why".
MAX_SERIES = 4
#: Smaller shares of the step have no bar.
_SMALLEST_BAR = 0.002


def waterfall_figure(division: CellDivision, row: ScalingRow, *, name: str, label: str) -> Drawing:
    """Draw how the causes add up from the ideal time of a step to its measured time."""
    bars = []
    for one in division.rows:
        shares = [(one.title, one.share)]
        if one.cause == NOT_EXPLAINED and division.rests and WHOLE not in division.rests:
            shares = [(part_title(part.part), part.share) for part in rest_parts(division)]
        colour = Colour.OLIVE if one.is_rest else Colour.WINE
        bars += [(Part(text, colour), share) for text, share in shares if abs(share) >= _SMALLEST_BAR]
    texts = [f"{part.words} {percent(share)}" for part, share in bars]
    draft = Draft(
        name=name,
        subject=f"From the ideal to the measured step, {ranks(row)}",
        topic="why",
        labels={"series": label},
        description=f"Waterfall: ideal step {percent(1 - division.loss)}, {', '.join(texts)}.",
        caption=CAPTIONS["why"],
        height_in=0.27 * (len(bars) + 2) + 0.75,
        left_in=2.25,
        with_axis=False,
    )
    ideal = 1 - division.loss
    return finish(draft, lambda axes: _draw_waterfall(axes, bars, ideal, row.step_time_sec))


def _draw_waterfall(axes: Axes, bars: list[tuple[Part, float]], ideal: float, step_s: float) -> None:
    end = 0.0
    ends = [Part(f"{name} step", Colour.BLUE) for name in ("ideal", "measured")]
    entries = [(ends[0], ideal), *bars, (ends[1], 1.0)]
    for place, (part, share) in enumerate(entries):
        start = end if 0 < place < len(entries) - 1 else 0.0
        draw_part(axes, place, share * step_s, left=start * step_s, part=part)
        right = max(start, start + share) * step_s
        text = f"{seconds(share * step_s)}, {percent(share)}" if share > 0 else percent(share)
        axes.text(
            right + 0.01 * step_s, place, text, va="center", ha="left", fontsize="small", color=Colour.MUTED
        )
        end = start + share
    axes.set_yticks(range(len(entries)), [one_line(part.words, limit=30) for part, _ in entries])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    # Leave room for the text after the longest bar.
    axes.set_xlim(min(0.0, *(share for _, share in entries)) * step_s, 1.55 * step_s)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value) if value > 0 else "0")
    axes.set_xlabel("Time per step")
