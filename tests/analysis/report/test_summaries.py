"""How certain a study is, in words; and how numbers are written."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.report.summary import certainty, left_out_sentence
from analysis.stats.columns import ScalingRow
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
from tests.analysis import studies

#: A size that loses efficiency.
ROW: Any = SimpleNamespace(efficiency=0.8, efficiency_low=0.7, efficiency_high=0.9, is_base=True)


def rows_of(path: Path, cells: Any = None, **options: Any) -> list[ScalingRow]:
    return scaling_table(load_study(studies.finished(path / "s", cells, **options)))


def altered(**values: Any) -> Any:
    return SimpleNamespace(**vars(ROW) | values)


def test_the_efficiency_of_all_runs_stands_beside_that_without_disturbed_runs() -> None:
    values = ((1, 1.0, 1.0), (2, 0.9, 0.85), (4, 0.8, math.nan))
    rows: Any = [altered(gpus=n, efficiency=own, efficiency_all=every) for n, own, every in values]
    assert left_out_sentence(rows) == " With the runs that are left out, E is 0.850 on 2 ranks."
    assert left_out_sentence(rows[:1]) == ""


def test_certainty_tells_runs_and_intervals(tmp_path: Path) -> None:
    assert certainty(rows_of(tmp_path / "a", repeats=1)) == (
        "1 run per cell: no intervals (they need 3 runs), so small differences may be chance."
    )
    five = certainty(rows_of(tmp_path / "b", repeats=5))
    assert five.startswith(
        "5 runs per cell; the 95 % interval of a throughput is ±0.7 % for the narrowest cell and ±1."
    )

    def state(cell: Any, repeat: int) -> tuple[str, str, str | None]:
        return ("planned", "", None) if cell.world_size == 8 and repeat > 2 else ("completed", "", None)

    mixed = certainty(rows_of(tmp_path / "c", repeats=4, state=state))
    assert mixed.startswith("2 to 4 runs per cell; ")
    assert mixed.endswith("; no interval for 1 cell with fewer than 3 runs.")
    none = rows_of(tmp_path / "d", state=lambda cell, repeat: ("planned", "", None))
    assert certainty(none) == "Nothing has been measured yet."


@pytest.mark.parametrize(
    ("highs", "text"),
    [
        ([1.65], "is -39.4 % to +65.0 % (1 cell)"),
        ([1.004, 1.09], "is ±0.4 % or -8.3 % to +9.0 % (2 cells)"),
        (
            [1.004, 1.01, 1.09],
            "is ±0.4 % for the narrowest cell and -8.3 % to +9.0 % for the widest (3 cells)",
        ),
        ([1.004, 1.0041, 1.0042], "is ±0.4 % (3 cells)"),
    ],
)
def test_an_interval_that_is_not_symmetric_has_both_ends(highs: list[float], text: str) -> None:
    rows: Any = [altered(cell_id=str(x), n=3, throughput_low=1 / x, throughput_high=x) for x in highs]
    assert certainty(rows).startswith(f"3 runs per cell; the 95 % interval of a throughput {text}")


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
    assert (seconds(1.234), seconds(0.1153), seconds(8.2e-4), seconds(math.nan)) == (
        "1.23 s",
        "115 ms",
        "820 µs",
        "–",
    )
    assert (percent(0.234), percent(0.2345, decimals=1), percent(math.nan)) == ("23 %", "23.4 %", "–")
    assert (fraction(0.98765), fraction(math.nan), whole(352), whole(2.5)) == ("0.988", "–", "352", "2.50")
    assert interval(1.0, 2.0) == "[1.000, 2.000]"
    assert interval(math.nan, 2.0) == ""
    assert (fractions(0.8, 0.9), fractions(0.8, math.nan)) == ("[0.800, 0.900]", "")
    assert (short_percent(0.02), short_percent(0.025)) == ("2 %", "2.5 %")
    assert (percent(-0.001), percent(-0.012)) == ("0 %", "-1 %")
    assert (count(1, "run"), count(12_000, "run"), count(2, "series", "series")) == (
        "1 run",
        "12,000 runs",
        "2 series",
    )
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
