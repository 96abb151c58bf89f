"""From a panel's content to a finished figure: fixed margins, house style, SVG, PNG and PDF."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from analysis.report.figures.palette import GRID, INK, MUTED, SURFACE
from analysis.report.figures.svg import inline, standalone, tidy

WIDTH_IN = 4.5
_LEGEND_LINE_IN = 0.21
_PNG_DPI = 200


@dataclass(frozen=True)
class Drawing:
    """One finished figure.

    ``title`` stands alone, ``heading`` under its regime; ``caption`` says how to read it;
    ``left_out`` how much of the data it draws, where that is not all, in words; ``topic`` is the part
    of the page that it stands in.
    """

    name: str
    topic: str
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


@dataclass(frozen=True)
class Draft:
    """A figure's words and measures, before it is drawn; ``labels`` and ``shared`` say of what it is."""

    name: str
    what: str
    description: str
    caption: str
    height_in: float = 2.9
    topic: str = "scaling"
    regime: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    shared: str = ""
    left_out: list[str] = field(default_factory=list)
    legend_lines: int = 0
    left_in: float = 0.78
    with_axis: bool = True

    @property
    def heading(self) -> str:
        """The figure's name under its regime."""
        return f"{self.what}{self._of()}"

    @property
    def title(self) -> str:
        """The figure's name by itself."""
        return f"{self.what}, {self.regime} scaling{self._of()}" if self.regime else self.heading

    def _of(self) -> str:
        words = [next(iter(self.labels.values()))] if len(self.labels) == 1 else []
        words += [self.shared] if self.shared else []
        return f" ({', '.join(words)})" if words else ""


def style() -> Any:
    """Return the context in which all figures are drawn."""
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


def finish(draft: Draft, draw: Callable[[Axes], dict[str, list[str]]]) -> Drawing:
    """Draw into a figure of fixed margins (no layout pass is needed) and save it in all forms.

    Args:
        draft: words and measures.
        draw: draws into the axes and returns the words for its marks by gid.
    """
    legend_in = _LEGEND_LINE_IN * draft.legend_lines + 0.08
    total_in = draft.height_in + legend_in
    bottom_in = legend_in + 0.54
    with style():
        figure = Figure(figsize=(WIDTH_IN, total_in))
        left, bottom = draft.left_in / WIDTH_IN, bottom_in / total_in
        axes = figure.add_axes((left, bottom, 1 - left - 0.12 / WIDTH_IN, 1 - bottom - 0.1 / total_in))
        tips = draw(axes)
        sns.despine(ax=axes, left=not draft.with_axis)
        name, title = draft.name, draft.title
        raw = _saved(figure, "svg", name).decode()
        png, pdf = _saved(figure, "png", name), _saved(figure, "pdf", name)
    tree = tidy(raw, name=name, title=title, description=draft.description, tips=tips)
    return Drawing(
        name=name,
        topic=draft.topic,
        regime=draft.regime,
        heading=draft.heading,
        title=title,
        description=draft.description,
        caption=draft.caption,
        left_out="; ".join(draft.left_out),
        svg=standalone(tree, title=title, description=draft.description),
        inline_svg=inline(tree),
        png=png,
        pdf=pdf,
    )


def log_ticks(low: float, high: float, *steps: Sequence[float]) -> list[float]:
    """Return the ticks of a logarithmic axis: of the first of ``steps`` that gives three, else of the last.

    Args:
        low: where the axis begins.
        high: where it ends.
        steps: the multiples of a power of ten that get a tick, ``(1, 2, 5)`` say; the fewest first.
    """
    ticks: list[float] = []
    for multiples in steps:
        found = LogLocator(base=10, subs=multiples).tick_values(low, high)
        ticks = [float(tick) for tick in found if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks


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


def evenly_spaced(length: int, most: int) -> list[int]:
    """Return at most ``most`` positions in a sequence, evenly spaced from the first to the last."""
    places = np.linspace(0, length - 1, min(most, length)).round().astype(int)
    return [int(place) for place in np.unique(places)]
