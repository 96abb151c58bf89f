"""The study in words: best size, main loss, certainty; and how numbers are written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.causes.cells import CauseRow, CellDivision
from analysis.causes.table import divide_study, read_evidence, read_run_facts
from analysis.checks.scaling_table import scaling_table, what_decides
from analysis.data.load import load_study
from analysis.report.results import Results
from analysis.report.summary import certainty, find, left_out_sentence, main_loss
from analysis.report.why import loss_table, share_text
from analysis.stats.columns import ScalingRow
from analysis.stats.measured import measure
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
from tests.analysis.points import frames_of_points

#: A size that loses efficiency.
ROW: Any = SimpleNamespace(efficiency=0.8, efficiency_low=0.7, efficiency_high=0.9, is_base=True)


def rows_of(path: Path, cells: Any = None, **options: Any) -> list[ScalingRow]:
    return scaling_table(load_study(studies.finished(path / "s", cells, **options)))


def findings(rows: list[ScalingRow], divisions: Any = None) -> Any:
    return find(rows, divisions or {}, labels={})


def altered(**values: Any) -> Any:
    return SimpleNamespace(**vars(ROW) | values)


def set_efficiencies(rows: list[ScalingRow], **values: tuple[float, float, float]) -> None:
    """Change the efficiencies, with their intervals, of the second and the third size."""
    for row, own in zip(rows[1:3], values.values(), strict=True):
        row.efficiency, row.efficiency_low, row.efficiency_high = own


def divided(
    path: Path, cells: Any = None, **options: Any
) -> tuple[list[ScalingRow], dict[int, CellDivision]]:
    """Return the scaling table of a study and the divisions of its losses."""
    study = load_study(studies.finished(path / "s", cells, **options))
    frames = measure(study)
    rows = scaling_table(frames)
    return rows, divide_study(rows, read_evidence(study, frames, read_run_facts(study, frames)))


def test_the_best_size_is_the_largest_at_the_guide(tmp_path: Path) -> None:
    (found,) = findings(rows_of(tmp_path, noise=0.0))
    assert found.best_size == "2 ranks"
    assert found.best_detail == "largest with efficiency ≥ 0.8"
    assert found.sentences[0] == (
        "8 ranks: 3.50 times as fast as 1x1 (1 rank), an efficiency of 0.44 [0.44, 0.44]."
    )
    assert (
        found.sentences[1]
        == "The largest size with an efficiency of at least 0.8 is 2 ranks: 0.85 [0.85, 0.85]."
    )
    assert (found.speedup, found.speedup_detail) == ("1.69×", "on 2 ranks; ideal 2.00×")


def test_the_main_loss_is_the_largest_part_of_the_division(tmp_path: Path) -> None:
    """Strong scaling of 64 samples: 80 ms of work and 4 ms of fixed costs per step, 10 ms of communication."""
    rows, divisions = divided(tmp_path, noise=0.0)
    (found,) = findings(rows, divisions)
    division = divisions[rows[-1].place]
    assert division.loss == pytest.approx(1 - rows[-1].efficiency * (1 - divisions[0].loss))
    assert (found.main_loss, found.loss_detail) == (
        "exposed communication",
        "51 % of the step on 8 ranks",
    )
    results = Results.of(load_study(tmp_path / "s"))
    whole, cause, rest, other = loss_table(results.rows[-1], results)
    assert whole[:2] == ("whole loss", "60 %")
    assert whole[2].startswith(
        "7.9 % at the baseline; whole parts of the step: data loading 1.3 % (3 % at the baseline);"
    )
    assert (cause[:2], rest[:2]) == (("less work per rank", "–"), ("not explained", "58 % [58 %, 58 %]"))
    assert rest[2].startswith("exposed communication 50.6 %; longer computation per sample ")
    assert other[:2] == ("outside all timers", "2 % [2 %, 2 %]")


@pytest.mark.parametrize(
    ("timing", "main"),
    [
        (studies.Timing(comm_s=0, fixed_s=0, imbalance=0.6), "waiting for other ranks"),
        (studies.Timing(comm_s=0, fixed_s=0.05, imbalance=0), "longer computation per sample"),
        (studies.Timing(comm_s=0, fixed_s=0, imbalance=0), "hardly any"),
    ],
)
def test_other_causes_lead_to_other_words(tmp_path: Path, timing: studies.Timing, main: str) -> None:
    (found,) = findings(*divided(tmp_path, timing=timing, noise=0.0))
    assert found.main_loss == main
    if main == "hardly any":
        assert found.best_size == "8 ranks"


def test_without_a_good_size_it_is_told_what_comes_closest(tmp_path: Path) -> None:
    (found,) = findings(rows_of(tmp_path, timing=studies.Timing(comm_s=0.2), noise=0.0))
    assert found.best_size == "no more than 1 rank"
    assert found.best_detail == "2 ranks come closest to 0.8, with 0.12"
    assert found.sentences[1] == (
        "No measured size beyond the baseline reaches an efficiency of 0.8: 2 ranks come closest, with 0.12 [0.12, 0.12]."
    )


def test_planned_sizes_without_a_result_are_not_ruled_out(tmp_path: Path) -> None:
    def state(cell: Any, repeat: int) -> tuple[str, str, str | None]:
        return ("failed", "", "oom") if cell.world_size > 2 else ("completed", "", None)

    (found,) = findings(rows_of(tmp_path, timing=studies.Timing(comm_s=0.2), noise=0.0, state=state))
    assert found.sentences[1].endswith(
        "come closest, with 0.12 [0.12, 0.12] (2 planned sizes have no valid result)."
    )


def test_where_no_larger_size_than_the_baseline_was_measured_none_comes_closest(tmp_path: Path) -> None:
    rows = scaling_table(load_study(studies.finished(tmp_path / "s", studies.strong())), baseline="8")
    (found,) = findings(rows)
    assert (found.best_size, found.best_detail) == (
        "no more than 8 ranks",
        "no larger size has an efficiency",
    )
    assert found.sentences[1] == "No size beyond the baseline has an efficiency."


def test_an_interval_across_the_guide_is_told(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    set_efficiencies(rows, two=(0.81, 0.78, 0.84), four=(0.79, 0.75, 0.83))
    (found,) = findings(rows)
    assert (found.best_size, found.best_detail) == (
        "cannot tell",
        "2 ranks: 0.81 [0.78, 0.84]; about 12 runs of this size and of the baseline would probably decide",
    )
    assert found.sentences[1] == (
        "The runs cannot tell whether these sizes reach 0.8: 2 ranks, with 0.81 [0.78, 0.84]; 4 ranks, with "
        "0.79 [0.75, 0.83]. For 2 ranks, about 12 runs of this size and of the baseline would probably decide."
    )
    below = replace(rows[1], efficiency=0.79)
    assert what_decides(below, rows[0]).endswith("would probably decide")
    rows[1].efficiency_low = 0.8
    (found,) = findings(rows)
    assert found.best_size == "2 ranks"
    assert found.sentences[1].startswith(
        "The largest size with an efficiency of at least 0.8 is 2 ranks: 0.81 [0.80, 0.84]. The runs cannot tell "
        "whether these sizes reach 0.8: 4 ranks, with 0.79 [0.75, 0.83]. For 4 ranks, about "
    )


def test_nothing_is_concluded_from_a_wide_interval(tmp_path: Path) -> None:
    """Runs of one size that differ by a factor of three: 0.94 [0.1, 8]."""
    points = [(1, 100), (1, 101), (1, 99), (2, 80), (2, 187), (2, 400)]
    frame = pd.DataFrame(points, columns=["gpus", "throughput"]).assign(global_batch=64)
    (found,) = findings(scaling_table(frames_of_points(frame)))
    assert (found.best_size, found.main_loss) == ("cannot tell", "not known")
    assert found.best_detail.endswith(
        "]; more than 100 runs of this size and of the baseline would be needed"
    )


def test_a_loss_whose_interval_includes_0_is_no_main_loss() -> None:
    rows = [CauseRow("other", 0.01, 0.0, 0.02), CauseRow("not-explained", 0.2, -0.1, 0.5)]
    division = CellDivision(rows, {}, {"transfer": 0.2})
    assert main_loss(division, ROW)[0] == "cannot tell"
    assert share_text(rows[1]) == "20 % [-10 %, 50 %; share not certain]"
    assert share_text(CauseRow("not-explained", 0.85, -2.82, 1.0)) == "85 % [share not certain]"
    assert [share_text(CauseRow("clocks", timed=timed)) for timed in (True, False)] == [
        "share not certain",
        "–",
    ]
    certain = CellDivision([rows[0], CauseRow("not-explained", 0.2, 0.1, 0.3)], {}, {"transfer": 0.2})
    assert main_loss(certain, ROW) == ("exposed communication", 0.2)


def test_nothing_is_concluded_from_sizes_that_are_not_valid(tmp_path: Path) -> None:
    rows, divisions = divided(tmp_path, noise=0.001)
    (found,) = find(rows, divisions, labels={}, invalid={"n8x1-gloo-srun-b8": "Shared cores"})
    assert found.best_size == "2 ranks"
    assert (found.main_loss, found.loss_detail) == ("not valid", "on 8 ranks")
    assert found.sentences[1].endswith(
        " Nothing is concluded from values that are not valid: 8 ranks, with 0.44 [0.44, 0.44]. See the error "
        "Shared cores."
    )
    (found,) = find(rows, divisions, labels={}, invalid={"n1x1-gloo-srun-b64": "Threads differ"})
    assert found.best_size == "not valid"
    assert found.best_detail.startswith("2 ranks: 0.85 [")
    assert found.best_detail.endswith("]; see the error Threads differ")


def test_fewer_than_3_runs_recommend_nothing_and_have_shares_without_intervals(tmp_path: Path) -> None:
    rows, divisions = divided(tmp_path, repeats=2, noise=0.0)
    (found,) = findings(rows, divisions)
    assert found.best_size == "cannot tell"
    assert found.best_detail == (
        "2 ranks: 0.85; at least 3 undisturbed runs of this size and of the baseline are needed"
    )
    assert not any("[" in share_text(row) for row in divisions[rows[-1].place].rows)


def test_a_dip_below_the_guide_before_the_best_size_is_told(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    set_efficiencies(rows, two=(0.7, 0.69, 0.71), four=(0.9, 0.89, 0.91))
    (found,) = findings(rows)
    assert found.sentences[1] == (
        "The largest size with an efficiency of at least 0.8 is 4 ranks: 0.90 [0.89, 0.91]; smaller sizes are "
        "below 0.8 (2 ranks)."
    )


def test_without_parts_of_the_step_the_loss_is_not_known() -> None:
    rows = [CauseRow("not-explained", 0.2, 0.1, 0.3)]
    division = CellDivision(rows, {"step": 0.8}, {"step": 0.2})
    assert main_loss(division, ROW)[0] == "not known"


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
    assert findings(none) == []


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
