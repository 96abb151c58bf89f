"""The figures: their texts, descriptions, files and marks, what they leave out, and that they hold no script."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from analysis.checks.slow_ranks import nodes_table
from analysis.data.csv_files import csv_text
from analysis.data.load import load_study
from analysis.report.figures.data import data_figures
from analysis.report.figures.drawing import MAX_SERIES, MAX_SIZES, Colour, Drawing, draw_figures
from analysis.report.figures.lines import NOT_VALID
from analysis.report.figures.ranks import MAX_BARS, ranks_figure
from analysis.report.figures.scaling import efficiency_figures, speedup_figures, throughput_figures
from analysis.report.results import Results
from ddp_scaling_bench.units import number
from tests.analysis import studies
from tests.analysis.figures import SVG, only_svg, styled, texts
from tests.analysis.studies import write_ranks


def results_of(path: Path) -> Results:
    return Results.of(load_study(path))


def drawings(path: Path) -> dict[str, Drawing]:
    return {drawing.name: drawing for drawing in draw_figures(results_of(path))}


def figure(path: Path, name: str) -> Drawing:
    """Return one figure of the scaling table, without drawing those behind it."""
    return next(drawing for drawing in scaling_figures(results_of(path)) if drawing.name == name)


def scaling_figures(results: Results) -> Iterator[Drawing]:
    """Draw the figures of the scaling table."""
    for draw in (efficiency_figures, speedup_figures, throughput_figures):
        yield from draw(results)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drawing]:
    cells = studies.merged(
        cell
        for algorithm in ("Ring", "Tree")
        for make in (studies.strong, studies.weak)
        for cell in make(sizes=(4, 8, 16, 64), swept={"env.NCCL_ALGO": algorithm})
    )
    path = studies.finished(tmp_path_factory.mktemp("figures") / "demo", cells, repeats=4, noise=0.03)
    write_ranks(path, late=lambda run, rank: 0.004 * (rank == 2), host=lambda rank: f"node{rank}")
    with only_svg():
        return drawings(path)


def test_files_have_their_formats(tmp_path: Path) -> None:
    drawing = efficiency_of(tmp_path / "s")
    assert drawing.pdf[:5] == b"%PDF-"
    (box,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ", drawing.pdf)
    assert float(box) / 72 * 25.4 == pytest.approx(85, abs=0.1)


def test_a_figure_has_its_description_the_width_of_a_column_and_fonts_of_at_least_7_points(demo) -> None:
    for drawing in demo.values():
        alone = ElementTree.fromstring(drawing.svg.encode())
        assert alone.tag == f"{SVG}svg"
        assert alone.findtext(f"{SVG}title") == drawing.title
        (description,) = alone.iter("{http://purl.org/dc/elements/1.1/}description")
        assert description.text == drawing.description
        width_mm = float(alone.get("width", "").removesuffix("pt")) / 72 * 25.4
        assert width_mm == pytest.approx(178 if drawing.name == "scaling" else 85, abs=0.01)
        sizes = re.findall(r"font(?:-size)?: (?:bold )?([\d.]+)px", drawing.svg)
        assert min(map(float, sizes)) >= 7
    strong = demo["efficiency-strong"]
    assert strong.title == "Efficiency, strong scaling (batch 64, gloo, srun)"
    assert strong.description.startswith("Efficiency over ranks. NCCL_ALGO Ring: 1.000 at 4 ranks, 0.")


def test_every_reference_has_one_target_on_the_page(demo: dict[str, Drawing]) -> None:
    page = "".join(drawing.markup for drawing in demo.values())
    ids = Counter(re.findall(r' id="([^"]+)"', page))
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert {ids[name] for name in used} == {1}


def test_the_ideal_line_goes_through_the_measured_base_point(demo: dict[str, Drawing]) -> None:
    for name in ("speedup-strong", "throughput-weak"):
        root = ElementTree.fromstring(demo[name].svg.encode())
        muted = [path for path in root.iter(f"{SVG}path") if styled(path, "stroke") == Colour.MUTED]
        dotted = [path for path in muted if styled(path, "stroke-dasharray")]
        starts = {tuple(map(float, path.get("d", "").split()[1:3])) for path in dotted}
        points = [(float(mark.get("x", 0)), float(mark.get("y", 0))) for mark in root.iter(f"{SVG}use")]
        assert any(abs(sx - x) < 0.01 and abs(sy - y) < 0.01 for sx, sy in starts for x, y in points), (
            f"no ideal line of {name} starts at a mark"
        )


def test_the_modes_have_equal_axes_and_the_lines_of_efficiencies_have_names(demo: dict[str, Drawing]) -> None:
    for curve in ("efficiency", "speedup", "throughput"):
        strong, weak = (texts(demo[f"{curve}-{mode}"]) for mode in ("strong", "weak"))
        ticks = [text for text in strong if re.fullmatch(r"[\d,.]+", text)]
        assert ticks == [text for text in weak if re.fullmatch(r"[\d,.]+", text)]
        assert ticks[:4] == ["4", "8", "16", "64"]
        assert ("ideal" in strong, "guide 0.8" in strong) == (True, curve == "efficiency")
    assert "0.0" in texts(demo["efficiency-weak"])


def test_a_size_that_is_not_valid_is_a_cross_without_line(tmp_path: Path, svg_only: None) -> None:
    """The ranks of the largest size share cores: its values do not show scaling."""
    cells = studies.strong(sizes=(1, 2, 4), per_node=4)
    path = studies.finished(tmp_path / "s", cells, env=lambda cell: studies.environment(cell, cores=2))
    results = results_of(path)
    assert list(results.invalid) == ["n1x4-gloo-srun-b16"]
    for drawing in scaling_figures(results):
        assert NOT_VALID in texts(drawing)
        assert "at 2 ranks; 1 size is not valid" in drawing.description


def test_a_series_has_one_look_in_all_figures_of_its_mode(tmp_path: Path, svg_only: None) -> None:
    """The first series has one size, and so no efficiency; the colour of the second one does not change."""
    cells = studies.strong(sizes=(1,), swept={"bucket_cap_mb": 1})
    cells += studies.strong(sizes=(1, 2), swept={"bucket_cap_mb": 25})
    path = studies.finished(tmp_path / "s", cells)
    with_both, with_one = figure(path, "throughput-strong").svg, figure(path, "efficiency-strong").svg
    assert Colour.BLUE in with_both
    assert Colour.BLUE not in with_one
    assert Colour.WINE in with_both
    assert Colour.WINE in with_one


def test_a_figure_reports_series_sizes_and_runs_that_it_leaves_out(
    tmp_path: Path, svg_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.report.figures.lines.MAX_RUNS", 60)
    cells = [
        cell
        for place in range(MAX_SERIES + 3)
        for cell in studies.weak(8 * (place + 1), (1, 2), swept={"bucket_cap_mb": place})
    ]
    cells += studies.weak(4, range(1, MAX_SIZES + 11))
    path = studies.finished(tmp_path / "s", cells, repeats=2, epochs=1, ranks_files=False)
    found = figure(path, "speedup-weak")
    assert "; ".join(found.left_out) == (
        "6 of 10 series drawn, with the most sizes; 34 of 44 cells drawn, spread over the sizes; "
        "the 68 individual runs are not drawn"
    )
    assert len(found.svg) < 200_000


def efficiency_of(path: Path, **options: Any) -> Drawing:
    """Return the figure of the efficiency of a strong series."""
    sizes = studies.strong(sizes=(1, 2), per_node=2)
    return figure(studies.finished(path, sizes, **options), "efficiency-strong")


def test_the_caption_gives_the_true_reason_of_missing_intervals(tmp_path: Path) -> None:
    alone = efficiency_of(tmp_path / "a", env=lambda cell: studies.environment(cell, cores=1))
    assert NOT_VALID in texts(alone)
    assert "No intervals" not in alone.caption
    few = efficiency_of(tmp_path / "b", repeats=2)
    assert few.caption.startswith("No intervals: they need three runs of a size and of its baseline.")
    lost = ("failed", "", "bad-exit")
    of_base = efficiency_of(tmp_path / "c", state=lambda cell, r: lost if cell.world_size == r == 1 else None)
    assert of_base.caption.startswith("No intervals: the baseline has fewer than three runs.")


def test_real_data_is_compared_with_synthetic_data_and_with_the_loader_alone(tmp_path: Path) -> None:
    cells = [cell for data in ("synthetic", "images") for cell in studies.weak(swept={"data": data})]
    path = studies.finished(tmp_path / "s", cells)
    (data,) = data_figures(results_of(path))
    assert data.name == "data-weak"
    loader = "loader alone, data images"
    assert {"data synthetic", "data images", loader} <= {*texts(data)}
    row = next(row for row in results_of(path).rows if row.gpus == 8 and "images" in row.series)
    assert data.description.endswith(f"{number(8 * 16 / row.data)} at 8 ranks."), (
        "samples per time in the loader"
    )
    for cell in cells:
        cell.workload["num_workers"] = 2
    (with_workers,) = data_figures(results_of(studies.finished(tmp_path / "w", cells)))
    assert loader not in texts(with_workers), "workers load during the step: their rate is not measured"


def ranks_of(path: Path) -> tuple[Results, Drawing]:
    results = results_of(path)
    (drawing,) = ranks_figure(results)
    return results, drawing


def test_the_late_rank_is_marked_and_named_and_its_node_is_first(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2, 4)))
    write_ranks(path, late=lambda run, rank: 0.004 * (rank == 2), host=lambda rank: f"node{rank}")
    found, figure = ranks_of(path)
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
    _, figure = ranks_of(path)
    assert (
        "; ".join(figure.left_out)
        == f"128 ranks of n64x2-gloo-srun-b8 drawn by node; the {MAX_BARS} slowest of 64 nodes drawn"
    )
    names = [text for text in texts(figure) if re.match(r"node\d", text)]
    assert names[0] == "node45 ◀"
    assert len(names) == MAX_BARS
