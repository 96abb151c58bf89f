"""Figures of throughput, speedup and efficiency by ranks, and of the all-reduce bandwidth by message size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.checks.fabric import FabricRow, SweepRow, fabric_table, ring_time
from analysis.data.load import Study
from analysis.data.names import ranks, with_layout
from analysis.report.figures.drawing import (
    SERIES_COLOURS,
    SERIES_DASHES,
    SERIES_MARKERS,
    Colour,
    Draft,
    Drawing,
    Key,
    Selection,
    Tip,
    Tips,
    evenly_spaced,
    finish,
    log_ticks,
    series_key,
    set_ticks,
)
from analysis.report.words import CAPTIONS
from analysis.stats.columns import ScalingRow, grouped
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.scaling import GUIDE, is_wide
from analysis.text import one_line
from bench.units import count, fraction, join_names, known, listed, number, seconds

MAX_TICKS = 8
#: If a figure has more runs, its single runs are not drawn.
MAX_REPEATS = 300
IDEAL = "ideal, through the baseline"
NOT_VALID = "not valid"
WIDE = "wide interval: not certain"
#: Intervals extend an axis by at most this share of the span of its points.
_REACH = 0.35
#: Minimum of this extension, as a difference of efficiencies or of natural logarithms.
_LEAST_REACH = 0.1
#: Maximum number of runs that a tip names.
_MAX_NAMED = 4
_DOTTED, _DASHED = (1.0, 2.0), (6.0, 3.0)
MAX_LINES = len(SERIES_COLOURS)
#: With more lines, the caption refers to fabric.csv.
_MAX_FITS_IN_CAPTION = 3


@dataclass(frozen=True)
class Curve:
    """A column of the scaling table for a figure: its axis, and the unit of its values."""

    kind: str
    column: str
    axis: str
    unit: str

    @property
    def is_efficiency(self) -> bool:
        """True for the figure with a linear axis."""
        return self.kind == "efficiency"

    def value(self, row: ScalingRow) -> float:
        """Return the value of a row."""
        return float(getattr(row, self.column))

    def text(self, value: float) -> str:
        """Return a value without its unit."""
        return fraction(value) if self.is_efficiency else number(value)

    def words(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{self.text(value)}{self.unit}"


THROUGHPUT = Curve("throughput", "throughput_samples_per_sec", "Throughput (samples/s)", " samples/s")
SPEEDUP = Curve("speedup", "speedup", "Speedup", "×")
EFFICIENCY = Curve("efficiency", "efficiency", "Efficiency", " efficiency")


@dataclass(frozen=True)
class Point:
    """A row on a curve, with its interval (NaN without one) and its runs.

    ``dots`` are the ids of the runs that are drawn, with their values on the curve.
    """

    row: ScalingRow
    value: float
    low: float
    high: float
    valid: bool
    run_ids: list[str]
    dots: list[tuple[str, float]]

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
    selection: Selection[ScalingRow],
    runs: Mapping[str, Sequence[tuple[str, float]]],
    invalid: Collection[str] = (),
) -> Drawing:
    """Draw one column of measured rows over the ranks, with single runs as dots if there are few.

    ``runs`` maps cells to the ids and the throughputs of their runs. A row that is ``invalid``, or whose
    baseline is, is only a cross, without line, interval and runs.
    """
    points = [_point(curve, row, runs.get(row.cell_id, ()), invalid) for row in selection.rows]
    left_out, dots = list(selection.left_out), sum(len(point.dots) for point in points)
    if dots > MAX_REPEATS:
        left_out.append(f"the {dots:,} individual runs are not drawn")
    # With one run per cell, the mean is that run.
    if dots > MAX_REPEATS or dots == sum(point.valid for point in points):
        points = [replace(point, dots=[]) for point in points]
    series = {name: [point for point in points if point.row.series == name] for name in selection.labels}
    lines = [(label, series[name]) for name, label in selection.labels.items()]
    wide = curve is THROUGHPUT and max(point.value for point in points) >= 50_000
    draft = Draft(
        name=f"{curve.kind}-{selection.mode or 'other'}",
        subject=curve.axis.partition(" (")[0],
        mode=selection.mode,
        labels=selection.labels,
        shared=selection.shared,
        description=f"{curve.axis} over ranks. {' '.join(_description(curve, *line) for line in lines)}",
        caption=_caption(curve, lines),
        left_out=left_out,
        view=curve.axis.partition(" (")[0],
        legend=_legend(curve, lines),
        left_in=0.9 if wide else 0.78,
    )
    return finish(draft, lambda axes: _draw(axes, curve, lines))


#: The lines of a figure: the name of each series, and its points.
Lines = Sequence[tuple[str, Sequence[Point]]]


def _point(
    curve: Curve, row: ScalingRow, runs: Sequence[tuple[str, float]], invalid: Collection[str]
) -> Point:
    value = curve.value(row)
    low, high = (getattr(row, f"{curve.kind}_{end}") for end in ("low", "high"))
    of_base = curve is not THROUGHPUT and row.base is not None and row.base.cell_id in invalid
    valid = not of_base and row.cell_id not in invalid
    dots = [(run_id, value * rate / row.rate) for run_id, rate in runs] if valid else []
    return Point(row, value, low, high, valid, [run_id for run_id, _ in runs], dots)


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
    relative = curve is not THROUGHPUT
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


def _draw(axes: Axes, curve: Curve, lines: Lines) -> Tips:
    """Draw one panel and return its tips."""
    axes.grid(axis="y")
    tips: Tips = {}
    limits = _limits(curve, lines)
    sizes = sorted({point.row.gpus for _, own in lines for point in own})
    _set_scales(axes, curve, sizes, limits)
    _draw_ideal(axes, curve, _valid(lines))
    for place, (label, points) in enumerate(lines):
        _draw_lines(axes, points, place=place)
        own, odd = [one for one in points if one.valid], [one for one in points if not one.valid]
        if odd:
            style: dict[str, Any] = {"color": Colour.MUTED, "marker": "x", "s": 30, "zorder": 7}
            axes.scatter(*_places(odd), **style).set_gid(f"series{place}@invalid")
            tips[f"series{place}@invalid"] = [_mean_tip(curve, label, point) for point in odd]
        if not own:
            continue
        if any(point.dots for point in own):
            _draw_runs(axes, own, span=sizes[-1] / sizes[0], place=place)
            tips[f"series{place}@runs"] = [
                _run_tip(curve, label, point, *dot) for point in own for dot in point.dots
            ]
        _draw_intervals(axes, curve, own, limits, place=place)
        _draw_means(axes, own, place=place)
        tips[f"series{place}@mean"] = [_mean_tip(curve, label, point) for point in own]
    return tips


def _places(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    """Return the horizontal and the vertical positions of points."""
    return [point.row.gpus for point in points], [point.value for point in points]


def _draw_means(axes: Axes, points: Sequence[Point], *, place: int) -> None:
    """Draw the means; a mean with a wide interval is hollow."""
    colour = SERIES_COLOURS[place]
    wide = np.array([point.wide for point in points])
    drawn = axes.scatter(
        *_places(points),
        s=30,
        marker=SERIES_MARKERS[place],
        facecolor=np.where(wide, str(Colour.SURFACE), str(colour)),
        edgecolor=np.where(wide, str(colour), str(Colour.SURFACE)),
        linewidth=np.where(wide, 1.3, 0.7),
        zorder=4,
    )
    drawn.set_gid(f"series{place}@mean")


def _draw_runs(axes: Axes, points: Sequence[Point], *, span: float, place: int) -> None:
    """Draw a dot per run, right of the mean; ``span`` is the ratio of the largest size to the smallest."""
    style: dict[str, Any] = {"facecolor": Colour.SURFACE, "edgecolor": SERIES_COLOURS[place]}
    amounts, drawn = Counter(point.row.gpus for point in points for _ in point.dots), Counter[int]()
    sizes = []
    for size in (point.row.gpus for point in points for _ in point.dots):
        right = 0.03 + 0.045 * drawn[size] / max(amounts[size], 3)
        sizes.append(size * (1.6 * max(span, 1.0)) ** right)
        drawn[size] += 1
    values = [value for point in points for _, value in point.dots]
    axes.scatter(sizes, values, s=9, zorder=3, linewidth=1.0, **style).set_gid(f"series{place}@runs")


def _draw_lines(axes: Axes, points: Sequence[Point], *, place: int) -> None:
    dashes = SERIES_DASHES[place]
    style: dict[str, Any] = {"color": SERIES_COLOURS[place], "linewidth": 1.4}
    style["linestyle"] = (0, dashes) if dashes else "-"
    for path in _paths(points):
        axes.plot(*_places(path), zorder=2, gid=f"series{place}@line", **style)


def _draw_intervals(
    axes: Axes, curve: Curve, points: Sequence[Point], limits: tuple[float, float], *, place: int
) -> None:
    """Draw the intervals; if one leaves the panel, draw an arrow and the value of its end."""
    bounded = [point for point in points if point.bounded]
    if not bounded:
        return
    colour, gid = SERIES_COLOURS[place], f"series{place}@interval"
    sizes, values = _places(bounded)
    ends = np.clip([[point.low for point in bounded], [point.high for point in bounded]], *limits)
    away = np.clip([values - ends[0], ends[1] - values], 0, None)
    style: dict[str, Any] = {"color": colour, "elinewidth": 1.3, "capsize": 4.5, "zorder": 5}
    _, caps, bars = axes.errorbar(sizes, values, yerr=away, fmt="none", **style)
    for artist in (*caps, *bars):
        artist.set_gid(gid)
    lows = [(point.row.gpus, point.low) for point in bounded if point.low < limits[0]]
    highs = [(point.row.gpus, point.high) for point in bounded if point.high > limits[1]]
    for clipped, end, marker, side in ((lows, limits[0], "v", 1), (highs, limits[1], "^", -1)):
        for size, value in clipped:
            axes.plot(size, end, marker=marker, color=colour, markersize=6, clip_on=False, zorder=6, gid=gid)
            at_end = size >= axes.get_xticks()[-1]
            text = axes.annotate(
                curve.text(value),
                (size, end),
                xytext=(-6 if at_end else 6, side * (2 + 10 * place)),
                textcoords="offset points",
                ha="right" if at_end else "left",
                va="bottom" if side > 0 else "top",
                fontsize="small",
                color=colour,
            )
            text.set_gid(gid)


def _draw_ideal(axes: Axes, curve: Curve, points: Sequence[Point]) -> None:
    """Draw perfect scaling through the measured baseline, and the guide of the efficiency."""
    style: dict[str, Any] = {"color": Colour.MUTED, "linewidth": 1.0, "linestyle": (0, _DOTTED), "zorder": 1}
    if curve.is_efficiency:
        axes.axhline(1.0, **style)
        axes.axhline(GUIDE, color=Colour.MUTED, linewidth=1.0, linestyle=(0, _DASHED), zorder=1)
        return
    largest = max((point.row.gpus for point in points), default=0)
    for start, value in dict.fromkeys((one.row.gpus, one.value) for one in points if one.row.is_base):
        if largest > start:
            axes.plot([start, largest], [value, value * largest / start], **style)


def _limits(curve: Curve, lines: Lines) -> tuple[float, float]:
    """Return the ends of the vertical axis: they follow the points and, up to a bound, the intervals."""
    every = [point for _, own in lines for point in own]
    values = [point.value for point in every] + [value for point in every for _, value in point.dots]
    linear = curve.is_efficiency
    scale, back = (np.positive, np.positive) if linear else (np.log, np.exp)
    if linear:
        values += [GUIDE, 1.0]
    low, high = float(scale(min(values))), float(scale(max(values)))
    reach = max(_REACH * (high - low), _LEAST_REACH)
    if bounded := [point for point in every if point.bounded]:
        low = min(low, max(float(scale(min(point.low for point in bounded))), low - reach))
        high = max(high, min(float(scale(max(point.high for point in bounded))), high + reach))
    margin = 0.05 * max(high - low, _LEAST_REACH)
    if linear and low < 0.3:
        return 0.0, high + margin
    return float(back(low - margin)), float(back(high + margin))


def _set_scales(axes: Axes, curve: Curve, sizes: Sequence[int], limits: tuple[float, float]) -> None:
    axes.set_xscale("log", base=2)
    set_ticks(axes.xaxis, _spread_sizes(sizes), lambda value: f"{value:,.0f}")
    # The axis is longer on the right, because the runs of the largest size are drawn beside their mean.
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * max(1.25, (1.6 * sizes[-1] / sizes[0]) ** 0.09))
    axes.set(xlabel="Ranks", ylabel=curve.axis)
    if not curve.is_efficiency:
        axes.set_yscale("log", base=2 if curve is SPEEDUP else 10)
    axes.set_ylim(*limits)
    if not curve.is_efficiency:
        _set_log_ticks(axes, curve)


def _set_log_ticks(axes: Axes, curve: Curve) -> None:
    low, high = axes.get_ylim()
    ticks = log_ticks(low, high, (1.0, 2.0, 5.0))
    if curve is SPEEDUP:
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        ticks = [2.0**power for power in powers if low <= 2.0**power <= high]
    if len(ticks) < 2:
        ticks = [float(tick) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
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
    keys = [series_key(label, place) for place, (label, _) in enumerate(lines)]
    if any(not point.valid for _, own in lines for point in own):
        keys.append(Key(NOT_VALID, Colour.MUTED, marker="x"))
    if any(point.wide for point in valid):
        keys.append(Key(WIDE, Colour.MUTED, marker="hollow"))
    if curve.is_efficiency:
        return [*keys, Key(f"guide {GUIDE}", Colour.MUTED, dashes=_DASHED)]
    if not any(point.row.is_base for point in valid):
        return keys
    return [*keys, Key(IDEAL, Colour.MUTED, dashes=_DOTTED)]


def _mean_tip(curve: Curve, label: str, point: Point) -> Tip:
    row, names = point.row, point.run_ids
    bounds = f" [{curve.text(point.low)}, {curve.text(point.high)}]"
    words = curve.words(point.value) + bounds * (known(point.low) and known(point.high))
    words += "" if point.valid else f", {NOT_VALID}"
    base = ", the baseline" if row.is_base and curve is not THROUGHPUT else ""
    text = f"{label}\n{with_layout(row)}: {words}{base}\n{count(row.n, 'run')}"
    if names:
        text += f": {listed([one_line(name, limit=80) for name in names], limit=_MAX_NAMED)}"
    return Tip(text, row.cell_id, names[0] if len(names) == 1 else "")


def _run_tip(curve: Curve, label: str, point: Point, run_id: str, value: float) -> Tip:
    text = f"{label}\n{ranks(point.row)}: {curve.words(value)}\nrun {one_line(run_id, limit=120)}"
    return Tip(text, point.row.cell_id, run_id)


# -- all-reduce bandwidth -------------------------------------------------------------


@dataclass(frozen=True)
class BandwidthLine:
    """A line of the bandwidth figure: the rows of the sweep of cells that share a name, and their fit."""

    label: str
    rows: list[SweepRow]
    fit: FabricRow

    @cached_property
    def by_size(self) -> dict[int, list[SweepRow]]:
        """The rows of each message size, the smallest size first."""
        return grouped(sorted(self.rows, key=lambda row: row.bytes), lambda row: row.bytes)

    def rate(self, size: int) -> float:
        """Return the median bus bandwidth of a message size (bytes/s)."""
        return median(row.busbw_bytes_per_sec for row in self.by_size[size])

    def rate_text(self, size: int) -> str:
        """Return the median bus bandwidth of a message size as text."""
        return f"{_rate(self.rate(size))} at {_bytes(size)}"

    def tip(self, size: int) -> Tip:
        """Return the tip of the point of a message size."""
        rows = self.by_size[size]
        time, runs = median(row.time_sec for row in rows), len({row.run_id for row in rows})
        text = f"{self.label}\n{_bytes(size)}: {_rate(self.rate(size))}\n"
        return Tip(f"{text}{seconds(time)}, {count(runs, 'run')}")

    @property
    def fit_text(self) -> str:
        """Latency and rate of the fit, or why there is none."""
        if not known(self.fit.ring_bytes_per_sec):
            return f"{self.label}: no fit ({one_line(self.fit.reason, limit=80)})."
        rate = _rate(self.fit.ring_bytes_per_sec)
        return f"{self.label}: α = {seconds(self.fit.alpha_sec)}, 1/β = {rate}."


def bandwidth_figure(sweep: Sequence[SweepRow], study: Study) -> Drawing | None:
    """Draw the all-reduce bandwidth by message size; return None if no run has timed all-reduces."""
    if not sweep:
        return None
    names = _names(study, {row.cell_id for row in sweep})
    lines, left_out = _bandwidth_lines(sweep, names)
    fits = " ".join(line.fit_text for line in lines)
    in_caption = f". {fits}" if len(lines) <= _MAX_FITS_IN_CAPTION else "; fabric.csv contains α and β."
    texts = [f"{line.label}: {line.rate_text(max(line.by_size))}; {line.fit_text}" for line in lines]
    draft = Draft(
        name="bandwidth",
        subject="All-reduce bandwidth by message size",
        topic="communication",
        description=f"Bus bandwidth by message size. {' '.join(texts)}",
        caption=CAPTIONS["bandwidth"] + _launches_in_caption(sweep, study, names) + in_caption,
        left_out=left_out,
        legend=[replace(series_key(line.label, place), dashes=()) for place, line in enumerate(lines)],
        left_in=0.9,
    )
    return finish(draft, lambda axes: _draw_bandwidth(axes, lines))


def _bandwidth_lines(
    sweep: Iterable[SweepRow], names: Mapping[str, str]
) -> tuple[list[BandwidthLine], list[str]]:
    """Return the lines to draw, and a text about those that are left out."""
    labels, left_out = list(dict.fromkeys(names.values())), []
    if len(labels) > MAX_LINES:
        left_out.append(f"{MAX_LINES} of {len(labels)} lines drawn, spread over the sizes")
        labels = [labels[place] for place in evenly_spaced(len(labels), MAX_LINES)]
    rows = grouped((row._replace(cell_id=names[row.cell_id]) for row in sweep), lambda row: row.cell_id)
    return [BandwidthLine(label, rows[label], *fabric_table(rows[label])) for label in labels], left_out


def _names(study: Study, cell_ids: Collection[str]) -> dict[str, str]:
    """Return the name of each cell's line in the figure, small sizes first; equal names share a line."""
    cells: list[Any] = [one for one in study.cells.itertuples(index=False) if one.cell_id in cell_ids]
    several = len({cell.backend for cell in cells}) > 1
    names = {}
    for cell in sorted(cells, key=lambda cell: (cell.gpus, cell.nodes)):
        swept: Mapping[str, Any] = cell.swept if isinstance(cell.swept, dict) else {}
        words = [cell.backend] if several else []
        words += [f"{k.removeprefix('env.')} {v}" for k, v in swept.items() if str(k).startswith("env.")]
        names[cell.cell_id] = one_line(", ".join([with_layout(cell), *map(str, words)]), limit=60)
    return names


