"""Make texts safe to show.

Texts from result files are not trusted: :func:`clean` leaves out users of URLs, and replaces
characters that no page, figure or table can show safely (control characters, lone surrogates,
text-direction overrides). Code that writes HTML, SVG or LaTeX must escape texts itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ddp_scaling_bench.finding import Finding
from ddp_scaling_bench.units import capital
from ddp_scaling_bench.variables import without_users

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def clean(value: Any) -> str:
    """Return ``value`` as text without users of URLs, and with replacements of unsafe characters."""
    if value is None:
        return ""
    text = without_users(value if isinstance(value, str) else str(value))
    return text if text.isprintable() else _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(value: Any, *, limit: int = 300) -> str:
    """Return ``value`` cleaned, on one line, with at most ``limit`` characters."""
    text = " ".join(clean(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def message(finding: Finding) -> str:
    """Return a finding in words, cleaned, on one line."""
    return one_line(finding.message, limit=8000)


def heading(finding: Finding) -> str:
    """Return the heading of a finding, or else the words of its kind, cleaned, on one line."""
    return one_line(finding.heading or capital(finding.kind.replace("-", " ")))


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
