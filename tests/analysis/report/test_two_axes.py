"""Scaling along two axes: the split of an efficiency, the table, and when there is none."""

import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.causes.cells import CauseRow, CellDivision
from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import ScalingRow
from analysis.data.load import load_study
from analysis.report.figures.waterfall import explained_sizes, waterfall
from analysis.report.results import Results
from analysis.report.write import write_report
from analysis.stats.measured import measure
from analysis.stats.scaling import two_axes
from tests.analysis import studies
from tests.analysis.causes.planted import plant
from tests.analysis.figures import texts


def table(path: Path) -> list[ScalingRow]:
    return scaling_table(measure(load_study(path)))


def test_an_efficiency_is_that_within_a_node_times_that_over_nodes_and_a_failed_size_has_none(grid_study):
    """The second factor is computed again from the step times, by the module's formula."""
    rows = table(grid_study)
    sizes = two_axes(rows)
    assert len(sizes) == 4 * 9
    times = {(row.series, row.nodes, row.gpus_per_node): row.step_time_sec for row in rows}
    for row in (row for row in sizes if row.n):
        one_node = times[row.series, 1, row.gpus_per_node]
        here = times[row.series, row.nodes, row.gpus_per_node]
        over = one_node / here / (row.nodes if row.mode == "strong" else 1)
        assert row.efficiency_over_nodes == pytest.approx(over)
        assert row.efficiency == pytest.approx(row.efficiency_within_node * row.efficiency_over_nodes)
    one_node_rows = [row for row in sizes if row.nodes == 1]
    assert {row.efficiency_over_nodes for row in one_node_rows} == {1}
    assert all(row.efficiency_within_node == row.efficiency for row in one_node_rows)
    lost = [row for row in sizes if (row.nodes, row.gpus_per_node) == (4, "4")]
    assert len(lost) == 4
    for row in lost:
        assert np.isnan([row.speedup, row.efficiency, row.efficiency_over_nodes]).all()
        assert row.efficiency_within_node > 0
        assert row.state == "failed"
        assert "ran out of <b>memory</b>" in row.reason


def test_without_two_axes_there_is_no_table_and_an_older_one_is_removed(tmp_path, nothing_drawn):
    over_nodes = studies.strong(backend="gloo")
    within_a_node = [studies.make_cell(n, batch=64, per_node=n, backend="nccl") for n in (1, 2, 4)]
    path = studies.finished(
        tmp_path / "s", over_nodes + within_a_node, repeats=1, epochs=1, ranks_files=False
    )
    (path / "report").mkdir()
    (path / "report/axes.csv").write_text("old")
    assert not two_axes(table(path))
    write_report(path)
    assert not (path / "report/axes.csv").exists()


@pytest.mark.usefixtures("nothing_drawn")
def test_the_section_names_the_cause_with_its_share_evidence_and_remedy(tmp_path: Path) -> None:
    path = plant(tmp_path / "s", {"data": 0.025}, noise=0.0)
    page = write_report(path).page.read_text(encoding="utf-8")
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", page.partition('id="why"')[2])).split())
    assert "data loading 20 % [20 %, 20 %] data loading takes 25.0 ms per step" in text
    assert "(values of n4x1-gloo-srun-b16-r1) Use more workers" in text
    causes = pd.read_csv(path / "report" / "causes.csv")
    cell = causes[causes["cell_id"] == "n4x1-gloo-srun-b16"]
    assert cell["cause"].to_list() == ["data-loading", "not-explained"]
    assert cell["share"].sum() == pytest.approx(0.2, abs=1e-6)
    figures = {file.stem for file in (path / "report" / "figures").iterdir()}
    assert "why-1" in figures


def test_the_bars_of_the_waterfall_lead_from_the_ideal_to_the_measured_step() -> None:
    shares = [("data-loading", 0.3), ("not-explained", -0.05), ("outside-timers", 0.001)]
    division = CellDivision([CauseRow(name, share, share, share) for name, share in shares], {})
    row: Any = SimpleNamespace(cell_id="c", series="weak", place=0, step_time_sec=0.1, gpus=4)
    results: Any = SimpleNamespace(divisions=[division], titles={})
    drawing = waterfall(results, row, name="why-1")
    names = ["ideal step", "data loading", "not explained", "measured step"]
    assert [text for text in texts(drawing) if text in names] == names
    values = ["74.9 ms, 75 %", "30.0 ms, 30 %", "-5 %", "100 ms, 100 %"]
    assert [text for text in texts(drawing) if text.endswith("%")] == values


def test_why_describes_the_recommended_size_or_else_the_largest_one(tmp_path: Path) -> None:
    recommended = Results.of(load_study(studies.finished(tmp_path / "a", studies.strong())))
    (size,) = explained_sizes(recommended)
    assert (size.gpus, recommended.verdicts[size.place].recommended) == (2, True)
    few = Results.of(load_study(studies.finished(tmp_path / "b", studies.strong(), repeats=2)))
    assert [size.gpus for size in explained_sizes(few)] == [8]
