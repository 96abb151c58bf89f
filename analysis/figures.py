"""The figures of a report, each as SVG (for the page and as a file), PNG and PDF.

A figure holds a few series at most and only as many marks as a reader can point at;
what it leaves out it says.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.bars import draw_split, split_rows
from analysis.curves import EFFICIENCY, IDEAL, SPEEDUP, THROUGHPUT, Curve, draw_curve, legend_lines
from analysis.decompose import PARTS
from analysis.palette import GRID, INK, MUTED, SURFACE
from analysis.selection import (
    MAX_REPEATS,
    Selection,
    curve_caption,
    curve_description,
    repeats_of,
    select,
)
from analysis.svg import inline, standalone, tidy
from analysis.wording import count, percent

_WIDTH_IN = 4.5
_LEGEND_LINE_IN = 0.21
_PNG_DPI = 200


_COLUMNS = (
    *("cell_id", "series", "baseline", "is_base", "nodes", "gpus_per_node", "gpus", "n"),
    *(name for curve in (SPEEDUP, EFFICIENCY, THROUGHPUT) for name in (curve.column, curve.low, curve.high)),
    *(*PARTS, "exposed"),
)


@dataclass(frozen=True)
class Drawing:
    """One finished figure.

    ``title`` stands alone, ``heading`` under its regime; ``caption`` says how to read it;
    ``left_out`` how much of the data it draws, where that is not all, in words.
    """

    name: str
    regime: str
    heading: str
    title: str
    description: str
    caption: str
    left_out: str
    svg: str
    inline_svg: str
    png: bytes
    pdf: bytes


def draw_figures(
    table: pd.DataFrame, runs: pd.DataFrame, *, parts: dict[str, dict[str, str]]
) -> Iterator[Drawing]:
    """Yield the figures of each regime: speedup, efficiency, throughput, the step's time.

    Args:
        table: from :func:`analysis.scaling.scale`.
        runs: the runs of :func:`analysis.measured.measure`.
        parts: from :func:`analysis.labels.series_parts`.
    """
    for regime in ("strong", "weak", ""):
        rows = table.loc[(table["mode"] == regime) & (table["n"] > 0), list(_COLUMNS)]
        if not len(rows):
            continue
        with _style():
            for curve in (SPEEDUP, EFFICIENCY, THROUGHPUT):
                drawn = rows[rows[curve.column].notna()].drop(columns=[*PARTS, "exposed"])
                if curve is THROUGHPUT or (drawn["gpus"].nunique() > 1):
                    yield _curve_figure(curve, select(drawn, regime, parts), runs)
            split = split_rows(rows)
            if len(split):
                yield _split_figure(select(split, regime, parts, bars=True))


def all_names() -> list[str]:
    """Return the names of all figures that a report may have."""
    kinds = (SPEEDUP.kind, EFFICIENCY.kind, THROUGHPUT.kind, "step")
    return [f"{kind}-{regime}" for kind in kinds for regime in ("strong", "weak", "other")]


def _style() -> Any:
    own: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.parse_math": False,
        "svg.fonttype": "none",
        "pdf.fonttype": 3,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.linewidth": 0.8,
        "xtick.major.width": 0.8,
        "ytick.major.width": 0.8,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "axes.facecolor": "none",
        "legend.fontsize": 9.5,
        "hatch.linewidth": 0.8,
        "hatch.color": SURFACE,
    }
    return mpl.rc_context({**sns.axes_style("ticks"), **own})


@dataclass(frozen=True)
class _Draft:
    """A figure's words and measures, before it is drawn."""

    name: str
    what: str
    selection: Selection
    description: str
    caption: str
    left_out: list[str]
    height_in: float
    legend_lines: int
    left_in: float = 0.78
    with_axis: bool = True

    @property
    def heading(self) -> str:
        return f"{self.what}{self._of()}"

    @property
    def title(self) -> str:
        regime = self.selection.regime
        return f"{self.what}, {regime} scaling{self._of()}" if regime else self.heading

    def _of(self) -> str:
        labels, shared = self.selection.labels, self.selection.shared
        words = [next(iter(labels.values()))] if len(labels) == 1 else []
        words += [shared] if shared else []
        return f" ({', '.join(words)})" if words else ""


