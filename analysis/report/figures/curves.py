"""Figures of throughput, speedup and efficiency by ranks, and of the all-reduce bandwidth by message size."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.checks.fabric import fabric_table, ring_time
from analysis.data.load import Study
from analysis.data.names import ranks, size_paths, with_layout
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
from analysis.report.words import WORDS
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.scaling import GUIDE, is_wide
from analysis.text import count, fraction, fractions, interval, known, listed, number, one_line, seconds
from bench.units import join_names

MAX_TICKS = 8
#: If a figure has more runs, its single runs are not drawn.
MAX_REPEATS = 300
IDEAL = "ideal, through the baseline"
NOT_VALID = "not valid: see Validity"
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


THROUGHPUT = Curve(
    "throughput",
    "throughput_samples_per_sec",
    "throughput_low",
    "throughput_high",
    "Throughput (samples/s)",
    " samples/s",
)
SPEEDUP = Curve("speedup", "speedup", "speedup_low", "speedup_high", "Speedup", "×")
EFFICIENCY = Curve(
    "efficiency", "efficiency", "efficiency_low", "efficiency_high", "Efficiency", " efficiency"
)


def curve_figure(curve: Curve, selection: Selection, runs: pd.DataFrame) -> Drawing:
    """Draw one column of measured rows over the ranks, with single runs as dots if there are few.

    A row that is not ``valid`` is only a cross, without line, interval and runs.
    """
    rows = selection.rows
    repeats = _repeats(curve, rows[rows["valid"]], runs)
    left_out = list(selection.left_out)
    if len(repeats) > MAX_REPEATS:
        left_out.append(f"the {len(repeats):,} individual runs are not drawn")
        repeats = repeats.iloc[:0]
    elif len(repeats) == rows["valid"].sum():
        repeats = repeats.iloc[:0]  # with one run per cell, the mean is that run
    draft = Draft(
        name=f"{curve.kind}-{selection.mode or 'other'}",
        subject=curve.axis.partition(" (")[0],
        mode=selection.mode,
        labels=selection.labels,
        shared=selection.shared,
        description=_description(curve, selection),
        caption=_caption(curve, selection, repeats),
        left_out=left_out,
        view=curve.axis.partition(" (")[0],
        legend=_legend(curve, selection),
        left_in=0.9 if curve.kind == THROUGHPUT.kind and rows[curve.column].max() >= 50_000 else 0.78,
    )
    counted = runs[runs["measured"] & runs["cell_id"].isin(rows["cell_id"])]
    names = counted.groupby("cell_id")["run_id"].apply(list)
    rows = rows.assign(run_ids=rows["cell_id"].map(names))
    return finish(draft, lambda axes: _draw(axes, curve, rows, repeats, labels=selection.labels))


def _repeats(curve: Curve, rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per measured run of the cells in ``rows``; ``value`` is the run's value on the curve."""
    wanted = runs["measured"] & runs["cell_id"].isin(rows["cell_id"])
    counted = runs.loc[wanted, ["run_id", "cell_id", "rate"]]
    frame = rows[["cell_id", "series", "gpus", "rate", curve.column]]
    frame = frame.merge(counted, on="cell_id", suffixes=("", "_run"))
    return frame.assign(value=frame[curve.column] * (frame["rate_run"] / frame["rate"]))


def _caption(curve: Curve, selection: Selection, repeats: pd.DataFrame) -> str:
    rows = selection.rows[selection.rows["valid"]]
    texts = []
    if rows[curve.low].notna().any():
        texts = [WORDS["captions"]["intervals"]]
        low, high = _limits(curve, selection.rows, repeats)
        if (rows[curve.low] < low).any() or (rows[curve.high] > high).any():
            texts.append(WORDS["captions"]["clipped"])
    else:
        texts = [reason] if (reason := _why_no_intervals(curve, rows)) else []
    if len(size_paths(rows)) > len(selection.labels):
        texts.append(WORDS["captions"]["lines"])
    if len(repeats):
        texts.append(WORDS["captions"]["runs"])
    return " ".join(texts)


def _why_no_intervals(curve: Curve, rows: pd.DataFrame) -> str:
    """Return why no value of a curve has an interval; empty if no value can have one."""
    relative = curve.kind != THROUGHPUT.kind
    own = rows[~rows["is_base"]] if relative else rows
    if not len(own):
        return ""  # the baseline's efficiency is 1 by definition
    if relative and (own["n"] >= MIN_RUNS).any():
        return str(WORDS["captions"]["few_of_baseline"])
    return str(WORDS["captions"]["no_intervals"])


