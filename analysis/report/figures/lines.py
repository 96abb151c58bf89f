"""Draw values over ranks: lines of points with intervals, and each run as a dot at its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from analysis.data.columns import ScalingRow, grouped
from analysis.report.figures.drawing import Colour, evenly_spaced, set_ticks
from analysis.report.words import CAPTIONS
from analysis.stats.scaling import is_wide
from ddp_scaling_bench.units import capital, count, known, number

#: Lines also differ in marker and dash, for grayscale prints.
COLOURS = (Colour.BLUE, Colour.WINE, Colour.OLIVE, Colour.ROSE, Colour.INDIGO, Colour.TEAL)
_MARKERS = ("o", "s", "D", "^", "v", "P")
_DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (3, 1.5), (8, 2.5))
#: The styles of the ideal line and of a guide.
IDEAL: dict[str, Any] = {"color": Colour.MUTED, "linewidth": 1.0, "linestyle": (0, (1.0, 2.0)), "zorder": 1}
GUIDE_LINE = IDEAL | {"linestyle": (0, (6.0, 3.0))}
NOT_VALID, WIDE = "not valid", "wide interval: not certain"
_MAX_TICKS = 7
#: If a figure has more runs, they are not drawn.
MAX_RUNS = 300
#: Intervals extend an axis by at most this share of the span of its points, or at least this logarithm.
_REACH, _LEAST_REACH = 0.35, 0.4
#: The least upper end of an axis from 0, and the largest to which an interval extends it.
_LEAST_TOP, _HIGHEST = 1.05, 1.5


@dataclass(frozen=True)
class Point:
    """A value at a size, with its interval (NaN without one) and the values of its runs."""

    gpus: int
    value: float
    low: float = math.nan
    high: float = math.nan
    runs: Sequence[float] = ()
    valid: bool = True
    is_base: bool = False
    nodes: int = 1
    per_node: str = ""

    @staticmethod
    def of(row: ScalingRow, value: float, **options: Any) -> Point:
        """Return a value of a row."""
        size: dict[str, Any] = {"nodes": row.nodes, "per_node": row.gpus_per_node, "is_base": row.is_base}
        return Point(row.gpus, value, **size, **options)

    @property
    def bounded(self) -> bool:
        """True if the value has an interval that is drawn."""
        return self.valid and known(self.low) and known(self.high)

    @property
    def wide(self) -> bool:
        """True if the interval is wide."""
        return self.bounded and bool(is_wide(self.low, self.high))


#: The lines of a panel: the points of each, by its label.
Lines = Mapping[str, Sequence[Point]]


def points_of(lines: Lines) -> list[Point]:
    """Return the points of all lines."""
    return [point for own in lines.values() for point in own]


@dataclass(frozen=True)
class Scale:
    """The axes of some panels: what the vertical one shows, its ends, and the sizes of all panels.

    ``device`` is what sizes count. A vertical axis with a ``base`` is logarithmic; another one, of ratios,
    begins at 0.
    """

    title: str
    text: Callable[[float], str]
    base: int | None
    device: str
    low: float
    high: float
    sizes: Sequence[int]
    ticks: int = _MAX_TICKS

    @staticmethod
    def of(panels: Iterable[Lines], **options: Any) -> Scale:
        """Return the axes of panels, whose ends follow the points and, up to a bound, the intervals."""
        every = [point for lines in panels for point in points_of(lines)]
        sizes = sorted({point.gpus for point in every})
        values = [value for point in every for value in (point.value, *point.runs)]
        lows, highs = ([getattr(one, end) for one in every if one.bounded] for end in ("low", "high"))
        if not options["base"]:  # from 0, so that figures of several studies look alike
            top = max([_LEAST_TOP, *values, *(min(high, _HIGHEST) for high in highs)])
            return Scale(low=0.0, high=1.05 * top, sizes=sizes, **options)
        low, high = math.log(min(values)), math.log(max(values))
        reach = max(_REACH * (high - low), _LEAST_REACH)
        low = min(low, max(math.log(min([*lows, min(values)])), low - reach))
        high = max(high, min(math.log(max([*highs, max(values)])), high + reach))
        margin = 0.05 * max(high - low, _LEAST_REACH)
        return Scale(low=math.exp(low - margin), high=math.exp(high + margin), sizes=sizes, **options)

    @property
    def left_in(self) -> float:
        """The margin for the labels of the vertical axis, in inches."""
        ticks = self._vertical() if self.base else [self.high]
        return 0.36 + 0.062 * max(3, *(len(_tick(tick, digits=_digits(ticks))) for tick in ticks))

    def apply(self, axes: Axes) -> None:
        """Set up the axes of a panel."""
        axes.grid(axis="y")
        axes.set_xscale("log", base=2)
        set_ticks(axes.xaxis, self._spread(), lambda value: f"{value:,.0f}")
        axes.set_xlim(self.sizes[0] / 1.25, self.sizes[-1] * 1.25)
        axes.set(xlabel=f"{capital(self.device)}s", ylabel=self.title)
        if self.base:
            axes.set_yscale("log", base=self.base)
            shown = self._vertical()
            set_ticks(axes.yaxis, shown, partial(_tick, digits=_digits(shown)))
        axes.set_ylim(self.low, self.high)

    def _vertical(self) -> list[float]:
        """Return the ticks of a logarithmic vertical axis."""
        for locator in (
            LogLocator(self.base or 10, (1.0,) if self.base == 2 else (1.0, 2.0, 5.0)),
            MaxNLocator(4),
        ):
            every = map(float, locator.tick_values(self.low, self.high))
            ticks = [tick for tick in every if self.low <= tick <= self.high]
            if len(ticks) > 1:
                break
        return ticks[:: math.ceil(len(ticks) / _MAX_TICKS)]

    def _spread(self) -> list[int]:
        """Return the sizes, from the smallest on, whose labels do not overlap on a logarithmic axis."""
        room = (self.sizes[-1] / self.sizes[0]) ** (1 / (1.2 * self.ticks))
        kept = [self.sizes[0]]
        for size in self.sizes[1:]:
            if size >= kept[-1] * room:
                kept.append(size)
        return kept


def _digits(ticks: Sequence[float]) -> int:
    """Return how many digits the labels of ticks need to be as evenly spaced as the ticks."""
    closest = min(np.diff(ticks), default=math.inf)
    errors = {digits: max(abs(float(f"{one:.{digits}g}") - one) for one in ticks) for digits in range(3, 7)}
    return next((digits for digits, error in errors.items() if error < closest / 20), 7)


def _tick(value: float, *, digits: int = 3) -> str:
    text = number(value, digits=digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def without_many_runs(lines: Lines) -> tuple[Lines, list[str]]:
    """Return the lines, without runs if there are too many or one of each cell; and what is left out."""
    runs = sum(len(point.runs) for point in points_of(lines))
    if sum(point.valid for point in points_of(lines)) < runs <= MAX_RUNS:
        return lines, []
    without = {label: [replace(point, runs=()) for point in own] for label, own in lines.items()}
    return without, [f"the {runs:,} individual runs are not drawn"] * (runs > MAX_RUNS)


def draw_lines(axes: Axes, *, lines: Lines, scale: Scale, looks: Sequence[int] = ()) -> None:
    """Draw a panel of lines, with their entries of the legend; ``looks`` are the places of their colours."""
    scale.apply(axes)
    for (label, points), look in zip(lines.items(), looks or range(len(lines)), strict=True):
        colour, marker, dashes = COLOURS[look], _MARKERS[look], _DASHES[look]
        style: dict[str, Any] = {"color": colour, "linestyle": (0, dashes) if dashes else "-"}
        axes.plot([], [], marker=marker, label=label, **style)
        curves = [[(one.gpus, one.value) for one in path] for path in paths(points)]
        axes.plot(*_columns(_joined(curves)), zorder=2, **style)
        valid = [point for point in points if point.valid]
        if runs := [(point.gpus, value) for point in valid for value in point.runs]:
            # Lines without length, with round ends: one path instead of an element for each run.
            dots = _joined([(run, run) for run in runs])
            axes.plot(*_columns(dots), color=colour, linewidth=3.2, alpha=0.45, zorder=3)
        if bounded := [point for point in valid if point.bounded]:
            ends = [(min(one.low, one.value), max(one.high, one.value)) for one in bounded]
            bars = [[(one.gpus, end) for end in own] for one, own in zip(bounded, ends, strict=True)]
            style = {"color": colour, "linewidth": 1.0, "solid_capstyle": "butt", "zorder": 5}
            axes.plot(*_columns(_joined(bars)), marker="_", markersize=5.0, **style)
        for wide, own in grouped(valid, lambda point: point.wide).items():
            face, edge = (Colour.SURFACE, colour) if wide else (colour, Colour.SURFACE)
            filled: dict[str, Any] = {
                "markerfacecolor": face,
                "markeredgecolor": edge,
                "markeredgewidth": 0.7,
            }
            means = _columns((one.gpus, one.value) for one in own)
            axes.plot(*means, marker=marker, linestyle="", zorder=4, **filled)
    odd = [point for point in points_of(lines) if not point.valid]
    if odd:
        axes.plot(*_columns((one.gpus, one.value) for one in odd), "x", color=Colour.MUTED, label=NOT_VALID)
    if any(point.wide for point in points_of(lines)):
        axes.plot([], [], "o", markerfacecolor=Colour.SURFACE, color=Colour.MUTED, label=WIDE)


def _joined(lines: Iterable[Iterable[tuple[float, float]]]) -> Iterator[tuple[float, float]]:
    """Yield the points of several lines, with gaps between: one artist is drawn faster than many."""
    for line in lines:
        yield from line
        yield math.nan, math.nan


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the horizontal and the vertical positions of points."""
    pairs = list(points)
    return [x for x, _ in pairs], [y for _, y in pairs]


