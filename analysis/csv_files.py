"""A frame as the text of a CSV file that programs read and spreadsheets only show."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.wording import clean

#: A spreadsheet would run a text that begins with one of these as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(frame: pd.DataFrame, *, digits: int = 12) -> str:
    """Return the frame as CSV: what was not measured is an empty cell, no text can run as a formula.

    Args:
        frame: its texts may come from results; they lose what no table can show safely.
        digits: significant digits of a number.
    """
    safe = frame.copy()
    for name in frame.columns:
        if pd.api.types.is_object_dtype(frame[name]) or pd.api.types.is_string_dtype(frame[name]):
            safe[name] = pd.Series([_safe(value) for value in frame[name]], index=frame.index, dtype=object)
    return str(safe.to_csv(index=False, float_format=f"%.{digits}g", lineterminator="\n"))


def _safe(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
