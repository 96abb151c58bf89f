"""Names of sizes and series, evenly spaced positions, ticks, and safe CSV."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.data.csv_files import csv_text
from analysis.data.names import Size, baseline_name, devices, job_size, layout, ranks, with_layout
from analysis.report.figures.drawing import evenly_spaced

SIZE = SimpleNamespace(nodes=2, gpus_per_node="4", gpus=8)
UNEQUAL = SimpleNamespace(nodes=2, gpus_per_node="4+2", gpus=6)
NODES_NOT_KNOWN = SimpleNamespace(nodes=1, gpus_per_node="", gpus=1)


def test_a_size_has_one_name_for_each_use() -> None:
    told = (ranks(SIZE), layout(SIZE), with_layout(SIZE), job_size(SIZE))
    assert told == ("8 ranks", "2 × 4", "8 ranks (2 × 4)", "8 ranks on 2 nodes")
    assert (with_layout(UNEQUAL), job_size(UNEQUAL)) == ("6 ranks (2 × 4+2)", "6 ranks on 2 nodes")


def test_if_nodes_are_unknown_a_size_is_its_ranks() -> None:
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
def test_devices_have_a_singular_except_names_of_models(
    row: Size, what: str, counted: bool, told: str
) -> None:
    assert devices(row, what, counted=counted) == told


@given(st.integers(1, 500), st.integers(2, 40))
def test_evenly_spaced_positions_include_both_ends(length: int, most: int) -> None:
    places = evenly_spaced(length, most)
    assert len(places) == min(length, most)
    assert (places[0], places[-1]) == (0, length - 1)
    assert places == sorted(set(places))


def test_no_text_of_a_csv_can_run_as_a_formula_and_numbers_are_unchanged() -> None:
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
