"""Figure of work and waiting per rank, in the cells with the lowest load balance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.checks.slow_ranks import LATE_FROM, RankMeans
from analysis.report.figures.bars import draw_part, set_time_axis
from analysis.report.figures.drawing import (
    HEADING,
    PARTS,
    WIDTH_IN,
    Draft,
    Drawing,
    Tip,
    Tips,
    finish,
    part_keys,
)
from analysis.report.words import WORDS
from analysis.text import count, fraction, known, one_line, percent, seconds

MAX_BARS = 40
_LEFT_IN = 1.2

#: The parts of a bar in the order of stacking.
_PARTS = {
    "data": PARTS["data"],
    "compute": PARTS["compute"],
    "rest": replace(PARTS["other"], words="optimizer, other"),
    "transfer": PARTS["transfer"],
    "wait": PARTS["wait"],
}


def ranks_figure(means: RankMeans, *, balance: Mapping[str, float]) -> Drawing:
    """Draw work and waiting: a bar per rank, or per node if there are too many ranks.

    Args:
        means: from :func:`analysis.checks.slow_ranks.rank_means`.
        balance: the load balance of each cell.
    """
    panels, left_out = _panels(means)
    late = pd.concat(panels).loc[lambda rows: rows["beyond"] >= LATE_FROM].sort_values("beyond")
    longest = f"{_rank_name(late.iloc[-1])} works longest" if len(late) else "no rank is late"
    cells = ", ".join(
        f"{one_line(panel['cell_id'].iloc[0], limit=80)} (load balance {_balance(panel, balance)})"
        for panel in panels
    )
    draft = Draft(
        name="ranks",
        subject="Work and waiting by rank",
        topic="ranks",
        description=f"Stacked bars of the ranks of {cells}: {longest}.",
        caption=WORDS["captions"]["ranks"].format(limit=percent(LATE_FROM)),
        left_out=left_out,
        height_in=0.21 * (sum(map(len, panels)) + 1.4 * len(panels)) + 0.75,
        legend=part_keys(
            {n: part for n, part in _PARTS.items() if any((panel[n] > 0).any() for panel in panels)}
        ),
        left_in=_LEFT_IN,
        with_axis=False,
    )
    return finish(draft, lambda axes: _draw(axes, panels, balance))


def _balance(panel: pd.DataFrame, balance: Mapping[str, float]) -> str:
    return fraction(balance.get(str(panel["cell_id"].iloc[0])), decimals=2)


def _panels(means: RankMeans) -> tuple[list[pd.DataFrame], list[str]]:
    """Return the rows of each cell that fit into the figure, and texts about what is left out."""
    panels, left_out = [], []
    room = MAX_BARS // means.by_rank["cell_id"].nunique()
    for cell_id, own in means.by_rank.groupby("cell_id", sort=False):
        panel = own.sort_values("rank", kind="stable")
        if len(panel) > room:
            left_out.append(f"{count(len(panel), 'rank')} of {one_line(cell_id, limit=60)} drawn by node")
            panel = means.by_host[means.by_host["cell_id"] == cell_id]
        if len(panel) > room:
            left_out.append(f"the {room} slowest of {count(len(panel), 'node')} drawn")
            panel = panel.sort_values("beyond", ascending=False, kind="stable").head(room)
        panels.append(panel)
    return panels, left_out


def _rank_name(row: Mapping[Hashable, Any] | pd.Series) -> str:
    host = one_line(row["host"], limit=40)
    return f"rank {int(row['rank'])} on {host}" if "rank" in row and pd.notna(row["rank"]) else host


def _draw(axes: Axes, panels: Sequence[pd.DataFrame], balance: Mapping[str, float]) -> Tips:
    tips: Tips = {}
    ticks, names = [], []
    place = 0.0
    widest = max(float(panel["step"].max()) for panel in panels)
    # Headings begin at the figure's edge, because names of cells are long.
    outside = -(_LEFT_IN - 0.04) / (WIDTH_IN * axes.get_position().width)
    for panel in panels:
        cell = one_line(panel["cell_id"].iloc[0], limit=36)
        heading = f"{cell}, load balance {_balance(panel, balance)}"
        axes.text(outside, place, heading, transform=axes.get_yaxis_transform(), **HEADING)
        place += 0.95
        for row in panel.to_dict("records"):
            tips.update(_draw_bar(axes, place, row))
            late = row["beyond"] >= LATE_FROM
            ticks.append(place)
            label = f"{int(row['rank'])} · " if "rank" in row and pd.notna(row["rank"]) else ""
            names.append(f"{label}{one_line(row['host'], limit=14)}{' ◀' if late else ''}")
            place += 1
        place += 0.45
    axes.set_yticks(ticks, names, fontsize="small")
    axes.set(xlim=(0, 1.02 * widest), ylim=(place - 0.5, -0.6))
    set_time_axis(axes, widest)
    axes.tick_params(axis="y", length=0)
    return tips


def _draw_bar(axes: Axes, place: float, row: dict[Hashable, Any]) -> Tips:
    tips = {}
    left = 0.0
    excess = (
        f"{percent(abs(row['beyond']), decimals=1)} of the step {'more' if row['beyond'] > 0 else 'less'}"
    )
    for key, part in _PARTS.items():
        value = row[key]
        if not (known(value) and value > 0):
            continue
        gid = f"{key}@{place:.2f}"
        draw_part(axes, place, value, left=left, part=part, gid=gid, height=0.74, edge=0.4)
        text = f"{_rank_name(row)}, {part.words}: {seconds(value)} per step\nuseful time: "
        text += f"{seconds(row['useful'])}, {excess} than usual\n{count(int(row['n']), 'run')}"
        tips[gid] = [Tip(text, row["cell_id"])]
        left += value
    return tips
