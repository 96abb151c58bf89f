"""Targets: met, missed or cannot tell, against a second implementation, and by the exit code."""

import csv
import io
import json
import math
import os
import statistics
from pathlib import Path

import pytest
from scipy import stats

from analysis.data.load import load_study
from analysis.report.results import Results
from analysis.targets import TargetRow
from bench.matrix.load import load_matrix, read_section
from bench.matrix.schema import TargetsFile
from bench.plan import make_plan, write_plan
from ddp_scaling_bench.errors import BenchError, InputError
from tests.analysis.studies import finished, strong, weak
from tests.commands.command_line import bench, refusal
from tests.common import change_json, raised
from tests.matrices import matrix


def targets(text: str, folder: Path) -> list:
    path = folder / "targets.yaml"
    path.write_text(text)
    return read_section(path, TargetsFile, what="file with targets", alone="targets").targets


def judged(path: Path, text: str) -> list[TargetRow]:
    return Results.of(load_study(path), targets=targets(text, path.parent)).target_rows


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def t_interval(mean: float, error: float, freedom: float) -> tuple[float, float]:
    if error == 0:
        return math.exp(mean), math.exp(mean)
    low, high = stats.t.interval(0.95, freedom, loc=mean, scale=error)
    return math.exp(low), math.exp(high)


def moments(rates: list[float]) -> tuple[float, float]:
    """Return the mean of the logarithms, and the square of its standard error."""
    logs = [math.log(rate) for rate in rates]
    return math.fsum(logs) / len(logs), statistics.variance(logs) / len(logs)


def test_few_runs_and_other_studies_cannot_be_told_and_one_run_can_miss_a_memory(tmp_path):
    two = finished(tmp_path / "two", strong(sizes=(1, 2)), repeats=2)
    text = "- {efficiency: 0.1}\n- {memory_gib: 0.4}\n- {memory_gib: 0.6}\n- {share: 0.5, of: nowhere}\n"
    text += "- {step_time_sec: 9, gpus: 3}\n- {throughput_per_gpu: 1, env.X: a}\n"
    by_target = {row.target: (str(row.verdict), row.reason) for row in judged(two, text)}
    assert by_target == {
        "efficiency at least 0.1": (
            "cannot tell",
            "it has 2 measured runs and its baseline has 2 measured runs; 3 are needed",
        ),
        "memory at most 0.4 GiB": ("missed", ""),
        "memory at most 0.6 GiB": ("cannot tell", "it has 2 measured runs; 3 are needed"),
        "share at least 0.5 of nowhere": ("cannot tell", by_target["share at least 0.5 of nowhere"][1]),
        "step time at most 9 s (gpus 3)": ("cannot tell", "it matches no cell"),
        "throughput per rank at least 1 samples/s (env.X a)": ("cannot tell", "it matches no cell"),
    }
    assert "nowhere" in by_target["share at least 0.5 of nowhere"][1]


def test_a_share_is_the_ratio_to_the_equal_cell_of_the_other_study(tmp_path):
    before = finished(tmp_path / "before", strong(sizes=(1, 2)), seed=1, noise=0.002)
    now = finished(tmp_path / "now", strong(sizes=(1, 2, 4)), seed=2, noise=0.002)
    found = judged(now, "- {share: 0.9, of: before}\n- {share: 1.1, of: before, nodes: [1, 2]}")
    assert [(row.cell_id[:4], str(row.verdict)) for row in found] == [
        ("n1x1", "met"),
        ("n2x1", "met"),
        ("n4x1", "cannot tell"),
        ("n1x1", "missed"),
        ("n2x1", "missed"),
    ]
    rates = [
        [run.rate for run in Results.of(load_study(path)).frames.measured_in(found[0].cell_id)]
        for path in (now, before)
    ]
    (mean, error2), (other, other2) = map(moments, rates)
    assert found[0].measured == pytest.approx(math.exp(mean - other))
    low, high = t_interval(
        mean - other, math.sqrt(error2 + other2), (error2 + other2) ** 2 / ((error2**2 + other2**2) / 2)
    )
    assert (found[0].low, found[0].high) == pytest.approx((low, high))
    assert found[2].reason == "an equal, valid cell of before has 0 measured runs; 3 are needed"


