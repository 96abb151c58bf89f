"""Parse and format numbers: durations, counts, sizes, shares, ranges; lists of names; the current time."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import groupby
from typing import TypeGuard

#: Text of a value that was not measured, on pages and in figures (CSV cells are empty).
MISSING = "–"

#: Longer names are shortened within sentences.
LONGEST_NAME = 60

_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?"
)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMGBT]?)")
_COUNT_FACTORS = {"": 1, "k": 1_000, "K": 1_000, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}

DURATION_FORMS = "such as 20m, 1h30m, 45s, or Slurm's [days-]hours:minutes:seconds"


def count(amount: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: ``1 run``, ``2 runs``, ``10,000 runs``."""
    return f"{amount:,} {noun if amount == 1 else plural or noun + 's'}"


def join_names(names: Sequence[str], *, most: int = 8) -> str:
    """Join the first ``most`` names by commas; add the number of the remaining names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def parse_duration_s(text: str | int | float) -> int:
    """Parse a duration such as ``20m``, ``1h30m``, ``1-02:00:00`` or ``00:20:00`` into seconds.

    A number without a unit is rejected: Slurm reads it as minutes, but people often mean seconds.

    Raises:
        ValueError: the text is not a duration, or the duration is too short or too long.
    """
    written = str(text).strip()
    match = _DURATION.fullmatch(written)
    if match and any(match.groups()):
        days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
        total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    else:
        total = _clock_s(written)
    if not 1 <= total < 366 * 86400:
        raise ValueError(f"{written!r} is not a duration between 1 second and a year; write one such as 20m")
    return round(total)


def _clock_s(written: str) -> float:
    """Parse Slurm's forms ``m:s``, ``h:m:s``, ``d-h``, ``d-h:m`` and ``d-h:m:s``."""
    match = _CLOCK.fullmatch(written)
    if not match or (":" not in written and "-" not in written):
        raise ValueError(f"{written!r} is not a duration; write one {DURATION_FORMS}")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        parts += [0] * (3 - len(parts))
        return int(days) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
    if len(parts) == 2:
        return parts[0] * 60 + parts[1]
    return parts[0] * 3600 + parts[1] * 60 + parts[2]


def slurm_time(seconds: int) -> str:
    """Format seconds as ``[days-]HH:MM:SS``, which all Slurm releases read in the same way."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{days}-{clock}" if days else clock


def parse_count(text: str | int) -> int:
    """Parse ``124M``, ``1.5B``, ``10k`` or a plain number into an integer.

    Raises:
        ValueError: the text is not a count.
    """
    match = _COUNT.fullmatch(str(text).strip())
    if not match:
        raise ValueError(f"{text!r} is not a count; write a number such as 500000, 10M or 1.5B")
    amount = float(match.group(1)) * _COUNT_FACTORS[match.group(2)]
    if not match.group(2) and amount != round(amount):
        raise ValueError(
            f"{text} is not a whole number; write a number such as 500000, or {text}M with its unit"
        )
    return round(amount)


def human_duration(seconds: float) -> str:
    """Format seconds for reading: ``7 s``, ``4 min 10 s``, ``2 h 05 min`` or ``3 d 4 h``."""
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s" if whole % 60 else f"{whole // 60} min"
    if whole < 86400:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def human_bytes(count: float) -> str:
    """Format a number of bytes: ``512 B``, ``1.5 KiB``, ``32.0 MiB``, ``2.0 GiB``; a dash if unknown."""
    if not known(count):
        return MISSING
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def number_ranges(numbers: Iterable[int]) -> str:
    """Sort numbers and format them as ranges: ``0-2,5`` for 0, 1, 2 and 5."""
    runs = [[n for _, n in group] for _, group in groupby(enumerate(sorted(numbers)), lambda p: p[1] - p[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def known(value: float | None) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number, not None or NaN."""
    # An integer of a damaged file can be larger than any float, for which math.isfinite raises OverflowError.
    return value is not None and abs(value) <= sys.float_info.max