def paths(points: Sequence[Point]) -> list[list[Point]]:
    """Split valid points into lines: the sizes on one node, and those with equal ranks per node."""
    points = [point for point in points if point.valid]
    by_size = grouped(points, lambda point: point.per_node)
    within = [point for point in points if point.nodes == 1]
    if len(within) == len(points):
        return [points] if points else []
    return [within, *by_size.values()] if len(by_size) > 1 and within else [*by_size.values()]


def explain(lines: Lines, scale: Scale, *, without: str = "no_intervals") -> dict[str, Any]:
    """Return the caption and the description of a panel.

    The caption explains the marks; ``without`` names that about why no point has an interval. The description
    contains the first and last valid value of each line, and the number of invalid ones.
    """
    valid = [point for point in points_of(lines) if point.valid]
    bounded = [point for point in valid if point.bounded]
    marks = ["intervals"] if bounded else [without] if without else []
    marks += ["clipped"] * any(one.low < scale.low or one.high > scale.high for one in bounded)
    marks += ["lines"] * any(len(paths(own)) > 1 for own in lines.values())
    marks += ["runs"] * any(point.runs for point in valid)
    texts = [f"{scale.title} over {scale.device}s."]
    for label, points in lines.items():
        own = [point for point in points if point.valid]
        ends = [own[place] for place in evenly_spaced(len(own), 2)] if own else []
        text = ", ".join(f"{scale.text(one.value)} at {count(one.gpus, scale.device)}" for one in ends)
        if odd := len(points) - len(own):
            text = f"{text or 'no valid value'}; {count(odd, 'size')} {'is' if odd == 1 else 'are'} not valid"
        texts.append(f"{label}: {text}.")
    return {"caption": " ".join(CAPTIONS[mark] for mark in marks), "description": " ".join(texts)}
