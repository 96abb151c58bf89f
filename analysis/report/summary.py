"""State how certain the results of a study are, and why there are none."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.data.names import ranks, widest_series
from analysis.stats.columns import ScalingRow
from analysis.stats.estimate import MIN_RUNS
from bench.units import MISSING, count, fraction, known, listed, percent


def no_finding(rows: Sequence[ScalingRow]) -> str:
    """Return sentences about why no series has an efficiency."""
    if widest_series([row for row in rows if row.n], limit=1):
        return (
            "The measured sizes cannot be compared with each other, so there is no speedup and no "
            "efficiency. The reasons are in scaling.csv."
        )
    return "No series has two measured sizes, so there is no speedup and no efficiency."


def certainty(rows: Sequence[ScalingRow]) -> str:
    """Return the number of runs per cell and the width of the intervals."""
    cells = {row.cell_id: row for row in rows if row.n}.values()
    if not cells:
        return "Nothing has been measured yet."
    low, high = min(row.n for row in cells), max(row.n for row in cells)
    runs = count(low, "run") if low == high else f"{low} to {high} runs"
    relative = [(row.throughput_high / row.throughput_low) ** 0.5 - 1 for row in cells]
    known_widths = sorted(filter(known, relative))
    if known_widths:
        text = f"{runs} per cell; the 95 % interval of a throughput is "
        if len(known_widths) < 3:
            text += " or ".join(dict.fromkeys(map(_width, known_widths)))
            text += f" ({count(len(known_widths), 'cell')})"
        else:
            narrow, wide = (_width(known_widths[place]) for place in (0, -1))
            text += narrow if narrow == wide else f"{narrow} for the narrowest cell and {wide} for the widest"
            text += f" ({count(len(known_widths), 'cell')})"
        if without := len(relative) - len(known_widths):
            text += f"; no interval for {count(without, 'cell')} with fewer than 3 runs"
        return f"{text}."
    return f"{runs} per cell: no intervals (they need {MIN_RUNS} runs), so small differences may be chance."


def _width(relative: float) -> str:
    """Return the ends of an interval from 1/(1 + relative) to 1 + relative, as differences from 1."""
    low, high = (percent(value, decimals=1) for value in (1 - 1 / (1 + relative), relative))
    return f"±{high}" if low == high else f"-{low} to +{high}"


def left_out_sentence(rows: Sequence[ScalingRow]) -> str:
    """Return the efficiencies over all runs, including those left out, if they differ; else an empty text."""
    texts = [
        f"{text} on {ranks(row)}"
        for row in rows
        if known(row.efficiency)
        and (text := fraction(row.efficiency_all)) not in (MISSING, fraction(row.efficiency))
    ]
    return f" With the runs that are left out, E is {listed(texts)}." if texts else ""