def number(value: float | None, *, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits, and commas from 10,000 on; a dash if unknown."""
    if not known(value):
        return MISSING
    if value == 0:
        return "0"
    scientific = f"{value:.{digits - 1}e}"
    rounded, magnitude = float(scientific), int(scientific.partition("e")[2])
    if not -4 <= magnitude < 15:
        return scientific
    decimals = max(digits - 1 - magnitude, 0)
    return f"{rounded:,.{decimals}f}" if abs(rounded) >= 10_000 else f"{rounded:.{decimals}f}"


def whole(value: float | None) -> str:
    """Format a count such as a batch: no decimals if it is whole, otherwise two; a dash if unknown."""
    if not known(value):
        return MISSING
    return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"


def fraction(value: float | None, *, decimals: int = 3) -> str:
    """Format an efficiency or another ratio near 1 with fixed decimals; a dash if unknown."""
    if not known(value):
        return MISSING
    return f"{value:.{decimals}f}" if abs(value) < 1000 else number(value)


def percent(value: float | None, *, decimals: int = 0) -> str:
    """Format a share as ``23 %``; a dash if unknown."""
    if not known(value):
        return MISSING
    return f"{round(100 * value, decimals) + 0.0:.{decimals}f} %"  # + 0.0: no "-0"


def short_percent(value: float) -> str:
    """Return a share as ``2 %`` or ``2.5 %``, with a decimal only if it is not 0."""
    return percent(value, decimals=1).replace(".0 %", " %")


def seconds(value: float | None, *, digits: int = 3) -> str:
    """Return a time with a suitable unit: ``820 µs``, ``115 ms``, ``1.23 s``."""
    if not known(value):
        return MISSING
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= factor:
            return f"{number(value / factor, digits=digits)} {unit}"
    return f"{number(value / 1e-6, digits=digits)} µs"


def interval(low: float | None, high: float | None, *, digits: int = 4) -> str:
    """Return ``[low, high]``, or an empty text if there is no interval."""
    if not (known(low) and known(high)):
        return ""
    return f"[{number(low, digits=digits)}, {number(high, digits=digits)}]"


def fractions(low: float | None, high: float | None, *, decimals: int = 3) -> str:
    """Return the interval of an efficiency as ``[0.812, 0.846]``, or an empty text if there is none."""
    if not (known(low) and known(high)):
        return ""
    return f"[{fraction(low, decimals=decimals)}, {fraction(high, decimals=decimals)}]"


def listed(items: list[str], *, limit: int = 5) -> str:
    """Return ``a, b and c``; beyond ``limit`` items ``a, b and 7 more``."""
    if len(items) > limit:
        items = [*items[: limit - 1], f"{len(items) - limit + 1} more"]
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def short_name(value: object) -> str:
    """Return a name within a sentence, shortened to :data:`LONGEST_NAME` characters."""
    text = str(value)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def cut(text: str, *, limit: int) -> str:
    """Return a text with at most ``limit`` characters, which ends after a word if it has several."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - 1].rpartition(' ')[0] or text[: limit - 2]} …"


#: The most names in a sentence.
MOST_NAMES = 4


def names(values: Iterable[object], *, limit: int = MOST_NAMES) -> str:
    """Return some names within a sentence as ``a, b and c``; beyond ``limit``, ``a, b and 7 more``."""
    return listed([short_name(value) for value in values], limit=limit)


def clauses(texts: Sequence[str], *, limit: int = 5) -> str:
    """Join the first ``limit`` texts by semicolons; add the number of the remaining ones."""
    more = [f"and {len(texts) - limit} more"] if len(texts) > limit else []
    return "; ".join([*texts[:limit], *more])


def signed_percent(change: float) -> str:
    """Return a relative change as ``+2.5 %`` or ``-2.5 %``."""
    return f"{'-' if change < 0 else '+'}{short_percent(abs(change))}"


def capital(text: str) -> str:
    """Return a text with its first letter capitalised and the others unchanged."""
    return text[:1].upper() + text[1:]


def now() -> str:
    """Return the current UTC time as ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
