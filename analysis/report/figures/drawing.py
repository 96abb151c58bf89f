"""Draw figures in a common style and save them as SVG for the page and as SVG, PNG and PDF files.

The page's style sheet refers to the colours, so that the figures follow its theme.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.data.columns import ScalingRow, by_series
from analysis.data.names import short_labels
from ddp_scaling_bench.units import count


class Colour(StrEnum):
    """Light colours of the figures. On the page, each is replaced by a CSS variable, which follows the theme.

    The hues of the parts of a step are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), those of
    the series are from Paul Tol (https://sronpersonalpages.nl/~pault/): both are distinct for people with
    colour blindness. No series has the colour of a part.
    """

    INK = "#1f2328"
    MUTED = "#59636e"
    GRID = "#e3e7eb"
    SURFACE = "#fefefe"
    BLUE = "#0072b2"
    WINE = "#882255"
    OLIVE = "#84842b"
    ROSE = "#cc6677"
    INDIGO = "#332288"
    TEAL = "#3a7d74"
    SKY = "#56b4e9"
    MINT = "#7fcfb9"
    GREEN = "#009e73"
    FOREST = "#00694d"
    PURPLE = "#cc79a7"
    GREY = "#8c959f"
    VERMILLION = "#d55e00"
    ORANGE = "#e69f00"

    @property
    def variable(self) -> str:
        """The colour on the page."""
        return f"var(--{self.name.lower()})"


def theme_rules() -> str:
    """Return the CSS rules that give the colours in the page's figures the values of the theme.

    The selectors name no ancestor, because in Chromium those of a marker (``use``) are not in its tree.
    """
    return "".join(
        f'[style*="{name}: {colour}"], [{name}="{colour}"] {{ {name}: {colour.variable} !important; }}\n'
        for colour in Colour
        for name in ("fill", "stroke")
    )


#: Series also differ in marker and dash, for grayscale prints.
SERIES_COLOURS = (Colour.BLUE, Colour.WINE, Colour.OLIVE, Colour.ROSE, Colour.INDIGO, Colour.TEAL)
SERIES_MARKERS = ("o", "s", "D", "^", "v", "P")
SERIES_DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (3, 1.5), (8, 2.5))

WIDTH_IN = 4.5
_LEGEND_LINE_IN = 0.21
_LONG_LABEL = 26
_PNG_DPI = 200

MAX_SERIES = 6
MAX_SIZES = 24
#: Maximum number of bars in one figure.
MAX_BARS = 18


@dataclass(frozen=True)
class Selection:
    """The ``rows`` of one scaling mode that a figure shows; for the other attributes, see :class:`Draft`."""

    mode: str
    rows: Sequence[ScalingRow]
    labels: dict[str, str]
    shared: str
    left_out: list[str]


def select(
    rows: Sequence[ScalingRow], mode: str, parts: dict[str, dict[str, str]], *, bars: bool = False
) -> Selection:
    """Select the series with the most sizes, and as many sizes as fit into a figure (or a bar chart)."""
    every = by_series(rows)
    sizes = {series: len({row.gpus for row in own}) for series, own in every.items()}
    widest = sorted(sizes, key=lambda series: -sizes[series])
    most = max(1, min(MAX_SERIES, MAX_BARS // sizes[widest[0]])) if bars else MAX_SERIES
    series = [name for name in every if name in widest[:most]]
    left_out = []
    if len(sizes) > len(series):
        left_out.append(
            f"{len(series)} of {count(len(sizes), 'series', 'series')} drawn, with the most sizes"
        )
    limit = min(MAX_SIZES, MAX_BARS) if bars else MAX_SIZES
    drawn = [every[name][place] for name in series for place in evenly_spaced(len(every[name]), limit)]
    if len(drawn) < (shown := sum(len(every[name]) for name in series)):
        left_out.append(f"{len(drawn):,} of {count(shown, 'cell')} drawn, spread over the sizes")
    labels, shared = short_labels(parts, series)
    return Selection(mode, drawn, labels, shared, left_out)


@dataclass(frozen=True)
class Part:
    """A part of a step: its words, colour and hatch in all figures.

    Hatches consist of lines: matplotlib writes a quarter of a megabyte for a hatch of dots.
    """

    words: str
    colour: Colour
    hatch: str = ""


#: The parts of a step in the order of stacking. ``compute`` is the sum of forward and backward.
PARTS = {
    "data": Part("data loading", Colour.SKY, "----"),
    "compute": Part("forward and backward", Colour.GREEN),
    "forward": Part("forward", Colour.MINT),
    "backward": Part("backward", Colour.FOREST),
    "optimizer": Part("optimizer", Colour.PURPLE, "\\\\\\\\"),
    "other": Part("other", Colour.GREY),
    "transfer": Part("exposed communication", Colour.VERMILLION),
    "wait": Part("waiting for the slowest rank", Colour.ORANGE, "////"),
}


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a line with a marker, or a filled box with a hatch.

    The markers ``x`` and ``hollow`` (a circle) are drawn without a line.
    """

    words: str
    colour: Colour
    hatch: str | None = None
    marker: str = ""
    dashes: tuple[float, ...] = ()

    def handle(self) -> Any:
        """Return the artist that shows the entry in the legend of a figure file."""
        if self.hatch is not None:
            return Patch(facecolor=self.colour, hatch=self.hatch, edgecolor=Colour.SURFACE)
        style: dict[str, Any] = {
            "color": self.colour,
            "markersize": 5,
            "linewidth": 1.4 if self.marker else 1.0,
        }
        if self.marker == "hollow":
            return Line2D([], [], marker="o", markerfacecolor=Colour.SURFACE, **style, linestyle="")
        style["linestyle"] = "" if self.marker == "x" else (0, self.dashes) if self.dashes else "-"
        return Line2D([], [], marker=self.marker or None, **style)


def part_keys(parts: Mapping[str, Part]) -> tuple[Key, ...]:
    """Return the legend of stacked bars."""
    return tuple(Key(part.words, part.colour, hatch=part.hatch) for part in parts.values())


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Texts and dimensions of a figure.

    Attributes:
        name: file name without suffix.
        subject: the figure's name without mode and series.
        description: text for readers who cannot see the figure.
        caption: explanation of the marks.
        topic: the part of the page that shows the figure.
        mode: ``strong``, ``weak`` or empty.
        labels: the series in order, with their names.
        shared: words that apply to all series.
        left_out: texts about data that is not drawn.
        view: name of the figure's tab, if several figures show the same cells.
        height_in, left_in: height without the legend, and left margin, in inches.
        legend: the entries of the legend.
        with_axis: true if the vertical axis has a line.
    """

    name: str
    subject: str
    description: str
    caption: str
    topic: str = "scaling"
    mode: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    shared: str = ""
    left_out: list[str] = field(default_factory=list)
    view: str = ""
    height_in: float = 2.9
    legend: Sequence[Key] = ()
    left_in: float = 0.78
    with_axis: bool = True

    @property
    def heading(self) -> str:
        """The subject; with the name of the series if the figure shows only one."""
        return f"{self.subject}{self._series()}"

    @property
    def title(self) -> str:
        """The heading with the scaling mode."""
        return f"{self.subject}, {self.mode} scaling{self._series()}" if self.mode else self.heading

    def _series(self) -> str:
        words = [next(iter(self.labels.values()))] if len(self.labels) == 1 else []
        words += [self.shared] if self.shared else []
        return f" ({', '.join(words)})" if words else ""

    @property
    def legend_lines(self) -> int:
        """The number of lines of the legend, which has two columns, or one if texts are long."""
        longest = max((len(key.words) for key in self.legend), default=0)
        return len(self.legend) if longest > _LONG_LABEL else -(-len(self.legend) // 2)


@dataclass(frozen=True, kw_only=True)
class Drawing(Draft):
    """A finished figure as SVG, PNG and PDF."""

    svg: str
    png: bytes
    pdf: bytes

    @property
    def markup(self) -> str:
        """The SVG element, for the page."""
        return self.svg[self.svg.index("<svg") :]


def _style() -> Any:
    """Return the matplotlib context of all figures."""
    own: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
        "text.parse_math": False,
        "svg.fonttype": "none",
        "pdf.fonttype": 3,
        "axes.facecolor": "none",
        "legend.fontsize": 9.5,
        "hatch.color": Colour.SURFACE,
        "grid.color": Colour.GRID,
        **dict.fromkeys(("text.color", "axes.labelcolor"), Colour.INK),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), Colour.INK),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), Colour.MUTED),
        **dict.fromkeys(("axes.linewidth", "grid.linewidth", "hatch.linewidth"), 0.8),
        **dict.fromkeys(("xtick.major.width", "ytick.major.width"), 0.8),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 3),
    }
    return mpl.rc_context({**sns.axes_style("ticks"), **own})


def finish(draft: Draft, draw: Callable[[Axes], None]) -> Drawing:
    """Draw a figure with fixed margins, which need no layout pass, and save it as SVG, PNG and PDF."""
    legend_in = _LEGEND_LINE_IN * draft.legend_lines + 0.08
    total_in = draft.height_in + legend_in
    bottom_in = legend_in + 0.54
    with _style():
        figure = Figure(figsize=(WIDTH_IN, total_in))
        left, bottom = draft.left_in / WIDTH_IN, bottom_in / total_in
        axes = figure.add_axes((left, bottom, 1 - left - 0.12 / WIDTH_IN, 1 - bottom - 0.1 / total_in))
        draw(axes)
        if draft.legend:
            _add_legend(figure, draft)
        sns.despine(ax=axes, left=not draft.with_axis)
        texts = {"Title": draft.title, "Description": draft.description}
        svg = _saved(figure, "svg", draft.name, metadata=texts).decode()
        png, pdf = _saved(figure, "png", draft.name), _saved(figure, "pdf", draft.name)
    return Drawing(**vars(draft), svg=svg, png=png, pdf=pdf)


#: Style of a heading inside a panel.
HEADING: dict[str, Any] = {"va": "center", "fontsize": "small", "fontweight": "bold", "color": Colour.INK}


def _add_legend(figure: Figure, draft: Draft) -> None:
    """Add the legend below the panel."""
    handles, names = [key.handle() for key in draft.legend], [key.words for key in draft.legend]
    columns = -(-len(names) // draft.legend_lines)
    style: dict[str, Any] = {
        "loc": "lower left",
        "frameon": False,
        "labelcolor": Colour.INK,
        "handlelength": 2.6,
    }
    figure.legend(handles, names, ncols=columns, **style)


def set_ticks(axis: Axis, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    """Set the major ticks of an axis with their labels, and no minor ticks."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def evenly_spaced(length: int, most: int) -> list[int]:
    """Return at most ``most`` positions in a sequence, evenly spaced from the first to the last."""
    places = np.linspace(0, length - 1, min(most, length)).round().astype(int)
    return [int(place) for place in np.unique(places)]


#: Metadata that matplotlib writes by default, by format.
_METADATA = {"svg": ("Creator", "Date", "Format", "Type"), "png": ("Software",), "pdf": ("CreationDate",)}


def _saved(figure: Figure, form: str, name: str, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the figure in one format; equal figures give equal bytes."""
    written = dict.fromkeys(_METADATA[form]) | dict(metadata or {})
    target = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        # PNG and PDF show boxes for characters that the font lacks. SVG keeps the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(
            target,
            format=form,
            metadata=written,
            dpi=_PNG_DPI,
            facecolor=Colour.SURFACE,
        )
    return target.getvalue()
