"""Fields in panels, one below the other: a size or a batch each, its efficiency as number and strength."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis.listing import row_state
from analysis.palette import BLUE, GREY, INK, MUTED
from analysis.wording import fraction

#: Ink stays readable on the strongest field, on light and on dark paper.
_STRONGEST, _WEAKEST = 0.5, 0.04
#: How much room a panel's heading takes, in fields.
_HEADING = 0.62


@dataclass(frozen=True)
class Field:
    """One field: its column and its line (from 0), what stands in it, and the words under the pointer.

    ``state`` stands in a field whose efficiency is not known (NaN).
    """

    column: int
    line: int
    efficiency: float
    below: str
    state: object
    words: str


@dataclass(frozen=True)
class Panel:
    """The fields of one heading, with the names of their lines."""

    heading: str
    lines: Sequence[str]
    fields: Sequence[Field]


@dataclass(frozen=True)
class Panels:
    """Panels that share their columns."""

    panels: Sequence[Panel]
    columns: Sequence[str]
    xlabel: str
    ylabel: str

    @property
    def _heading(self) -> float:
        return _HEADING if len(self.panels) > 1 else 0.0

    @property
    def height_in(self) -> float:
        """How high the panels are, in inches, with the axis below them."""
        lines = sum(len(panel.lines) for panel in self.panels)
        return 0.42 * (lines + self._heading * len(self.panels)) + 0.62

    def draw(self, axes: Axes) -> dict[str, list[str]]:
        """Draw the panels and return the words for the fields by gid."""
        tips: dict[str, list[str]] = {}
        ticks: list[float] = []
        top = 0.0
        for number, panel in enumerate(self.panels):
            if self._heading:
                style: dict[str, Any] = {"fontsize": "small", "fontweight": "bold", "color": INK}
                axes.text(-0.5, top - 0.16, panel.heading, va="center", ha="left", **style)
                top += self._heading
            for place, field in enumerate(panel.fields):
                gid = f"field-{number}-{place}"
                _draw_field(axes, field, y=top + field.line, gid=gid)
                tips[gid] = [field.words]
            ticks += [top + line for line in range(len(panel.lines))]
            top += len(panel.lines)
        axes.set_yticks(ticks, [name for panel in self.panels for name in panel.lines])
        axes.set_xticks(range(len(self.columns)), list(self.columns))
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)
        axes.set(xlim=(-0.5, len(self.columns) - 0.5), ylim=(top - 0.5, -0.5))
        axes.tick_params(length=0)
        axes.spines["bottom"].set_visible(False)
        return tips


def _draw_field(axes: Axes, field: Field, *, y: float, gid: str) -> None:
    x, efficiency = field.column, field.efficiency
    known = math.isfinite(efficiency)
    strength = _WEAKEST + (_STRONGEST - _WEAKEST) * min(max(efficiency, 0.0), 1.0) if known else 0.0
    box = Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, linewidth=0.8)
    box.set_facecolor((BLUE, strength) if known else "none")
    box.set_edgecolor(BLUE if known else GREY)
    box.set_linestyle("-" if known else (0, (2, 2)))
    box.set_gid(gid)
    axes.add_patch(box)
    if not known:
        axes.text(x, y, row_state(field.state), va="center", ha="center", fontsize=7, color=MUTED)
        return
    centred: dict[str, Any] = {"va": "center", "ha": "center", "color": INK}
    axes.text(x, y - 0.17, fraction(efficiency, decimals=2), fontsize=9.5, **centred)
    axes.text(x, y + 0.23, field.below, fontsize=7.5, **centred)
