"""Compose the page's section about scaling laws: sentences and tables for each series."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from analysis.data.names import widest_series
from analysis.stats.laws.choose import LEVEL, LawFit, fit_laws
from analysis.stats.laws.fit import ALL_SIZES, Refusal, runs_of
from analysis.stats.laws.forms import Fabric
from analysis.stats.measured import Frames
from analysis.text import (
    MISSING,
    count,
    fraction,
    fractions,
    interval,
    known,
    listed,
    number,
    percent,
    seconds,
)

MAX_SERIES = 4
#: The serial fraction hardly changes if its intervals exclude a larger relative change.
_FLAT = 0.5


@dataclass(frozen=True)
class LawSection:
    """The page's section about the laws of one series: heading, sentences, and three tables of texts."""

    heading: str
    sentences: tuple[str, ...]
    parameters: list[tuple[str, ...]]
    laws: list[tuple[str, ...]]
    predictions: list[tuple[str, ...]]


def law_sections(
    rows: pd.DataFrame,
    frames: Frames,
    *,
    labels: Mapping[str, str],
    fabrics: Mapping[str, Fabric] | None = None,
) -> list[LawSection]:
    """Return a part for each of the series with the most measured sizes, in the plan's order.

    ``labels`` maps series to their names, ``fabrics`` to their measured all-reduce.
    """
    measured = rows[(rows["n"] > 0) & (rows["mode"] != "") & rows["ddp"]]
    sections = []
    for series in widest_series(measured, limit=MAX_SERIES):
        own = measured[measured["series"] == series]
        fit = fit_laws(
            runs_of(own, frames), mode=str(own["mode"].iloc[0]), probes=(fabrics or {}).get(series)
        )
        sections.append(_section(own, fit, heading=labels.get(series, series)))
    return sections


def _section(own: pd.DataFrame, fit: LawFit | Refusal, *, heading: str) -> LawSection:
    trend = serial_fraction_trend(own)
    if isinstance(fit, Refusal):
        return LawSection(heading, tuple(filter(None, (trend, f"No law is fitted: {fit}."))), [], [], [])
    in_seconds = bool(own["step_time_sec"].notna().all())
    path = "" if fit.path == ALL_SIZES else f" Sizes: {fit.path}."
    choice = f"{choice_text(fit)}{path} Noise of individual runs: {percent(fit.chosen.noise, decimals=1)}."
    return LawSection(
        heading,
        tuple(filter(None, (trend, choice, _why_no_prediction(own)))),
        _parameter_rows(fit, in_seconds=in_seconds),
        _law_rows(fit),
        _prediction_rows(own, fit, in_seconds=in_seconds),
    )


def choice_text(fit: LawFit) -> str:
    """Return sentences that give the reason for the chosen law."""
    title = fit.chosen.law.title
    others = [law.law.title for law in fit.plausible if law is not fit.chosen and not law.refused]
    error = percent(abs(fit.chosen.leave_last_error), decimals=1)
    runs = count(fit.runs, "run")
    if fit.by_aicc:
        text = f"{title} has the lowest AICc over {runs}. "
        text += f"Fitted to the other sizes, it predicts the largest to within {error}"
    else:
        text = f"{title} predicts the largest size best when fitted without it (error {error}); "
        text += f"{runs} are too few for AICc"
    if others:
        text += f". Laws with nearly the same support: {listed(others)}; the intervals include their results"
    return f"{text}."


