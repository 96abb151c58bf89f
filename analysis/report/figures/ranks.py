"""Per rank and per node: who works longer and who waits, in the cells that are least in balance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.checks.stragglers import LATE_FROM
from analysis.data.load import Study
from analysis.report.figures.bars import parts_legend
from analysis.report.figures.drawing import WIDTH_IN, Draft, Drawing, finish
from analysis.report.figures.palette import BLUE, GREY, INK, ORANGE, SKY, SURFACE, VERMILLION
from analysis.stats.typical_rank import usual_value
from analysis.text import MISSING, clean, count, fraction, known, one_line, percent, seconds

#: How many cells are looked at, and of how many runs of each ranks.csv is read.
MAX_CELLS, MAX_RUNS = 2, 5
MAX_BARS = 40
_LEFT_IN = 1.2
MAX_NODES_LISTED = 60

#: The columns of report/nodes.csv, one row per cell and host; times are seconds per step.
NODE_COLUMNS = (
    *("cell_id", "host", "ranks", "n", "useful_sec", "data_sec", "compute_sec", "wait_sec", "transfer_sec"),
    *("step_sec", "beyond_usual"),
)
#: What a bar stacks: name, words, colour, hatch.
_STACK = (
    ("data", "data loading", SKY, ""),
    ("compute", "forward and backward", BLUE, ""),
    ("rest", "optimizer, other", GREY, ""),
    ("transfer", "exposed communication", VERMILLION, ""),
    ("wait", "waiting for the slowest rank", ORANGE, "////"),
)
_TIMES = ("data", "compute", "rest", "useful", "transfer", "wait", "step")


@dataclass(frozen=True)
class Ranks:
    """Means per step of the ranks of the worst cells.

    Attributes:
        by_rank: ``cell_id, host, rank, n`` (runs) and :data:`_TIMES`, ``beyond`` (the useful time
            beyond the usual one, as a share of the step).
        by_host: the same per ``cell_id`` and ``host``, with ``ranks``.
    """

    by_rank: pd.DataFrame
    by_host: pd.DataFrame


def worst_cells(rows: pd.DataFrame) -> list[str]:
    """Return the measured cells of several ranks with the lowest load balance, the worst first."""
    wide = rows[(rows["n"] > 0) & (rows["gpus"] > 1) & rows["load_balance"].notna()]
    order = wide.drop_duplicates("cell_id").sort_values("load_balance", kind="stable")
    return [str(name) for name in order["cell_id"].head(MAX_CELLS)]


def rank_means(study: Study, cells: Sequence[str], runs: pd.DataFrame) -> Ranks | None:
    """Return the means over epochs and runs; None where no run tells its ranks.

    Args:
        study: whose ranks.csv are read.
        cells: from :func:`worst_cells`.
        runs: of :func:`analysis.stats.measured.measure`.
    """
    wanted = runs[runs["measured"] & runs["cell_id"].isin(cells)]
    read = study.ranks_of(wanted.groupby("cell_id", sort=False)["run_id"].head(MAX_RUNS))
    read = read[read[["step_time_sec", "comm_exposed_time_sec", "rank"]].notna().all(axis=1)]
    if not len(read):
        return None
    frame = pd.DataFrame(
        {
            "run_id": read["run_id"].astype("str"),
            "cell_id": read["cell_id"].astype("str"),
            "host": [clean(host) if isinstance(host, str) and host else MISSING for host in read["host"]],
            "rank": read["rank"].astype("int64"),
            "step": read["step_time_sec"],
            "data": read["data_load_time_sec"],
            "compute": read["forward_time_sec"] + read["backward_time_sec"],
            "useful": read["step_time_sec"] - read["comm_exposed_time_sec"],
            "wait": read["comm_wait_time_sec"],
        }
    )
    frame["rest"] = frame["useful"] - frame["data"].fillna(0) - frame["compute"].fillna(0)
    frame["transfer"] = read["comm_exposed_time_sec"] - frame["wait"].fillna(0)
    order = {cell: place for place, cell in enumerate(cells)}
    frame["place"] = frame["cell_id"].map(order)
    return Ranks(_means(frame, ["place", "cell_id", "host", "rank"]), _by_host(frame))


def _means(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    groups = frame.groupby(keys)
    means = groups[list(_TIMES)].mean()
    means["n"] = groups["run_id"].nunique()
    means = means.reset_index()
    by_cell = means.groupby("cell_id")
    usual = usual_value(means, "useful", among=["cell_id"])
    means["beyond"] = (means["useful"] - usual) / by_cell["step"].transform("max")
    return means


def _by_host(frame: pd.DataFrame) -> pd.DataFrame:
    keys = ["place", "cell_id", "host"]
    means = _means(frame, keys)
    means["ranks"] = frame.groupby(keys)["rank"].nunique().to_numpy()
    return means.sort_values(["place", "beyond"], ascending=[True, False], kind="stable", ignore_index=True)


def nodes_frame(ranks: Ranks) -> pd.DataFrame:
    """Return :data:`NODE_COLUMNS`, the worst cell and its latest host first."""
    names = {"useful": "useful_sec", "data": "data_sec", "compute": "compute_sec", "step": "step_sec"}
    names |= {"wait": "wait_sec", "transfer": "transfer_sec", "beyond": "beyond_usual"}
    return ranks.by_host.rename(columns=names)[list(NODE_COLUMNS)]


#: The headings of :func:`node_table`; all but the first two are of numbers.
NODE_HEADINGS = (
    *("Host", "Cell", "Ranks", "Runs"),
    *("Works per step", "of it data loading", "Beyond the usual", "Waits", "Step"),
)


def node_table(ranks: Ranks) -> list[tuple[bool, list[str]]]:
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


def ranks_figure(ranks: Ranks, *, balance: Mapping[str, float]) -> Drawing:
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


def _panels(ranks: Ranks) -> tuple[list[pd.DataFrame], list[str]]:
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