def _draw_bandwidth(axes: Axes, lines: Sequence[BandwidthLine]) -> Tips:
    tips: Tips = {}
    for place, line in enumerate(lines):
        colour, marker = SERIES_COLOURS[place], SERIES_MARKERS[place]
        sizes = list(line.by_size)
        _draw_fit(axes, line.fit, sizes, colour, gid=f"series{place}@fit")
        style: dict[str, Any] = {"marker": marker, "edgecolor": Colour.SURFACE, "linewidth": 0.7, "zorder": 4}
        marks = axes.scatter(sizes, list(map(line.rate, sizes)), s=26, color=colour, **style)
        marks.set_gid(f"series{place}@points")
        tips[f"series{place}@points"] = [line.tip(size) for size in sizes]
    _set_bandwidth_scales(axes, [size for line in lines for size in line.by_size])
    return tips


def _draw_fit(axes: Axes, fit: FabricRow, sizes: Sequence[float], colour: str, *, gid: str) -> None:
    if not (known(fit.alpha_sec) and known(fit.beta_sec_per_byte)):
        return
    size = np.geomspace(float(min(sizes)), float(max(sizes)), 60)
    time = ring_time(size, fit.ranks, fit.alpha_sec, fit.beta_sec_per_byte)
    axes.plot(
        size, size * 2 * (fit.ranks - 1) / fit.ranks / time, color=colour, linewidth=1.2, zorder=2, gid=gid
    )


