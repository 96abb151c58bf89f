"""Draw figures at the width of a paper's column, and save them as SVG and PDF.

A kind of figures is one module of this package, with a function that :func:`figure` registers. The page's
style sheet gives the colours other values in its dark theme.
"""

from __future__ import annotations

import io
import pkgutil
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.data.columns import ScalingRow, by_series
from analysis.data.names import short_labels
from analysis.processes import share
from analysis.report.results import Results
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


#: The variables of the style sheet by colour.
_VARIABLES = {str(colour): f"var(--{colour.name.lower()})" for colour in Colour}

#: The width of one and of two columns of a paper, in inches (85 and 178 mm).
COLUMN_IN, TWO_COLUMNS_IN = 85 / 25.4, 178 / 25.4
#: The sizes of fonts: journals require 7 points. Ticks and legends have the small one.
_FONT_PT, _SMALL_PT = 7.872, 7.216
_POINTS_PER_IN = 72
#: The height of a line of the legend, and the most characters of its texts with two columns and with one.
_LEGEND_LINE_IN, _SHORT_TEXT, _LONG_TEXT = 0.155, 23, 46

#: Maximum number of series, of sizes of a series, and of sizes in a figure of bars.
MAX_SERIES, MAX_SIZES, MAX_BARS = 6, 24, 18


# -- kinds ----------------------------------------------------------------------------

#: Draws the figures of a kind; their names begin with one of the names of the kind.
Draw = Callable[[Results], Iterator["Drawing"]]
_KINDS: list[tuple[bool, str, Sequence[str], Draw]] = []


def figure(*names: str, is_long: bool = False) -> Callable[[Draw], Draw]:
    """Register a function that draws the figures ``NAME`` or ``NAME-...`` with the names of its kind.

    If ``is_long``, they are drawn first, so that no process waits for them in the end.

    The page shows a figure by its topic: ``scaling`` beside the sizes, ``why`` and ``settings`` in these
    sections, and any other one in a section of its own.
    """

    def register(draw: Draw) -> Draw:
        _KINDS.append((not is_long, draw.__module__, names, draw))
        return draw

    return register


def _kinds() -> list[tuple[Sequence[str], Draw]]:
    """Return the kinds of all modules of this package: long ones, then in the order of the modules' names."""
    package = import_module("analysis.report.figures")
    for module in pkgutil.iter_modules(package.__path__, "analysis.report.figures."):
        import_module(module.name)
    return [kind[2:] for kind in sorted(_KINDS, key=itemgetter(0, 1))]


def draw_figures(results: Results) -> list[Drawing]:
    """Draw all figures of a report, in two processes: matplotlib takes most of the time of a report."""
    kinds = [partial(_drawn, draw, results) for _, draw in _kinds()]
    return [one for drawings in share(kinds)() for one in drawings]


def _drawn(draw: Draw, results: Results) -> list[Drawing]:
    return list(draw(results))


def is_name(name: str) -> bool:
    """Return whether a report can have a figure of this name."""
    names = "|".join(re.escape(name) for names, _ in _kinds() for name in names)
    return re.fullmatch(rf"({names})(-(strong|weak|other|\d+))?", name) is not None


# -- what a figure shows --------------------------------------------------------------


class Selection(NamedTuple):
    """The ``rows`` of one scaling mode that a figure shows, a label per series, and texts of the figure."""

    rows: Sequence[ScalingRow]
    labels: dict[str, str]
    texts: dict[str, Any]


