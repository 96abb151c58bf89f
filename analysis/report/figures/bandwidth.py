"""Figure of the all-reduce bandwidth over the message size, with the fit of the fabric."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.checks.fabric import fabric_table, ring_time
from analysis.data.names import with_layout
from analysis.report.figures.drawing import (
    SERIES_COLOURS,
    SERIES_MARKERS,
    Colour,
    Draft,
    Drawing,
    Tip,
    Tips,
    evenly_spaced,
    finish,
    log_ticks,
    series_key,
    set_ticks,
)
from analysis.report.words import WORDS
from analysis.text import count, known, number, one_line, seconds

MAX_LINES = len(SERIES_COLOURS)
#: With more lines, the caption refers to fabric.csv.
_MAX_FITS_IN_CAPTION = 3


def bandwidth_figure(sweep: pd.DataFrame, cells: pd.DataFrame) -> Drawing | None:
    """Draw the all-reduce bandwidth by message size; return None if no run has timed all-reduces.

    Args:
        sweep: from :func:`analysis.checks.fabric.sweep_rows`.
        cells: a study's ``cell_id, nodes, gpus_per_node, gpus, backend, swept``.
    """
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
        description=_description(lines, fits, labels),
        caption=WORDS["captions"]["bandwidth"] + _fits_in_caption(labels, fits),
        left_out=left_out,
        legend=[replace(series_key(label, place), dashes=()) for place, label in enumerate(labels)],
        left_in=0.9,
    )
    return finish(draft, lambda axes: _draw(axes, lines, fits, labels))


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


def _draw(
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
    _set_scales(axes, lines)
    return tips


def _draw_fit(axes: Axes, fit: Mapping[Hashable, Any], sizes: pd.Series, colour: str, *, gid: str) -> None:
    alpha, beta, ranks = float(fit["alpha_sec"]), float(fit["beta_sec_per_byte"]), int(fit["ranks"])
    if not (known(alpha) and known(beta)):
        return
    size = np.geomspace(float(sizes.min()), float(sizes.max()), 60)
    rate = size * 2 * (ranks - 1) / ranks / ring_time(size, ranks, alpha, beta)
    axes.plot(size, rate, color=colour, linewidth=1.2, zorder=2, gid=gid)


def _set_scales(axes: Axes, lines: pd.DataFrame) -> None:
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


def _description(
    lines: pd.DataFrame, fits: Mapping[str, Mapping[Hashable, Any]], labels: Sequence[str]
) -> str:
    texts = []
    for label in labels:
        own = lines[lines["cell_id"] == label]
        largest = int(own["bytes"].max())
        rate = float(own.loc[own["bytes"] == largest, "busbw_bytes_per_sec"].median())
        texts.append(f"{label}: {_rate(rate)} at {_bytes(largest)}; {_fit_text(label, fits)}")
    return f"Bus bandwidth by message size. {' '.join(texts)}"
