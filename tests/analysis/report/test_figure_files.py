"""The figures of the scaling table: their texts, descriptions and files, and that they hold no script."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from analysis.checks.scaling_table import scaling_table
from analysis.data.load import load_study
from analysis.data.names import series_parts
from analysis.report.figures.all_figures import scaling_figures
from analysis.report.figures.bars import split
from analysis.report.figures.curves import NOT_VALID
from analysis.report.figures.drawing import MAX_SERIES, MAX_SIZES, Colour, Drawing
from analysis.report.write import write_report
from analysis.stats.measured import measure
from tests.analysis import studies
from tests.analysis.figures import SVG, styled, texts


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


def test_files_have_their_formats(demo: dict[str, Drawing]) -> None:
    for drawing in demo.values():
        assert drawing.png.startswith(b"\x89PNG\r\n")
        assert drawing.pdf.startswith(b"%PDF-")
        assert ElementTree.fromstring(drawing.svg.encode()).tag == f"{SVG}svg"


def test_a_figure_has_a_description(demo: dict[str, Drawing]) -> None:
    for drawing in demo.values():
        alone = ElementTree.fromstring(drawing.svg.encode())
        assert alone.findtext(f"{SVG}title") == drawing.title
        (description,) = alone.iter("{http://purl.org/dc/elements/1.1/}description")
        assert description.text == drawing.description
    assert demo["efficiency-strong"].title == "Efficiency, strong scaling (batch 64, srun)"
    assert demo["efficiency-strong"].description.startswith(
        "Efficiency over ranks. gloo: 1.000 at 1 rank, 0.4"
    )


def test_figures_hold_no_script_and_no_outside_reference(demo: dict[str, Drawing]) -> None:
    for drawing in demo.values():
        root = ElementTree.fromstring(drawing.markup)
        names = {element.tag.removeprefix(SVG) for element in root.iter() if element.tag.startswith(SVG)}
        shapes = {"svg", "defs", "style", "g", "path", "use", "text", "clipPath", "rect", "pattern"}
        assert names <= {*shapes, "title", "metadata"}
        assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', drawing.markup))


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


HOSTILE = '"><script>alert(1)</script>$\\frac{1}{0}$ \x1b[31m\u202e &amp; 漢字'


def test_hostile_names_are_text_in_every_figure(tmp_path: Path, svg_only: None) -> None:
    cells: list[Any] = [*studies.strong(swept={"env.X": HOSTILE}), *studies.strong(swept={"env.X": "plain"})]
    for place, cell in enumerate(cells):
        cell.cell_id = f"c{place}"
    for drawing in drawings(studies.finished(tmp_path / "s", cells)).values():
        alone = ElementTree.fromstring(drawing.svg.encode())
        tags = {element.tag for element in alone.iter()}
        assert not tags & {f"{SVG}{tag}" for tag in ("script", "foreignObject", "a", "image")}
        assert "<script>" not in drawing.svg
        words = "".join(e.text or "" for e in alone.iter(f"{SVG}text"))
        assert "X plain" in words
        assert '"><script>alert(1)</script>$' in words
        assert not re.search("[\x00-\x08\x1b\u202e]", drawing.svg)


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
