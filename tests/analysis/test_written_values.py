"""How numbers, counts, lists and foreign text are written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.text import clean, one_line
from bench.units import (
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.5, "1234"),
        (12345.6, "12,350"),
        (9999.9, "10,000"),
        (0.99999, "1.000"),
        (0.012345, "0.01235"),
        (0.0, "0"),
        (-2.5, "-2.500"),
        (1e-9, "1.000e-09"),
        (math.nan, "–"),
        (math.inf, "–"),
        (None, "–"),
    ],
)
def test_numbers_have_four_digits_and_commas_from_ten_thousand(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-4, 1e12))
def test_a_written_number_is_the_number_to_its_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


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


@given(st.text())
def test_cleaned_text_can_be_written_and_shows_what_it_holds(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode("utf-8")
    assert len(cleaned) == len(text)
    assert "\x1b" not in cleaned
    assert "\n" not in one_line(text)
    assert len(one_line(text, limit=10)) <= 10
