"""The settings of cells as texts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from analysis.text import clean, one_line
from bench.matrix.cell import Cell, value_text

NOT_SET = "not set"


def settings_of(cell: Cell) -> dict[str, str]:
    """Return all settings of a cell: values as texts, by the setting's name in the matrix."""
    found = {_scalar(name): spelled(value) for name, value in cell.settings.items()}
    # Two commands with one name match; their texts are a difference.
    return found | {"command": clean(cell.program)}


def spelled(value: Any) -> str:
    """Return the value of a setting as written in the matrix."""
    if value is None or isinstance(value, bool | float | int | str):
        return _scalar(value)
    if isinstance(value, list) and any(isinstance(word, str) for word in value):
        return clean(value_text(value))  # a command as typed
    if isinstance(value, list):
        # [4, 4], four ranks on each of two nodes, equals 4.
        parts = list(dict.fromkeys(map(str, value)))
        return parts[0] if len(parts) == 1 else "+".join(map(str, value))
    return one_line(value, limit=120)


@lru_cache(maxsize=2000, typed=True)
def _scalar(value: Any) -> str:
    if value is None:
        return NOT_SET
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else one_line(value, limit=120)
