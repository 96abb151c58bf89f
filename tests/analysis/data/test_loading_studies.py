"""Studies and tables are loaded with reasons for missing or broken files, and environments as a summary."""

import io
import json
import math
import shutil
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.checks.assessment import CheckedStudy
from analysis.data import csv_files as csvs
from analysis.data import environment
from analysis.data.csv_files import csv_text, read_csvs
from analysis.data.differences import Difference
from analysis.data.environment import describe_environment
from analysis.data.load import load_study
from analysis.report.results import Results
from analysis.report.write import write_report
from analysis.stats.measured import measure
from bench.matrix.cell import Cell
from bench.study.layout import StudyFolder
from ddp_scaling_bench.checksums import write_sums
from ddp_scaling_bench.errors import BenchError
from ddp_scaling_bench.finding import messages
from ddp_scaling_bench.records import EpochRow, header
from ddp_scaling_bench.run_folder import RunFolder
from tests.analysis import studies
from tests.common import edited_json, raised


def attempt(path: Path, run: str, number: int = 1) -> Path:
    return StudyFolder(path).attempt(run, number).path


def test_what_is_missing_broken_partial_or_unknown_has_a_reason_and_does_not_count(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2, 4, 8, 16)), repeats=1)
    unknown, tried, missing, broken, failed = (f"n{n}x1-gloo-srun-b{64 // n}-r1" for n in (1, 2, 4, 8, 16))
    shutil.rmtree(attempt(path, unknown).parent)
    ledger = path / "ledger.jsonl"
    ledger.write_text("".join(line for line in ledger.read_text().splitlines(True) if unknown not in line))
    lost = {"state": "failed", "reason": "node n2 was lost", "failure_class": "node-failure"}
    for number, values in ((10, lost), (9, {})):
        shutil.copytree(attempt(path, tried), attempt(path, tried, number))
        studies.change_run(path, tried, attempt=number, **values)
    shutil.rmtree(attempt(path, missing))
    (attempt(path, broken) / "metrics.csv").write_text(header(EpochRow))
    write_sums(RunFolder(attempt(path, broken)))
    studies.change_run(path, failed, state="failed", reason="killed")
    for name in ("stranger", "x\x1b[31m", ".hidden"):
        (path / "runs" / name / "attempt-1").mkdir(parents=True)
    study = load_study(path)
    assert study.remarks == ["Not in the plan and ignored: 2 folders in runs/ (stranger and x\ufffd[31m)"]
    assert (study.epochs["run_id"] == failed).sum() == 3
    runs = studies.runs_frame(study.runs).set_index("run_id")
    found = {run: (runs["attempt"][run], runs["state"][run], runs["reason"][run]) for run in runs.index}
    assert found[tried] == (10, "failed", "node n2 was lost")
    assert runs["failure_class"][tried] == "node-failure"
    assert (pd.isna(found[unknown][0]), *found[unknown][1:]) == (True, "planned", "")
    measured = studies.runs_frame(measure(study).runs).set_index("run_id")
    assert not measured["measured"].any()
    assert {run: messages(measured["facts"][run]) for run in (missing, broken)} == {
        missing: "the folder of attempt 1 is missing",
        broken: "metrics.csv has no epoch with samples and a throughput",
    }


def test_a_cell_without_metrics_has_a_reason_of_its_own(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1,)), repeats=1)
    with edited_json(path / "plan.json") as plan:
        plan["cells"][0] |= {"argv": ["true"], "planned_epochs": None, "metrics": {"source": "none"}}
    (attempt(path, "n1x1-gloo-srun-b64-r1") / "metrics.csv").unlink()
    assert load_study(path).runs[0].reason == "the matrix asks for no metrics (metrics: none)"


def test_a_folder_without_a_plan_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    assert raised(BenchError, load_study, tmp_path) == (
        f"{tmp_path}/plan.json: the study's plan does not exist; "
        "give the folder of a study, such as results/<study>, or plan one: bench plan MATRIX"
    )


def described(path: Path, **options: Any) -> environment.Environment:
    return describe_environment(load_study(studies.finished(path / "s", **options)))


def test_facts_that_all_runs_share_are_listed_once(tmp_path: Path) -> None:
    found = described(tmp_path)
    facts = dict(found.facts)
    assert facts["torch"] == "2.13.0+cpu"
    assert facts["parameters"] == "8,000,000"
    assert facts["gradient_bytes"] == "30.5 MiB"
    assert facts["interface"] == "eth0"
    assert "cuda" not in facts
    assert dict(found.variables)["OMP_NUM_THREADS"] == "1"
    assert [(h.name, h.cores, h.memory, h.runs) for h in found.hosts][:2] == [
        ("n1", "8", "16.0 GiB", 12),
        ("n2", "8", "16.0 GiB", 9),
    ]
    assert found.source == "From the env.json of 12 runs."


