"""Describe in sentences how far each series scales, why it loses efficiency, and how certain that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.causes.catalogue import NOT_EXPLAINED, OTHER, RESTS, no_causes, title_of
from analysis.causes.cells import CellDivision, Share
from analysis.causes.divide import WHOLE
from analysis.causes.table import LOST_WORDS, rest_parts
from analysis.checks.assessment import Check
from analysis.checks.scaling_table import (
    Invalid,
    Recommendation,
    efficiency_text,
    invalid_reason,
    recommend,
    what_decides,
    without_result,
)
from analysis.data.names import ranks, widest_series, with_layout
from analysis.report.words import WORDS
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.scaling import GUIDE
from analysis.text import MISSING, count, fraction, known, listed, number, percent

MAX_SERIES = 4
#: Maximum number of sizes that the sentence about undecided sizes names.
_MAX_OPEN = 3
#: A smaller loss without a named cause is mostly noise: a share of the step, or a loss of efficiency.
_HARDLY_ANY = 0.03
#: If the interval of the efficiency begins below this value, the loss of efficiency may be larger.
_HARDLY_ANY_LOW = 0.9
#: Losses without a cause below this share of the step are not listed.
_SMALLEST_REST = 0.005


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
    rows: pd.DataFrame,
    divisions: Mapping[int, CellDivision],
    *,
    labels: dict[str, str],
    invalid: Invalid | None = None,
) -> list[SeriesFinding]:
    """Return a finding for each of the series with the most measured sizes, in the plan's order.

    ``labels`` maps series to their names. ``invalid`` maps cells whose values are not valid to the reason.
    """
    based = rows[rows["efficiency"].notna()].copy()
    based["several"] = based.duplicated(["series", "gpus"], keep=False)
    return [
        _finding(
            based[based["series"] == series],
            rows,
            divisions,
            label=labels.get(series, series),
            invalid=invalid or {},
        )
        for series in widest_series(based, limit=MAX_SERIES)
    ]


def no_finding(rows: pd.DataFrame) -> str:
    """Return sentences about why no series has an efficiency."""
    sizes = rows[rows["n"] > 0].groupby("series")["gpus"].nunique()
    if (sizes > 1).any():
        return (
            "The measured sizes cannot be compared with each other, so there is no speedup and no "
            "efficiency. The reasons are in scaling.csv."
        )
    return "No series has two measured sizes, so there is no speedup and no efficiency."


def certainty(rows: pd.DataFrame) -> str:
    """Return the number of runs per cell and the width of the intervals."""
    cells = rows[rows["n"] > 0].drop_duplicates("cell_id")
    if not len(cells):
        return "Nothing has been measured yet."
    low, high = int(cells["n"].min()), int(cells["n"].max())
    runs = count(low, "run") if low == high else f"{low} to {high} runs"
    relative = (cells["throughput_high"] / cells["throughput_low"]) ** 0.5 - 1
    known_widths = sorted(relative.dropna())
    if known_widths:
        text = f"{runs} per cell; the 95 % interval of a throughput is "
        if len(known_widths) < 3:
            text += " or ".join(dict.fromkeys(map(_width, known_widths)))
            text += f" ({count(len(known_widths), 'cell')})"
        else:
            narrow, wide = (_width(known_widths[place]) for place in (0, -1))
            text += narrow if narrow == wide else f"{narrow} for the narrowest cell and {wide} for the widest"
            text += f" ({count(len(known_widths), 'cell')})"
        if without := int(relative.isna().sum()):
            text += f"; no interval for {count(without, 'cell')} with fewer than 3 runs"
        return f"{text}."
    return f"{runs} per cell: no intervals (they need {MIN_RUNS} runs), so small differences may be chance."


def checked(checks: Sequence[Check]) -> str:
    """Return how many checks of validity passed, and name those that were not possible for some cell."""
    passed = sum(check.passed for check in checks)
    text = f"{passed} of {count(len(checks), 'check')} passed"
    if found := [check for check in checks if check.findings]:
        text += f"; {len(found)} found something"
    if missing := [check for check in checks if check.missing]:
        names = listed([_without_values(check) for check in missing])
        text += f"; {len(missing)} not possible, because values were not recorded: {names}"
    return f"{text}."


def _without_values(check: Check) -> str:
    """Return the name of a check, and the number of cells for which it was not possible if not all."""
    words = str(WORDS["checks"][check.name])
    if not check.possible:
        return words
    return f"{words} (for {check.cells - check.possible} of {count(check.cells, 'cell')})"


def _width(relative: float) -> str:
    """Return the ends of an interval from 1/(1 + relative) to 1 + relative, as differences from 1."""
    low, high = (percent(value, decimals=1) for value in (1 - 1 / (1 + relative), relative))
    return f"±{high}" if low == high else f"-{low} to +{high}"


def left_out_sentence(rows: pd.DataFrame) -> str:
    """Return the efficiencies over all runs, including those left out, if they differ; else an empty text."""
    texts = [
        f"{text} on {ranks(row)}"
        for row in rows.to_dict("records")
        if known(row["efficiency"])
        and (text := fraction(row["efficiency_all"])) not in (MISSING, fraction(row["efficiency"]))
    ]
    return f" With the runs that are left out, E is {listed(texts)}." if texts else ""


def _finding(
    rows: pd.DataFrame,
    table: pd.DataFrame,
    divisions: Mapping[int, CellDivision],
    *,
    label: str,
    invalid: Invalid,
) -> SeriesFinding:
    last = rows.iloc[-1]
    base = table.iloc[int(last["base_place"])]
    found = recommend(rows, base, invalid=invalid)
    lacking = without_result(table, base, series=str(last["series"]))
    division = divisions.get(int(str(last.name)))
    warned = invalid_reason(last, base, invalid)
    title, share = ("not valid", math.nan) if warned else main_loss(division, last)
    best_size, best_detail = _best_tile(found, base, invalid)
    # The tile of the speedup is about the size that the tile beside it recommends.
    shown = last if found.best is None else found.best
    return SeriesFinding(
        series=str(last["series"]),
        heading=label,
        sentences=(
            _speedup_sentence(last, base) + _fastest(rows, last) + left_out_sentence(rows),
            _best_sentence(found, base, invalid, lacking),
            loss_sentence(division, last, size=_size(last), not_valid=warned),
        ),
        best_size=best_size,
        best_detail=best_detail,
        speedup="not valid"
        if invalid_reason(shown, base, invalid)
        else f"{number(shown['speedup'], digits=3)}×",
        speedup_detail=f"on {_size(shown)}; ideal {number(shown['gpus'] / base['gpus'], digits=3)}×",
        main_loss=title,
        loss_detail=f"{percent(share)} of the step on {_size(last)}" if known(share) else f"on {_size(last)}",
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
        title = "not valid" if invalid_reason(row, base, invalid) else "cannot tell"
        detail = f"{_size(row)}: {efficiency_text(row)}; {what_decides(row, base, invalid=invalid)}"
        return title, detail
    closest = found.closest
    if closest is None:
        return f"no more than {ranks(base)}", "no larger size has an efficiency"
    value = fraction(closest["efficiency"], decimals=2)
    return f"no more than {ranks(base)}", f"{_size(closest)} come closest to {GUIDE}, with {value}"


def _best_sentence(found: Recommendation, base: pd.Series, invalid: Invalid, lacking: str) -> str:
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
        return f"No size beyond the baseline has an efficiency{lacking}."
    return (
        f"No measured size beyond the baseline reaches an efficiency of {GUIDE}: {_size(closest)} come "
        f"closest, with {efficiency_text(closest)}{lacking}."
    )


def _open_sentence(found: Recommendation, base: pd.Series, invalid: Invalid) -> str:
    """Return sentences about sizes that the runs neither recommend nor rule out; empty without any."""
    sizes = [row for _, row in found.open.iterrows()]
    unclear = [row for row in sizes if not invalid_reason(row, base, invalid)]
    text = ""
    if unclear:
        decides = what_decides(unclear[0], base)
        text += f" The runs cannot tell whether these sizes reach {GUIDE}: {_sizes(unclear)}."
        text += f" For {_size(unclear[0])}, {decides}."
    not_valid = [row for row in sizes if invalid_reason(row, base, invalid)]
    if not_valid:
        reasons = dict.fromkeys(invalid_reason(row, base, invalid) for row in not_valid)
        text += f" Nothing is concluded from values that are not valid: {_sizes(not_valid)}."
        text += f" See {'the error' if len(reasons) == 1 else 'the errors'} {listed(list(reasons))}."
    return text


def _sizes(rows: Sequence[pd.Series]) -> str:
    """Return some sizes, each with its efficiency."""
    shown = [f"{_size(row)}, with {efficiency_text(row)}" for row in rows[:_MAX_OPEN]]
    more = len(rows) - len(shown)
    return "; ".join([*shown, *([f"{more} more"] if more else [])])


# -- the loss and its causes ----------------------------------------------------------


def main_loss(division: CellDivision | None, row: pd.Series) -> tuple[str, float]:
    """Return the title and the share of the largest part of a loss: a cause, else a part of the step.

    The share is NaN if the title says that there is hardly any loss, or that its cause is not known.
    """
    if division is None or WHOLE in division.ideal:
        return "not known", math.nan
    if _hardly_any(division, row):
        return "hardly any", math.nan
    shares = [(title_of(one.key.cause), one.share) for one in division.rows if one.key.cause != NOT_EXPLAINED]
    rest = next(one for one in division.rows if one.key.cause == NOT_EXPLAINED)
    if not rest.low <= 0:
        shares += rest_parts(division)
    title, share = max(shares, key=lambda one: one[1] if known(one[1]) else 0.0)
    return (title, share) if share >= _HARDLY_ANY else ("cannot tell", math.nan)


def loss_sentence(
    division: CellDivision | None,
    row: pd.Series,
    base: CellDivision | None = None,
    *,
    size: str,
    not_valid: str = "",
) -> str:
    """Return sentences about the loss of a cell: its named causes, and what is not assigned to a cause.

    ``base`` is the division of the baseline; with it, the text compares the parts of the step.
    ``not_valid`` is the heading of an error about the values of the cell or of its baseline.
    """
    if not_valid:
        rows = division.rows if division else []
        present = listed([title_of(one.key.cause) for one in rows if one.claim and one.claim.timeless])
        return no_causes(not_valid) + (f" Present, independent of times: {present}." if present else "")
    relative = not row["is_base"] and known(row["efficiency"])
    if division is None or (WHOLE in division.ideal and not relative):
        return "The causes of the loss are not known: there are no times of the parts of a step."
    compared = _compared(division, base) if relative and WHOLE not in division.ideal else ""
    if _hardly_any(division, row):
        if division.loss < _HARDLY_ANY:
            return f"There is hardly any loss to explain on {size}."
        return f"Compared with the baseline, there is hardly any loss on {size}.{compared}"
    rests = [one for one in division.rows if (one.key.cause in RESTS and abs(one.share) >= _SMALLEST_REST)]
    named = [one for one in division.rows if one.key.cause not in RESTS]
    alone = rests[0] if len(rests) == 1 and not named else None
    doubtful = row["efficiency_low"] <= 1 <= row["efficiency_high"]
    lost = share_text(alone) if alone and not doubtful else percent(division.loss)
    lost += f" of the step on {size} is lost{_notes_on_loss(division, row, doubtful=doubtful)}"
    if WHOLE in division.ideal:
        lost = f"Compared with the baseline, {lost}"
    if alone:
        return f"{lost}, not assigned to a cause: {_rest_parts(alone, division)}.{compared}"
    unknown = listed([_rest_text(one, division) for one in rests])
    if not named:
        return f"{lost}, not assigned to a cause: {unknown}.{compared}"
    texts = listed([f"{title_of(one.key.cause)} ({_share_of_runs(one, row)})" for one in named])
    if all(math.isnan(one.share) for one in named):
        divided = f". Not divided among causes: {unknown}" if unknown else ", not divided among causes"
        return f"{lost}{divided}. Present: {texts}.{compared}"
    rest = f" Not assigned to a cause: {unknown}." if unknown else ""
    return f"{lost}: {texts}.{rest}{compared}"


def _share_of_runs(share: Share, row: pd.Series) -> str:
    """Return the share of a cause, and in how many runs it is present if not in all."""
    text = share_text(share, unknown="share not known")
    return f"{text}, in {share.runs} of {row['n']} runs" if 0 < share.runs < row.get("n", 0) else text


def _notes_on_loss(division: CellDivision, row: pd.Series, *, doubtful: bool) -> str:
    """Return the loss of the baseline, from E(N) = (1 - loss(N)) / (1 - loss(N0)), and whether E may be 1."""
    base = 1 - (1 - division.loss) / row["efficiency"]
    shown = WHOLE not in division.ideal and not row["is_base"] and base >= _SMALLEST_REST
    notes = [f"{percent(base)} at the baseline"] if shown else []
    notes += ["not certain: the interval of the efficiency contains 1"] if doubtful else []
    return f" ({'; '.join(notes)})" if notes else ""


def _compared(division: CellDivision, base: CellDivision | None) -> str:
    """Return each lost part of the step, with that of the baseline in brackets, if both were measured."""
    here, there = division.parts, {} if base is None else base.parts
    texts = [
        f"{words} {percent(here[part])} ({percent(there[part])})"
        for part, words in LOST_WORDS.items()
        if part in here and part in there and max(here[part], there[part]) >= _SMALLEST_REST
    ]
    return f" Whole parts of the step (the baseline's in parentheses): {listed(texts)}." if texts else ""


def _hardly_any(division: CellDivision, row: pd.Series) -> bool:
    small = division.loss < _HARDLY_ANY
    small |= row["efficiency"] > 1 - _HARDLY_ANY and row["efficiency_low"] >= _HARDLY_ANY_LOW
    return small and all(one.key.cause in RESTS for one in division.rows)


def _rest_text(row: Share, division: CellDivision) -> str:
    """Return the share of a row without a cause, with the parts of the step."""
    parts = _rest_parts(row, division)
    return f"{share_text(row)} {parts}" if row.key.cause == OTHER else f"{share_text(row)} ({parts})"


def _rest_parts(row: Share, division: CellDivision) -> str:
    if row.key.cause == OTHER:
        return "outside all timers"
    if WHOLE in division.ideal:
        return "the parts of the step were not measured"
    return listed(
        [f"{name} {percent(value)}" for name, value in rest_parts(division) if abs(value) >= _SMALLEST_REST]
    )


def share_text(row: Share, *, unknown: str = MISSING) -> str:
    """Return the share of a row with its interval; ``unknown`` if its time was not measured."""
    if math.isnan(row.share):
        hidden = row.claim is not None and row.claim.share is not None  # by noise
        return "share not certain" if hidden else unknown
    if math.isnan(row.low):
        return percent(row.share)
    if row.high - row.low > 1:
        return f"{percent(row.share)} [share not certain]"
    doubtful = "; share not certain" if row.low <= 0 <= row.high else ""
    return f"{percent(row.share)} [{percent(row.low)}, {percent(row.high)}{doubtful}]"
