"""Per rank and per node: who works longer and who waits, in the cells that are least in balance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.checks.slow_ranks import LATE_FROM, RankMeans
from analysis.report.figures.bars import parts_legend
from analysis.report.figures.drawing import WIDTH_IN, Draft, Drawing, finish
from analysis.report.figures.palette import BLUE, GREY, INK, ORANGE, SKY, SURFACE, VERMILLION
from analysis.text import count, fraction, known, one_line, percent, seconds

MAX_BARS = 40
_LEFT_IN = 1.2
MAX_NODES_LISTED = 60

#: What a bar stacks: name, words, colour, hatch.
_STACK = (
    ("data", "data loading", SKY, ""),
    ("compute", "forward and backward", BLUE, ""),
    ("rest", "optimizer, other", GREY, ""),
    ("transfer", "exposed communication", VERMILLION, ""),
    ("wait", "waiting for the slowest rank", ORANGE, "////"),
)


#: The headings of :func:`node_table`; all but the first two are of numbers.
NODE_HEADINGS = (
    *("Host", "Cell", "Ranks", "Runs"),
    *("Works per step", "of it data loading", "Beyond the usual", "Waits", "Step"),
)


def node_table(ranks: RankMeans) -> list[tuple[bool, list[str]]]:
    """Return for each host whether it is late, and its texts; of very many the latest ones."""
    return [
        (
            row["beyond"] >= LATE_FROM,
            [
                one_line(row["host"], limit=80),
                one_line(row["cell_id"], limit=120),
                str(row["ranks"]),
                str(row["n"]),
                seconds(row["useful"]),
                seconds(row["data"]),
                f"{round(100 * row['beyond'], 1) + 0.0:g} %",
                seconds(row["wait"]),
                seconds(row["step"]),
            ],
        )
        for row in ranks.by_host.head(MAX_NODES_LISTED).to_dict("records")
    ]


# -- the figure -----------------------------------------------------------------------


def ranks_figure(ranks: RankMeans, *, balance: Mapping[str, float]) -> Drawing:
    """Return the figure: a bar per rank; per node, where there are too many.

    Args:
        ranks: from :func:`rank_means`.
        balance: the load balance of each cell.
    """
    panels, left_out = _panels(ranks)
    late = pd.concat(panels).loc[lambda rows: rows["beyond"] >= LATE_FROM].sort_values("beyond")
    named = f"{_who(late.iloc[-1])} works longest" if len(late) else "no rank is late"
    cells = ", ".join(
        f"{one_line(panel['cell_id'].iloc[0], limit=80)} (load balance {_balance(panel, balance)})"
        for panel in panels
    )
    draft = Draft(
        name="ranks",
        what="Work and waiting by rank",
        topic="ranks",
        description=f"Stacked bars of the ranks of {cells}: {named}.",
        caption=(
            "Means per step over epochs and runs, of the attribution window, in the cells with the lowest "
            f"load balance. ◀ marks who works longer than usual by {percent(LATE_FROM)} of the step or more."
        ),
        left_out=left_out,
        height_in=0.21 * (sum(map(len, panels)) + 1.4 * len(panels)) + 0.75,
        legend_lines=3,
        left_in=_LEFT_IN,
        with_axis=False,
    )
    return finish(draft, lambda axes: _draw(axes, panels, balance))


def _balance(panel: pd.DataFrame, balance: Mapping[str, float]) -> str:
    return fraction(balance.get(str(panel["cell_id"].iloc[0])), decimals=2)


def _panels(ranks: RankMeans) -> tuple[list[pd.DataFrame], list[str]]:
    panels, left_out = [], []
    room = MAX_BARS // ranks.by_rank["cell_id"].nunique()
    for cell_id, own in ranks.by_rank.groupby("cell_id", sort=False):
        panel = own.sort_values("rank", kind="stable")
        if len(panel) > room:
            left_out.append(f"{count(len(panel), 'rank')} of {one_line(cell_id, limit=60)} drawn by node")
            panel = ranks.by_host[ranks.by_host["cell_id"] == cell_id]
        if len(panel) > room:
            left_out.append(f"the {room} latest of {count(len(panel), 'node')}")
            panel = panel.sort_values("beyond", ascending=False, kind="stable").head(room)
        panels.append(panel)
    return panels, left_out


def _who(row: Mapping[Hashable, Any] | pd.Series) -> str:
    host = one_line(row["host"], limit=40)
    return f"rank {int(row['rank'])} on {host}" if "rank" in row and pd.notna(row["rank"]) else host


def _draw(axes: Axes, panels: Sequence[pd.DataFrame], balance: Mapping[str, float]) -> dict[str, list[str]]:
    tips: dict[str, list[str]] = {}
    ticks, names = [], []
    place = 0.0
    widest = max(float(panel["step"].max()) for panel in panels)
    # A heading begins at the figure's edge: names of cells are long.
    outside = -(_LEFT_IN - 0.04) / (WIDTH_IN * axes.get_position().width)
    for panel in panels:
        cell = one_line(panel["cell_id"].iloc[0], limit=36)
        heading = f"{cell}, load balance {_balance(panel, balance)}"
        edge = axes.get_yaxis_transform()
        style: dict[str, Any] = {"va": "center", "fontsize": "small", "fontweight": "bold", "color": INK}
        axes.text(outside, place, heading, transform=edge, **style)
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
    unit, factor = ("s", 1.0) if widest >= 1 else ("ms", 1e3)
    axes.set(xlim=(0, 1.02 * widest), ylim=(place - 0.5, -0.6), xlabel=f"Time per step ({unit})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * factor:.4g}")
    axes.tick_params(axis="y", length=0)
    parts_legend(axes, [part[1:] for part in _STACK if any((panel[part[0]] > 0).any() for panel in panels)])
    return tips


def _draw_bar(axes: Axes, place: float, row: dict[Hashable, Any]) -> dict[str, list[str]]:
    tips = {}
    left = 0.0
    beyond = (
        f"{percent(abs(row['beyond']), decimals=1)} of the step {'more' if row['beyond'] > 0 else 'less'}"
    )
    for part, words, colour, hatch in _STACK:
        value = row[part]
        if not (known(value) and value > 0):
            continue
        gid = f"rank-{part}-{place:.2f}"
        style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": SURFACE, "linewidth": 0.4}
        (bar,) = axes.barh(place, value, left=left, height=0.74, **style)
        bar.set_gid(gid)
        tips[gid] = [
            f"{_who(row)}, {words}: {seconds(value)} per step\nits own work: {seconds(row['useful'])}, "
            f"{beyond} than usual\n{count(int(row['n']), 'run')}"
        ]
        left += value
    return tips