def test_the_sample_of_a_large_study_contains_every_size(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "MAX_READ", 6)
    path = studies.finished(tmp_path / "s", repeats=10, epochs=1, ranks_files=False)
    found = describe_environment(load_study(path))
    assert found.asked <= 10
    assert found.source == f"From a sample: the env.json of {found.read} of 40 started runs."
    assert {host.name for host in found.hosts} == {f"n{n}" for n in range(1, 9)}


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**30) | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = tuple("hosts transport env slurm warnings torch world_size parameters gradient_bytes".split())
HOST_KEYS = ("host", "cores", "ranks_here", "memory_bytes", "cpu_model")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.sampled_from(KEYS), anything, max_size=5),
    host=st.dictionaries(st.sampled_from(HOST_KEYS), anything, max_size=5),
)
def test_no_content_of_an_env_json_stops_the_summary(tmp_path, changes, host):
    path = tmp_path / "s"
    if not path.exists():
        studies.finished(path, studies.strong(sizes=(1,)), repeats=1)
    (file,) = path.glob("runs/*/attempt-1/env.json")
    file.write_text(json.dumps({"hosts": [host, 3, None]} | changes))
    found = describe_environment(load_study(path))
    assert found.read == 1
    for _, value in [*found.facts, *found.variables]:
        value.encode("utf-8")
        assert "\n" not in value


def differing(path: Path, cells: list[Cell] | None = None, **options: Any) -> dict[str, Difference]:
    study = load_study(studies.finished(path / "s", cells, **options))
    return {f"{one.kind} {one.name}": one for one in Results.of(study).differences}


def test_only_the_axes_and_what_follows_from_them_are_planned(tmp_path: Path) -> None:
    def env(cell: Cell) -> dict[str, Any]:
        env = studies.environment(cell) | {"parameters": 1000 if cell.swept["model"] == "mlp" else 2000}
        env["env"] |= {"OMP_NUM_THREADS": str(cell.nodes)}
        return env

    models = [studies.strong(sizes=(1, 2), swept={"model": name}) for name in ("mlp", "convnet")]
    for cells, name in zip(models, ("mlp", "convnet"), strict=True):
        for cell in cells:
            cell.workload = {**cell.workload, "model": name}
    found = differing(tmp_path, [cell for cells in models for cell in cells], env=env)
    assert set(found) == {
        *("setting nodes", "setting world_size", "setting per_gpu_batch", "setting model"),
        *("environment parameters", "environment hosts", "variable OMP_NUM_THREADS"),
    }
    assert all(one.planned for one in found.values())
    assert (
        found["setting model"].text(0, counts=True)
        == "mlp (6 runs of 2 cells) and convnet (6 runs of 2 cells)"
    )
    assert found["environment parameters"].text(0) == "1,000 and 2,000"
    assert not [
        fact
        for fact in CheckedStudy.of(load_study(tmp_path / "s")).assessment.findings
        if fact.kind == "runs-differ"
    ]


