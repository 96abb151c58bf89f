"""Describe in sentences how far each series scales, why it loses efficiency, and how certain this is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.data.names import ranks, widest_series, with_layout
from analysis.stats.losses import (
    LOSSES,
    SHORT_NAMES,
    SMALLEST_SHARE,
    Loss,
    hardly_any_loss,
    losses,
    why_unknown,
)
from analysis.stats.scaling import GUIDE
from analysis.text import count, fraction, fractions, known, listed, number, percent

MAX_SERIES = 4
#: Data loading is reported if it takes at least this share of the step.
_MUCH_LOADING = 0.1
#: Attribution and throughput windows agree if their efficiencies differ by at most this share.
_AGREE = 0.05


@dataclass(frozen=True)
class SeriesFinding:
    """The finding about one series: a heading, sentences, and the texts of the page's three tiles."""

    series: str
    heading: str
    sentences: tuple[str, ...]
    best_size: str
    best_detail: str
    speedup: str
    speedup_detail: str
    main_loss: str
    loss_detail: str


def find(rows: pd.DataFrame, *, labels: dict[str, str]) -> list[SeriesFinding]:
    """Return a finding for each of the series with the most measured sizes, in the plan's order."""
    based = rows[rows["efficiency"].notna()].copy()
    based["several"] = based.duplicated(["series", "gpus"], keep=False)
    return [
        _finding(based[based["series"] == series], rows, label=labels.get(series, series))
        for series in widest_series(based, limit=MAX_SERIES)
    ]


def no_finding(rows: pd.DataFrame) -> str:
    """Return sentences about why no series has an efficiency."""
    timed = rows[rows["to_train"] & rows["speedup"].notna() & ~rows["is_base"]]
    if not len(timed):
        sizes = rows[rows["n"] > 0].groupby("series")["gpus"].nunique()
        if (sizes > 1).any():
            return (
                "The measured sizes cannot be compared with each other, so there is no speedup and no "
                "efficiency. The table of all cells gives the reasons."
            )
        return "No series has two measured sizes, so there is no speedup and no efficiency."
    last = timed.sort_values("gpus", kind="stable").iloc[-1]
    times = number(last["speedup"], digits=3)
    return (
        f"{ranks(last)} trained {times} times as fast as {last['baseline']}. A time to "
        "train includes convergence, which changes with the global batch. This is therefore a speedup of the "
        "whole training, not a parallel efficiency."
    )


def certainty(rows: pd.DataFrame) -> str:
    """Return the number of runs per cell and the width of the intervals."""
    cells = rows[rows["n"] > 0].drop_duplicates("cell_id")
    if not len(cells):
        return "Nothing has been measured yet."
    low, high = int(cells["n"].min()), int(cells["n"].max())
    runs = count(low, "run") if low == high else f"{low} to {high} runs"
    relative = (cells["throughput_high"] / cells["throughput_low"]) ** 0.5 - 1
    if relative.notna().any():
        typical = float(relative.median())
        width = percent(typical, decimals=1 if typical < 0.1 else 0)
        text = f"{runs} per cell; the 95 % interval of a throughput is ±{width} (median over cells)"
        if without := int(relative.isna().sum()):
            text += f"; no interval for {count(without, 'cell')} with fewer than 3 runs"
        return f"{text}."
    return f"{runs} per cell: no intervals (they need 3 runs), so small differences may be chance."


def _finding(rows: pd.DataFrame, table: pd.DataFrame, *, label: str) -> SeriesFinding:
    last = rows.iloc[-1]
    base = table.iloc[int(last["base_place"])]
    best, closest = recommended(rows), closest_to_guide(rows)
    found = [] if hardly_any_loss(last) else losses(last, base)
    main = found[0] if found else None
    unexplained = "hardly any" if hardly_any_loss(last) else "not known"
    return SeriesFinding(
        series=str(last["series"]),
        heading=label,
        sentences=(
            _speedup_sentence(last, base),
            _best_sentence(rows, best, closest),
            _loss_sentence(last, base, found),
        ),
        best_size=_size(best) if best is not None else f"no more than {ranks(base)}",
        best_detail=f"largest with efficiency ≥ {GUIDE}" if best is not None else _closest_detail(closest),
        speedup=f"{number(last['speedup'], digits=3)}×",
        speedup_detail=f"on {_size(last)}; ideal {number(last['gpus'] / base['gpus'], digits=3)}×",
        main_loss=SHORT_NAMES[main.factor] if main else unexplained,
        loss_detail=f"{percent(main.share)} of the loss on {_size(last)}" if main else f"on {_size(last)}",
    )