def _description(curve: Curve, selection: Selection) -> str:
    """Describe the figure: the first and last valid value of each series, and the number of invalid ones."""
    texts = []
    for series, label in selection.labels.items():
        own = selection.rows[selection.rows["series"] == series]
        rows = own[own["valid"]]
        values = "no valid value"
        if len(rows):
            first, last = rows.iloc[0], rows.iloc[-1]
            values = f"{curve.text(first[curve.column])} at {ranks(first)}"
            if known(last[curve.column]) and len(rows) > 1:
                values += f", {curve.text(last[curve.column])} at {ranks(last)}"
        if odd := len(own) - len(rows):
            values += f"; {count(odd, 'size')} {'is' if odd == 1 else 'are'} not valid (see Validity)"
        texts.append(f"{label}: {values}.")
    return f"{curve.axis} over ranks. {' '.join(texts)}"


def _draw(
    axes: Axes, curve: Curve, rows: pd.DataFrame, repeats: pd.DataFrame, *, labels: dict[str, str]
) -> Tips:
    """Draw one panel and return its tips. ``repeats`` may be empty."""
    axes.grid(axis="y")
    tips: Tips = {}
    limits = _limits(curve, rows, repeats)
    _set_scales(axes, curve, rows, limits)
    _draw_ideal(axes, curve, rows)
    span = float(rows["gpus"].max() / rows["gpus"].min())
    for place, (series, label) in enumerate(labels.items()):
        runs, every = repeats[repeats["series"] == series], rows[rows["series"] == series]
        _draw_lines(axes, curve, every, place=place)
        own, odd = every[every["valid"]], every[~every["valid"]]
        if len(odd):
            style: dict[str, Any] = {"color": Colour.MUTED, "marker": "x", "s": 30, "zorder": 7}
            axes.scatter(odd["gpus"], odd[curve.column], **style).set_gid(f"series{place}@invalid")
            tips[f"series{place}@invalid"] = [_mean_tip(curve, label, row) for row in odd.to_dict("records")]
        if not len(own):
            continue
        if len(runs):
            _draw_runs(axes, runs, span=span, place=place)
            tips[f"series{place}@runs"] = [_run_tip(curve, label, run) for run in runs.to_dict("records")]
        _draw_intervals(axes, curve, own, limits, place=place)
        _draw_means(axes, own, curve, place=place)
        tips[f"series{place}@mean"] = [_mean_tip(curve, label, row) for row in own.to_dict("records")]
    return tips


def _draw_means(axes: Axes, rows: pd.DataFrame, curve: Curve, *, place: int) -> None:
    """Draw the means; a mean with a wide interval is hollow."""
    colour = SERIES_COLOURS[place]
    wide = is_wide(rows[curve.low], rows[curve.high])
    points = axes.scatter(
        rows["gpus"],
        rows[curve.column],
        s=30,
        marker=SERIES_MARKERS[place],
        facecolor=np.where(wide, str(Colour.SURFACE), str(colour)),
        edgecolor=np.where(wide, str(colour), str(Colour.SURFACE)),
        linewidth=np.where(wide, 1.3, 0.7),
        zorder=4,
    )
    points.set_gid(f"series{place}@mean")


def _draw_runs(axes: Axes, runs: pd.DataFrame, *, span: float, place: int) -> None:
    """Draw a dot per run; ``span`` is the ratio of the largest size to the smallest."""
    style: dict[str, Any] = {
        "facecolor": Colour.SURFACE,
        "edgecolor": SERIES_COLOURS[place],
        "linewidth": 1.0,
    }
    dots = axes.scatter(_side_by_side(runs, span=span), runs["value"], s=9, zorder=3, **style)
    dots.set_gid(f"series{place}@runs")


def _side_by_side(runs: pd.DataFrame, *, span: float) -> pd.Series:
    """Return the horizontal positions of runs: right of their mean, and each at its own position."""
    groups = runs.groupby(["series", "gpus"])
    amount = groups["gpus"].transform("size")
    place = 0.03 + 0.045 * groups.cumcount() / amount.clip(lower=3)
    return runs["gpus"] * (1.6 * max(span, 1.0)) ** place


