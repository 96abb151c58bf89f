"""Heat maps, bandwidth, step times, ranks and nodes: their marks, and the data that they leave out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.checks.fabric import ring_time
from analysis.checks.scaling_table import scaling_table
from analysis.checks.slow_ranks import LATE_FROM, nodes_table
from analysis.data.csv_files import csv_text
from analysis.data.load import load_study
from analysis.report.figures.all_figures import all_names, detail_figures
from analysis.report.figures.bars import MAX_BARS
from analysis.report.figures.drawing import Drawing
from analysis.report.figures.heatmaps import batch_figure
from analysis.report.figures.step_times import MAX_RUNS
from analysis.report.results import Results
from analysis.report.tables import node_rows
from analysis.report.write import write_report
from analysis.stats.measured import measure
from bench.matrix.cell import Cell
from bench.study.layout import StudyFolder
from tests.analysis import studies
from tests.analysis.closer_studies import ALPHA, BETA, SIZES, with_probes, write_ranks
from tests.analysis.figures import texts, tips

pytestmark = pytest.mark.usefixtures("svg_only")

HOSTILE = '"><script>alert(1)</script>$\\frac{1}{0}$ \x1b[31m'


def details_of(path: Path) -> tuple[Results, dict[str, Drawing]]:
    results = Results.of(load_study(path))
    return results, {drawing.name: drawing for drawing in detail_figures(results)}


def heat(path: Path, mode: str) -> Drawing:
    results = Results.of(load_study(path))
    found = batch_figure(results.rows, mode, results.parts)
    assert found is not None
    return found


# -- sizes and batches ----------------------------------------------------------------


def test_the_heat_map_has_a_field_per_size_and_batch(tmp_path: Path) -> None:
    cells = [cell for batch in (64, 128) for cell in studies.strong(batch, (1, 2, 4))]

    def state(cell: Cell, repeat: int) -> tuple[str, str, str | None]:
        failed = cell.global_batch == 128 and cell.nodes == 4
        return ("failed", "out of memory", "out-of-memory") if failed else ("completed", "", None)

    path = studies.finished(tmp_path / "s", cells, state=state)
    found = heat(path, "strong")
    assert len(tips(found)) == 6
    for row in (row for row in scaling_table(load_study(path)) if row.n):
        words = f"= {row.gpus} rank", f"batch {row.global_batch:g},"
        (tip,) = (tip for tip in tips(found) if all(word in tip for word in words))
        assert f"efficiency {row.efficiency:.3f}\n" in tip
    (failed,) = (tip for tip in tips(found) if "failed" in tip)
    assert failed.endswith(
        "4 nodes × 1 rank = 4 ranks, batch 128, 32 per rank: failed\nno run counted: 3 ran out of memory (out of memory)"
    )
    assert {"Nodes", "Global batch", "64", "128", "1", "2", "4", "failed"} <= set(texts(found))


@pytest.mark.parametrize(
    "cells", [studies.strong(64), [c for b in (64, 128) for c in studies.strong(b, (4,))]]
)
def test_one_batch_or_one_size_has_no_heat_map(tmp_path: Path, cells: list[Cell]) -> None:
    table = scaling_table(measure(load_study(studies.finished(tmp_path / "s", cells))))
    assert batch_figure(table, "strong", {}) is None


def test_backends_have_panels_of_their_own(tmp_path: Path) -> None:
    cells = [
        c for b in (8, 16) for backend in ("gloo", "nccl") for c in studies.weak(b, (1, 2), backend=backend)
    ]
    found = heat(studies.finished(tmp_path / "s", cells), "weak")
    assert {"gloo, srun, 1 rank per node", "nccl, srun, 1 rank per node"} <= set(texts(found))
    assert len(tips(found)) == 8


# -- bandwidth ------------------------------------------------------------------------


def test_bandwidth_has_a_point_per_message_and_line_and_shows_the_fit(tmp_path: Path) -> None:
    cells = studies.strong(64, (2, 4)) + studies.strong(128, (2, 4))
    path = with_probes(studies.finished(tmp_path / "s", cells), cells)
    found = details_of(path)[1]["bandwidth"]
    # Cells that differ in their batch share a fabric: one line per size.
    assert len(tips(found)) == 2 * len(SIZES)
    largest = SIZES[-1] * 2 * 3 / 4 / ring_time(SIZES[-1], 4, ALPHA, BETA) / 1e9
    assert tips(found)[-1].startswith(f"4 ranks (4 × 1)\n64 MiB: {largest:.2f} GB/s\n")
    assert tips(found)[-1].endswith(", 6 runs")
    assert "4 ranks (4 × 1): α = 25.0 µs, 1/β = 5.00 GB/s." in found.caption


@pytest.mark.parametrize(
    ("backend", "method", "is_marked"),
    [("nccl", None, True), ("nccl", "single", True), ("nccl", "queued", False), ("gloo", None, False)],
)
def test_times_of_nccl_that_contain_the_launch_are_marked(
    tmp_path: Path, backend: str, method: str | None, is_marked: bool
) -> None:
    cells = studies.strong(64, (2, 4), backend=backend)
    path = with_probes(studies.finished(tmp_path / "s", cells), cells, method=method)
    note = (
        "; 2 ranks (2 × 1), 4 ranks (4 × 1) measured by version 0.1.0, one all-reduce at a time: these times"
        " contain the launch by the host, some 10 to 100 µs. 2 ranks (2 × 1): α"
    )
    assert (note in details_of(path)[1]["bandwidth"].caption) == is_marked


def test_more_lines_than_colours_are_left_out_with_a_note(tmp_path: Path) -> None:
    cells = studies.weak(8, range(2, 12))
    path = with_probes(studies.finished(tmp_path / "s", cells, repeats=1), cells, repeats=1)
    found = details_of(path)[1]["bandwidth"]
    assert found.left_out == ["6 of 10 lines drawn, spread over the sizes"]
    assert found.caption.endswith("; fabric.csv contains α and β.")


def test_a_sweep_without_a_fit_shows_the_reason(tmp_path: Path) -> None:
    cells = studies.strong(64, (2,))
    path = studies.finished(tmp_path / "s", cells, repeats=1)
    content = {"schema": 1, "world_size": 2, "all_reduce": {"sizes": [{"bytes": 4096, "times_s": [[1e-3]]}]}}
    StudyFolder(path).attempt(f"{cells[0].cell_id}-r1", 1).probes.write_text(json.dumps(content))
    studies.seal(path)
    found = details_of(path)[1]["bandwidth"]
    assert len(tips(found)) == 1
    assert "no fit (1 message sizes; a fit needs 3)" in found.caption


# -- step times -----------------------------------------------------------------------


def test_boxes_hold_the_quantiles_of_the_steps(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), repeats=2)
    times = {}
    for place, file in enumerate(sorted(path.glob("runs/n2x1*/attempt-1/steps.csv"))):
        values = np.random.default_rng(place).uniform(0.010, 0.020, 40)
        frame = pd.DataFrame({"epoch": 0, "step": range(40), "step_time_sec": values, "slowest_rank": 1})
        frame.to_csv(file, index=False)
        times[place] = values
    studies.seal(path)
    both = np.concatenate(list(times.values()))
    found = details_of(path)[1]["times-strong"]
    box, slowest = (tip for tip in tips(found) if "2 ranks" in tip)
    ms = [f"{1e3 * value:.1f} ms" for value in np.quantile(both, [0.5, 0.25, 0.75, 0.05, 0.95])]
    assert box == (
        f"batch 64\n2 ranks: median {ms[0]}\nhalf of the steps take {ms[1]} to {ms[2]}, "
        f"90 % take {ms[3]} to {ms[4]}\n"
        "80 steps of 2 runs"
    )
    assert f"the slowest step, {1e3 * both.max():.1f} ms\nrun n2x1-gloo-srun-b32-r" in slowest
    assert slowest.endswith(", rank 1 was slowest")


def test_only_some_of_many_repeats_are_read(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), repeats=9, epochs=1)
    found = details_of(path)[1]["times-strong"]
    assert all(tip.endswith(f" of {MAX_RUNS} runs") for tip in tips(found) if "median" in tip)


def test_without_step_times_there_is_no_figure_of_them(tmp_path: Path) -> None:
    found, drawings = details_of(studies.finished(tmp_path / "s", ranks_files=False))
    assert (drawings, found.ranks, len(found.sweep)) == ({}, None, 0)


# -- ranks and nodes ------------------------------------------------------------------


def test_the_late_rank_is_marked_and_named_and_its_node_is_first(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2, 4)))
    write_ranks(path, late=lambda run, rank: 0.004 * (rank == 2), host=lambda rank: f"node{rank}")
    found, drawings = details_of(path)
    figure = drawings["ranks"]
    assert "2 · node2 ◀" in texts(figure)
    assert sum("◀" in text for text in texts(figure)) == 1
    assert figure.description.endswith("rank 2 on node2 works longest.")
    work = next(tip for tip in tips(figure) if tip.startswith("rank 2 on node2, forward and backward"))
    assert work == (
        "rank 2 on node2, forward and backward: 12.0 ms per step\nuseful time: 14.0 ms, 25.0 % of the step more "
        "than usual\n3 runs"
    )
    assert found.ranks is not None
    nodes = csv_text(nodes_table(found.ranks), digits=9).splitlines()
    assert nodes[0].startswith("cell_id,host,ranks,n,useful_sec,data_sec,compute_sec,wait_sec,transfer_sec")
    latest = next(line for line in nodes if line.startswith("n4x1"))
    assert latest == "n4x1-gloo-srun-b16,node2,1,3,0.014,0.001,0.012,0,0.002,0.016,0.25"


def test_a_rank_that_is_late_in_few_runs_has_no_mark(tmp_path: Path) -> None:
    """Of two ranks, each is late in some run by chance: both have a mean excess above 5 % of the step."""
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)), repeats=4)
    first = {"r1": 0.004, "r2": 0.004}
    write_ranks(
        path,
        late=lambda run, rank: first.get(run[-2:], 0.0) if rank == 0 else 0.004 - first.get(run[-2:], 0.0),
        host=lambda rank: f"node{rank}",
    )
    found, drawings = details_of(path)
    assert found.ranks is not None
    assert all(rank.beyond > LATE_FROM for rank in found.ranks.by_rank)
    assert not any("◀" in text for text in texts(drawings["ranks"]))
    assert drawings["ranks"].description.endswith("no rank is late.")
    assert [late for late, _ in node_rows(found.ranks)] == [False, False]


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


def test_hosts_and_names_of_results_are_text_in_every_new_section(tmp_path: Path) -> None:
    cells = [
        c for b in (64, 128) for c in studies.strong(b, (1, 2), swept={"env.X": HOSTILE}, backend=HOSTILE)
    ]
    for place, cell in enumerate(cells):
        cell.cell_id = f"c{place}<script>alert(1)<"
    path = studies.finished(tmp_path / "s", cells, repeats=3)
    with_probes(path, [cell for cell in cells if cell.world_size > 1])
    write_ranks(path, late=lambda run, rank: 0.004 * (rank == 1), host=lambda rank: f"n{rank}{HOSTILE}")
    page = write_report(path).page.read_text(encoding="utf-8")
    names = {file.stem for file in (path / "report" / "figures").iterdir()}
    assert {"heat-strong", "bandwidth", "times-strong", "ranks"} <= names <= set(all_names())
    assert page.count("<script") == 2  # the data and ours
    assert "\x1b" not in page
    nodes = page[page.index('aria-label="Means per step by node"') :]
    assert "n1&#34;&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in nodes[: nodes.index("</details>")]
    for file in (path / "report" / "figures").glob("*.svg"):
        assert "<script" not in file.read_text(encoding="utf-8")
