"""The page's first screen: what went wrong, and the tables of sizes, verdicts, and the lines below."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from analysis.causes.cells import CauseRow, CellDivision
from analysis.checks.assessment import Assessment
from analysis.checks.nodes import CrowdedCores
from analysis.data.load import load_study
from analysis.report.decision import MAX_SERIES, Decision, SizeRow, decisions, main_loss
from analysis.report.page import _lead
from analysis.report.results import Results
from analysis.report.why import share_text
from bench.matrix.cell import Cell
from tests.analysis import studies
from tests.analysis.stats.test_disturbed import repeated


def results_of(path: Path, cells: Any = None, *, baseline: str | None = None, **options: Any) -> Results:
    return Results.of(load_study(studies.finished(path / "s", cells, **options)), baseline=baseline)


def decided(results: Results) -> tuple[list[SizeRow], dict[str, str]]:
    """Return the sizes of the only series of a study, its answer and the lines below its table."""
    (decision,) = decisions(results)
    ((label, sizes),) = decision.groups
    (answer,) = decision.answers
    assert label == answer.label == ""
    return sizes, {**dict(decision.lines), **asdict(answer)}


def set_efficiencies(results: Results, *values: float) -> None:
    """Change the efficiencies of the second and the third size; their runs differ by 1 %."""
    base = results.rows[0]
    for row, own in zip(results.rows[1:3], values, strict=True):
        row.efficiency, row.efficiency_low, row.efficiency_high = own, 0.98 * own, 1.02 * own
        row.rate = row.throughput_samples_per_sec = (
            own * base.throughput_samples_per_sec * row.gpus / base.gpus
        )
        row.log_mean, row.log_variance = math.log(row.throughput_samples_per_sec), 1e-4


LATE, CRASHED, MEMORY = (("failed", "", one) for one in ("time-limit", "bad-exit", "out-of-memory"))
PLANNED, QUEUED, RUNNING, LOST = ((one, "", None) for one in ("planned", "queued", "running", "unknown"))


def first_line(path: Path, *, include_disturbed: bool = False) -> tuple[dict[str, str], bool]:
    """Return the facts about runs and warnings in the first line, and whether a run went wrong."""
    results = Results.of(load_study(path), include_disturbed=include_disturbed)
    facts, is_wrong = _lead(results)
    return {label: text for label, text in facts if label != "Checks"}, is_wrong


@pytest.mark.parametrize(
    ("ends", "cores", "text"),
    [
        ({}, 8, "nothing"),
        (
            {(4, 1): LATE, (4, 2): LATE, (2, 3): MEMORY},
            8,
            "3 of 9 runs: 2 hit the time limit (4 ranks); 1 ran out of memory (2 ranks)",
        ),
        ({}, 2, "3 of 9 runs not valid, Ranks share cores (4 ranks)"),
        (
            {(4, 1): RUNNING, (4, 2): QUEUED, (4, 3): PLANNED},
            8,
            "no run failed so far; 3 not run yet (4 ranks)",
        ),
    ],
)
def test_the_first_line_says_what_went_wrong_at_which_sizes(tmp_path, ends, cores, text):
    path = studies.finished(
        tmp_path / "s",
        studies.strong(sizes=(1, 2, 4), per_node=4),
        noise=0.0,
        state=lambda cell, repeat: ends.get((cell.world_size, repeat)),
        env=lambda cell: studies.environment(cell, cores=cores),
    )
    assert first_line(path) == ({"Went wrong": text}, text[0].isdigit())


def test_a_disturbed_run_is_named_in_the_first_line_and_in_the_row_of_its_size(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2, 4)), noise=0.0)
    studies.disturb(path, "n2x1-gloo-srun-b32-r1", "foreign-cpu", share=0.25, limit=0.05)
    assert first_line(path)[0] == {"Went wrong": "1 of 9 runs disturbed by other programs (2 ranks)"}
    sizes, _ = decided(Results.of(load_study(path)))
    assert [size.lacking for size in sizes] == ["", "2 of 3 runs; 1 disturbed by other programs", ""]
    assert first_line(path, include_disturbed=True) == (
        {"Went wrong": "no run failed", "Warnings": "Disturbed runs"},
        False,
    )
    studies.disturb(path, "n2x1-gloo-srun-b32-r1", "link-errors", errors=3)
    assert first_line(path)[0] == {"Went wrong": "1 of 9 runs disturbed (2 ranks)"}


def test_with_a_warning_or_a_repeated_attempt_the_first_line_does_not_say_nothing(tmp_path: Path) -> None:
    own = {"facts": [studies.recorded("other-strategy", strategy="hsdp", used="fsdp", hosts=1)]}
    cells = studies.strong(sizes=(1, 2))
    path = studies.finished(
        tmp_path / "facts", cells, noise=0.0, env=lambda cell: studies.environment(cell) | own
    )
    fine = "no run failed"
    assert first_line(path) == ({"Went wrong": fine, "Warnings": "Other strategy"}, False)
    path = studies.finished(tmp_path / "attempts", cells, noise=0.0)
    repeated(path, "n2x1-gloo-srun-b32-r2")
    assert first_line(path) == ({"Went wrong": f"{fine}; 1 attempt repeated"}, False)


def test_the_largest_size_at_the_guide_is_recommended(tmp_path: Path) -> None:
    sizes, lines = decided(results_of(tmp_path, noise=0.0))
    below = "below 0.8, P\xa0<\xa00.01"
    verdicts = ["baseline", "use it: efficient, P\xa0>\xa00.99", below, below]
    assert [size.verdict for size in sizes] == verdicts
    best = sizes[1]
    assert (best.ranks, best.layout, best.speedup) == ("2", "2 × 1", "1.69")
    assert (best.efficiency, best.loss) == ("0.85 [0.85, 0.85]", "12 % exposed communication")
    assert lines == {
        "label": "",
        "use": "use 2 ranks (2 × 1), 1.69 times the rate of 1 rank",
        "sure": "efficiency 0.85 [0.85, 0.85], P > 0.99",
        "why": "12 % exposed communication",
        "others": "4 ranks and 8 ranks: below 0.8 (lost: 30 % exposed communication at 4 ranks)",
    }


def test_the_cost_is_in_node_hours_on_cpus_and_in_gpu_hours_on_gpus(tmp_path: Path) -> None:
    for device, heading in (("cpu", "Node-hours"), ("cuda", "GPU-hours")):
        cells = studies.strong(sizes=(1, 4), per_node=2)
        for cell in cells:
            cell.workload["device"] = device
        results = results_of(tmp_path / device, cells, noise=0.0)
        (decision,) = decisions(results)
        assert decision.cost == heading
        row = results.rows[1]
        units = row.nodes if device == "cpu" else row.gpus
        hours = units * 1e6 / row.throughput_samples_per_sec / 3600
        assert float(decision.groups[0][1][1].cost) == pytest.approx(hours, rel=5e-3)


def test_each_mode_has_a_table_and_series_have_groups(tmp_path: Path) -> None:
    cells = [cell for n in range(6) for cell in studies.strong(sizes=(1, 2), swept={"n": n})]
    cells += [cell for n in (1, 2) for cell in studies.weak(sizes=(1, 2, 4), swept={"n": n})]
    found: dict[str, Decision] = {one.mode: one for one in decisions(results_of(tmp_path, cells, epochs=1))}
    assert [one.title for one in found.values()] == ["Strong scaling", "Weak scaling"]
    assert [label for label, _ in found["strong"].groups] == ["n 0", "n 1", "n 2", "n 3"]
    assert found["strong"].caption == "batch 64, gloo, srun, 4 of 6 series, the others are in All cells"
    assert [len(sizes) for _, sizes in found["weak"].groups] == [3, 3]
    assert [answer.label for answer in found["strong"].answers] == ["n 0", "n 1", "n 2", "n 3"]
    assert {answer.use.rpartition(", ")[2] for answer in found["strong"].answers} == {
        "the largest size planned"
    }


def test_layouts_with_as_many_ranks_as_the_recommended_size(tmp_path: Path) -> None:
    """1 × 8 is recommended, 2 × 4 is below the guide, and 4 × 2 failed."""

    cells = [studies.make_cell(ranks, per_node=n, batch=64) for ranks, n in ((1, 1), (8, 8), (8, 4), (8, 2))]
    state = {4: MEMORY}
    results = results_of(tmp_path, cells, state=lambda cell, _: state.get(cell.nodes), noise=0.0)
    set_efficiencies(results, 0.9, 0.6)
    sizes, lines = decided(results)
    assert [size.kind for size in sizes] == ["baseline", "efficient", "inefficient", "no-result"]
    assert [size.recommended for size in sizes] == [False, True, False, False]
    assert lines["use"].startswith("use 8 ranks (1 × 8), ")
    assert lines["others"].startswith("8 ranks (2 × 4): below 0.8")
    assert lines["others"].endswith("8 ranks (4 × 2): no result")


OPEN = "the best size is not known yet"
FAR = {"timing": studies.Timing(comm_s=0.2), "noise": 0.0}
NEAR = {"timing": studies.Timing(comm_s=0, fixed_s=0, imbalance=0), "noise": 0.0}


@pytest.mark.parametrize(
    ("options", "verdicts", "use"),
    [
        (FAR, ["baseline", *["inefficient"] * 3], "use no more than 1 rank (1 × 1)"),
        ({"baseline": "8"}, [*["no-advice"] * 3, "baseline"], OPEN),
        ({"baseline": "4", **NEAR}, [*["no-advice"] * 2, "baseline", "efficient"], "use 8 ranks (8 × 1)"),
    ],
)
def test_sizes_larger_than_the_baseline_are_used_or_below_the_guide(tmp_path, options, verdicts, use):
    sizes, lines = decided(results_of(tmp_path, **options))
    assert [size.kind for size in sizes] == verdicts
    assert lines["use"].partition(",")[0] == use


def test_nothing_is_concluded_from_sizes_that_are_not_valid(tmp_path: Path) -> None:
    results, good, two = results_of(tmp_path, noise=0.001), ["baseline", "efficient"], "use 2 ranks (2 × 1)"
    for cell, kinds, use, others in (
        (
            "n8x1-gloo-srun-b8",
            [*good, "inefficient", "not-valid"],
            two,
            "8 ranks: not valid (Ranks share cores)",
        ),
        (
            "n4x1-gloo-srun-b16",
            [*good, "not-valid", "inefficient"],
            two,
            "4 ranks: not valid (Ranks share cores)",
        ),
        (
            "n1x1-gloo-srun-b64",
            ["not-valid"] * 4,
            OPEN,
            "1 rank, 2 ranks and 2 more: not valid (Ranks share cores)",
        ),
    ):
        vars(results)["assessment"] = Assessment(
            [CrowdedCores(subject=(cell,), ranks=4, threads=4, cores=2, crowds={})], []
        )
        for name in ("verdicts", "choices"):
            vars(results).pop(name, None)
        sizes, lines = decided(results)
        assert [size.kind for size in sizes] == kinds
        assert {size.verdict for size in sizes if size.kind == "not-valid"} == {
            "not valid: Ranks share cores"
        }
        assert lines["use"].partition(",")[0] == use
        assert others in lines["others"]
        assert "Not known" not in lines


def test_fewer_than_3_runs_recommend_nothing_and_have_shares_without_intervals(tmp_path: Path) -> None:
    results = results_of(tmp_path, repeats=2, noise=0.0)
    sizes, lines = decided(results)
    assert (sizes[1].efficiency, sizes[1].verdict) == ("0.85", "2 runs, no interval")
    assert lines["Not known"] == (
        "whether 2 ranks, 4 ranks and 8 ranks reach 0.8: an interval needs 3 undisturbed runs of each and of 1 rank"
    )
    division = results.divisions[results.rows[-1].place]
    assert not any("[" in share_text(row) for row in division.rows)


def test_a_loss_whose_interval_includes_0_is_no_main_loss() -> None:
    rows = [CauseRow("outside-timers", 0.01, 0.0, 0.02), CauseRow("not-explained", 0.2, -0.1, 0.5)]
    division = CellDivision(rows, {"transfer": 0.2})
    assert main_loss(division)[0] == "no clear cause"
    assert share_text(rows[1]) == "20 % [-10 %, 50 %; share not certain]"
    assert share_text(CauseRow("not-explained", 0.85, -2.82, 1.0)) == "85 % [share not certain]"
    assert [share_text(CauseRow("computation", timed=timed)) for timed in (True, False)] == [
        "share not certain",
        "–",
    ]
    certain = CellDivision([rows[0], CauseRow("not-explained", 0.2, 0.1, 0.3)], {"transfer": 0.2})
    assert main_loss(certain) == ("exposed communication", 0.2)


SIZES = [size for size in range(1, 19) if 5040 % size == 0]


def test_series_that_are_not_in_the_table_have_their_answer_on_the_first_screen(tmp_path: Path) -> None:
    cells = [
        cell
        for place in range(1, MAX_SERIES + 3)
        for cell in studies.weak(8 * place, (1, 2) if place <= MAX_SERIES else (1,))
    ]
    failed = f"n1x1-gloo-srun-b{8 * (MAX_SERIES + 2)}"

    def state(cell: Cell, repeat: int) -> studies.State | None:
        return ("failed", "", "killed") if cell.cell_id == failed else None

    path = studies.finished(tmp_path / "s", cells, state=state, ranks_files=False)
    (decision,) = decisions(Results.of(load_study(path)))
    assert len(decision.answers) == MAX_SERIES
    assert decision.more == (
        "40 per rank: no advice from a single size: measure another one; "
        "48 per rank: no run has a result (3 killed by a signal)"
    )


def test_a_long_table_folds_the_sizes_that_decide_least(tmp_path: Path) -> None:
    quick = {"epochs": 1, "noise": 0.001, "ranks_files": False}
    sizes, _ = decided(results_of(tmp_path, studies.strong(5040, SIZES), **quick))
    assert not any(size.folded for size in sizes), "15 sizes fit"
    cells = [cell for name in "abcd" for cell in studies.strong(5040, SIZES[:9], swept={"name": name})]
    (decision,) = decisions(results_of(tmp_path / "four", cells, **quick))
    for _, own in decision.groups:
        shown = [size for size in own if not size.folded]
        assert len(shown) == 5
        assert own[0] in shown
        assert own[-1] in shown
        assert all(size in shown for size in own if size.recommended)