def select(
    rows: Sequence[ScalingRow], parts: Mapping[str, dict[str, str]], *, bars: bool = False
) -> Selection:
    """Select the series with the most sizes, and as many sizes as fit into a figure (or a bar chart)."""
    every = by_series(rows)
    sizes = {series: len({row.gpus for row in own}) for series, own in every.items()}
    widest = sorted(sizes, key=lambda series: -sizes[series])
    most = max(1, min(MAX_SERIES, MAX_BARS // sizes[widest[0]])) if bars else MAX_SERIES
    series = [name for name in every if name in widest[:most]]
    left_out = []
    if len(sizes) > len(series):
        of_all = count(len(sizes), "series", "series")
        left_out.append(f"{len(series)} of {of_all} drawn, with the most sizes")
    limit = MAX_BARS if bars else MAX_SIZES
    drawn = [every[name][place] for name in series for place in evenly_spaced(len(every[name]), limit)]
    if len(drawn) < (shown := sum(len(every[name]) for name in series)):
        left_out.append(f"{len(drawn):,} of {count(shown, 'cell')} drawn, spread over the sizes")
    labels, shared = short_labels(dict(parts), series)
    names = [*labels.values()] if len(labels) == 1 else []
    texts = {"mode": rows[0].mode, "series": ", ".join(filter(None, (*names, shared))), "left_out": left_out}
    return Selection(drawn, labels, texts)


def by_mode(rows: Sequence[ScalingRow]) -> Iterator[tuple[str, list[ScalingRow]]]:
    """Yield each scaling mode with its measured rows, and the suffix of the names of its figures."""
    for mode in ("strong", "weak", ""):
        if own := [row for row in rows if row.mode == mode and row.n]:
            yield mode or "other", own


#: Draws one panel of a figure.
Panel = Callable[[Axes], None]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure with its texts.

    Attributes:
        name: file name without suffix.
        subject: the name without mode and series. Figures of a mode with the topic ``scaling``
            have tabs with these names.
        topic: the part of the page that shows the figure; empty for a figure that is only a file.
        description: text for readers who cannot see the figure.
        caption: explanation of the marks.
        mode: ``strong``, ``weak`` or empty.
        series: what all series have in common.
        left_out: texts about data that is not drawn.
    """

    name: str
    subject: str
    topic: str
    description: str
    caption: str = ""
    mode: str = ""
    series: str = ""
    left_out: Sequence[str] = ()
    svg: str = ""
    pdf: bytes = b""

    @property
    def title(self) -> str:
        """The subject with the scaling mode and the series."""
        mode = f", {self.mode} scaling" if self.mode else ""
        return f"{self.subject}{mode}" + f" ({self.series})" * bool(self.series)

    @property
    def markup(self) -> str:
        """The SVG element for the page, whose colours are those of the theme, without what the page has."""
        element = re.sub(r"(?s)<metadata>.*</metadata>", "", self.svg[self.svg.index("<svg") :])
        element = re.sub(r'<g id="[^"]*"', "<g", element)  # other figures have the same names
        element = re.sub(r'fill="(#\w{6})"', r'style="fill: \1"', element)  # an attribute has no variables
        return re.sub(r"(?<=: )#\w{6}", lambda colour: _VARIABLES.get(colour[0], colour[0]), element)

    def draw(
        self,
        *panels: Panel,
        columns: int = 1,
        height_in: float = 2.1,
        left_in: float = 0.55,
        bottom_in: float = 0.4,
    ) -> Drawing:
        """Draw the panels, each with ``height_in`` and margins, and one legend; return the finished figure.

        Margins are fixed, so no layout pass is needed.
        """
        width_in = COLUMN_IN if columns == 1 else TWO_COLUMNS_IN
        cell_in, rows = width_in / columns, -(-len(panels) // columns)
        with _style():
            sheet = Figure(figsize=(width_in, height_in), dpi=_POINTS_PER_IN, facecolor=Colour.SURFACE)
            every = [sheet.add_axes((0, 0, 1, 1), label=str(place)) for place, _ in enumerate(panels)]
            for axes, draw in zip(every, panels, strict=True):
                draw(axes)
            legend_in = _add_legend(sheet, every, columns=columns)
            total_in = rows * height_in + legend_in
            sheet.set_size_inches(width_in, total_in)
            inside_in = cell_in - left_in - 0.1, height_in - bottom_in - 0.08
            for place, axes in enumerate(every):
                x_in = place % columns * cell_in + left_in
                y_in = legend_in + (rows - 1 - place // columns) * height_in + bottom_in
                box = x_in / width_in, y_in / total_in, inside_in[0] / width_in, inside_in[1] / total_in
                axes.set_position(box)
            svg = _saved(sheet, "svg", self.name, Title=self.title, Description=self.description).decode()
            pdf = _saved(sheet, "pdf", self.name)
        return replace(self, svg=svg, pdf=pdf)


# -- style ----------------------------------------------------------------------------


def _style() -> Any:
    """Return the matplotlib context of all figures: a paper's column, in the colours of the themes."""
    ink = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor")
    each = {"major.size": 4.8, "major.width": 1.0, "labelsize": _SMALL_PT}
    style: dict[Any, Any] = {
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": _FONT_PT,
        "axes.labelsize": _FONT_PT,
        "legend.fontsize": _SMALL_PT,
        **{f"{axis}tick.{name}": value for axis in "xy" for name, value in each.items()},
        "text.parse_math": False,
        "svg.fonttype": "none",
        "pdf.fonttype": 3,
        "axes.facecolor": "none",
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        "axes.axisbelow": True,
        "axes.linewidth": 1.0,
        "lines.linewidth": 1.2,
        "lines.markersize": 4.8,
        "lines.solid_capstyle": "round",
        "path.simplify": False,  # it removes lines without length, which are dots
        "hatch.color": Colour.SURFACE,
        "hatch.linewidth": 0.8,
        "grid.color": Colour.GRID,
        **dict.fromkeys(ink, Colour.INK),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), Colour.MUTED),
    }
    return mpl.rc_context(style)


