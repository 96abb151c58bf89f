"""Comparisons of studies and of swept settings: cells, pairs, texts, and how often verdicts are wrong."""

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from analysis.checks.assessment import CheckedStudy
from analysis.compare.comparison import (
    Comparison,
    Verdict,
    benjamini_hochberg,
    compare_studies,
    compare_within,
    judge,
)
from analysis.compare.settings import SettingRow, sentences, setting_rows
from analysis.compare.text import as_content, conclusion, difference_rows, markdown_report, table_rows
from analysis.data.load import Study, load_study
from analysis.report.results import Results
from analysis.report.write import write_report
from analysis.stats.estimate import LogMoments, unpaired
from analysis.stats.measured import measure
from analysis.tables_in.read import read_table
from analysis.tables_in.study import study_of_table
from bench.cli import app
from bench.matrix.cell import Cell
from ddp_scaling_bench.errors import BenchError
from tests.analysis import studies
from tests.analysis.causes.planted import plant
from tests.analysis.studies import (
    Timing,
    change_run,
    environment,
    finished,
    make_cell,
    runs_frame,
    scale_rate,
    strong,
    weak,
)
from tests.common import raised


def study(path: Path, cells: list[Cell] | None = None, *, slower: float = 1.0, **options: Any) -> Study:
    """Return a finished study whose steps take ``slower`` times as long."""
    timing = Timing(sample_s=1e-3 * slower, comm_s=4e-3 * slower, fixed_s=1e-3 * slower)
    options = {"epochs": 1, "ranks_files": False, "timing": timing} | options
    return load_study(finished(path, cells, **options))


def with_settings(cells: list[Cell], **settings: Any) -> list[Cell]:
    for cell in cells:
        cell.workload = {**cell.workload, **settings}
    return cells


def settings(found: Comparison) -> list[tuple[str, str, str]]:
    """Return the settings that differ, with their values in A and in B."""
    rows = zip(found.differences, difference_rows(found), strict=True)
    return [row for one, row in rows if one.kind == "setting"]


