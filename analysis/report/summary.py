"""Describe how far each series scales, what it loses most by, and how certain that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.causes.catalogue import NOT_EXPLAINED
from analysis.causes.cells import CellDivision
from analysis.causes.divide import WHOLE
from analysis.causes.table import rest_parts
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
from analysis.stats.columns import ScalingRow
from analysis.stats.estimate import MIN_RUNS
from analysis.stats.scaling import GUIDE
from bench.units import MISSING, count, fraction, known, listed, number, percent
from bench.words import about, heading, term

MAX_SERIES = 4
#: Maximum number of sizes that the sentence about undecided sizes names.
_MAX_OPEN = 3
#: A smaller loss without a named cause is mostly noise: a share of the step, or a loss of efficiency.
_HARDLY_ANY = 0.03
#: If the interval of the efficiency begins below this value, the loss of efficiency may be larger.
_HARDLY_ANY_LOW = 0.9


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
    rows: Sequence[ScalingRow],
    divisions: Mapping[int, CellDivision],
    *,
    labels: dict[str, str],
    invalid: Invalid | None = None,
) -> list[SeriesFinding]:
    """Return a finding for each of the series with the most measured sizes, in the plan's order.

    ``labels`` maps series to their names. ``invalid`` maps cells whose values are not valid to the reason.
    """
    based = [row for row in rows if known(row.efficiency)]
    return [
        _finding(
            [row for row in based if row.series == series],
            rows,
            divisions,
            label=labels.get(series, series),
            invalid=invalid or {},
        )
        for series in widest_series(based, limit=MAX_SERIES)
    ]


def no_finding(rows: Sequence[ScalingRow]) -> str:
    """Return sentences about why no series has an efficiency."""
    if widest_series([row for row in rows if row.n], limit=1):
        return (
            "The measured sizes cannot be compared with each other, so there is no speedup and no "
            "efficiency. The reasons are in scaling.csv."
        )
    return "No series has two measured sizes, so there is no speedup and no efficiency."


def certainty(rows: Sequence[ScalingRow]) -> str:
    """Return the number of runs per cell and the width of the intervals."""
    cells = {row.cell_id: row for row in rows if row.n}.values()
    if not cells:
        return "Nothing has been measured yet."
    low, high = min(row.n for row in cells), max(row.n for row in cells)
    runs = count(low, "run") if low == high else f"{low} to {high} runs"
    relative = [(row.throughput_high / row.throughput_low) ** 0.5 - 1 for row in cells]
    known_widths = sorted(filter(known, relative))
    if known_widths:
        text = f"{runs} per cell; the 95 % interval of a throughput is "
        if len(known_widths) < 3:
            text += " or ".join(dict.fromkeys(map(_width, known_widths)))
            text += f" ({count(len(known_widths), 'cell')})"
        else:
            narrow, wide = (_width(known_widths[place]) for place in (0, -1))
            text += narrow if narrow == wide else f"{narrow} for the narrowest cell and {wide} for the widest"
            text += f" ({count(len(known_widths), 'cell')})"
        if without := len(relative) - len(known_widths):
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


def left_out_sentence(rows: Sequence[ScalingRow]) -> str:
    """Return the efficiencies over all runs, including those left out, if they differ; else an empty text."""
    texts = [
        f"{text} on {ranks(row)}"
        for row in rows
        if known(row.efficiency)
        and (text := fraction(row.efficiency_all)) not in (MISSING, fraction(row.efficiency))
    ]
    return f" With the runs that are left out, E is {listed(texts)}." if texts else ""


def _finding(
    rows: Sequence[ScalingRow],
    table: Sequence[ScalingRow],
    divisions: Mapping[int, CellDivision],
    *,
    label: str,
    invalid: Invalid,
) -> SeriesFinding:
    last = rows[-1]
    base = last.base or last
    found = recommend(rows, base, invalid=invalid)
    lacking = without_result(table, base, series=last.series)
    division = divisions.get(last.place)
    warned = invalid_reason(last, base, invalid)
    title, share = ("not valid", math.nan) if warned else main_loss(division, last)
    best_size, best_detail = _best_tile(found, base, invalid)
    # The tile of the speedup is about the size that the tile beside it recommends.
    shown = last if found.best is None else found.best
    return SeriesFinding(
        series=last.series,
        heading=label,
        sentences=(
            _speedup_sentence(last, base) + _fastest(rows, last) + left_out_sentence(rows),
            _best_sentence(found, base, invalid, lacking),
        ),
        best_size=best_size,
        best_detail=best_detail,
        speedup="not valid"
        if invalid_reason(shown, base, invalid)
        else f"{number(shown.speedup, digits=3)}×",
        speedup_detail=f"on {_size(shown)}; ideal {number(shown.gpus / base.gpus, digits=3)}×",
        main_loss=title,
        loss_detail=f"{percent(share)} of the step on {_size(last)}" if known(share) else f"on {_size(last)}",
    )


def _size(row: ScalingRow) -> str:
    return with_layout(row) if row.several else ranks(row)


def _speedup_sentence(last: ScalingRow, base: ScalingRow) -> str:
    relation = "as fast as" if last.mode == "strong" else "the throughput of"
    return (
        f"{_size(last)}: {number(last.speedup, digits=3)} times {relation} {base.baseline}, "
        f"an efficiency of {efficiency_text(last)}."
    )


def _fastest(rows: Sequence[ScalingRow], last: ScalingRow) -> str:
    """Return a sentence about the fastest size if it is not the largest, else an empty text."""
    fastest = max(reversed(rows), key=lambda row: row.speedup)
    if fastest.gpus >= last.gpus:
        return ""
    times = number(fastest.speedup, digits=3)
    return f" The fastest measured size is {ranks(fastest)}, with a speedup of {times}."


def _best_tile(found: Recommendation, base: ScalingRow, invalid: Invalid) -> tuple[str, str]:
    """Return the recommended size and its reason, for the page's tile."""
    if found.best is not None:
        return _size(found.best), f"largest with efficiency ≥ {GUIDE}"
    if len(found.open):
        row = found.open[0]
        title = "not valid" if invalid_reason(row, base, invalid) else "cannot tell"
        detail = f"{_size(row)}: {efficiency_text(row)}; {what_decides(row, base, invalid=invalid)}"
        return title, detail
    closest = found.closest
    if closest is None:
        return f"no more than {ranks(base)}", "no larger size has an efficiency"
    value = fraction(closest.efficiency, decimals=2)
    return f"no more than {ranks(base)}", f"{_size(closest)} come closest to {GUIDE}, with {value}"


