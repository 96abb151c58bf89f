"""Names of sizes and series, evenly spaced positions, ticks, and safe CSV."""

import io
import math
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.data.csv_files import csv_text
from analysis.data.names import baseline_name, devices, job_size, layout, ranks, with_layout
from analysis.report.figures.drawing import evenly_spaced
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

SIZE = SimpleNamespace(nodes=2, gpus_per_node="4", gpus=8)
UNEQUAL = SimpleNamespace(nodes=2, gpus_per_node="4+2", gpus=6)
NODES_NOT_KNOWN = SimpleNamespace(nodes=1, gpus_per_node="", gpus=1)


def test_a_size_has_one_name_for_each_use():
    told = (ranks(SIZE), layout(SIZE), with_layout(SIZE), job_size(SIZE))
    assert told == ("8 ranks", "2 × 4", "8 ranks (2 × 4)", "8 ranks on 2 nodes")
    assert (with_layout(UNEQUAL), job_size(UNEQUAL)) == ("6 ranks (2 × 4+2)", "6 ranks on 2 nodes")


def test_if_nodes_are_unknown_a_size_is_its_ranks():
    assert layout(NODES_NOT_KNOWN) == ""
    for tell in (with_layout, job_size):
        assert tell(NODES_NOT_KNOWN) == "1 rank"
    assert [baseline_name(size) for size in (SIZE, NODES_NOT_KNOWN)] == ["2x4 (8 ranks)", "1 rank"]


@pytest.mark.parametrize(
    ("row", "what", "counted", "told"),
    [
        (SIZE, "GPUs", True, "2 nodes x 4 GPUs"),
        (SimpleNamespace(nodes=1, gpus_per_node="8", gpus=8), "L40S", False, "8 L40S"),
        (SimpleNamespace(nodes=1, gpus_per_node="1", gpus=1), "ranks", True, "1 rank"),
        (SimpleNamespace(nodes=2, gpus_per_node="1", gpus=2), "L40S", False, "2 nodes x 1 L40S"),
    ],
)
def test_devices_have_a_singular_except_names_of_models(row, what, counted, told):
    assert devices(row, what, counted=counted) == told


@given(st.integers(1, 500), st.integers(2, 40))
def test_evenly_spaced_positions_include_both_ends(length, most):
    places = evenly_spaced(length, most)
    assert len(places) == min(length, most)
    assert (places[0], places[-1]) == (0, length - 1)
    assert places == sorted(set(places))


def test_no_text_of_a_csv_can_run_as_a_formula_and_numbers_are_unchanged():
    frame = pd.DataFrame(
        {
            "anything": ["=1+1", None, "plain\x1b[31m"],
            "value": [-1.5, float("nan"), 1 / 3],
            "whole": [1, 2, 3],
        }
    )
    text = csv_text(frame)
    assert text.splitlines()[1:3] == ["'=1+1,-1.5,1", ",,2"]
    read = pd.read_csv(io.StringIO(text))
    assert read["value"].iloc[2] == pytest.approx(1 / 3, rel=1e-11)
    assert "\x1b" not in text
    assert csv_text(frame, digits=3).splitlines()[3].split(",")[1] == "0.333"


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
