"""The figures of the scaling table: their texts, descriptions and files, and that they hold no script."""

from __future__ import annotations

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
from analysis.data.names import series_parts, short_labels
from analysis.report.figures.all_figures import all_names, scaling_figures
from analysis.report.figures.bars import split
from analysis.report.figures.curves import NOT_VALID, WIDE
from analysis.report.figures.drawing import (
    MAX_SERIES,
    MAX_SIZES,
    PARTS,
    SERIES_COLOURS,
    SERIES_DASHES,
    SERIES_MARKERS,
    Colour,
    Drawing,
    theme_rules,
)
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


def test_each_regime_has_its_figures(demo: dict[str, Drawing]) -> None:
    kinds = ("efficiency", "speedup", "throughput", "step", "shares")
    assert list(demo) == [f"{kind}-{regime}" for regime in ("strong", "weak") for kind in kinds]
    assert set(demo) <= set(all_names())


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


def test_text_stays_text_and_the_legend_is_part_of_the_figure(demo: dict[str, Drawing]) -> None:
    drawing = demo["speedup-strong"]
    legend = {"gloo", "nccl", "ideal, through the baseline"}
    assert {"Ranks", "Speedup", "1", "2", "4", "8"} | legend <= set(texts(drawing))
    assert legend == {key.words for key in drawing.legend}


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


def test_the_style_sheet_has_a_rule_for_each_colour_on_the_page(demo: dict[str, Drawing]) -> None:
    rules = theme_rules()
    for drawing in demo.values():
        root = ElementTree.fromstring(drawing.markup)
        for element in root.iter():
            for name in ("fill", "stroke"):
                colour = element.get(name) or styled(element, name)
                if colour not in ("", "none") and not colour.startswith("url(#"):
                    assert f'[style*="{name}: {colour}"], [{name}="{colour}"] {{ {name}: var(--' in rules
        assert "var(" not in drawing.svg


def test_drawing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)))
    assert drawings(path) == drawings(path)


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


def test_a_run_above_every_mean_is_drawn_inside_the_panel(tmp_path: Path, svg_only: None) -> None:
    path = studies.finished(tmp_path / "s", studies.weak(sizes=(1, 2)), timing=studies.Timing(comm_s=0))
    metrics = path / "runs" / "n2x1-gloo-srun-b16-r1" / "attempt-1" / "metrics.csv"
    studies.scale_rate(metrics, 1.5)
    shapes = ElementTree.fromstring(figure(path, "efficiency-weak").markup).iter(f"{SVG}use")
    assert min(float(shape.get("y", 0)) for shape in shapes) >= 7.2  # the panel's upper edge, in points


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


def test_without_a_valid_baseline_there_is_no_ideal_line(tmp_path: Path, svg_only: None) -> None:
    study = load_study(studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2))))
    frames = measure(study)
    table, base = scaling_table(frames), "n1x1-gloo-srun-b64"
    found = scaling_figures(table, frames.runs, parts=series_parts(study.plan), invalid=[base])
    efficiency, speedup, throughput = (next(found) for _ in range(3))
    for drawing in (efficiency, speedup):
        assert "no valid value; 2 sizes are not valid." in drawing.description
    assert " at 2 ranks; 1 size is not valid" in throughput.description
    for drawing in (speedup, throughput):
        assert "ideal, through the baseline" not in [key.words for key in drawing.legend]


def test_a_part_of_the_step_has_one_colour_and_hatch_in_all_figures(demo: dict[str, Drawing]) -> None:
    keys = [key for drawing in demo.values() for key in drawing.legend if key.hatch is not None]
    step = {key.words: (key.colour, key.hatch) for key in keys}
    assert all((key.colour, key.hatch) == step[key.words] for key in keys)
    assert len(set(PARTS.values())) == len({part.colour for part in PARTS.values()}) == len(PARTS)
    assert not {part.colour for part in PARTS.values()} & set(SERIES_COLOURS)


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


def test_one_size_alone_has_throughput_and_no_curve(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(4,)))
    assert list(drawings(path)) == ["throughput-strong", "step-strong", "shares-strong"]


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", state=lambda cell, repeat: ("failed", "x", None))
    assert drawings(path) == {}


def test_several_layouts_of_one_size_are_named(tmp_path: Path, svg_only: None) -> None:
    cells = [
        studies.make_cell(n, batch=16, mode="weak", per_node=p, name=f"c{n}x{p}")
        for n, p in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 1))
    ]
    found = drawings(studies.finished(tmp_path / "s", cells))
    names = {"1 rank", "2 ranks (2 × 1)", "2 ranks (1 × 2)", "4 ranks (2 × 2)", "4 ranks (4 × 1)"}
    assert names <= set(texts(found["step-weak"]))
    assert (
        "Lines connect sizes on one node, or sizes with equal ranks per node."
        in found["efficiency-weak"].caption
    )


HOSTILE = '"><script>alert(1)</script>$\\frac{1}{0}$ \x1b[31m\u202e &amp; 漢字'


def test_hostile_names_are_text_in_every_figure(tmp_path: Path, svg_only: None) -> None:
    cells: list[Any] = [
        *studies.strong(swept={"env.X": HOSTILE}),
        *studies.strong(swept={"env.X": "plain"}),
    ]
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


def test_labels_hold_only_what_differs() -> None:
    plan = {
        "series": [
            {
                "series": "a",
                "mode": "strong",
                "batch": 1024,
                "backend": "nccl",
                "launcher": "srun",
                "swept": {"env.A": 1},
            },
            {
                "series": "b",
                "mode": "weak",
                "batch": 8,
                "backend": "nccl",
                "launcher": "srun",
                "swept": {"env.A": 2},
            },
        ]
    }
    parts = series_parts(plan)
    assert short_labels(parts, ["a", "b"]) == (
        {"a": "batch 1,024, A 1", "b": "8 per rank, A 2"},
        "nccl, srun",
    )
    assert short_labels(parts, ["a"]) == ({"a": "batch 1,024"}, "nccl, srun, A 1")
    assert short_labels({}, ["x"]) == ({"x": "x"}, "")
    long = [f"{'y' * 70}{end}" for end in "ab"]
    assert short_labels({}, long)[0] == {one: f"{i}: {'y' * 55}…" for i, one in enumerate(long, start=1)}
    twins = {"a": parts["a"], "c": dict(parts["a"])}
    assert short_labels(twins, ["a", "c"]) == ({"a": "a", "c": "c"}, "nccl, srun, A 1")


def test_series_differ_in_colour_marker_and_dash() -> None:
    assert len(set(SERIES_COLOURS)) == len(set(SERIES_MARKERS)) == len(set(SERIES_DASHES)) == MAX_SERIES


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
        tmp_path / "c",
        [],
        state=lambda cell, r: lost if cell.world_size == r == 1 else ("completed", "", None),
    )
    assert of_base.caption.startswith("No intervals: the baseline has fewer than three runs.")


def test_the_legend_explains_a_mean_with_a_wide_interval(tmp_path: Path) -> None:
    for name, noise in (("certain", 0.01), ("wide", 0.4)):
        drawing = efficiency_of(tmp_path / name, [], noise=noise)
        assert (WIDE in [key.words for key in drawing.legend]) == (name == "wide")
