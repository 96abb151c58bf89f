"""Figures of horizontal bars: parts of the step by size, work and waiting by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from analysis.checks.slow_ranks import LATE_FROM, MeanTimes, RankMeans
from analysis.data.columns import ScalingRow, by_series
from analysis.data.names import ranks, with_layout
from analysis.report.figures.drawing import (
    HEADING,
    PARTS,
    WIDTH_IN,
    Colour,
    Draft,
    Drawing,
    Part,
    Selection,
    finish,
    part_keys,
)
from analysis.report.words import CAPTIONS
from analysis.text import one_line
from ddp_scaling_bench.units import count, fraction, known, percent, seconds

#: The parts of a bar of the step time in the order of stacking.
STEP_PARTS = {name: part for name, part in PARTS.items() if name != "compute"}

#: With more ranks, the figure has a bar per node.
MAX_BARS = 40
_LEFT_IN = 1.2
#: The parts of the bar of a rank in the order of stacking.
_PARTS = {
    "data": PARTS["data"],
    "compute": PARTS["compute"],
    "rest": replace(PARTS["other"], words="optimizer, other"),
    "transfer": PARTS["transfer"],
    "wait": PARTS["wait"],
}


def draw_part(
    axes: Axes,
    place: float,
    width: float,
    *,
    left: float,
    part: Part,
    height: float = 0.72,
    edge: float = 0.6,
) -> None:
    """Draw one part of a stacked bar."""
    style: dict[str, Any] = {"color": part.colour, "hatch": part.hatch, "linewidth": edge}
    style["edgecolor"] = Colour.SURFACE
    axes.barh(place, width, left=left, height=height, **style)


# -- parts of the step ----------------------------------------------------------------


def split(row: ScalingRow) -> dict[str, float]:
    """Return the seconds of each part of a row's step, by the names of STEP_PARTS; empty if one is unknown.

    ``other`` may be slightly negative, because timers overlap by microseconds; it is drawn as 0. If waiting
    is not known, ``transfer`` contains all exposed communication.
    """
    parts = {name: float(getattr(row, name)) for name in STEP_PARTS}
    parts |= {} if known(row.transfer) else {"transfer": row.exposed}
    parts |= {} if known(row.wait) else {"wait": 0.0}
    if not all(map(known, parts.values())) or not any(value > 0 for value in parts.values()):
        return {}
    return {name: max(value, 0.0) for name, value in parts.items()}


def split_figure(selection: Selection, *, shares: bool = False) -> Drawing:
    """Draw the parts of the step as times or as shares; :func:`split` knows those of each row."""
    rows, labels, kind = selection.rows, selection.labels, "shares" if shares else "step"
    splits = [split(row) for row in rows]
    largest, parts = max(zip(rows, splits, strict=True), key=lambda pair: pair[0].gpus)
    exposed = (parts["transfer"] + parts["wait"]) / sum(parts.values())
    shown = {name: part for name, part in STEP_PARTS.items() if any(own[name] > 0 for own in splits)}
    headings = 1.1 * len(labels) if len(labels) > 1 else 0
    draft = Draft(
        name=f"{kind}-{selection.mode or 'other'}",
        subject="Shares of the step time" if shares else "Parts of the step time",
        topic="time",
        mode=selection.mode,
        labels=labels,
        shared=selection.shared,
        description=(
            f"Stacked bars of {count(len(splits), 'cell')}. At {ranks(largest)} "
            f"{percent(exposed)} of the step is exposed communication."
        ),
        caption=CAPTIONS[kind],
        left_out=selection.left_out,
        height_in=0.28 * (len(rows) + headings) + 0.75,
        view="Shares" if shares else "Step time",
        legend=part_keys(shown),
        left_in=0.78 if len({(row.series, row.gpus) for row in rows}) == len(rows) else 1.2,
        with_axis=False,
    )
    longest = 1.0 if shares else max(sum(own.values()) for own in splits)
    return finish(draft, lambda axes: _draw_split(axes, selection, longest=longest, shares=shares))


def _draw_split(axes: Axes, selection: Selection, *, longest: float, shares: bool) -> None:
    """Draw each row, series by series; if there are several series, with their names."""
    names: dict[float, str] = {}
    place = 0.0
    for series, own in by_series(selection.rows).items():
        if len(selection.labels) > 1:
            # The transform places the text at the panel's edge, independent of the limits of the axis.
            axes.text(0, place, selection.labels[series], transform=axes.get_yaxis_transform(), **HEADING)
            place += 0.85
        sizes = Counter(row.gpus for row in own)
        for row in own:
            names[place] = with_layout(row) if sizes[row.gpus] > 1 else ranks(row)
            _draw_split_bar(axes, place, row, longest=longest, shares=shares)
            place += 1
        place += 0.25
    axes.set_yticks(list(names), list(names.values()))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1.16 * longest), ylim=(place - 0.35, -0.65))
    if shares:
        axes.set_xlabel("Share of the step's time")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
        axes.spines["bottom"].set_bounds(0, 1)
    else:
        set_time_axis(axes, longest)


def set_time_axis(axes: Axes, longest: float) -> None:
    """Label the horizontal axis of times per step in a unit that suits the longest."""
    unit, factor = next(
        (u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if longest * f >= 1 or u == "µs"
    )
    axes.set_xlabel(f"Time per step ({unit})")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * factor:.4g}"))


def _draw_split_bar(axes: Axes, place: float, row: ScalingRow, *, longest: float, shares: bool) -> None:
    parts = split(row)
    left, total = 0.0, sum(parts.values())
    unit = total if shares else 1.0
    for key, value in parts.items():
        if not value > 0:
            continue
        draw_part(axes, place, value / unit, left=left, part=STEP_PARTS[key])
        left += value / unit
    end = left + 0.015 * longest
    axes.text(end, place, seconds(total), va="center", ha="left", fontsize="small", color=Colour.MUTED)


# -- work and waiting by rank ---------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """The bars of a cell: its ranks, or its nodes if it has too many ranks."""

    cell_id: str
    balance: float | None
    bars: list[MeanTimes]

    def words(self, limit: int) -> str:
        """Return the cell and its load balance."""
        return f"{one_line(self.cell_id, limit=limit)}, load balance {fraction(self.balance, decimals=2)}"


def ranks_figure(means: RankMeans, *, balance: Mapping[str, float]) -> Drawing:
    """Draw work and waiting: a bar per rank, or per node if there are too many ranks."""
    panels, left_out = _panels(means, balance)
    bars = [bar for panel in panels for bar in panel.bars]
    late = max((bar for bar in bars if bar.late), key=lambda bar: bar.beyond, default=None)
    longest = f"{_rank_name(late)} works longest" if late else "no rank is late"
    cells = "; ".join(panel.words(80) for panel in panels)
    draft = Draft(
        name="ranks",
        subject="Work and waiting by rank",
        topic="ranks",
        description=f"Stacked bars of the ranks of {cells}: {longest}.",
        caption=(
            f"Cells with the lowest load balance. ◀: late (by {percent(LATE_FROM)} of the step or more) in "
            "most runs."
        ),
        left_out=left_out,
        height_in=0.21 * (len(bars) + 1.4 * len(panels)) + 0.75,
        legend=part_keys({n: part for n, part in _PARTS.items() if any(getattr(b, n) > 0 for b in bars)}),
        left_in=_LEFT_IN,
        with_axis=False,
    )
    return finish(draft, lambda axes: _draw(axes, panels))


def _panels(means: RankMeans, balance: Mapping[str, float]) -> tuple[list[Panel], list[str]]:
    """Return the bars of each cell that fit into the figure, and texts about what is left out."""
    panels, left_out = [], []
    cells = list(dict.fromkeys(rank.cell_id for rank in means.by_rank))
    room = MAX_BARS // len(cells)
    for cell_id in cells:
        bars = sorted((one for one in means.by_rank if one.cell_id == cell_id), key=lambda one: one.rank or 0)
        if len(bars) > room:
            left_out.append(f"{count(len(bars), 'rank')} of {one_line(cell_id, limit=60)} drawn by node")
            bars = [host for host in means.by_host if host.cell_id == cell_id]
        if len(bars) > room:
            left_out.append(f"the {room} slowest of {count(len(bars), 'node')} drawn")
            bars = sorted(bars, key=lambda bar: -bar.beyond)[:room]
        panels.append(Panel(cell_id, balance.get(cell_id), bars))
    return panels, left_out


def _rank_name(bar: MeanTimes) -> str:
    host = one_line(bar.host, limit=40)
    return host if bar.rank is None else f"rank {bar.rank} on {host}"


def _draw(axes: Axes, panels: Sequence[Panel]) -> None:
    ticks, names = [], []
    place = 0.0
    widest = max(bar.step for panel in panels for bar in panel.bars)
    # Headings begin at the figure's edge, because names of cells are long.
    outside = -(_LEFT_IN - 0.04) / (WIDTH_IN * axes.get_position().width)
    for panel in panels:
        axes.text(outside, place, panel.words(36), transform=axes.get_yaxis_transform(), **HEADING)
        place += 0.95
        for bar in panel.bars:
            _draw_bar(axes, place, bar)
            ticks.append(place)
            label = "" if bar.rank is None else f"{bar.rank} · "
            names.append(f"{label}{one_line(bar.host, limit=14)}{' ◀' if bar.late else ''}")
            place += 1
        place += 0.45
    axes.set_yticks(ticks, names, fontsize="small")
    axes.set(xlim=(0, 1.02 * widest), ylim=(place - 0.5, -0.6))
    set_time_axis(axes, widest)
    axes.tick_params(axis="y", length=0)


def _draw_bar(axes: Axes, place: float, bar: MeanTimes) -> None:
    left = 0.0
    for key, part in _PARTS.items():
        value = getattr(bar, key)
        if not (known(value) and value > 0):
            continue
        draw_part(axes, place, value, left=left, part=part, height=0.74, edge=0.4)
        left += value
