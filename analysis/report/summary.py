"""Describe in sentences how far each series scales, why it loses efficiency, and how certain this is."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from analysis.checks.recommendation import (
    Invalid,
    Recommendation,
    efficiency_text,
    recommend,
    valid_causes,
    what_decides,
)
from analysis.data.names import ranks, widest_series, with_layout
from analysis.stats.losses import LOSSES, SHORT_NAMES, Causes
from analysis.stats.scaling import GUIDE
from analysis.text import count, fraction, known, listed, number, percent

MAX_SERIES = 4
#: Maximum number of sizes that the sentence about undecided sizes names.
_MAX_OPEN = 3
#: If causes of a larger share of the loss are uncertain, this is reported.
_LARGE_REST = 0.02
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


def find(
    rows: pd.DataFrame, *, labels: dict[str, str], invalid: Invalid | None = None
) -> list[SeriesFinding]:
    """Return a finding for each of the series with the most measured sizes, in the plan's order.

    ``invalid`` maps cells whose values are not valid to the reason.
    """
    based = rows[rows["efficiency"].notna()].copy()
    based["several"] = based.duplicated(["series", "gpus"], keep=False)
    return [
        _finding(
            based[based["series"] == series], rows, label=labels.get(series, series), invalid=invalid or {}
        )
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
        f"whole training, not a parallel efficiency.{_fastest(timed, last)}"
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


def _finding(rows: pd.DataFrame, table: pd.DataFrame, *, label: str, invalid: Invalid) -> SeriesFinding:
    last = rows.iloc[-1]
    base = table.iloc[int(last["base_place"])]
    found = recommend(rows, base, invalid=invalid)
    causes = valid_causes(last, base, invalid=invalid)
    main = causes.main
    best_size, best_detail = _best_tile(found, base, invalid)
    return SeriesFinding(
        series=str(last["series"]),
        heading=label,
        sentences=(
            _speedup_sentence(last, base) + _fastest(rows, last),
            _best_sentence(found, base, invalid),
            _loss_sentence(last, base, causes),
        ),
        best_size=best_size,
        best_detail=best_detail,
        speedup=f"{number(last['speedup'], digits=3)}×",
        speedup_detail=f"on {_size(last)}; ideal {number(last['gpus'] / base['gpus'], digits=3)}×",
        main_loss=SHORT_NAMES[main.factor] if main else causes.short,
        loss_detail=f"{percent(main.share)} of the loss on {_size(last)}" if main else f"on {_size(last)}",
    )


def _size(row: pd.Series) -> str:
    return with_layout(row) if row["several"] else ranks(row)


def _speedup_sentence(last: pd.Series, base: pd.Series) -> str:
    relation = "as fast as" if last["mode"] == "strong" else "the throughput of"
    return (
        f"{_size(last)}: {number(last['speedup'], digits=3)} times {relation} {base['baseline']}, "
        f"an efficiency of {efficiency_text(last)}."
    )


def _fastest(rows: pd.DataFrame, last: pd.Series) -> str:
    """Return a sentence about the fastest size if it is not the largest, else an empty text."""
    fastest = rows.sort_values("speedup", kind="stable").iloc[-1]
    if fastest["gpus"] >= last["gpus"]:
        return ""
    times = number(fastest["speedup"], digits=3)
    return f" The fastest measured size is {ranks(fastest)}, with a speedup of {times}."


def _best_tile(found: Recommendation, base: pd.Series, invalid: Invalid) -> tuple[str, str]:
    """Return the recommended size and its reason, for the page's tile."""
    if found.best is not None:
        return _size(found.best), f"largest with efficiency ≥ {GUIDE}"
    if len(found.open):
        row = found.open.iloc[0]
        return (
            "cannot tell",
            f"{_size(row)}: {efficiency_text(row)}; {what_decides(row, base, invalid=invalid)}",
        )
    closest = found.closest
    if closest is None:
        return f"no more than {ranks(base)}", "no larger size has an efficiency"
    value = fraction(closest["efficiency"], decimals=2)
    return f"no more than {ranks(base)}", f"{_size(closest)} come closest to {GUIDE}, with {value}"


def _best_sentence(found: Recommendation, base: pd.Series, invalid: Invalid) -> str:
    best, closest = found.best, found.closest
    if best is not None:
        text = f"The largest size with an efficiency of at least {GUIDE} is {_size(best)}: "
        text += efficiency_text(best)
        between = found.below[found.below["gpus"] < best["gpus"]]
        if len(between):
            sizes = ", ".join(str(size) for size in sorted(set(between["gpus"]))[:4])
            text += f"; smaller sizes are below {GUIDE} ({sizes} ranks)"
        return f"{text}.{_open_sentence(found, base, invalid)}"
    if len(found.open):
        return _open_sentence(found, base, invalid).strip()
    if closest is None:
        return "No size beyond the baseline has an efficiency."
    return (
        f"No size beyond the baseline reaches an efficiency of {GUIDE}: {_size(closest)} come closest, with "
        f"{efficiency_text(closest)}."
    )


def _open_sentence(found: Recommendation, base: pd.Series, invalid: Invalid) -> str:
    """Return a sentence about the sizes for which the runs cannot tell, or nothing."""
    if not len(found.open):
        return ""
    first = found.open.iloc[0]
    shown = [f"{_size(row)}, with {efficiency_text(row)}" for _, row in found.open.head(_MAX_OPEN).iterrows()]
    more = len(found.open) - len(shown)
    names = "; ".join([*shown, *([f"{more} more"] if more else [])])
    need = what_decides(first, base, invalid=invalid)
    return f" The runs cannot tell whether these sizes reach {GUIDE}: {names}. For {_size(first)}, {need}."


def _loss_sentence(last: pd.Series, base: pd.Series, causes: Causes) -> str:
    if causes.hardly_any:
        return f"There is hardly any loss to explain on {_size(last)}{_loading(last)}."
    if not causes.losses:
        return f"The causes of the loss are not known: {causes.unknown}."
    text = f"Of the loss on {_size(last)}, {listed(describe_losses(causes))}{_loading(last)}."
    attributed = last["global_efficiency"] / base["pop_parallel_efficiency"]
    if abs(attributed / last["efficiency"] - 1) > _AGREE:
        measured = fraction(attributed, decimals=2)
        text += (
            f" The attribution window, which gives these shares, has an efficiency of {measured}: the shares "
            "are rough."
        )
    return text


def describe_losses(causes: Causes, *, verb: str = "is ") -> list[str]:
    """Return the share and the cause of each certain loss, and the share of the others; empty without one."""
    if not causes.losses:
        return []
    texts = [f"{percent(loss.share)} {verb}{LOSSES[loss.factor]}" for loss in causes.losses]
    rest = 1 - sum(loss.share for loss in causes.losses)
    return [*texts, *([f"the cause of {percent(rest)} cannot be told"] if rest >= _LARGE_REST else [])]


def _loading(row: pd.Series) -> str:
    """Mention a large share of data loading, which costs no efficiency if it is equal at every size."""
    share = float(row["data"] / row["useful_s"] * row["pop_parallel_efficiency"])
    if not known(share) or share < _MUCH_LOADING:
        return ""
    return f"; data loading takes {percent(share)} of the step"