def _draw_lines(axes: Axes, curve: Curve, rows: pd.DataFrame, *, place: int) -> None:
    dashes = SERIES_DASHES[place]
    style: dict[str, Any] = {"color": SERIES_COLOURS[place], "linewidth": 1.4}
    style["linestyle"] = (0, dashes) if dashes else "-"
    for part in [part[part["valid"]] for _, part in size_paths(rows) if part["valid"].any()]:
        axes.plot(part["gpus"], part[curve.column], zorder=2, gid=f"series{place}@line", **style)


def _draw_intervals(
    axes: Axes, curve: Curve, rows: pd.DataFrame, limits: tuple[float, float], *, place: int
) -> None:
    """Draw the intervals; if one leaves the panel, draw an arrow and the value of its end."""
    bounded = rows[rows[curve.low].notna() & rows[curve.high].notna()]
    if not len(bounded):
        return
    colour, gid = SERIES_COLOURS[place], f"series{place}@interval"
    sizes, values = bounded["gpus"], bounded[curve.column]
    ends = [bounded[name].clip(*limits) for name in (curve.low, curve.high)]
    away = [(values - ends[0]).clip(lower=0), (ends[1] - values).clip(lower=0)]
    style: dict[str, Any] = {"color": colour, "elinewidth": 1.3, "capsize": 4.5, "zorder": 5}
    _, caps, bars = axes.errorbar(sizes, values, yerr=away, fmt="none", **style)
    for artist in (*caps, *bars):
        artist.set_gid(gid)
    for name, end, marker, side in ((curve.low, limits[0], "v", 1), (curve.high, limits[1], "^", -1)):
        clipped = bounded[(bounded[name] - end) * side < 0]
        for size, value in zip(clipped["gpus"], clipped[name], strict=True):
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


def _draw_ideal(axes: Axes, curve: Curve, rows: pd.DataFrame) -> None:
    """Draw perfect scaling through the measured baseline, and the guide of the efficiency."""
    style: dict[str, Any] = {"color": Colour.MUTED, "linewidth": 1.0, "linestyle": (0, _DOTTED), "zorder": 1}
    if curve.kind == "efficiency":
        axes.axhline(1.0, **style)
        axes.axhline(GUIDE, color=Colour.MUTED, linewidth=1.0, linestyle=(0, _DASHED), zorder=1)
        return
    rows = rows[rows["valid"]]
    largest = rows["gpus"].max()
    for base in rows[rows["is_base"]].drop_duplicates(["gpus", curve.column]).itertuples():
        start, value = base.gpus, getattr(base, curve.column)
        if largest > start:
            axes.plot([start, largest], [value, value * largest / start], **style)


def _limits(curve: Curve, rows: pd.DataFrame, repeats: pd.DataFrame) -> tuple[float, float]:
    """Return the ends of the vertical axis: they follow the points and, up to a bound, the intervals."""
    points = np.concatenate([rows[curve.column].dropna(), repeats["value"].dropna()])
    linear = curve.kind == "efficiency"
    scale, back = (np.positive, np.positive) if linear else (np.log, np.exp)
    if linear:
        points = np.append(points, [GUIDE, 1.0])
    low, high = float(scale(points.min())), float(scale(points.max()))
    reach = max(_REACH * (high - low), _LEAST_REACH)
    bounded = rows.loc[rows["valid"], [curve.low, curve.high]].dropna()
    if len(bounded):
        low = min(low, max(float(scale(bounded[curve.low].min())), low - reach))
        high = max(high, min(float(scale(bounded[curve.high].max())), high + reach))
    margin = 0.05 * max(high - low, _LEAST_REACH)
    if linear and low < 0.3:
        return 0.0, high + margin
    return float(back(low - margin)), float(back(high + margin))


def _set_scales(axes: Axes, curve: Curve, rows: pd.DataFrame, limits: tuple[float, float]) -> None:
    sizes = sorted(set(rows["gpus"]))
    axes.set_xscale("log", base=2)
    set_ticks(axes.xaxis, _spread_sizes(sizes), lambda value: f"{value:,.0f}")
    # The axis is longer on the right, because the runs of the largest size are drawn beside their mean.
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * max(1.25, (1.6 * sizes[-1] / sizes[0]) ** 0.09))
    axes.set(xlabel="Ranks", ylabel=curve.axis)
    if curve.kind != "efficiency":
        axes.set_yscale("log", base=2 if curve.kind == "speedup" else 10)
    axes.set_ylim(*limits)
    if curve.kind != "efficiency":
        _set_log_ticks(axes, curve)


