"""Throughput, speedup and efficiency over the number of ranks: one panel each."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.data.names import paths, ranks, with_layout
from analysis.report.figures.drawing import evenly_spaced, log_ticks
from analysis.report.figures.palette import (
    INK,
    MUTED,
    SERIES_COLOURS,
    SERIES_DASHES,
    SERIES_MARKERS,
    SURFACE,
)
from analysis.stats.scaling import GUIDE
from analysis.text import count, fraction, fractions, interval, number

MAX_TICKS = 8
IDEAL = "ideal, through the baseline"
_LONG_LABEL = 26


@dataclass(frozen=True)
class Curve:
    """What one kind of panel shows: a column of the scaling table and its words."""

    kind: str
    column: str
    low: str
    high: str
    axis: str
    unit: str

    def words(self, value: float) -> str:
        """Return a value with the digits and the unit that suit it."""
        text = fraction(value) if self.kind == "efficiency" else number(value)
        return f"{text}{self.unit}"

    def bounds(self, low: float, high: float) -> str:
        """Return the interval in brackets, or nothing."""
        return fractions(low, high) if self.kind == "efficiency" else interval(low, high)


def throughput_in(rate_unit: str) -> Curve:
    """Return the curve of the throughput in a unit such as ``samples/s``."""
    columns = ("throughput_samples_per_sec", "throughput_low", "throughput_high")
    return Curve("throughput", *columns, f"Throughput ({rate_unit})", f" {rate_unit}")


THROUGHPUT = throughput_in("samples/s")
SPEEDUP = Curve("speedup", "speedup", "speedup_low", "speedup_high", "Speedup", "×")
EFFICIENCY = Curve(
    "efficiency", "efficiency", "efficiency_low", "efficiency_high", "Efficiency", " efficiency"
)


def draw_curve(
    axes: Axes, curve: Curve, rows: pd.DataFrame, repeats: pd.DataFrame, *, labels: dict[str, str]
) -> dict[str, list[str]]:
    """Draw one panel and return the words for its marks by gid.

    Args:
        axes: where to draw.
        curve: what to draw.
        rows: measured rows of :func:`analysis.checks.scaling_table.scaling_table`, of a few series.
        repeats: one row per run of those: ``series, gpus, run_id`` and ``value``; may be empty.
        labels: the series in order, with their names.
    """
    shown = rows.assign(label=rows["series"].map(labels))
    tips: dict[str, list[str]] = {}
    _draw_ideal(axes, curve, shown)
    _draw_lines(axes, curve, shown, list(labels.values()))
    span = float(shown["gpus"].max() / shown["gpus"].min())
    for place, (series, label) in enumerate(labels.items()):
        runs, own = repeats[repeats["series"] == series], shown[shown["series"] == series]
        if len(runs):
            _draw_runs(axes, runs, span=span, place=place)
            tips[f"runs-{place}"] = [_run_tip(curve, label, run) for run in runs.to_dict("records")]
        _draw_intervals(axes, curve, own, SERIES_COLOURS[place])
        _draw_means(axes, own["gpus"], own[curve.column], place=place)
        tips[f"mean-{place}"] = [_mean_tip(curve, label, row) for row in own.to_dict("records")]
    _set_scales(axes, curve, shown)
    _add_legend(axes, curve, list(labels.values()))
    return tips


def _draw_means(axes: Axes, sizes: pd.Series, values: pd.Series, *, place: int) -> None:
    style: dict[str, Any] = {"color": SERIES_COLOURS[place], "marker": SERIES_MARKERS[place]}
    points = axes.scatter(sizes, values, s=30, edgecolor=SURFACE, linewidth=0.7, zorder=4, **style)
    points.set_gid(f"mean-{place}")


def _draw_runs(axes: Axes, runs: pd.DataFrame, *, span: float, place: int) -> None:
    """Draw a dot for each run; ``span`` is the largest size over the smallest."""
    style: dict[str, Any] = {"color": SERIES_COLOURS[place], "alpha": 0.6, "linewidth": 0}
    dots = axes.scatter(_beside(runs, span=span), runs["value"], s=7, zorder=3, **style)
    dots.set_gid(f"runs-{place}")


def _beside(runs: pd.DataFrame, *, span: float) -> pd.Series:
    """Return where the runs of a size stand: side by side within a hundredth or two of the axis."""
    groups = runs.groupby("gpus")
    amount = groups["gpus"].transform("size")
    place = (groups.cumcount() - (amount - 1) / 2) / amount.clip(lower=2)
    return runs["gpus"] * max(span, 2.0) ** (place / 22)


def _draw_lines(axes: Axes, curve: Curve, rows: pd.DataFrame, labels: Sequence[str]) -> None:
    joined = pd.concat([part.assign(path=name) for name, part in paths(rows)], ignore_index=True)
    sns.lineplot(
        data=joined,
        x="gpus",
        y=curve.column,
        hue="label",
        hue_order=labels,
        style="label",
        style_order=labels,
        units="path",
        estimator=None,
        palette=list(SERIES_COLOURS[: len(labels)]),
        dashes=list(SERIES_DASHES[: len(labels)]),
        linewidth=1.4,
        legend=False,
        ax=axes,
        zorder=2,
    )


def _draw_intervals(axes: Axes, curve: Curve, rows: pd.DataFrame, colour: str) -> None:
    known = rows[rows[curve.low].notna() & rows[curve.high].notna()]
    if len(known):
        below = (known[curve.column] - known[curve.low]).clip(lower=0)
        above = (known[curve.high] - known[curve.column]).clip(lower=0)
        axes.errorbar(
            known["gpus"],
            known[curve.column],
            yerr=[below, above],
            fmt="none",
            color=colour,
            ecolor=colour,
            elinewidth=1.3,
            capsize=4.5,
            zorder=5,
        )


def _draw_ideal(axes: Axes, curve: Curve, rows: pd.DataFrame) -> None:
    """Draw what perfect scaling would be, through the measured base point; for efficiency the guide."""
    style: dict[str, Any] = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (1, 2)), "zorder": 1}
    if curve.kind == "efficiency":
        axes.axhline(1.0, **style)
        axes.axhline(GUIDE, color=MUTED, linewidth=1.0, linestyle=(0, (6, 3)), zorder=1)
        return
    largest = rows["gpus"].max()
    for base in rows[rows["is_base"]].drop_duplicates(["gpus", curve.column]).itertuples():
        start, value = base.gpus, getattr(base, curve.column)
        if largest > start:
            axes.plot([start, largest], [value, value * largest / start], **style)


def _set_scales(axes: Axes, curve: Curve, rows: pd.DataFrame) -> None:
    sizes = sorted(set(rows["gpus"]))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_spread_sizes(sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    axes.set(xlabel="Ranks", ylabel=curve.axis)
    if curve.kind == "efficiency":
        # All that is drawn: a repeat above every mean must not fall off the page.
        top = max(1.05, float(axes.dataLim.y1) * 1.03)
        axes.set_ylim(0, top)
        return
    axes.set_yscale("log", base=2 if curve.kind == "speedup" else 10)
    _set_log_ticks(axes, curve)


def _set_log_ticks(axes: Axes, curve: Curve) -> None:
    low, high = axes.get_ylim()
    if curve.kind == "speedup":
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        ticks = _few_ticks([2.0**power for power in powers if low <= 2.0**power <= high])
    else:
        ticks = log_ticks(low, high, (1.0, 2.0, 5.0))
        ticks = ticks if len(ticks) > 1 else list(np.linspace(low, high, 4)[1:-1])
    axes.yaxis.set_major_locator(FixedLocator(_few_ticks(ticks)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _tick(value: float) -> str:
    text = number(value, digits=3)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _spread_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes that have room for a number on a logarithmic axis; the smallest is among them."""
    room = (sizes[-1] / sizes[0]) ** (1 / (1.2 * MAX_TICKS))
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size >= kept[-1] * room:
            kept.append(size)
    return kept


