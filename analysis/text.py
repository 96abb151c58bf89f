"""Format numbers and texts for people: sensible digits, units, safe characters.

Texts from result files are not trusted: :func:`clean` masks values that may be secrets, and replaces
characters that no page, figure or table can show safely (control characters, lone surrogates,
text-direction overrides). Code that writes HTML, SVG or LaTeX must escape texts itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeGuard

from bench.secret_values import mask_text
from bench.units import count as count

#: Text of a value that was not measured, on pages and in figures (CSV cells are empty).
MISSING = "–"

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def clean(value: Any) -> str:
    """Return ``value`` as text without secrets; each unsafe character becomes a replacement character."""
    if value is None:
        return ""
    return clean_characters(mask_text(value if isinstance(value, str) else str(value)))


def clean_characters(text: str) -> str:
    """Return ``text`` with a replacement character for each unsafe character; nothing is masked."""
    return text if text.isprintable() else _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(value: Any, *, limit: int = 300) -> str:
    """Return ``value`` cleaned, on one line, with at most ``limit`` characters."""
    text = " ".join(clean(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def known(value: float | None) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number, not None or NaN."""
    return value is not None and math.isfinite(value)


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
    return f"{100 * value:z.{decimals}f} %"  # z: no "-0"


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


def capital(text: str) -> str:
    """Return a text with its first letter capitalised and the others unchanged."""
    return text[:1].upper() + text[1:]


def plain(value: Any) -> Any:
    """Convert a value of a DataFrame to a value for JSON; a missing or infinite value becomes None."""
    if value is None or isinstance(value, (str, bool)):
        return value
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, float) and not math.isfinite(item):
        return None
    return item if isinstance(item, (bool, int, float)) else None


def markdown_line(texts: Sequence[str]) -> str:
    """Escape the texts and return them as one row of a Markdown table."""
    return "| " + " | ".join(markdown(text, limit=600) for text in texts) + " |"


def markdown(text: str, *, limit: int = 300) -> str:
    """Return a text escaped for Markdown, including HTML and table bars."""
    return re.sub(r"([\\`*_{}\[\]<>|#!&~$])", r"\\\1", one_line(text, limit=limit))