def _set_log_ticks(axes: Axes, curve: Curve) -> None:
    low, high = axes.get_ylim()
    ticks = log_ticks(low, high, (1.0, 2.0, 5.0))
    if curve.kind == "speedup":
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


def _legend(curve: Curve, selection: Selection) -> list[Key]:
    keys = [series_key(label, place) for place, label in enumerate(selection.labels.values())]
    if not selection.rows["valid"].all():
        keys.append(Key(NOT_VALID, Colour.MUTED, marker="x"))
    rows = selection.rows[selection.rows["valid"]]
    if is_wide(rows[curve.low], rows[curve.high]).any():
        keys.append(Key(WIDE, Colour.MUTED, marker="hollow"))
    if curve.kind == "efficiency":
        return [*keys, Key(f"guide {GUIDE}", Colour.MUTED, dashes=_DASHED)]
    if not (selection.rows["valid"] & selection.rows["is_base"]).any():
        return keys
    return [*keys, Key(IDEAL, Colour.MUTED, dashes=_DOTTED)]


def _mean_tip(curve: Curve, label: str, row: dict[Hashable, Any]) -> Tip:
    value, low, high = (float(row[name]) for name in (curve.column, curve.low, curve.high))
    words = f"{curve.words(value)} {curve.bounds(low, high)}".strip()
    words += "" if row["valid"] else f", {NOT_VALID}"
    base = ", the baseline" if row["is_base"] and curve.kind != "throughput" else ""
    text = f"{label}\n{with_layout(row)}: {words}{base}\n{count(int(row['n']), 'run')}"
    names = row["run_ids"] if isinstance(row["run_ids"], list) else []
    if names:
        text += f": {listed([one_line(name, limit=80) for name in names], limit=_MAX_NAMED)}"
    return Tip(text, row["cell_id"], names[0] if len(names) == 1 else "")


def _run_tip(curve: Curve, label: str, run: dict[Hashable, Any]) -> Tip:
    text = (
        f"{label}\n{ranks(run)}: {curve.words(float(run['value']))}\nrun {one_line(run['run_id'], limit=120)}"
    )
    return Tip(text, run["cell_id"], run["run_id"])


def bandwidth_figure(sweep: pd.DataFrame, study: Study) -> Drawing | None:
    """Draw the all-reduce bandwidth by message size; return None if no run has timed all-reduces.

    ``sweep`` is from :func:`analysis.checks.fabric.sweep_rows`.
    """
    cells = study.cells
    if not len(sweep):
        return None
    names = _names(cells[cells["cell_id"].isin(set(sweep["cell_id"]))])
    lines = sweep.assign(cell_id=sweep["cell_id"].map(names))
    labels = list(dict.fromkeys(name for name in names.values() if name in set(lines["cell_id"])))
    left_out = []
    if len(labels) > MAX_LINES:
        left_out.append(f"{MAX_LINES} of {len(labels)} lines drawn, spread over the sizes")
        labels = [labels[place] for place in evenly_spaced(len(labels), MAX_LINES)]
    lines = lines[lines["cell_id"].isin(labels)]
    fits = {str(fit["cell_id"]): fit for fit in fabric_table(lines).to_dict("records")}
    draft = Draft(
        name="bandwidth",
        subject="All-reduce bandwidth by message size",
        topic="communication",
        description=_bandwidth_description(lines, fits, labels),
        caption=WORDS["captions"]["bandwidth"]
        + _launches_in_caption(sweep, study, names)
        + _fits_in_caption(labels, fits),
        left_out=left_out,
        legend=[replace(series_key(label, place), dashes=()) for place, label in enumerate(labels)],
        left_in=0.9,
    )
    return finish(draft, lambda axes: _draw_bandwidth(axes, lines, fits, labels))


def _names(cells: pd.DataFrame) -> dict[str, str]:
    """Return the name of each cell's line in the figure, small sizes first; equal names share a line."""
    several = cells["backend"].nunique() > 1
    frame = cells.sort_values(["gpus", "nodes"], kind="stable")
    names = {}
    for cell in frame.to_dict("records"):
        swept: Mapping[str, Any] = cell["swept"] if isinstance(cell["swept"], dict) else {}
        words = [cell["backend"]] if several else []
        words += [f"{k.removeprefix('env.')} {v}" for k, v in swept.items() if str(k).startswith("env.")]
        names[cell["cell_id"]] = one_line(", ".join([with_layout(cell), *map(str, words)]), limit=60)
    return names


