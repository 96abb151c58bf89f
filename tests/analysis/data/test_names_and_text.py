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


def test_units_counts_and_lists() -> None:
    times = [seconds(value) for value in (1.234, 0.1153, 8.2e-4, math.nan)]
    assert times == ["1.23 s", "115 ms", "820 µs", "–"]
    assert (percent(0.234), percent(0.2345, decimals=1), percent(math.nan)) == ("23 %", "23.4 %", "–")
    assert (fraction(0.98765), fraction(math.nan), whole(352), whole(2.5)) == ("0.988", "–", "352", "2.50")
    assert interval(1.0, 2.0) == "[1.000, 2.000]"
    assert interval(math.nan, 2.0) == ""
    assert (fractions(0.8, 0.9), fractions(0.8, math.nan)) == ("[0.800, 0.900]", "")
    assert (short_percent(0.02), short_percent(0.025)) == ("2 %", "2.5 %")
    assert (percent(-0.001), percent(-0.012)) == ("0 %", "-1 %")
    assert (count(1, "run"), count(12_000, "run")) == ("1 run", "12,000 runs")
    assert count(2, "series", "series") == "2 series"
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefg"), limit=3) == "a, b and 5 more"