def test_targets_select_cells_by_settings_and_the_unit_must_be_that_of_the_study(tmp_path):
    path = finished(tmp_path / "s", [*strong(sizes=(1, 2, 4)), *weak(sizes=(1, 2))])
    found = judged(path, "{efficiency: 0.01, step_time_sec: 99, mode: strong, nodes: [2, 4]}")
    assert [(row.series[:6], row.cell_id[:4], str(row.verdict)) for row in found] == [
        ("strong", cell, "met") for cell in ("n2x1", "n4x1", "n2x1", "n4x1")
    ]
    assert {row.cell_id[:4] for row in judged(path, "{memory_gib: 9, tasks_per_node: 1, gpus: 4}")} == {
        "n4x1"
    }
    message = raised(BenchError, judged, path, "{throughput_per_gpu: 1, unit: tokens/s}")
    assert "a target is in tokens/s, but the throughput of s in samples/s" in message


def test_mistakes_in_targets_are_listed_with_their_lines(tmp_path):
    text = "targets:\n- {efficiency: 0.8, nodess: 2}\n- {share: 0.9}\n- nodes: 2\n- {efficiency: 0, of: a}\n"
    path = tmp_path / "m.yaml"
    path.write_text(matrix() + text)
    for read in (lambda: load_matrix(path), lambda: targets(text, tmp_path)):
        with pytest.raises(InputError) as error:
            read()
        first = 1 if str(tmp_path / "targets.yaml") in str(error.value) else path.read_text().count("\n") - 4
        found = {problem.line - first: problem.message for problem in error.value.problems}
        assert found[1].startswith("unknown key 'nodess' in targets[0]")
        assert found[2].endswith("share needs `of: STUDY`, the study to compare with")
        assert "a target needs exactly one of efficiency, " in found[3]
        assert "targets[3].efficiency must be greater than 0" in found[4]


def test_changed_targets_are_no_new_plan(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(matrix())
    folder = write_plan(make_plan(path), tmp_path / "results")
    os.utime(folder.plan_json, ns=(10**18, 10**18))
    path.write_text(matrix() + "targets: {efficiency: 0.8}\n")
    write_plan(make_plan(path), tmp_path / "results")
    assert json.loads(folder.plan_json.read_text())["targets"] == [{"efficiency": 0.8}]
    assert folder.plan_json.stat().st_mtime_ns == 10**18
    path.write_text(matrix(repeats=5) + "targets: {efficiency: 0.8}\n")
    write_plan(make_plan(path), tmp_path / "results")
    assert folder.plan_json.stat().st_mtime_ns != 10**18


def test_the_exit_code_of_check_is_that_of_the_targets(tmp_path, nothing_drawn):
    path = finished(tmp_path / "s", strong(sizes=(1, 2)))
    assert "--check: there are no targets" in refusal("report", "./s", "--check", cwd=tmp_path)
    change_json(path / "plan.json", targets=[{"step_time_sec": 99}], matrix_file="../s.yaml")
    (tmp_path / "s.yaml").write_text("changed")
    done = bench("report", "./s", "--check", cwd=tmp_path)
    assert (done.returncode, "targets: 2 met\n" in done.stderr) == (0, True)
    assert "warning: the targets are those of the plan; s.yaml differs: bench plan s.yaml" in done.stderr
    file = tmp_path / "t.yaml"
    for text, code in (("- {share: 0.9, of: x}", 3), ("- {share: 0.9, of: x}\n- {memory_gib: 0.1}", 1)):
        file.write_text(text)
        done = bench("report", "./s", "--check", "--targets", "t.yaml", "--json", cwd=tmp_path)
        verdicts = {one["verdict"] for one in json.loads(done.stdout)["targets"]}
        assert (done.returncode, "missed" in verdicts, "cannot tell" in verdicts) == (code, code == 1, True)
    assert bench("report", "./s", "--targets", "t.yaml", cwd=tmp_path).returncode == 0
    assert "memory at most 0.1 GiB" in (path / "report/index.html").read_text()
    assert len(rows((path / "report/targets.csv").read_text())) == 4