def _draw_bandwidth(
    axes: Axes, lines: pd.DataFrame, fits: Mapping[str, Mapping[Hashable, Any]], labels: Sequence[str]
) -> Tips:
    tips: Tips = {}
    for place, label in enumerate(labels):
        colour, marker = SERIES_COLOURS[place], SERIES_MARKERS[place]
        own = lines[lines["cell_id"] == label]
        by_size = own.groupby("bytes")
        points = by_size[["busbw_bytes_per_sec", "time_sec"]].median().reset_index()
        runs = by_size["run_id"].nunique().to_list()
        _draw_fit(axes, fits[label], points["bytes"], colour, gid=f"series{place}@fit")
        style: dict[str, Any] = {"marker": marker, "edgecolor": Colour.SURFACE, "linewidth": 0.7, "zorder": 4}
        marks = axes.scatter(points["bytes"], points["busbw_bytes_per_sec"], s=26, color=colour, **style)
        marks.set_gid(f"series{place}@points")
        tips[f"series{place}@points"] = [
            Tip(f"{label}\n{_bytes(size)}: {_rate(rate)}\n{seconds(time)}, {count(amount, 'run')}")
            for size, rate, time, amount in zip(*(points[name] for name in points), runs, strict=True)
        ]
    _set_bandwidth_scales(axes, lines)
    return tips


def _draw_fit(axes: Axes, fit: Mapping[Hashable, Any], sizes: pd.Series, colour: str, *, gid: str) -> None:
    alpha, beta, ranks = float(fit["alpha_sec"]), float(fit["beta_sec_per_byte"]), int(fit["ranks"])
    if not (known(alpha) and known(beta)):
        return
    size = np.geomspace(float(sizes.min()), float(sizes.max()), 60)
    rate = size * 2 * (ranks - 1) / ranks / ring_time(size, ranks, alpha, beta)
    axes.plot(size, rate, color=colour, linewidth=1.2, zorder=2, gid=gid)


def _set_bandwidth_scales(axes: Axes, lines: pd.DataFrame) -> None:
    axes.grid(axis="y")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = math.log2(lines["bytes"].min()), math.log2(lines["bytes"].max())
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


def _fit_text(label: str, fits: Mapping[str, Mapping[Hashable, Any]]) -> str:
    fit = fits[label]
    if not known(float(fit["ring_bytes_per_sec"])):
        return f"{label}: no fit ({one_line(fit['reason'], limit=80)})."
    return f"{label}: α = {seconds(fit['alpha_sec'])}, 1/β = {_rate(fit['ring_bytes_per_sec'])}."


def _fits_in_caption(labels: Sequence[str], fits: Mapping[str, Mapping[Hashable, Any]]) -> str:
    if len(labels) > _MAX_FITS_IN_CAPTION:
        return "; fabric.csv contains α and β."
    return ". " + " ".join(_fit_text(label, fits) for label in labels)


def _launches_in_caption(sweep: pd.DataFrame, study: Study, names: Mapping[str, str]) -> str:
    """Return a note if the times of NCCL are not those of the device; no line of gloo needs it."""
    of_nccl = study.cells.loc[study.cells["backend"] == "nccl", "cell_id"]
    old = sweep[(sweep["method"] == "single") & sweep["cell_id"].isin(list(of_nccl))]
    if not len(old):
        return ""
    lines = list(dict.fromkeys(map(names.__getitem__, old["cell_id"])))
    envs = study.envs_of(old["run_id"].drop_duplicates()).values()
    versions = sorted({one_line(env.get("bench_version") or "unknown", limit=20) for env in envs})
    shown = {"lines": join_names(lines, most=3), "versions": join_names(versions or ["unknown"], most=3)}
    note: str = WORDS["captions"]["launches"].format(**shown)
    return note


def _bandwidth_description(
    lines: pd.DataFrame, fits: Mapping[str, Mapping[Hashable, Any]], labels: Sequence[str]
) -> str:
    texts = []
    for label in labels:
        own = lines[lines["cell_id"] == label]
        largest = int(own["bytes"].max())
        rate = float(own.loc[own["bytes"] == largest, "busbw_bytes_per_sec"].median())
        texts.append(f"{label}: {_rate(rate)} at {_bytes(largest)}; {_fit_text(label, fits)}")
    return f"Bus bandwidth by message size. {' '.join(texts)}"
