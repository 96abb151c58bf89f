"""Figures of throughput, speedup and efficiency over the number of ranks."""

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

from analysis.data.names import ranks, size_paths, with_layout
from analysis.report.figures.drawing import (
    SERIES_COLOURS,
    SERIES_DASHES,
    SERIES_MARKERS,
    Colour,
    Draft,
    Drawing,
    Selection,
    add_legend,
    evenly_spaced,
    finish,
    log_ticks,
    set_ticks,
)
from analysis.report.words import WORDS
from analysis.stats.scaling import GUIDE
from analysis.text import count, fraction, fractions, interval, known, number

MAX_TICKS = 8
#: If a figure has more runs, its single runs are not drawn.
MAX_REPEATS = 300
IDEAL = "ideal, through the baseline"
_LONG_LABEL = 26


@dataclass(frozen=True)
class Curve:
    """A column of the scaling table for a figure, with its interval and the format of its values."""

    kind: str
    column: str
    low: str
    high: str
    axis: str
    unit: str

    def words(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{self.text(value)}{self.unit}"

    def text(self, value: float) -> str:
        """Return a value without its unit."""
        return fraction(value) if self.kind == "efficiency" else number(value)

    def bounds(self, low: float, high: float) -> str:
        """Return the interval in brackets, or an empty text."""
        return fractions(low, high) if self.kind == "efficiency" else interval(low, high)


def throughput_in(rate_unit: str) -> Curve:
    """Return the throughput curve in a unit such as ``samples/s``."""
    columns = ("throughput_samples_per_sec", "throughput_low", "throughput_high")
    return Curve("throughput", *columns, f"Throughput ({rate_unit})", f" {rate_unit}")


THROUGHPUT = throughput_in("samples/s")
SPEEDUP = Curve("speedup", "speedup", "speedup_low", "speedup_high", "Speedup", "×")
EFFICIENCY = Curve(
    "efficiency", "efficiency", "efficiency_low", "efficiency_high", "Efficiency", " efficiency"
)


def curve_figure(curve: Curve, selection: Selection, runs: pd.DataFrame) -> Drawing:
    """Draw one column of measured rows over the ranks, with single runs as dots if there are few."""
    rows = selection.rows
    repeats = _repeats(curve, rows, runs)
    left_out = list(selection.left_out)
    if len(repeats) > MAX_REPEATS:
        left_out.append(f"the {len(repeats):,} individual runs are not drawn")
        repeats = repeats.iloc[:0]
    elif len(repeats) == len(rows):
        repeats = repeats.iloc[:0]  # one run each: the mean is the run
    draft = Draft(
        name=f"{curve.kind}-{selection.mode or 'other'}",
        subject=curve.axis.partition(" (")[0],
        mode=selection.mode,
        labels=selection.labels,
        shared=selection.shared,
        description=_description(curve, selection),
        caption=_caption(curve, selection, with_runs=len(repeats) > 0),
        left_out=left_out,
        legend_lines=legend_lines([*selection.labels.values(), IDEAL]),
        left_in=0.9 if curve.kind == THROUGHPUT.kind and rows[curve.column].max() >= 50_000 else 0.78,
    )
    return finish(draft, lambda axes: _draw(axes, curve, rows, repeats, labels=selection.labels))


def _repeats(curve: Curve, rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per measured run of the cells in ``rows``; ``value`` is the run's value on the curve."""
    wanted = runs["measured"] & runs["cell_id"].isin(rows["cell_id"])
    counted = runs.loc[wanted, ["run_id", "cell_id", "rate"]]
    frame = rows[["cell_id", "series", "gpus", "rate", curve.column]]
    frame = frame.merge(counted, on="cell_id", suffixes=("", "_run"))
    return frame.assign(value=frame[curve.column] * (frame["rate_run"] / frame["rate"]))


def _caption(curve: Curve, selection: Selection, *, with_runs: bool) -> str:
    rows = selection.rows
    if rows[curve.low].notna().any():
        texts = [WORDS["captions"]["intervals"]]
    else:
        texts = [
            WORDS["captions"]["no_intervals"] + (" and baseline." if (rows["baseline"] != "").any() else ".")
        ]
    if len(size_paths(rows)) > len(selection.labels):
        texts.append(WORDS["captions"]["lines"])
    if with_runs:
        texts.append(WORDS["captions"]["runs"])
    return " ".join(texts)


def _description(curve: Curve, selection: Selection) -> str:
    """Describe the figure: the first and last value of each series."""
    texts = []
    for series, label in selection.labels.items():
        rows = selection.rows[selection.rows["series"] == series]
        first, last = rows.iloc[0], rows.iloc[-1]
        values = f"{curve.text(first[curve.column])} at {ranks(first)}"
        if known(last[curve.column]) and len(rows) > 1:
            values += f", {curve.text(last[curve.column])} at {ranks(last)}"
        texts.append(f"{label}: {values}.")
    return f"{curve.axis} over ranks. {' '.join(texts)}"


def _draw(
    axes: Axes, curve: Curve, rows: pd.DataFrame, repeats: pd.DataFrame, *, labels: dict[str, str]
) -> dict[str, list[str]]:
    """Draw one panel; return the tooltips of its marks by the artist's gid. ``repeats`` may be empty."""
    axes.grid(axis="y")
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
    _add_curve_legend(axes, curve, list(labels.values()))
    return tips


def _draw_means(axes: Axes, sizes: pd.Series, values: pd.Series, *, place: int) -> None:
    style: dict[str, Any] = {"color": SERIES_COLOURS[place], "marker": SERIES_MARKERS[place]}
    points = axes.scatter(sizes, values, s=30, edgecolor=Colour.SURFACE, linewidth=0.7, zorder=4, **style)
    points.set_gid(f"mean-{place}")


def _draw_runs(axes: Axes, runs: pd.DataFrame, *, span: float, place: int) -> None:
    """Draw a dot per run; ``span`` is the largest size over the smallest."""
    style: dict[str, Any] = {"color": SERIES_COLOURS[place], "alpha": 0.6, "linewidth": 0}
    dots = axes.scatter(_side_by_side(runs, span=span), runs["value"], s=7, zorder=3, **style)
    dots.set_gid(f"runs-{place}")


def _side_by_side(runs: pd.DataFrame, *, span: float) -> pd.Series:
    """Return the sizes of runs, slightly shifted so that dots of one size do not overlap."""
    groups = runs.groupby("gpus")
    amount = groups["gpus"].transform("size")
    place = (groups.cumcount() - (amount - 1) / 2) / amount.clip(lower=2)
    return runs["gpus"] * max(span, 2.0) ** (place / 22)


def _draw_lines(axes: Axes, curve: Curve, rows: pd.DataFrame, labels: Sequence[str]) -> None:
    joined = pd.concat([part.assign(path=name) for name, part in size_paths(rows)], ignore_index=True)
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
    bounded = rows[rows[curve.low].notna() & rows[curve.high].notna()]
    if len(bounded):
        below = (bounded[curve.column] - bounded[curve.low]).clip(lower=0)
        above = (bounded[curve.high] - bounded[curve.column]).clip(lower=0)
        style: dict[str, Any] = {"color": colour, "ecolor": colour, "elinewidth": 1.3, "capsize": 4.5}
        sizes, values = bounded["gpus"], bounded[curve.column]
        axes.errorbar(sizes, values, yerr=[below, above], fmt="none", zorder=5, **style)


def _draw_ideal(axes: Axes, curve: Curve, rows: pd.DataFrame) -> None:
    """Draw perfect scaling through the measured baseline, and the guide of the efficiency."""
    style: dict[str, Any] = {"color": Colour.MUTED, "linewidth": 1.0, "linestyle": (0, (1, 2)), "zorder": 1}
    if curve.kind == "efficiency":
        axes.axhline(1.0, **style)
        axes.axhline(GUIDE, color=Colour.MUTED, linewidth=1.0, linestyle=(0, (6, 3)), zorder=1)
        return
    largest = rows["gpus"].max()
    for base in rows[rows["is_base"]].drop_duplicates(["gpus", curve.column]).itertuples():
        start, value = base.gpus, getattr(base, curve.column)
        if largest > start:
            axes.plot([start, largest], [value, value * largest / start], **style)


def _set_scales(axes: Axes, curve: Curve, rows: pd.DataFrame) -> None:
    sizes = sorted(set(rows["gpus"]))
    axes.set_xscale("log", base=2)
    set_ticks(axes.xaxis, _spread_sizes(sizes), lambda value: f"{value:,.0f}")
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    axes.set(xlabel="Ranks", ylabel=curve.axis)
    if curve.kind == "efficiency":
        # The dot of a run may be above all means, and must be inside the panel.
        top = max(1.05, float(axes.dataLim.y1) * 1.03)
        axes.set_ylim(0, top)
        return
    axes.set_yscale("log", base=2 if curve.kind == "speedup" else 10)
    _set_log_ticks(axes, curve)


def _set_log_ticks(axes: Axes, curve: Curve) -> None:
    low, high = axes.get_ylim()
    if curve.kind == "speedup":
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        ticks = _spread_ticks([2.0**power for power in powers if low <= 2.0**power <= high])
    else:
        ticks = log_ticks(low, high, (1.0, 2.0, 5.0))
        ticks = ticks if len(ticks) > 1 else list(np.linspace(low, high, 4)[1:-1])
    set_ticks(axes.yaxis, _spread_ticks(ticks), _tick)


def _tick(value: float) -> str:
    text = number(value, digits=3)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _spread_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the smallest size, and further sizes with room for their number on a logarithmic axis."""
    room = (sizes[-1] / sizes[0]) ** (1 / (1.2 * MAX_TICKS))
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size >= kept[-1] * room:
            kept.append(size)
    return kept


def _spread_ticks(values: Sequence[float]) -> list[float]:
    """Return at most :data:`MAX_TICKS` values, evenly spread, with the first and the last."""
    return [values[place] for place in evenly_spaced(len(values), MAX_TICKS)]


def _add_curve_legend(axes: Axes, curve: Curve, labels: Sequence[str]) -> None:
    styles = zip(SERIES_COLOURS, SERIES_MARKERS, SERIES_DASHES, strict=True)
    handles = [
        Line2D([], [], color=c, marker=m, linestyle=(0, d) if d else "-", markersize=5, linewidth=1.4)
        for _, (c, m, d) in zip(labels, styles, strict=False)
    ]
    guide = curve.kind == "efficiency"
    dashes = (0, (6, 3) if guide else (1, 2))
    handles.append(Line2D([], [], color=Colour.MUTED, linewidth=1.0, linestyle=dashes))
    names = [*labels, f"guide {GUIDE}" if guide else IDEAL]
    add_legend(axes, handles, names, columns=-(-len(names) // legend_lines(names)), handlelength=2.6)


def legend_lines(names: Sequence[str]) -> int:
    """Return the number of lines of a legend, which has two columns, or one if names are long."""
    longest = max((len(name) for name in names if name != IDEAL), default=0)
    return len(names) if longest > _LONG_LABEL else -(-len(names) // 2)


def _mean_tip(curve: Curve, label: str, row: dict[Hashable, Any]) -> str:
    value, low, high = (float(row[name]) for name in (curve.column, curve.low, curve.high))
    words = f"{curve.words(value)} {curve.bounds(low, high)}".strip()
    base = ", the baseline" if row["is_base"] and curve.kind != "throughput" else ""
    return f"{label}\n{with_layout(row)}: {words}{base}\n{count(int(row['n']), 'run')}"


def _run_tip(curve: Curve, label: str, run: dict[Hashable, Any]) -> str:
    return f"{label}\n{ranks(run)}: {curve.words(float(run['value']))}\nrun {run['run_id']}"