def _curve_figure(curve: Curve, selection: Selection, runs: pd.DataFrame) -> Drawing:
    rows = selection.rows
    repeats = repeats_of(curve, rows, runs)
    left_out = list(selection.left_out)
    if len(repeats) > MAX_REPEATS:
        left_out.append(f"the {len(repeats):,} single runs are not drawn")
        repeats = repeats.iloc[:0]
    elif len(repeats) == len(rows):
        repeats = repeats.iloc[:0]  # one run each: the mean is the run

    def draw(axes: Axes) -> dict[str, list[str]]:
        axes.grid(axis="y")
        return draw_curve(axes, curve, rows, repeats, labels=selection.labels)

    draft = _Draft(
        name=f"{curve.kind}-{selection.regime or 'other'}",
        what=curve.axis.partition(" (")[0],
        selection=selection,
        description=curve_description(curve, selection),
        caption=curve_caption(curve, selection, with_runs=len(repeats) > 0),
        left_out=left_out,
        height_in=2.9,
        legend_lines=legend_lines([*selection.labels.values(), IDEAL]),
        left_in=0.9 if curve is THROUGHPUT and rows[curve.column].max() >= 50_000 else 0.78,
    )
    return _finish(draft, draw)


def _split_figure(selection: Selection) -> Drawing:
    rows = selection.rows

    def draw(axes: Axes) -> dict[str, list[str]]:
        return draw_split(axes, rows, labels=selection.labels)

    headings = 1.1 * len(selection.labels) if len(selection.labels) > 1 else 0
    largest = rows.sort_values("gpus", kind="stable").iloc[-1]
    exposed = (largest["transfer"] + np.nan_to_num(largest["wait"])) / largest["total_s"]
    draft = _Draft(
        name=f"step-{selection.regime or 'other'}",
        what="Where the step's time goes",
        selection=selection,
        description=(
            f"Stacked bars of {count(len(rows), 'cell')}. At {count(int(largest['gpus']), 'rank')} "
            f"{percent(exposed)} of the step is exposed communication."
        ),
        caption=(
            "Means over ranks, of the attribution window; the step's time stands behind its bar. Hatched: "
            "waiting for the slowest rank, the part of exposed communication above the least of all ranks."
        ),
        left_out=list(selection.left_out),
        height_in=0.25 * (len(rows) + headings) + 0.75,
        legend_lines=4,
        left_in=1.2 if rows.duplicated(["series", "gpus"]).any() else 0.78,
        with_axis=False,
    )
    return _finish(draft, draw)


def _finish(draft: _Draft, draw: Callable[[Axes], dict[str, list[str]]]) -> Drawing:
    """Draw into a figure of fixed margins (no layout pass is needed) and save it in all forms."""
    legend_in = _LEGEND_LINE_IN * draft.legend_lines + 0.08
    total_in = draft.height_in + legend_in
    bottom_in = legend_in + 0.54
    figure = Figure(figsize=(_WIDTH_IN, total_in))
    left, bottom = draft.left_in / _WIDTH_IN, bottom_in / total_in
    axes = figure.add_axes((left, bottom, 1 - left - 0.12 / _WIDTH_IN, 1 - bottom - 0.1 / total_in))
    tips = draw(axes)
    sns.despine(ax=axes, left=not draft.with_axis)
    name, title = draft.name, draft.title
    raw = _saved(figure, "svg", name).decode()
    tree = tidy(raw, name=name, title=title, description=draft.description, tips=tips)
    return Drawing(
        name=name,
        regime=draft.selection.regime,
        heading=draft.heading,
        title=title,
        description=draft.description,
        caption=draft.caption,
        left_out="; ".join(draft.left_out),
        svg=standalone(tree, title=title, description=draft.description),
        inline_svg=inline(tree),
        png=_saved(figure, "png", name),
        pdf=_saved(figure, "pdf", name),
    )


def _saved(figure: Figure, form: str, name: str) -> bytes:
    """Return the figure in one format, the same bytes each time."""
    metadata = {"svg": {"Date": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}[form]
    target = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        # A label in letters that the font lacks is drawn as boxes in PNG and PDF; SVG keeps the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(
            target,
            format=form,
            metadata=metadata,
            dpi=_PNG_DPI,
            facecolor="none" if form == "svg" else SURFACE,
        )
    return target.getvalue()