def _best_sentence(found: Recommendation, base: ScalingRow, invalid: Invalid, lacking: str) -> str:
    best, closest = found.best, found.closest
    if best is not None:
        text = f"The largest size with an efficiency of at least {GUIDE} is {_size(best)}: "
        text += efficiency_text(best)
        if between := {row.gpus for row in found.below if row.gpus < best.gpus}:
            sizes = ", ".join(str(size) for size in sorted(between)[:4])
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


def _open_sentence(found: Recommendation, base: ScalingRow, invalid: Invalid) -> str:
    """Return sentences about sizes that the runs neither recommend nor rule out; empty without any."""
    unclear = [row for row in found.open if not invalid_reason(row, base, invalid)]
    text = ""
    if unclear:
        decides = what_decides(unclear[0], base)
        text += f" The runs cannot tell whether these sizes reach {GUIDE}: {_sizes(unclear)}."
        text += f" For {_size(unclear[0])}, {decides}."
    not_valid = [row for row in found.open if invalid_reason(row, base, invalid)]
    if not_valid:
        errors = list(dict.fromkeys(heading(invalid_reason(row, base, invalid)) for row in not_valid))
        text += f" Nothing is concluded from values that are not valid: {_sizes(not_valid)}."
        text += f" See {'the error' if len(errors) == 1 else 'the errors'} {listed(errors)}."
    return text


def _sizes(rows: Sequence[ScalingRow]) -> str:
    """Return some sizes, each with its efficiency."""
    shown = [f"{_size(row)}, with {efficiency_text(row)}" for row in rows[:_MAX_OPEN]]
    more = len(rows) - len(shown)
    return "; ".join([*shown, *([f"{more} more"] if more else [])])


# -- the main loss --------------------------------------------------------------------


def main_loss(division: CellDivision | None, row: ScalingRow) -> tuple[str, float]:
    """Return the title and the share of the largest part of a loss: a cause, else a part of the step.

    The share is NaN if the title says that there is hardly any loss, or that its cause is not known.
    """
    if division is None or WHOLE in division.ideal:
        return "not known", math.nan
    if _hardly_any(division, row):
        return "hardly any", math.nan
    shares = [(about(one.causes, "title"), one.share) for one in division.rows if one.cause != NOT_EXPLAINED]
    rest = next(one for one in division.rows if one.cause == NOT_EXPLAINED)
    if not rest.share_low <= 0:
        shares += [(term("part", part), share) for part, share in rest_parts(division)]
    title, share = max(shares, key=lambda one: one[1] if known(one[1]) else 0.0)
    return (title, share) if share >= _HARDLY_ANY else ("cannot tell", math.nan)


def _hardly_any(division: CellDivision, row: ScalingRow) -> bool:
    small = division.loss < _HARDLY_ANY
    small |= row.efficiency > 1 - _HARDLY_ANY and row.efficiency_low >= _HARDLY_ANY_LOW
    return small and all(one.is_rest for one in division.rows)
