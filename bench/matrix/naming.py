"""Names of cells and series: every swept axis is in them, and they are safe as folder names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_NAME = 150

_WORD = re.compile(r"[A-Za-z0-9_.+]{1,40}")


def canonical(value: Any) -> str:
    """Return a text that is equal for equal values only."""
    return json.dumps(value, sort_keys=True, default=str)


def word(value: Any) -> str:
    """Return a value as a person writes it: ``true``, ``4+2`` for a list, else its text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "+".join(str(number) for number in value)
    return str(value)


def name_of(parts: list[str], swept: Mapping[str, Any]) -> str:
    """Return ``parts`` and the swept values joined by ``-``, shortened where it must be.

    A value with letters that a folder's name should not hold is kept apart from its
    neighbours by a digest.
    """
    name = "-".join(
        [*parts, *(f"{axis.removeprefix('env.')}.{_safe_word(value)}" for axis, value in swept.items())]
    )
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}-{_digest(name)}"


def _safe_word(value: Any) -> str:
    text = word(value)
    if _WORD.fullmatch(text):
        return text
    return f"{re.sub(r'[^A-Za-z0-9_.+]', '_', text)[:24]}_{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
