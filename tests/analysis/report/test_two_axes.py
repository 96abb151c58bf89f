"""Scaling along two axes: the split of an efficiency, the table, and when there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.report.write import write_report
from analysis.stats.columns import ScalingRow
from analysis.stats.measured import measure
from analysis.stats.scaling import two_axes
from tests.analysis import studies


def table(path: Path) -> list[ScalingRow]:
    return scaling_table(measure(load_study(path)))


def test_an_efficiency_is_that_within_a_node_times_that_over_nodes(grid_study: Path) -> None:
    """The second factor is computed again from the step times, by the module's formula."""
    sizes = two_axes(table(grid_study))
    assert len(sizes) == 4 * 9
    times = {(row.series, row.nodes, row.gpus_per_node): row.step_time_sec for row in table(grid_study)}
    for row in (row for row in sizes if row.n):
        one_node = times[row.series, 1, row.gpus_per_node]
        here = times[row.series, row.nodes, row.gpus_per_node]
        over = one_node / here / (row.nodes if row.mode == "strong" else 1)
        assert row.efficiency_over_nodes == pytest.approx(over)
        assert row.efficiency == pytest.approx(row.efficiency_within_node * row.efficiency_over_nodes)
    one_node_rows = [row for row in sizes if row.nodes == 1]
    assert {row.efficiency_over_nodes for row in one_node_rows} == {1}
    assert all(row.efficiency_within_node == row.efficiency for row in one_node_rows)


def test_a_size_that_failed_is_there_without_a_value_and_with_its_reason(grid_study: Path) -> None:
    lost = [row for row in two_axes(table(grid_study)) if (row.nodes, row.gpus_per_node) == (4, "4")]
    assert len(lost) == 4
    for row in lost:
        assert np.isnan([row.speedup, row.efficiency, row.efficiency_over_nodes]).all()
        assert row.efficiency_within_node > 0
        assert row.state == "failed"
        assert "ran out of <b>memory</b>" in row.reason


def test_a_size_without_its_one_node_has_no_part_over_nodes(tmp_path: Path) -> None:
    cells = [cell for cell in studies.over_two_axes() if (cell.nodes, cell.tasks_per_node) != (1, 4)]
    sizes = two_axes(table(studies.finished(tmp_path / "s", cells, epochs=1, ranks_files=False)))
    four = [row for row in sizes if row.gpus_per_node == "4"]
    assert all(row.efficiency > 0 for row in four)
    assert np.isnan([(row.efficiency_within_node, row.efficiency_over_nodes) for row in four]).all()


def test_without_two_axes_there_is_no_table_and_an_older_one_is_removed(
    tmp_path: Path, nothing_drawn: None
) -> None:
    over_nodes = studies.strong(backend="gloo")
    within_a_node = [studies.make_cell(n, batch=64, per_node=n, backend="nccl") for n in (1, 2, 4)]
    path = studies.finished(
        tmp_path / "s", over_nodes + within_a_node, repeats=1, epochs=1, ranks_files=False
    )
    (path / "report").mkdir()
    (path / "report/axes.csv").write_text("old")
    assert not two_axes(table(path))
    page = write_report(path).page.read_text()
    assert "by nodes and ranks per node" not in page
    assert not (path / "report/axes.csv").exists()


def test_the_page_shows_both_paths_in_a_table_and_escapes_reasons(grid_study: Path) -> None:
    page = (grid_study / "report/index.html").read_text()
    assert page.count('<details class="axes"><summary>Table</summary>') == 2
    assert page.count('"verdict">baseline</td>') == 4
    for word in ("Within one node", "Over nodes", ", srun</caption>", ", torchrun</caption>"):
        assert word in page
    assert 'href="axes.csv"' in page
    assert "<b>memory</b>" not in page


def test_mixed_nodes_have_no_place_on_the_axes(tmp_path: Path) -> None:
    cells = studies.over_two_axes()
    mixed = studies.make_cell(3, batch=16, mode="weak", per_node=1, name="mixed")
    mixed = dataclasses.replace(mixed, nodes=2, tasks_per_node=[2, 1])
    path = studies.finished(tmp_path / "s", [*cells, mixed], repeats=1, epochs=1, ranks_files=False)
    rows = table(path)
    assert "mixed" in {row.cell_id for row in rows}
    assert "mixed" not in {row.cell_id for row in two_axes(rows)}