def _size(row: pd.Series) -> str:
    return with_layout(row) if row["several"] else ranks(row)


def _with_interval(row: pd.Series) -> str:
    bounds = fractions(row["efficiency_low"], row["efficiency_high"], decimals=2)
    return f"{fraction(row['efficiency'], decimals=2)} {bounds}".strip()


def _speedup_sentence(last: pd.Series, base: pd.Series) -> str:
    relation = "as fast as" if last["mode"] == "strong" else "the throughput of"
    return (
        f"{_size(last)}: {number(last['speedup'], digits=3)} times {relation} {base['baseline']}, "
        f"an efficiency of {_with_interval(last)}."
    )


def recommended(rows: pd.DataFrame) -> pd.Series | None:
    """Return the largest size above the baseline with an efficiency of :data:`GUIDE` or more, else None."""
    good = rows[(rows["efficiency"] >= GUIDE) & (rows["gpus"] > rows["base_gpus"])]
    return None if not len(good) else good.sort_values("gpus", kind="stable").iloc[-1]


def closest_to_guide(rows: pd.DataFrame) -> pd.Series | None:
    """Return the size above the baseline with the highest efficiency; None if there is no larger size."""
    larger = rows[rows["gpus"] > rows["base_gpus"]]
    return None if not len(larger) else larger.sort_values("efficiency", kind="stable").iloc[-1]


def _closest_detail(closest: pd.Series | None) -> str:
    if closest is None:
        return "no larger size has an efficiency"
    return f"{_size(closest)} come closest to {GUIDE}, with {fraction(closest['efficiency'], decimals=2)}"


def _best_sentence(rows: pd.DataFrame, best: pd.Series | None, closest: pd.Series | None) -> str:
    if best is None and closest is None:
        return "No size beyond the baseline has an efficiency."
    if best is None:
        assert closest is not None
        best_value = f"{_size(closest)} come closest, with {_with_interval(closest)}"
        return f"No size beyond the baseline reaches an efficiency of {GUIDE}: {best_value}."
    text = f"The largest size with an efficiency of at least {GUIDE} is {_size(best)}: {_with_interval(best)}"
    if known(best["efficiency_low"]) and best["efficiency_low"] < GUIDE:
        text += f" (its interval reaches below {GUIDE}, so this is uncertain)"
    above = rows[(rows["gpus"] > best["gpus"]) & (rows["efficiency_high"] >= GUIDE)]
    if len(above):
        text += f"; {_size(above.iloc[0])}, with {_with_interval(above.iloc[0])}, may reach {GUIDE}, too"
    between = rows[(rows["gpus"] < best["gpus"]) & (rows["efficiency"] < GUIDE)]
    if len(between):
        sizes = ", ".join(str(size) for size in sorted(set(between["gpus"]))[:4])
        text += f"; smaller sizes are below {GUIDE} ({sizes} ranks)"
    return f"{text}."


def _loss_sentence(last: pd.Series, base: pd.Series, found: Sequence[Loss]) -> str:
    if hardly_any_loss(last):
        return f"There is hardly any loss to explain on {_size(last)}{_loading(last)}."
    if not found:
        return f"The causes of the loss are not known: {why_unknown(last, base)}."
    parts = [
        f"{percent(loss.share)} is {LOSSES[loss.factor]}" for loss in found if loss.share >= SMALLEST_SHARE
    ]
    text = f"Of the loss on {_size(last)}, {listed(parts)}{_loading(last)}."
    attributed = last["global_efficiency"] / base["pop_parallel_efficiency"]
    if abs(attributed / last["efficiency"] - 1) > _AGREE:
        measured = fraction(attributed, decimals=2)
        text += (
            f" The attribution window, which gives these shares, has an efficiency of {measured}: the shares "
            "are rough."
        )
    return text


def _loading(row: pd.Series) -> str:
    """Mention a large share of data loading, which costs no efficiency if it is equal at every size."""
    share = float(row["data"] / row["useful_s"] * row["pop_parallel_efficiency"])
    if not known(share) or share < _MUCH_LOADING:
        return ""
    return f"; data loading takes {percent(share)} of the step"