@pytest.mark.usefixtures("nothing_drawn")
def test_versions_variables_hosts_and_clocks_of_some_runs_are_not_planned(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", studies.strong(sizes=(1, 2)))
    for file in path.glob("runs/n2x1-gloo-srun-b32-r3/attempt-1/env.json"):
        env = json.loads(file.read_text()) | {"torch": "2.14.0", "parameters": 7}
        env["env"] |= {"NCCL_DEBUG": "INFO"}
        env["hosts"][0]["host"] = "n9"
        file.write_text(json.dumps(env))
    for file in path.glob("runs/*/attempt-1/env.json"):
        mhz = 1400.0 if "x1-gloo-srun-b32-r3" in str(file) else 2900.0
        times = {"epoch": 1, "start": "2026-01-02T03:04:05.000Z", "end": "2026-01-02T03:05:05.000Z"}
        window = {**times, "nodes": [{"node": "n1", "freq_mhz": mhz}], "ranks": []}
        file.with_name("conditions.json").write_text(json.dumps({"schema": 1, "windows": [window]}))
    page = write_report(path).page
    table = pd.read_csv(page.with_name("what-differs.csv"))
    odd = table[~table["planned"]]
    assert list(dict.fromkeys(odd["quantity"])) == ["torch", "parameters", "hosts", "NCCL_DEBUG", "clock"]
    rows = [
        tuple(row) for row in odd.loc[odd["quantity"] == "NCCL_DEBUG", ["value", "runs", "cells"]].to_numpy()
    ]
    assert rows == [("INFO", 1, 1), ("not set", 5, 2)]
    assert set(odd.loc[odd["quantity"] == "clock", "value"]) == {"1.4 GHz", "2.9 GHz"}
    (fact,) = [
        fact for fact in CheckedStudy.of(load_study(path)).assessment.findings if fact.kind == "runs-differ"
    ]
    assert fact.values["differing"] == ["torch", "parameters"]
    section = page.read_text().partition('id="differs"')
    assert section[0].endswith("<details open><summary><h2 ")
    assert "<td>PyTorch</td><td>no</td>" in section[2]


Row = make_dataclass("Row", [("epoch", "float"), ("rate", "float"), ("host", "str")])


def read(folder: Path, *contents: str | bytes) -> csvs.Loaded:
    paths = []
    for number, content in enumerate(contents):
        path = folder / str(number) / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(str(path))
    return read_csvs(paths, Row)


def test_broken_files_do_not_affect_valid_ones(tmp_path):
    good, broken = "epoch,rate,host\n0,0.1,n1\n1,1e-9,n2\n", "epoch,rate,host\n0,2.5,n1\n1,not a number,n1\n"
    loaded = read(tmp_path, good, broken, "epoch,rate,host\n", good)
    assert set(loaded.problems) == {1}
    assert loaded.rows["file"].to_list() == [0, 0, 1, 1, 3, 3]
    assert loaded.rows["rate"].to_list() == pytest.approx([0.1, 1e-9, 2.5, math.nan, 0.1, 1e-9], nan_ok=True)


@pytest.mark.parametrize(
    ("content", "rates", "problem"),
    [
        (
            "epoch,rate,host\n0,1.5,a\n1,2.",
            [1.5],
            "metrics.csv: the last line is incomplete and was left out",
        ),
        ("epoch,rate,host\n0,1.5,a\n1\n", [1.5], "metrics.csv: line 3 has 1 values instead of 3"),
        ("epoch,rate,host\n0,fast,a\n", [math.nan], "metrics.csv: line 2: rate 'fast' is not a number"),
        ("epoch,rate\n0,1.5\n", [1.5], "metrics.csv: lacks the column host"),
        ("a;b;c\n", [], "metrics.csv: the header 'a;b;c' is that of another table"),
        ("", [], "metrics.csv: the file is empty"),
        (
            "epo",
            [],
            "metrics.csv: the last line is incomplete and was left out; the header '' is that of another table",
        ),
        (b"\xff\xfe\x00epoch", [], None),
        ("rate,host,epoch\n1.5,a,0\n", [1.5], None),
        ("\ufeffepoch,rate,host\r\n0,1.5,a\r\n", [1.5], None),
        ('epoch,rate,host\n0,1.5,"n1,\nn2"\n', [1.5], None),
        ("epoch,rate,host\n", [], None),
    ],
)
def test_a_file_in_another_form_is_parsed_row_by_row(tmp_path, content, rates, problem):
    loaded = read(tmp_path, content)
    assert loaded.rows["rate"].to_list() == pytest.approx(rates, nan_ok=True)
    if problem is not None:
        assert loaded.problems == {0: problem}
    assert list(loaded.rows.dtypes.astype(str)) == ["int64", "float64", "float64", "str"]


def test_no_text_of_a_csv_can_run_as_a_formula_and_numbers_are_unchanged():
    columns = {
        "anything": ["=1+1", None, "plain\x1b[31m", "+1", "-1", "@SUM(A1)", "\tx"],
        "value": [-1.5, float("nan"), 1 / 3, *[0] * 4],
        "whole": [1, 2, 3, *[0] * 4],
    }
    text = csv_text(columns)
    assert text.splitlines()[1:3] == ["'=1+1,-1.5,1", ",,2"]
    assert text.splitlines()[4:] == [f"'{formula},0,0" for formula in ("+1", "-1", "@SUM(A1)", "\tx")]
    assert pd.read_csv(io.StringIO(text))["value"].iloc[2] == pytest.approx(1 / 3, rel=1e-11)
    assert "\x1b" not in text
    assert csv_text(columns, digits=3).splitlines()[3].split(",")[1] == "0.333"