def _set_bandwidth_scales(axes: Axes, sizes: Sequence[float]) -> None:
    axes.grid(axis="y")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    step = max(2, math.ceil((high - low) / 6))
    set_ticks(axes.xaxis, [2.0**p for p in range(math.ceil(low), int(high) + 1, step)], _bytes)
    set_ticks(axes.yaxis, log_ticks(*axes.get_ylim(), (1.0,), (1.0, 2.0, 5.0)), _short_rate)
    axes.set(xlabel="Message size", ylabel="Bus bandwidth")


def _bytes(size: float) -> str:
    """Return a size in binary units: ``64 KiB``, ``25 MiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.3g} {unit}"
    return f"{size:.0f} B"


def _short_rate(rate: float) -> str:
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if rate >= factor:
            return f"{rate / factor:.3g} {unit}"
    return f"{rate:.3g} B/s"


def _rate(rate: float) -> str:
    """Return a rate in decimal units, as vendors state them: ``12.3 GB/s``."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if rate >= factor:
            return f"{number(rate / factor, digits=3)} {unit}"
    return f"{number(rate / 1e3, digits=3)} kB/s"


def _launches_in_caption(sweep: Iterable[SweepRow], study: Study, names: Mapping[str, str]) -> str:
    """Return a note if the times of NCCL are not those of the device; no line of gloo needs it."""
    cells: Any = study.cells.itertuples(index=False)
    of_nccl = {cell.cell_id for cell in cells if cell.backend == "nccl"}
    old = [row for row in sweep if row.method == "single" and row.cell_id in of_nccl]
    if not old:
        return ""
    lines = list(dict.fromkeys(names[row.cell_id] for row in old))
    envs = study.envs_of(list(dict.fromkeys(row.run_id for row in old))).values()
    versions = sorted({one_line(env.get("bench_version") or "unknown", limit=20) for env in envs})
    shown = {"lines": join_names(lines, most=3), "versions": join_names(versions or ["unknown"], most=3)}
    return CAPTIONS["launches"].format(**shown)
