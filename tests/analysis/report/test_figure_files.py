"""The figures: their texts, descriptions, files and marks, what they leave out, and that they hold no script."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.checks.slow_ranks import nodes_table
from analysis.data.csv_files import csv_text
from analysis.data.load import load_study
from analysis.data.names import series_parts
from analysis.report.figures.all_figures import detail_figures, scaling_figures
from analysis.report.figures.bars import MAX_BARS, split
from analysis.report.figures.curves import NOT_VALID
from analysis.report.figures.drawing import MAX_SERIES, MAX_SIZES, Colour, Drawing
from analysis.report.results import Results
from analysis.report.write import write_report
from analysis.stats.measured import measure
from tests.analysis import studies
from tests.analysis.figures import SVG, styled, texts
from tests.analysis.studies import write_ranks


def figures(path: Path) -> Iterator[Drawing]:
    study = load_study(path)
    frames = measure(study)
    return scaling_figures(scaling_table(frames), frames.runs, parts=series_parts(study.plan))


def drawings(path: Path) -> dict[str, Drawing]:
    return {drawing.name: drawing for drawing in figures(path)}


def figure(path: Path, name: str) -> Drawing:
    """Return one figure, without drawing those behind it."""
    return next(drawing for drawing in figures(path) if drawing.name == name)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drawing]:
    cells = studies.merged(
        cell
        for backend in ("gloo", "nccl")
        for cell in studies.strong(backend=backend) + studies.weak(backend=backend)
    )
    return drawings(studies.finished(tmp_path_factory.mktemp("figures") / "demo", cells, repeats=4))


def test_files_have_their_formats_and_a_figure_its_description(demo: dict[str, Drawing]) -> None:
    for drawing in demo.values():
        assert (drawing.png[:6], drawing.pdf[:5]) == (b"\x89PNG\r\n", b"%PDF-")
        alone = ElementTree.fromstring(drawing.svg.encode())
        assert alone.tag == f"{SVG}svg"
        assert alone.findtext(f"{SVG}title") == drawing.title
        (description,) = alone.iter("{http://purl.org/dc/elements/1.1/}description")
        assert description.text == drawing.description
    assert demo["efficiency-strong"].title == "Efficiency, strong scaling (batch 64, srun)"
    assert demo["efficiency-strong"].description.startswith(
        "Efficiency over ranks. gloo: 1.000 at 1 rank, 0.4"
    )


def test_every_reference_has_one_target_on_the_page(demo: dict[str, Drawing]) -> None:
    page = "".join(drawing.markup for drawing in demo.values())
    ids = Counter(re.findall(r' id="([^"]+)"', page))
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert {ids[name] for name in used} == {1}


def test_the_ideal_line_goes_through_the_measured_base_point(demo: dict[str, Drawing]) -> None:
    for name in ("speedup-strong", "throughput-weak"):
        root = ElementTree.fromstring(demo[name].markup)
        muted = [path for path in root.iter(f"{SVG}path") if styled(path, "stroke") == Colour.MUTED]
        dotted = [path for path in muted if styled(path, "stroke-dasharray")]
        starts = {tuple(map(float, path.get("d", "").split()[1:3])) for path in dotted}
        points = [(float(mark.get("x", 0)), float(mark.get("y", 0))) for mark in root.iter(f"{SVG}use")]
        assert any(abs(sx - x) < 0.01 and abs(sy - y) < 0.01 for sx, sy in starts for x, y in points), (
            f"no ideal line of {name} starts at a mark"
        )


def test_an_interval_beyond_the_bound_ends_in_an_arrow_with_its_value(tmp_path: Path, svg_only: None) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2, 4)))
    for repeat, factor in enumerate((0.5, 1, 2.2), 1):
        metrics = path / f"runs/n2x1-gloo-srun-b32-r{repeat}/attempt-1/metrics.csv"
        studies.scale_rate(metrics, factor)
    _, two, _ = scaling_table(load_study(path))
    found = figure(path, "efficiency-strong")
    assert two.efficiency_high > 4
    assert f"{two.efficiency_high:.3f}" in texts(found)
    ticks = [float(text) for text in texts(found) if re.fullmatch(r"\d\.\d+", text)]
    assert sorted(ticks)[-2] <= 3, "the axis follows the runs, not the interval"
    assert "Arrows: the interval ends at the number." in found.caption


def test_a_size_that_is_not_valid_is_a_cross_without_line(tmp_path: Path, svg_only: None) -> None:
    """The ranks of the largest size share cores: its values do not show scaling."""
    cells = studies.strong(sizes=(1, 2, 4), per_node=4)
    path = studies.finished(tmp_path / "s", cells, env=lambda cell: studies.environment(cell, cores=2))
    page = write_report(path, proposal=True).page
    proposal = (page.parent / "proposal.md").read_text(encoding="utf-8")
    assert re.search(r"!\[Efficiency over .* at 2 ranks; 1 size is not valid\.\]", proposal)
    study = load_study(path)
    frames = measure(study)
    table = scaling_table(frames)
    invalid = ["n1x4-gloo-srun-b16"]
    found = scaling_figures(table, frames.runs, parts=series_parts(study.plan), invalid=invalid)
    for drawing in (next(found) for _ in range(3)):
        assert NOT_VALID in [key.words for key in drawing.legend]
        assert "at 2 ranks; 1 size is not valid" in drawing.description


def test_unknown_waiting_stays_in_the_communication() -> None:
    parts = {"data": 1.0, "forward": 1.0, "backward": 1.0, "optimizer": 1.0, "other": -0.5}
    row: Any = SimpleNamespace(**parts, exposed=2.0, transfer=float("nan"), wait=float("nan"))
    found = split(row)
    assert (found["transfer"], found["other"], sum(found.values())) == (2.0, 0.0, 6.0)
    row.forward = float("nan")
    assert split(row) == {}


def test_a_figure_reports_series_sizes_and_runs_that_it_leaves_out(tmp_path: Path, svg_only: None) -> None:
    cells = [
        cell
        for place in range(MAX_SERIES + 3)
        for cell in studies.weak(8 * (place + 1), (1, 2), swept={"bucket_cap_mb": place})
    ]
    cells += studies.weak(4, range(1, MAX_SIZES + 11))
    path = studies.finished(tmp_path / "s", cells, repeats=10, epochs=1, ranks_files=False)
    found = figure(path, "speedup-weak")
    assert "; ".join(found.left_out) == (
        "6 of 10 series drawn, with the most sizes; 34 of 44 cells drawn, spread over the sizes; "
        "the 340 individual runs are not drawn"
    )
    assert len(found.svg) < 200_000


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", state=lambda cell, repeat: ("failed", "x", None))
    assert drawings(path) == {}


def efficiency_of(path: Path, invalid: list[str], **options: Any) -> Drawing:
    """Return the figure of the efficiency of a strong series; ``invalid`` cells are not valid."""
    study = load_study(studies.finished(path, studies.strong(sizes=(1, 2)), **options))
    frames = measure(study)
    parts = series_parts(study.plan)
    return next(scaling_figures(scaling_table(frames), frames.runs, parts=parts, invalid=invalid))


def test_the_caption_gives_the_true_reason_of_missing_intervals(tmp_path: Path) -> None:
    alone = efficiency_of(tmp_path / "a", ["n2x1-gloo-srun-b32"])
    assert "No intervals" not in alone.caption
    few = efficiency_of(tmp_path / "b", [], repeats=2)
    assert few.caption.startswith("No intervals: they need three runs of a size and of its baseline.")
    lost = ("failed", "", "bad-exit")
    of_base = efficiency_of(
        tmp_path / "c", [], state=lambda cell, r: lost if cell.world_size == r == 1 else None
    )
    assert of_base.caption.startswith("No intervals: the baseline has fewer than three runs.")


def details_of(path: Path) -> tuple[Results, dict[str, Drawing]]:
    results = Results.of(load_study(path))
    return results, {drawing.name: drawing for drawing in detail_figures(results)}


def test_the_late_rank_is_marked_and_named_and_its_node_is_first(tmp_path: Path, svg_only: None) -> None:
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


def test_many_ranks_are_drawn_by_node_and_many_nodes_are_bounded(tmp_path: Path, svg_only: None) -> None:
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
