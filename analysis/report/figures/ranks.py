"""Work and waiting by rank, or by node, in the cells with the lowest load balance."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from analysis.checks.slow_ranks import LATE_FROM, MeanTimes
from analysis.data.columns import grouped
from analysis.data.names import ranks as number_of_ranks
from analysis.report.figures.bars import PARTS, Bars
from analysis.report.figures.drawing import Drawing, figure
from analysis.report.results import Results
from analysis.text import one_line
from ddp_scaling_bench.units import count, fraction, percent

#: With more ranks, the figure has a bar per node.
MAX_BARS = 40
#: The longest name of a cell, in characters.
_MAX_NAME = 36
#: The parts of the bar of a rank in the order of stacking.
_PARTS = {
    **{name: PARTS[name] for name in ("data", "compute")},
    "rest": PARTS["other"]._replace(words="optimizer, other"),
    **{name: PARTS[name] for name in ("transfer", "wait")},
}


@figure("ranks")
def ranks_figure(results: Results) -> Iterator[Drawing]:
    """Draw a bar per rank, or per node if there are too many ranks, if a run has ranks.csv."""
    if results.ranks is None:
        return
    names = {
        row.cell_id: f"{number_of_ranks(row)}, {results.labels[0][row.series]}" for row in results.rows[::-1]
    }
    balance = {row.cell_id: fraction(row.load_balance, decimals=2) for row in results.rows}
    by_rank, by_host = (grouped(own, lambda one: one.cell_id) for own in results.ranks)
    bars, left_out, drawn = Bars(1.25), [], []
    room = MAX_BARS // len(by_rank)
    for cell_id, own in by_rank.items():
        every = sorted(own, key=lambda bar: bar.rank or 0)
        if len(every) > room:
            left_out.append(f"{count(len(every), 'rank')} of {one_line(cell_id, limit=60)} drawn by node")
            every = by_host[cell_id]
        if len(every) > room:
            left_out.append(f"the {room} slowest of {count(len(every), 'node')} drawn")
            every = sorted(every, key=lambda bar: -bar.beyond)[:room]
        bars.add_heading(f"{one_line(names[cell_id], limit=_MAX_NAME)}, LB {balance.get(cell_id)}")
        for bar in every:
            label = "" if bar.rank is None else f"{bar.rank} · "
            name = f"{label}{one_line(bar.host, limit=14)}{' ◀' if bar.late else ''}"
            bars.add(name, {part: getattr(bar, part) for part in _PARTS})
        drawn += every
    late = max((bar for bar in drawn if bar.late), key=lambda bar: bar.beyond, default=None)
    longest = f"{_name(late)} works longest" if late else "no rank is late"
    cells = "; ".join(f"{one_line(cell, limit=80)}, load balance {balance.get(cell)}" for cell in by_rank)
    drawing = Drawing(
        name="ranks",
        subject="Work and waiting by rank",
        topic="ranks",
        description=f"Stacked bars of the ranks of {cells}: {longest}.",
        caption=(
            f"Cells with the lowest load balance (LB). ◀: late (by {percent(LATE_FROM)} of the step or more) "
            "in most runs; the others wait for it."
        ),
        left_out=left_out,
    )

    panel = partial(_draw, bars=bars)
    yield drawing.draw(panel, height_in=bars.height_in + 0.5, left_in=bars.left_in)


def _draw(axes: Axes, *, bars: Bars) -> None:
    bars.draw(axes, _PARTS)
    axes.set_xlim(0, 1.02 * bars.longest)
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    unit, factor = next(one for one in units if bars.longest * one[1] >= 1 or one[0] == "µs")
    axes.set_xlabel(f"Time per step ({unit})")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * factor:.4g}"))


def _name(bar: MeanTimes) -> str:
    host = one_line(bar.host, limit=40)
    return host if bar.rank is None else f"rank {bar.rank} on {host}"
