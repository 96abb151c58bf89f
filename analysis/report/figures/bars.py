"""Draw horizontal bars: a bar has a name, and parts beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from analysis.report.figures.drawing import Colour, set_ticks, small
from ddp_scaling_bench.units import known

#: The height of a bar with its space, in inches.
_BAR_IN = 0.19


class Part(NamedTuple):
    """A part of a bar: its words, colour and hatch in all figures.

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
    "wait": Part("waiting for other ranks", Colour.ORANGE, "////"),
}


@dataclass
class Bars:
    """Bars from top to bottom, in groups with headings; ``ends`` are texts at their right ends.

    ``left_in`` is the margin for the names, in inches.
    """

    left_in: float
    names: dict[float, str] = field(default_factory=dict)
    widths: list[Mapping[str, float]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    headings: dict[float, str] = field(default_factory=dict)
    end: float = -0.5

    def add_heading(self, text: str) -> None:
        """Begin a group."""
        self.end += 0.2 * bool(self.names)
        self.headings[self.end + 0.5] = text
        self.end += 1

    def add(self, name: str, widths: Mapping[str, float], end: str = "") -> None:
        """Add a bar with the widths of its parts."""
        self.names[self.end + 0.5] = name
        self.widths.append(widths)
        self.ends.append(end)
        self.end += 1

    @property
    def height_in(self) -> float:
        """The height of the bars."""
        return _BAR_IN * (self.end + 0.5)

    @property
    def longest(self) -> float:
        """The length of the longest bar."""
        return max(sum(value for value in own.values() if known(value)) for own in self.widths)

    def draw(self, axes: Axes, parts: Mapping[str, Part]) -> None:
        """Draw the bars; headings begin at the figure's edge, because names of cells and series are long."""
        left, places = np.zeros(len(self.widths)), np.array([*self.names])
        for name, part in parts.items():
            widths = np.nan_to_num([own.get(name, 0.0) for own in self.widths])
            if (drawn := widths > 0).any():
                style: dict[str, Any] = {"color": part.colour, "hatch": part.hatch, "label": part.words}
                style |= {"left": left[drawn], "height": 0.74, "edgecolor": Colour.SURFACE, "linewidth": 0.5}
                axes.barh(places[drawn], widths[drawn], **style)
            left = left + widths
        for place, end, text in zip(places, left, self.ends, strict=True):
            add_text(axes, (end, place), text, right_pt=3)
        for place, text in self.headings.items():
            style = {"xycoords": axes.get_yaxis_transform(), "color": Colour.INK, "fontweight": "bold"}
            add_text(axes, (0, place), text, right_pt=3 - 72 * self.left_in, **style)
        name_bars(axes, self.names)
        axes.set_ylim(self.end, -0.5)


def name_bars(axes: Axes, names: Mapping[float, str]) -> None:
    """Write the names of the bars at their places, without an axis."""
    set_ticks(axes.yaxis, [*names], lambda place: names[place])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def add_text(axes: Axes, point: tuple[float, float], text: str, *, right_pt: float, **style: Any) -> None:
    """Write a small text to the right of a point."""
    at: dict[str, Any] = {"xytext": (right_pt, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, point, **at | small() | style)