def _add_legend(sheet: Figure, every: Sequence[Axes], *, columns: int) -> float:
    """Add a legend below the panels, with each label once, row by row; return its height in inches."""
    handles: dict[str, Any] = {}
    for axes in every:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return 0.0
    texts = [textwrap.wrap(label, _LONG_TEXT) for label in handles]
    is_short = all(len(text) == 1 and len(text[0]) <= _SHORT_TEXT for text in texts)
    across = min(len(texts), 2 * columns if is_short else columns)
    lines = sum(max(map(len, texts[start : start + across])) for start in range(0, len(texts), across))
    # Matplotlib fills a column after the other.
    order = [place for start in range(across) for place in range(start, len(texts), across)]
    keys, names = [*handles.values()], ["\n".join(text) for text in texts]
    style: dict[str, Any] = {"loc": "lower left", "frameon": False, "borderaxespad": 0.1, "borderpad": 0.2}
    style |= {"handlelength": 2.2, "columnspacing": 1.0, "labelspacing": 0.3}
    sheet.legend([keys[place] for place in order], [names[place] for place in order], ncols=across, **style)
    return _LEGEND_LINE_IN * lines + 0.05


def small() -> dict[str, Any]:
    """Return the style of a text as small as the label of a tick."""
    return {"fontsize": mpl.rcParams["xtick.labelsize"], "color": Colour.MUTED}


def set_ticks(axis: Axis, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    """Set the major ticks of an axis with their labels, and no minor ticks."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def evenly_spaced(length: int, most: int) -> list[int]:
    """Return at most ``most`` positions in a sequence, evenly spaced from the first to the last."""
    places = np.linspace(0, length - 1, min(most, length)).round().astype(int)
    return [int(place) for place in np.unique(places)]


def _saved(sheet: Figure, form: str, name: str, **metadata: str) -> bytes:
    """Return the figure in a format; equal figures give equal files."""
    target = io.BytesIO()
    # Without what matplotlib writes.
    unwanted = ("Creator", "Date", "Format", "Type") if form == "svg" else ("CreationDate",)
    with mpl.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        # A PDF shows boxes for characters that the font lacks. SVG keeps the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        sheet.savefig(target, format=form, metadata={**metadata, **dict.fromkeys(unwanted)})
    return target.getvalue()
