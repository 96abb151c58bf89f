"""Verdicts on swept settings: a planted difference, and a second computation of the ratios."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from analysis.compare.comparison import compare_within
from analysis.compare.settings import SettingRow, sentences, setting_rows
from analysis.data.load import load_study
from analysis.report.results import Results
from analysis.tables_in.read import read_table
from analysis.tables_in.study import study_of_table
from tests.analysis import studies

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