def _few_ticks(values: Sequence[float]) -> list[float]:
    """Return at most 8 of the values, evenly spread, the first and the last among them."""
    return [values[place] for place in evenly_spaced(len(values), MAX_TICKS)]


def _add_legend(axes: Axes, curve: Curve, labels: Sequence[str]) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=colour,
            marker=marker,
            linestyle=(0, dashes) if dashes else "-",
            markersize=5,
            linewidth=1.4,
        )
        for _, colour, marker, dashes in zip(
            labels, SERIES_COLOURS, SERIES_MARKERS, SERIES_DASHES, strict=False
        )
    ]
    names = list(labels)
    if curve.kind == "efficiency":
        handles.append(Line2D([], [], color=MUTED, linewidth=1.0, linestyle=(0, (6, 3))))
        names.append(f"guide {GUIDE}")
    else:
        handles.append(Line2D([], [], color=MUTED, linewidth=1.0, linestyle=(0, (1, 2))))
        names.append(IDEAL)
    columns = len(names) // legend_lines(names) + (len(names) % legend_lines(names) > 0)
    axes.figure.legend(
        handles, names, loc="lower left", ncols=columns, frameon=False, labelcolor=INK, handlelength=2.6
    )


def legend_lines(names: Sequence[str]) -> int:
    """Return how many lines a legend of these names needs: two columns, or one where names are long."""
    longest = max((len(name) for name in names if name != IDEAL), default=0)
    return len(names) if longest > _LONG_LABEL else -(-len(names) // 2)


def _mean_tip(curve: Curve, label: str, row: dict[Hashable, Any]) -> str:
    value, low, high = (float(row[name]) for name in (curve.column, curve.low, curve.high))
    words = f"{curve.words(value)} {curve.bounds(low, high)}".strip()
    base = ", the baseline" if row["is_base"] and curve.kind != "throughput" else ""
    return f"{label}\n{with_layout(row)}: {words}{base}\n{count(int(row['n']), 'run')}"


def _run_tip(curve: Curve, label: str, run: dict[Hashable, Any]) -> str:
    return f"{label}\n{ranks(run)}: {curve.words(float(run['value']))}\nrun {run['run_id']}"