def _parameter_rows(fit: LawFit, *, in_seconds: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    chosen = fit.chosen
    table = zip(chosen.law.parameters, chosen.theta, chosen.low, chosen.high, strict=True)
    for parameter, value, low, high in table:
        if not parameter.unit:
            text, bounds = number(value, digits=3), interval(low, high, digits=3)
        elif in_seconds:
            text, bounds = seconds(value), f"[{seconds(low)}, {seconds(high)}]"
        else:
            continue
        rows.append((parameter.name, text, bounds, parameter.meaning))
    return rows


def _law_rows(fit: LawFit) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for law in fit.table.to_dict("records"):
        delta = number(law["delta_aicc"], digits=3) if known(law.get("delta_aicc")) else MISSING
        error = percent(law.get("leave_last_error"), decimals=1)
        reason = law.get("reason") or ""
        verdict = f"refused: {reason}" if law["status"] == "refused" else law["status"]
        rows.append((law["title"], law["formula"], delta, error, verdict))
    return rows


def _why_no_prediction(own: pd.DataFrame) -> str:
    """Return a sentence if a law has no prediction because the law does not describe the baseline."""
    if own["is_base"].any():
        return ""
    return (
        f"No prediction: the baseline is {own['baseline'].iloc[0]}, but the law describes only sizes with "
        "DDP. Choose a size with DDP as the baseline (--baseline)."
    )


def _prediction_rows(own: pd.DataFrame, fit: LawFit, *, in_seconds: bool) -> list[tuple[str, ...]]:
    """Predict the row of twice the largest size; efficiencies are relative to the law's baseline value."""
    base = own[own["is_base"]]
    if not len(base):
        return []
    first = base.iloc[0]
    fitted = float(fit.chosen.curve(own["gpus"].to_numpy(dtype=float)[own["is_base"].to_numpy()])[0])
    rows: list[tuple[str, ...]] = []
    for row in fit.predict([2 * fit.largest], LEVEL).to_dict("records"):
        growth = row["gpus"] / first["gpus"] if fit.mode == "strong" else 1.0
        values = [fitted / row[name] / growth for name in ("step_time_sec", "high", "low")]
        time = seconds(row["step_time_sec"]) if in_seconds else MISSING
        if in_seconds:
            time += f" [{seconds(row['low'])}, {seconds(row['high'])}]"
        rows.append((f"{row['gpus']:,}", time, fraction(values[0]), fractions(*values[1:])))
    return rows


def serial_fraction_trend(own: pd.DataFrame) -> str:
    """Return a sentence about Karp-Flatt's serial fraction over the sizes of a strong series, or nothing.

    A trend is stated only if the intervals of the first and the last size support it.
    """
    known_rows = own[own["karp_flatt"].notna()].drop_duplicates("gpus")
    if len(known_rows) < 2:
        return ""
    ends = [_bounds(row) for _, row in known_rows.iterrows()]
    pairs = zip(known_rows["gpus"], known_rows["karp_flatt"], ends, strict=True)
    values = [f"{number(v, digits=2)} {interval(*e, digits=2)}".strip() + f" at {n}" for n, v, e in pairs]
    text = f"Serial fraction by Karp and Flatt: {listed(values, limit=8)} ranks"
    return f"{text}. {_trend(ends[0], ends[-1], values=known_rows['karp_flatt'])}"


def _trend(first: tuple[float, float], last: tuple[float, float], *, values: pd.Series) -> str:
    """Return what the intervals of the serial fraction at the first and the last size say."""
    if not all(known(bound) for bound in (*first, *last)):
        return "A trend is not stated without intervals, which need 3 runs."
    if last[0] > first[1]:
        return (
            "It grows with the size: additional ranks cause the loss (communication, imbalance), not a fixed "
            "serial part."
        )
    if last[1] < first[0]:
        return "It falls with the size: the smallest sizes have a loss that larger ones do not have."
    if max(first[1], last[1]) <= 0:
        return "It is not above 0: the speedup is at least ideal."
    centres, halves = ([(high + sign * low) / 2 for low, high in (first, last)] for sign in (1, -1))
    largest_change = abs(centres[1] - centres[0]) + math.hypot(*halves)
    if largest_change <= _FLAT * abs(float(values.mean())):
        return "It hardly changes, which is consistent with a fixed serial part."
    return "Whether it changes with the size cannot be told from these intervals."


def _bounds(row: pd.Series) -> tuple[float, float]:
    """Return the lower and upper ends of the serial fraction's interval, from those of the speedup."""
    times = float(row["gpus"]) / float(row["base_gpus"])
    low, high = (
        (1 / float(row[name]) - 1 / times) / (1 - 1 / times) for name in ("speedup_high", "speedup_low")
    )
    return low, high
