"""Work and waiting by rank and by node: the figure, its marks of late ranks, and what it leaves out."""

import re
from pathlib import Path

import pytest

from analysis.checks.slow_ranks import nodes_table
from analysis.data.csv_files import csv_text
from analysis.data.load import load_study
from analysis.report.figures.all_figures import detail_figures
from analysis.report.figures.bars import MAX_BARS
from analysis.report.figures.drawing import Drawing
from analysis.report.results import Results
from tests.analysis import studies
from tests.analysis.closer_studies import write_ranks
from tests.analysis.figures import texts

pytestmark = pytest.mark.usefixtures("svg_only")


def details_of(path: Path) -> tuple[Results, dict[str, Drawing]]:
    results = Results.of(load_study(path))
    return results, {drawing.name: drawing for drawing in detail_figures(results)}


def test_without_ranks_there_is_no_figure_of_them(tmp_path: Path) -> None:
    found, drawings = details_of(studies.finished(tmp_path / "s", ranks_files=False))
    assert (drawings, found.ranks, len(found.sweep)) == ({}, None, 0)


def test_the_late_rank_is_marked_and_named_and_its_node_is_first(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2, 4)))
    write_ranks(path, late=lambda run, rank: 0.004 * (rank == 2), host=lambda rank: f"node{rank}")
    found, drawings = details_of(path)
    figure = drawings["ranks"]
    assert "2 · node2 ◀" in texts(figure)
    assert sum("◀" in text for text in texts(figure)) == 1
    assert figure.description.endswith("rank 2 on node2 works longest.")
    assert found.ranks is not None
    nodes = csv_text(nodes_table(found.ranks), digits=9).splitlines()
    assert nodes[0].startswith("cell_id,host,ranks,n,useful_sec,data_sec,compute_sec,wait_sec,transfer_sec")
    latest = next(line for line in nodes if line.startswith("n4x1"))
    assert latest == "n4x1-gloo-srun-b16,node2,1,3,0.014,0.001,0.012,0,0.002,0.016,0.25"


def test_many_ranks_are_drawn_by_node_and_many_nodes_are_bounded(tmp_path: Path) -> None:
    cells = studies.weak(8, (1, 128), per_node=2)
    path = studies.finished(tmp_path / "s", cells, repeats=1, epochs=1)
    write_ranks(path, late=lambda run, rank: 0.004 * (rank == 90), host=lambda rank: f"node{rank // 2}")
    figure = details_of(path)[1]["ranks"]
    assert (
        "; ".join(figure.left_out)
        == f"128 ranks of n64x2-gloo-srun-b8 drawn by node; the {MAX_BARS} slowest of 64 nodes drawn"
    )
    names = [text for text in texts(figure) if re.match(r"node\d", text)]
    assert names[0] == "node45 ◀"
    assert len(names) == MAX_BARS
