"""Figures of throughput, speedup and efficiency by ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from analysis.data.columns import ScalingRow
from analysis.data.names import ranks
from analysis.report.figures.drawing import (
    SERIES_COLOURS,
    SERIES_DASHES,
    SERIES_MARKERS,
    Colour,
    Draft,
    Drawing,
    Key,
    Selection,
    evenly_spaced,
    finish,
    set_ticks,
)
from analysis.report.words import CAPTIONS
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.rates import SAMPLES, rate_unit
from analysis.stats.scaling import GUIDE, is_wide
from ddp_scaling_bench.units import count, fraction, known, number

MAX_TICKS = 8
#: If a figure has more runs, its single runs are not drawn.
MAX_REPEATS = 300
IDEAL = "ideal, through the baseline"
NOT_VALID = "not valid"
WIDE = "wide interval: not certain"
#: The least upper end of the axis of efficiencies, and the largest to which an interval extends it.
_LEAST_TOP, _HIGHEST = 1.05, 1.5
#: Intervals extend another axis by at most this share of the span of its points.
_REACH = 0.35
#: Minimum of this extension, as a difference of natural logarithms.
_LEAST_REACH = 0.1
_DOTTED, _DASHED = (1.0, 2.0), (6.0, 3.0)


@dataclass(frozen=True)
class Curve:
    """A column of the scaling table for a figure, and its axis."""

    kind: str
    column: str
    subject: str
    unit: str = ""

    @property
    def axis(self) -> str:
        """The title of the axis."""
        return f"{self.subject} ({self.unit})" if self.unit else self.subject

    @property
    def is_efficiency(self) -> bool:
        """True for the figure with a linear axis."""
        return self.kind == "efficiency"

    def value(self, row: ScalingRow) -> float:
        """Return the value of a row."""
        return float(getattr(row, self.column))

    def text(self, value: float) -> str:
        """Return a value as text."""
        return fraction(value) if self.is_efficiency else number(value)


THROUGHPUT = Curve("throughput", "throughput_samples_per_sec", "Throughput", "samples/s")
SPEEDUP = Curve("speedup", "speedup", "Speedup")
EFFICIENCY = Curve("efficiency", "efficiency", "Efficiency")


@dataclass(frozen=True)
class Point:
    """A row on a curve, with its interval (NaN without one) and its runs.

    ``dots`` are the values of the runs that are drawn.
    """

    row: ScalingRow
    value: float
    low: float
    high: float
    valid: bool
    dots: list[float]

    @property
    def bounded(self) -> bool:
        """True if the row has an interval that is drawn."""
        return self.valid and known(self.low) and known(self.high)

    @property
    def wide(self) -> bool:
        """True if the interval is wide."""
        return bool(self.bounded and is_wide(self.low, self.high))


def curve_figure(
    curve: Curve,
    selection: Selection,
    runs: Mapping[str, Sequence[float]],
    invalid: Collection[str] = (),
) -> Drawing:
    """Draw one column of measured rows over the ranks, with single runs as dots if there are few.

    ``runs`` maps cells to the throughputs of their runs. A row that is ``invalid``, or whose
    baseline is, is only a cross, without line, interval and runs.
    """
    rows = selection.rows
    if curve is THROUGHPUT and (unit := rate_unit(rows)) != SAMPLES:
        rows, curve = unit.rows(rows), replace(curve, unit=unit.name)
    points = [_point(curve, row, runs.get(row.cell_id, ()), invalid) for row in rows]
    left_out, dots = list(selection.left_out), sum(len(point.dots) for point in points)
    if dots > MAX_REPEATS:
        left_out.append(f"the {dots:,} individual runs are not drawn")
    # With one run per cell, the mean is that run.
    if dots > MAX_REPEATS or dots == sum(point.valid for point in points):
        points = [replace(point, dots=[]) for point in points]
    series = {name: [point for point in points if point.row.series == name] for name in selection.labels}
    lines = [(label, series[name]) for name, label in selection.labels.items()]
    wide = curve.kind == THROUGHPUT.kind and max(point.value for point in points) >= 50_000
    draft = Draft(
        name=f"{curve.kind}-{selection.mode or 'other'}",
        subject=curve.subject,
        mode=selection.mode,
        labels=selection.labels,
        shared=selection.shared,
        description=f"{curve.axis} over ranks. {' '.join(_description(curve, *line) for line in lines)}",
        caption=_caption(curve, lines),
        left_out=left_out,
        view=curve.subject,
        legend=_legend(curve, lines),
        left_in=0.9 if wide else 0.78,
    )
    return finish(draft, lambda axes: _draw(axes, curve, lines))


#: The lines of a figure: the name of each series, and its points.
Lines = Sequence[tuple[str, Sequence[Point]]]


def _point(curve: Curve, row: ScalingRow, runs: Sequence[float], invalid: Collection[str]) -> Point:
    value = curve.value(row)
    low, high = (getattr(row, f"{curve.kind}_{end}") for end in ("low", "high"))
    of_base = curve.kind != THROUGHPUT.kind and row.base is not None and row.base.cell_id in invalid
    valid = not of_base and row.cell_id not in invalid
    dots = [value * rate / row.rate for rate in runs] if valid else []
    return Point(row, value, low, high, valid, dots)


def _valid(lines: Lines) -> list[Point]:
    return [point for _, own in lines for point in own if point.valid]


def _caption(curve: Curve, lines: Lines) -> str:
    points = _valid(lines)
    texts = []
    if any(known(point.low) for point in points):
        texts = [CAPTIONS["intervals"]]
        low, high = _limits(curve, lines)
        if any(point.low < low or point.high > high for point in points):
            texts.append(CAPTIONS["clipped"])
    elif reason := _why_no_intervals(curve, points):
        texts = [CAPTIONS[reason]]
    if any(len(_paths(own)) > 1 for _, own in lines):
        texts.append(CAPTIONS["lines"])
    if any(point.dots for point in points):
        texts.append(CAPTIONS["runs"])
    return " ".join(texts)


def _why_no_intervals(curve: Curve, points: Sequence[Point]) -> str:
    """Return the caption about why no value has an interval; empty if no value can have one."""
    relative = curve.kind != THROUGHPUT.kind
    rows = [point.row for point in points if not (relative and point.row.is_base)]
    if not rows:
        return ""  # the baseline's efficiency is 1 by definition
    return "few_of_baseline" if relative and any(row.n >= MIN_RUNS for row in rows) else "no_intervals"


def _description(curve: Curve, label: str, points: Sequence[Point]) -> str:
    """Describe a line: its first and last valid value, and the number of invalid ones."""
    valid = [point for point in points if point.valid]
    values = "no valid value"
    if valid:
        first, last = valid[0], valid[-1]
        values = f"{curve.text(first.value)} at {ranks(first.row)}"
        if len(valid) > 1:
            values += f", {curve.text(last.value)} at {ranks(last.row)}"
    if odd := len(points) - len(valid):
        values += f"; {count(odd, 'size')} {'is' if odd == 1 else 'are'} not valid"
    return f"{label}: {values}."


def _paths(points: Sequence[Point]) -> list[list[Point]]:
    """Split a series into lines: the sizes on one node, and those with equal ranks per node."""
    points = [point for point in points if point.valid]
    if all(point.row.nodes == 1 for point in points):
        return [points] if points else []
    sizes = dict.fromkeys(point.row.gpus_per_node for point in points)
    paths = [[point for point in points if point.row.gpus_per_node == size] for size in sizes]
    within = [point for point in points if point.row.nodes == 1]
    return paths if len(sizes) == 1 or not within else [within, *paths]


def _draw(axes: Axes, curve: Curve, lines: Lines) -> None:
    """Draw one panel."""
    axes.grid(axis="y")
    limits = _limits(curve, lines)
    sizes = sorted({point.row.gpus for _, own in lines for point in own})
    _set_scales(axes, curve, sizes, limits)
    _draw_ideal(axes, curve, _valid(lines))
    for place, (_, points) in enumerate(lines):
        _draw_lines(axes, points, place=place)
        own, odd = [one for one in points if one.valid], [one for one in points if not one.valid]
        if odd:
            style: dict[str, Any] = {"color": Colour.MUTED, "marker": "x", "s": 30, "zorder": 7}
            axes.scatter(*_places(odd), **style)
        if not own:
            continue
        if any(point.dots for point in own):
            _draw_runs(axes, own, place=place)
        _draw_intervals(axes, curve, own, limits, place=place)
        _draw_means(axes, own, place=place)


def _places(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    """Return the horizontal and the vertical positions of points."""
    return [point.row.gpus for point in points], [point.value for point in points]


def _draw_means(axes: Axes, points: Sequence[Point], *, place: int) -> None:
    """Draw the means; a mean with a wide interval is hollow."""
    colour = SERIES_COLOURS[place]
    wide = np.array([point.wide for point in points])
    axes.scatter(
        *_places(points),
        s=30,
        marker=SERIES_MARKERS[place],
        facecolor=np.where(wide, str(Colour.SURFACE), str(colour)),
        edgecolor=np.where(wide, str(colour), str(Colour.SURFACE)),
        linewidth=np.where(wide, 1.3, 0.7),
        zorder=4,
    )


def _draw_runs(axes: Axes, points: Sequence[Point], *, place: int) -> None:
    """Draw a dot per run at its size."""
    style: dict[str, Any] = {"facecolor": "none", "edgecolor": SERIES_COLOURS[place], "alpha": 0.75}
    sizes = [point.row.gpus for point in points for _ in point.dots]
    values = [value for point in points for value in point.dots]
    axes.scatter(sizes, values, s=16, zorder=3, linewidth=1.0, **style)


def _draw_lines(axes: Axes, points: Sequence[Point], *, place: int) -> None:
    dashes = SERIES_DASHES[place]
    style: dict[str, Any] = {"color": SERIES_COLOURS[place], "linewidth": 1.4}
    style["linestyle"] = (0, dashes) if dashes else "-"
    for path in _paths(points):
        axes.plot(*_places(path), zorder=2, **style)


def _draw_intervals(
    axes: Axes, curve: Curve, points: Sequence[Point], limits: tuple[float, float], *, place: int
) -> None:
    """Draw the intervals; if one leaves the panel, draw an arrow and the value of its end."""
    bounded = [point for point in points if point.bounded]
    if not bounded:
        return
    colour = SERIES_COLOURS[place]
    sizes, values = _places(bounded)
    ends = np.clip([[point.low for point in bounded], [point.high for point in bounded]], *limits)
    away = np.clip([values - ends[0], ends[1] - values], 0, None)
    style: dict[str, Any] = {"color": colour, "elinewidth": 1.3, "capsize": 4.5, "zorder": 5}
    axes.errorbar(sizes, values, yerr=away, fmt="none", **style)
    lows = [(point.row.gpus, point.low) for point in bounded if point.low < limits[0]]
    highs = [(point.row.gpus, point.high) for point in bounded if point.high > limits[1]]
    for clipped, end, marker, side in ((lows, limits[0], "v", 1), (highs, limits[1], "^", -1)):
        for size, value in clipped:
            axes.plot(size, end, marker=marker, color=colour, markersize=6, clip_on=False, zorder=6)
            at_end = size >= axes.get_xticks()[-1]
            axes.annotate(
                curve.text(value),
                (size, end),
                xytext=(-6 if at_end else 6, side * (2 + 10 * place)),
                textcoords="offset points",
                ha="right" if at_end else "left",
                va="bottom" if side > 0 else "top",
                fontsize="small",
                color=colour,
            )


def _draw_ideal(axes: Axes, curve: Curve, points: Sequence[Point]) -> None:
    """Draw perfect scaling through the measured baseline, and the guide of the efficiency."""
    style: dict[str, Any] = {"color": Colour.MUTED, "linewidth": 1.0, "linestyle": (0, _DOTTED), "zorder": 1}
    if curve.is_efficiency:
        for value, name, dashes in ((1.0, "ideal", _DOTTED), (GUIDE, f"guide {GUIDE}", _DASHED)):
            axes.axhline(value, **style | {"linestyle": (0, dashes)})
            axes.annotate(
                name,
                (0, value),
                xycoords=("axes fraction", "data"),
                xytext=(3, -2),
                textcoords="offset points",
                va="top",
                fontsize="small",
                color=Colour.MUTED,
            )
        return
    largest = max((point.row.gpus for point in points), default=0)
    for start, value in dict.fromkeys((one.row.gpus, one.value) for one in points if one.row.is_base):
        if largest > start:
            axes.plot([start, largest], [value, value * largest / start], **style)


def _limits(curve: Curve, lines: Lines) -> tuple[float, float]:
    """Return the ends of the vertical axis: they follow the points and, up to a bound, the intervals."""
    every = [point for _, own in lines for point in own]
    values = [point.value for point in every] + [value for point in every for value in point.dots]
    bounded = [point for point in every if point.bounded]
    if curve.is_efficiency:  # from 0, so that figures of several modes and studies look alike
        ends = [min(point.high, _HIGHEST) for point in bounded]
        return 0.0, 1.05 * max([_LEAST_TOP, *values, *ends])
    low, high = math.log(min(values)), math.log(max(values))
    reach = max(_REACH * (high - low), _LEAST_REACH)
    if bounded:
        low = min(low, max(math.log(min(point.low for point in bounded)), low - reach))
        high = max(high, min(math.log(max(point.high for point in bounded)), high + reach))
    margin = 0.05 * max(high - low, _LEAST_REACH)
    return math.exp(low - margin), math.exp(high + margin)


def _set_scales(axes: Axes, curve: Curve, sizes: Sequence[int], limits: tuple[float, float]) -> None:
    axes.set_xscale("log", base=2)
    set_ticks(axes.xaxis, _spread_sizes(sizes), lambda value: f"{value:,.0f}")
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    axes.set(xlabel="Ranks", ylabel=curve.axis)
    if not curve.is_efficiency:
        axes.set_yscale("log", base=2 if curve is SPEEDUP else 10)
    axes.set_ylim(*limits)
    if not curve.is_efficiency:
        _set_log_ticks(axes, curve)


def _set_log_ticks(axes: Axes, curve: Curve) -> None:
    low, high = axes.get_ylim()
    base, subs = (2, (1.0,)) if curve is SPEEDUP else (10, (1.0, 2.0, 5.0))
    for locator in (LogLocator(base=base, subs=subs), MaxNLocator(4)):
        ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
        if len(ticks) > 1:
            break
    set_ticks(axes.yaxis, [ticks[place] for place in evenly_spaced(len(ticks), MAX_TICKS)], _tick)


def _tick(value: float) -> str:
    text = number(value, digits=3)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _spread_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes, from the smallest on, whose labels do not overlap on a logarithmic axis."""
    room = (sizes[-1] / sizes[0]) ** (1 / (1.2 * MAX_TICKS))
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size >= kept[-1] * room:
            kept.append(size)
    return kept


def _legend(curve: Curve, lines: Lines) -> list[Key]:
    valid = _valid(lines)
    looks = zip(lines, SERIES_COLOURS, SERIES_MARKERS, SERIES_DASHES, strict=False)
    keys = [Key(label, colour, marker=marker, dashes=dashes) for (label, _), colour, marker, dashes in looks]
    if any(not point.valid for _, own in lines for point in own):
        keys.append(Key(NOT_VALID, Colour.MUTED, marker="x"))
    if any(point.wide for point in valid):
        keys.append(Key(WIDE, Colour.MUTED, marker="hollow"))
    if curve.is_efficiency or not any(point.row.is_base for point in valid):
        return keys
    return [*keys, Key(IDEAL, Colour.MUTED, dashes=_DOTTED)]
