"""Names of sizes and series, evenly spaced positions, ticks, and safe CSV."""

import io
import math

import pandas as pd
import pytest

from analysis.data.csv_files import csv_text
from ddp_scaling_bench.units import (
    count,
    fraction,
    fractions,
    interval,
    listed,
    number,
    percent,
    seconds,
    short_percent,
    whole,
)


def test_no_text_of_a_csv_can_run_as_a_formula_and_numbers_are_unchanged():
    columns = {
        "anything": ["=1+1", None, "plain\x1b[31m", "+1", "-1", "@SUM(A1)", "\tx"],
        "value": [-1.5, float("nan"), 1 / 3, *[0] * 4],
        "whole": [1, 2, 3, *[0] * 4],
    }
    text = csv_text(columns)
    assert text.splitlines()[1:3] == ["'=1+1,-1.5,1", ",,2"]
    assert text.splitlines()[4:] == [f"'{formula},0,0" for formula in ("+1", "-1", "@SUM(A1)", "\tx")]
    read = pd.read_csv(io.StringIO(text))
    assert read["value"].iloc[2] == pytest.approx(1 / 3, rel=1e-11)
    assert "\x1b" not in text
    assert csv_text(columns, digits=3).splitlines()[3].split(",")[1] == "0.333"


def test_numbers_have_four_digits_and_commas_from_ten_thousand() -> None:
    texts = {1234.5: "1234", 12345.6: "12,350", 9999.9: "10,000", 0.99999: "1.000", 0.012345: "0.01235"}
    texts |= {0.0: "0", -2.5: "-2.500", 1e-9: "1.000e-09", math.nan: "–", math.inf: "–"}
    assert {value: number(value) for value in texts} == texts
    assert number(None) == "–"


#: Texts of values, and the calls that make them.
TEXTS = {
    "1.23 s, 115 ms, 820 µs, –": map(seconds, (1.234, 0.1153, 8.2e-4, math.nan)),
    "23 %, –, 0 %, -1 %": map(percent, (0.234, math.nan, -0.001, -0.012)),
    "23.4 %": [percent(0.2345, decimals=1)],
    "2 %, 2.5 %": map(short_percent, (0.02, 0.025)),
    "0.988, –": map(fraction, (0.98765, math.nan)),
    "352, 2.50": map(whole, (352, 2.5)),
    "[1.000, 2.000], ": [interval(1.0, 2.0), interval(math.nan, 2.0)],
    "[0.800, 0.900], ": [fractions(0.8, 0.9), fractions(0.8, math.nan)],
    "1 run, 12,000 runs, 2 series": [count(1, "run"), count(12_000, "run"), count(2, "series", "series")],
}


def test_units_counts_and_lists() -> None:
    for text, values in TEXTS.items():
        assert ", ".join(values) == text
    assert [listed(texts) for texts in ("", "a", "abc")] == ["", "a", "a, b and c"]
    assert listed("abcdefg", limit=3) == "a, b and 5 more"