def test_ratios_are_b_over_a_with_welchs_interval_of_the_logarithms(tmp_path):
    a = study(tmp_path / "a", repeats=6, noise=0.02)
    b = study(tmp_path / "b", repeats=5, noise=0.03, slower=1.05, seed=2)
    found = compare_studies(a, b).cells
    logs = []
    for one in (a, b):
        runs = runs_frame(measure(one).runs)
        own = runs.loc[runs["cell_id"] == "n2x1-gloo-srun-b32", "throughput_samples_per_sec"]
        logs.append(np.log(own.to_numpy(dtype=float)))
    expected = stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    (row,) = (row for row in found if row.cell_a == "n2x1-gloo-srun-b32")
    assert (row.low, row.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    means = [stats.hmean(np.exp(own)) for own in logs]
    assert [row.throughput_a, row.throughput_b] == pytest.approx(means)
    assert row.ratio == pytest.approx(math.sqrt(row.low * row.high))
    assert (row.n_a, row.n_b) == (6, 5)


def test_unmatched_cells_are_listed_and_a_setting_that_varies_within_a_study_must_agree(tmp_path):
    a = study(tmp_path / "a", [*strong(), *strong(backend="nccl")])
    b = study(tmp_path / "b", [*strong(sizes=(1, 2)), *weak(32, sizes=(4, 8))])
    found = compare_studies(a, b)
    assert [row.cell_a for row in found.cells] == ["n1x1-gloo-srun-b64", "n2x1-gloo-srun-b32"]
    assert {"n4x1-gloo-srun-b16", "n1x1-nccl-srun-b64"} <= {*found.only_a}
    assert found.only_b == ["n4x1-gloo-srun-b32", "n8x1-gloo-srun-b32"]
    assert settings(found) == []


def test_clusters_with_different_nodes_compare_if_the_layout_is_ignored(tmp_path):
    a = study(tmp_path / "a", strong(352, sizes=(4, 8), per_node=4))
    b = study(tmp_path / "b", strong(352, sizes=(4, 8), per_node=8))
    assert len(compare_studies(a, b).cells) == 1
    found = compare_studies(a, b, ignore=["nodes"])
    assert [row.cell_b for row in found.cells] == ["n1x4-gloo-srun-b88", "n1x8-gloo-srun-b44"]
    assert ("nodes", "1 and 2", "1") in {*settings(found)}


@pytest.mark.parametrize(
    ("cells_a", "cells_b", "ignore", "said"),
    [
        (with_settings(strong(), model="convnet"), with_settings(strong(), model="mlp"), [], "studies a (A) and b (B) have no cell in common: model is convnet in A and mlp in B; give --ignore model, or compare the same work"),
        ([*strong(sizes=(2,)), *strong(sizes=(2,), backend="nccl")], strong(sizes=(2,)), ["backend"], "cells n2x1-gloo-srun-b32 and n2x1-nccl-srun-b32 of A agree in all compared settings, so it is not clear which of them to compare; ignore fewer settings (--ignore)"),
        (strong(), strong(), ["colour"], "--ignore: no cell has a setting 'colour'; allowed: nodes, world_size, per_gpu_batch"),
        (with_settings(strong(), model="convnet", data="a"), with_settings(strong(), model="mlp", data="b"), [], "studies a (A) and b (B) have no cell in common: model is convnet in A and mlp in B; data differs, too; give each with --ignore, or compare the same work"),
        (strong(sizes=(2,)), strong(sizes=(4,)), [], "studies a (A) and b (B) have no cell in common: nodes is 2 in A and 4 in B; world_size and per_gpu_batch differ, too; compare studies of the same work and sizes"),
    ],
    ids=["work", "ambiguous", "unknown", "several", "sizes"],
)  # fmt: skip
def test_studies_that_do_not_match_are_an_error(tmp_path, cells_a, cells_b, ignore, said):
    a, b = study(tmp_path / "a", cells_a), study(tmp_path / "b", cells_b)
    assert raised(BenchError, compare_studies, a, b, ignore=ignore).startswith(said)


def test_a_cell_that_fails_after_the_change_is_a_regression_and_one_that_has_not_run_is_none(tmp_path):
    states = {4: ("planned", "", None), 8: ("failed", "boom", "out-of-memory")}
    a = study(tmp_path / "a", noise=0.001)
    b = study(tmp_path / "b", noise=0.001, state=lambda cell, _: states.get(cell.world_size))
    found = compare_studies(a, b)
    *_, planned, failed = found.cells
    assert (planned.remark, planned.broken) == ("B: no measured run (3 not started)", False)
    assert (failed.broken, failed.verdict) == (True, "cannot tell")
    assert (
        failed.remark
        == "B: no measured run (3 ran out of memory); failed in B but completed in A: this counts as a regression"
    )
    assert found.regression
    assert conclusion(found).endswith("; 1 failed in B and completed in A")
    assert not compare_studies(b, a).regression
    failing = study(tmp_path / "c", state=lambda cell, repeat: states[8])
    assert raised(BenchError, compare_studies, a, failing) == (
        f"{tmp_path}/c: nothing to compare: no run has completed (12 ran out of memory); run it first: bench submit {tmp_path}/c --retry-failed"
    )


def paired_study(path: Path, *, packed: bool, drift: float = 0.3) -> Study:
    """Return a study of two backends that differ by 3 %, with a different level in every repeat."""
    cells = [*strong(sizes=(2, 4), backend="gloo"), *strong(sizes=(2, 4), backend="nccl")]
    finished(path, cells, repeats=6, noise=0.002, epochs=1, ranks_files=False)
    hours = np.random.default_rng(7).normal(0, drift, 7)
    for file in sorted(path.glob("runs/*/attempt-1/metrics.csv")):
        record = json.loads((file.parent / "run.json").read_text())
        factor = math.exp(hours[record["repeat"]]) * (1.03 if "nccl" in record["cell_id"] else 1.0)
        scale_rate(file, factor)
    if packed:
        for run in (path / "runs").iterdir():
            change_run(path, run.name, job_id="77", pack=1)
    return load_study(path)


def test_runs_interleaved_in_one_allocation_are_pairs_by_repeat_and_those_of_two_studies_never(tmp_path):
    packed, alone = (paired_study(tmp_path / str(one), packed=one) for one in (True, False))
    found, apart = (compare_within(CheckedStudy.of(one), key="backend").cells for one in (packed, alone))
    assert [(row.pairs, row.verdict) for row in found] == [(6, "faster")] * 2
    assert [row.ratio for row in found] == pytest.approx([1.03, 1.03], rel=0.005)
    assert [(row.pairs, row.verdict) for row in apart] == [(None, "cannot tell")] * 2
    for wide, narrow in zip(apart, found, strict=True):
        assert wide.high - wide.low > 20 * (narrow.high - narrow.low)
    copy = load_study(shutil.copytree(tmp_path / "True", tmp_path / "copy"))
    assert {row.pairs for row in compare_studies(packed, copy).cells} == {None}


def test_every_value_of_a_setting_is_compared_with_the_base(tmp_path):
    cells = [
        make_cell(ranks, batch=64, swept={"env.NCCL_ALGO": algo})
        for algo in ("Ring", "Tree", "CollNet")
        for ranks in (1, 2)
    ]
    for cell in cells:
        cell.env = {"NCCL_ALGO": cell.swept["env.NCCL_ALGO"]}
    one = CheckedStudy.of(study(tmp_path / "s", cells))
    found = compare_within(one, key="env.NCCL_ALGO")
    pairs = [(row.a, row.b) for row in found.cells]
    assert pairs == [("Ring", "Tree")] * 2 + [("Ring", "CollNet")] * 2
    assert (found.a, found.b) == ("env.NCCL_ALGO Ring", "env.NCCL_ALGO Tree, CollNet")
    assert [row[0] for row in table_rows(found)] == [row.cell_b for row in found.cells]
    assert {row.a for row in compare_within(one, key="env.NCCL_ALGO", base="Tree").cells} == {"Tree"}


@pytest.mark.parametrize(
    ("key", "base", "message"),
    [
        ("nodes", None, "--by nodes: sizes cannot be compared with --by; bench report shows speedup and efficiency by size"),
        ("colour", None, "--by colour: 'colour' is not a setting of study s; settings that vary: backend"),
        ("launcher", None, "--by launcher: launcher is srun in every cell of study s; settings that vary: backend"),
        ("backend", "mpi", "--base: no cell of study s has backend 'mpi'; its values are: gloo, nccl"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_compared_is_an_error(tmp_path, key, base, message):
    one = CheckedStudy.of(study(tmp_path / "s", [*strong(backend="gloo"), *strong(backend="nccl")]))
    assert raised(BenchError, compare_within, one, key=key, base=base) == message


def test_environments_are_compared(tmp_path):
    def newer(cell: Cell) -> dict[str, Any]:
        env = environment(cell)
        env["torch"] = "2.14.0"
        env |= {"cuda": "13.0", "strategy": "ddp", "workload": {}}
        env["env"] = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "PyTorch": "mine"}
        env["slurm"]["SLURM_JOB_ID"] = "9999"
        for host in env["hosts"]:
            host["host"] = host["host"].replace("n", "m")
        return env

    a, b = study(tmp_path / "a"), study(tmp_path / "b", env=newer)
    found = {*difference_rows(compare_studies(a, b))}
    assert {one for one in found if one[0] in ("PyTorch", "CUDA", "Strategy")} == {
        ("PyTorch", "2.13.0+cpu", "2.14.0"),
        ("PyTorch", "not set", "mine"),
        ("CUDA", "not known", "13.0"),
    }
    assert ("OMP_NUM_THREADS", "1", "2") in found
    assert ("GLOO_SOCKET_IFNAME", "eth0", "not set") in found
    assert ("NCCL_DEBUG", "not set", "INFO") in found
    assert ("Hosts", "n1, n2, n3 and 5 more", "m1, m2, m3 and 5 more") in found
    assert not any(one[0] == "SLURM_JOB_ID" for one in found)


def test_json_has_no_nan_and_markdown_escapes_markup(tmp_path):
    a = study(
        tmp_path / "a", [make_cell(1, batch=64, name="<script>|`x`"), make_cell(2, batch=64)], repeats=1
    )
    b = study(tmp_path / "b", [make_cell(1, batch=64), make_cell(2, batch=64)])
    found = compare_studies(a, b)
    content = json.loads(json.dumps(as_content(found), allow_nan=False))
    assert content["cells"][0]["low"] is None
    assert content["cells"][0]["n_a"] == 1
    assert content["counts"]["cannot tell"] == 2
    text = markdown_report(found)
    assert "\\<script\\>\\|\\`x\\`" in text
    assert "<script>" not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_the_part_and_the_cause_that_changed_are_named(tmp_path):
    a, b = (load_study(plant(tmp_path / name, more)) for name, more in (("a", {}), ("b", {"data": 0.025})))
    found = compare_studies(a, b)
    slower = next(row for row in found.cells if row.verdict == "slower")
    assert (slower.cell_a, slower.part, slower.cause) == ("n4x1-gloo-srun-b16", "data", "data-loading")
    assert slower.part_b_sec - slower.part_a_sec == pytest.approx(0.025, rel=0.05)
    assert slower.remark.startswith("data loading: ")
    assert slower.remark.endswith("; cause: data-loading")
    assert {row.cause for row in found.cells if row.verdict != "slower"} == {""}


def test_strategies_of_a_size_are_beside_each_other_and_compared_with_ddp(tmp_path, nothing_drawn):
    cells = [cell for name in ("fsdp", "ddp") for cell in weak(sizes=(1, 2), swept={"strategy": name})]
    for cell in cells:
        cell.workload["strategy"] = cell.swept["strategy"]
    path = finished(tmp_path / "s", cells, repeats=3, noise=0.0, timing=Timing(comm_s=0.01))
    for metrics in path.glob("runs/n2x1*fsdp*/attempt-1/metrics.csv"):
        scale_rate(metrics, 0.5)
    words = ["compare", str(path), "--by", "strategy"]  # the base is ddp, not the first value
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 1, "fsdp is slower on two ranks"
    rows = json.loads(done.stdout)["strategies"]
    assert [(row["gpus"], row["strategy"]) for row in rows] == [
        (gpus, name) for gpus in (1, 2) for name in ("ddp", "fsdp")
    ]
    assert [row["ratio"] for row in rows] == [None, pytest.approx(1), None, pytest.approx(0.5)]
    # Each strategy has its own baseline, so half the speed on two ranks is half the efficiency.
    assert rows[3]["efficiency"] == pytest.approx(rows[2]["efficiency"] / 2)
    assert rows[2]["exposed_sec"] > 0
    write_report(path)
    page = re.sub("</?span[^>]*>", "", (path / "report/index.html").read_text())
    section = page.partition('<section aria-labelledby="strategies">')[2].partition("</section>")[0]
    assert section.count("<tr>") == 5
    assert "0.500 [0.500, 0.500]" in section
    assert section.count("Exposed (ms)") == section.count("Exposed: end (ms)") == 1
    assert "0.500 [0.500, 0.500]" in CliRunner().invoke(app, words).stdout


def moments(logs: np.ndarray) -> LogMoments:
    return LogMoments(np.full(len(logs), float(logs.shape[1])), logs.mean(axis=1), logs.var(axis=1, ddof=1))


def simulated(
    *, cells: int, runs: int, change: float = 0.0, noise: float = 0.02, studies: int, seed: int
) -> np.ndarray:
    """Return the verdicts of simulated pairs of studies, one row each."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(studies):
        a, b = random.normal(0.0, noise, (2, cells, runs))
        pairs = unpaired(moments(a), moments(b + math.log1p(change)))
        found.append([one.verdict for one in judge(pairs)])
    return np.array(found)


def called(verdicts: np.ndarray) -> np.ndarray:
    return (verdicts == Verdict.FASTER) | (verdicts == Verdict.SLOWER)


@pytest.mark.parametrize(("cells", "runs"), [(1, 3), (12, 6)])
def test_without_a_change_at_most_one_study_in_twenty_has_a_false_alarm(cells, runs):
    """``make campaign`` checks 5 % with more studies; here the limit is 5 % plus two standard errors."""
    verdicts = simulated(cells=cells, runs=runs, studies=250, seed=11)
    assert called(verdicts).any(axis=1).mean() <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 250)


def test_a_change_below_the_minimum_effect_is_not_called_however_sure_it_is():
    verdicts = simulated(cells=1, runs=20, change=0.01, noise=0.002, studies=200, seed=14)
    assert not called(verdicts).any()
    assert (verdicts == Verdict.SAME).mean() > 0.95


def test_p_values_are_adjusted_as_scipy_adjusts_them():
    p = np.array([0.01, 0.04, 0.03, 0.005, 0.8])
    assert benjamini_hochberg(p) == pytest.approx(stats.false_discovery_control(p))
    assert benjamini_hochberg(np.array([0.02, math.nan]))[0] == pytest.approx(0.02), "one test"


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "same"), (0.1, "faster"), (-0.1, "slower")])
def test_two_runs_have_no_verdict_and_runs_without_any_noise_that_of_their_ratio(shift, verdict):
    (row,) = judge(unpaired(moments(np.array([[0.0, 0.1]])), moments(np.array([[1.0, 1.1, 1.2]]) + shift)))
    assert (row.ratio, row.verdict) == (pytest.approx(math.exp(1.05 + shift)), Verdict.UNKNOWN)
    assert math.isnan(row.low)
    a = np.zeros((1, 4))
    (row,) = judge(unpaired(moments(a), moments(a + shift)))
    assert row.verdict == verdict
    assert row.low == row.ratio == row.high


ALGORITHM = "env.NCCL_ALGO"


@dataclass
class FastTree(studies.Timing):
    """A network on which the trees of NCCL need a third of the time."""

    def parts(self, cell):
        parts = super().parts(cell)
        if cell.env.get("NCCL_ALGO") == "Tree":
            parts["exposed"] = parts["wait"] + (parts["exposed"] - parts["wait"]) / 3
        return parts


def results_of(path: Path, values=("Ring", "Tree"), **options) -> Results:
    cells = []
    for value in values:
        for cell in studies.strong(sizes=(1, 2, 8), swept={ALGORITHM: value}):
            cell.env = {**cell.env, "NCCL_ALGO": value}
            cells.append(cell)
    return Results.of(load_study(studies.finished(path / "s", cells, **options)))


def by_size(rows: list[SettingRow]) -> dict[int | None, SettingRow]:
    return {row.gpus: row for row in rows}


def test_a_planted_difference_is_found_by_size_and_overall(tmp_path):
    results = results_of(tmp_path, timing=FastTree(comm_s=0.01), noise=0.005)
    rows = by_size(results.settings)
    assert [*rows] == [None, 1, 2, 8]
    assert {(row.setting, row.value, row.other) for row in results.settings} == {(ALGORITHM, "Tree", "Ring")}
    assert [str(row.judgement.verdict) for row in rows.values()] == ["faster", "same", "faster", "faster"]
    assert rows[8].p > 0.99
    (text,) = sentences(results.settings)
    assert text.startswith(f"{ALGORITHM} Tree: 1.")
    assert text.endswith("on 8 ranks")


def test_the_ratios_are_those_of_compare_and_the_overall_one_their_geometric_mean(tmp_path):
    results = results_of(tmp_path, noise=0.03)
    rows = by_size(setting_rows(results))
    cells = compare_within(results, key=ALGORITHM).cells
    logs, errors, freedoms = [], [], []
    for cell in cells:
        found = rows[cell.gpus].judgement
        assert (found.ratio, found.low, found.high) == pytest.approx((cell.ratio, cell.low, cell.high))
        own = [[run.rate for run in results.frames.measured_in(name)] for name in (cell.cell_a, cell.cell_b)]
        a, b = (np.log(rates) for rates in own)
        square = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
        logs.append(b.mean() - a.mean())
        errors.append(math.sqrt(sum(square)))
        freedoms.append(sum(square) ** 2 / sum(one**2 / (len(a) - 1) for one in square))
    centre, squares = np.mean(logs), np.square(errors)
    error = math.sqrt(squares.sum()) / len(logs)
    freedom = squares.sum() ** 2 / (squares**2 / np.array(freedoms)).sum()
    half = stats.t.ppf(0.975, freedom) * error
    whole = rows[None].judgement
    assert (whole.ratio, whole.low, whole.high) == pytest.approx(
        tuple(np.exp([centre, centre - half, centre + half]))
    )
    assert rows[None].p == pytest.approx(stats.t.cdf(centre / error, freedom))
    assert rows[None].cells == 3


def test_each_value_is_compared_with_the_first_one_and_few_runs_have_no_p(tmp_path):
    results = results_of(tmp_path, values=("Ring", "Tree", "NVLS"), repeats=2)
    assert {(row.value, row.other) for row in results.settings} == {("Tree", "Ring"), ("NVLS", "Ring")}
    assert all(math.isnan(row.p) for row in results.settings)
    assert [text.rpartition(":")[2].strip() for text in sentences(results.settings)] == [
        "no interval (cannot tell)"
    ] * 2
    assert results.settings[0].as_json()["p"] is None


def test_a_table_measured_elsewhere_has_verdicts_on_its_settings(tmp_path):
    rng = np.random.default_rng(7)
    rates = {
        (p, n): list(base * n * rng.normal(1, 0.01, 4))
        for p, base in (("fp16", 500), ("tf32", 300))
        for n in (8, 16)
    }
    lines = [f"{p},{n},65536,{rate}" for (p, n), own in rates.items() for rate in own]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["precision,gpus,global_batch,throughput", *lines, "tf32,32,65536,9000"]))
    found = study_of_table(read_table(table), mode=None, folder=tmp_path)
    rows = by_size(Results(found.study, found.shown, found.scale()).settings)
    assert [*rows] == [None, 8, 16]
    for gpus in (8, 16):
        one, other = (np.log(rates[name, gpus]) for name in ("tf32", "fp16"))
        interval = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
        own = rows[gpus].judgement
        assert math.log(own.ratio) == pytest.approx(one.mean() - other.mean())
        assert [math.log(own.low), math.log(own.high)] == pytest.approx([*interval])
        assert (rows[gpus].setting, rows[gpus].value, str(own.verdict)) == ("precision", "tf32", "slower")


@pytest.mark.parametrize(
    "text",
    [
        # Seconds of an unknown work, another work, and another batch say nothing about a setting.
        "precision,gpus,mode,time\nfp16,1,strong,3\ntf32,1,strong,5\nfp16,2,strong,2\ntf32,2,strong,3\n",
        "model,gpus,global_batch,throughput\na,1,64,3\nb,1,64,5\na,2,64,2\nb,2,64,3\n",
        "precision,gpus,global_batch,throughput\nfp16,1,64,3\ntf32,1,32,5\nfp16,2,64,2\ntf32,2,32,3\n",
    ],
)
def test_rates_of_different_work_are_not_compared(tmp_path, text):
    table = tmp_path / "t.csv"
    table.write_text(text)
    found = study_of_table(read_table(table), mode=None, folder=tmp_path)
    assert Results(found.study, found.shown, found.scale()).settings == []
