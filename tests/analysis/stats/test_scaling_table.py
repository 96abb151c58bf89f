"""Columns, regimes, baselines and numbers of the scaling table, against a second computation."""

import csv
import json
import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.checks.scaling_table import scaling_table
from analysis.data.columns import PUBLISHED
from analysis.data.load import load_study
from bench.study.layout import StudyFolder
from ddp_scaling_bench.errors import BenchError
from tests.analysis import studies
from tests.analysis.studies import frames_of_points
from tests.common import edited_csv, raised

STRONG, WEAK = "strong-64-gloo-srun", "weak-16-gloo-srun"


def both(**options: Any) -> list[Any]:
    return studies.merged(studies.strong(**options) + studies.weak(**options))


def table(path: Path, **options: Any) -> pd.DataFrame:
    return studies.frame(scaling_table(load_study(path), **options))


def series(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    return frame[frame["series"] == name].reset_index(drop=True)


def run_times(path: Path, run: dict[str, Any], batch: int) -> tuple[float, dict[str, float]]:
    """Return one run's time per global batch and its mean parts, computed with the standard library."""
    with open(StudyFolder(path).attempt(run["run_id"], 1).metrics_csv, newline="") as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    seconds = sum(row["samples"] / row["throughput_samples_per_sec"] for row in rows)
    time = batch * seconds / sum(row["samples"] for row in rows)
    useful = [
        sum(row[f"{part}_time_sec"] for part in ("data_load", "forward", "backward", "optimizer", "other"))
        for row in rows
    ]
    return time, {
        "useful": fmean(useful),
        "most": fmean(u / row["load_balance"] for u, row in zip(useful, rows, strict=True)),
        "step": fmean(
            u / row["load_balance"] / row["comm_efficiency"] for u, row in zip(useful, rows, strict=True)
        ),
    }


def expected_rows(path: Path, name: str, mode: str) -> list[dict[str, float]]:
    """Compute a series cell by cell, in plain Python."""
    plan = json.loads((path / "plan.json").read_text())
    cells = [c for c in plan["cells"] if any(m["series"] == name for m in c["series"])]
    rows = []
    for cell in sorted(cells, key=lambda c: c["world_size"]):
        runs = [r for r in plan["runs"] if r["cell_id"] == cell["cell_id"]]
        times, parts = zip(*(run_times(path, r, cell["global_batch"]) for r in runs), strict=True)
        mean = {key: fmean(part[key] for part in parts) for key in parts[0]}
        rows.append({"N": cell["world_size"], "batch": cell["global_batch"], "times": times, **mean})

    def rates(row: dict[str, Any]) -> Any:
        logs = np.log(row["batch"] / np.array(row["times"]))
        return np.exp(stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs)))

    base = rows[0]
    found = []
    for row in rows:
        ratio, growth = fmean(base["times"]) / fmean(row["times"]), row["N"] / base["N"]
        efficiency = ratio / growth if mode == "strong" else ratio
        logs = [np.log(r["times"]) for r in (base, row)]
        welch = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
        scaled = (growth if mode == "strong" else 1.0) ** -1
        found.append(
            {
                "throughput_samples_per_sec": row["batch"] / fmean(row["times"]),
                **dict(zip(("throughput_low", "throughput_high"), rates(row), strict=True)),
                "step_time_sec": fmean(row["times"]),
                "speedup": efficiency * growth,
                "efficiency": efficiency,
                "efficiency_low": math.exp(welch.low) * scaled if row is not base else math.nan,
                "efficiency_high": math.exp(welch.high) * scaled if row is not base else math.nan,
                "load_balance": row["useful"] / row["most"],
                "comm_efficiency": row["most"] / row["step"],
                "pop_parallel_efficiency": row["useful"] / row["step"],
                "computational_scalability": (base["useful"] * base["N"] / base["batch"])
                / (row["useful"] * row["N"] / row["batch"]),
            }
        )
    return found


def test_the_documentation_lists_the_columns_of_scaling_csv() -> None:
    text = (Path(__file__).parents[3] / "docs" / "analysis.md").read_text(encoding="utf-8")
    section = text.partition("## The columns of scaling.csv")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(cells)) == list(PUBLISHED)


def test_every_number_equals_a_computation_cell_by_cell(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s", both(), repeats=4, noise=0.05)
    whole = table(path)
    for name, mode in ((STRONG, "strong"), (WEAK, "weak")):
        found, expected = series(whole, name), pd.DataFrame(expected_rows(path, name, mode))
        assert list(found["mode"]) == [mode] * 4
        for column in expected:
            own = expected[column].to_list()
            assert found[column].to_list() == pytest.approx(own, rel=1e-9, nan_ok=True), column
        product = expected["pop_parallel_efficiency"] * expected["computational_scalability"]
        assert found["global_efficiency"].to_list() == pytest.approx(product.to_list())
        for end in ("low", "high"):
            growth = found["speedup"] / found["efficiency"]
            own = (growth * found[f"efficiency_{end}"]).to_list()
            assert found[f"speedup_{end}"].to_list() == pytest.approx(own, nan_ok=True)


def test_a_failed_baseline_is_replaced_by_the_next_size_with_a_reason(tmp_path: Path) -> None:
    late = ("failed", "ran out of time", "time-limit")
    path = studies.finished(tmp_path / "s", state=lambda cell, repeat: late if cell.world_size == 1 else None)
    found = table(path)
    failed, *others = found.to_dict("records")
    assert (failed["state"], failed["n"]) == ("failed", 0)
    assert failed["reason"] == "no run counted: 3 hit the time limit (ran out of time)"
    numbers = [name for name in PUBLISHED[12:26] if name != "node_hours"]
    assert all(pd.isna(failed[name]) for name in [*numbers, "node_hours"])
    for row in others:
        assert row["baseline"] == "2x1 (2 ranks)"
        assert row["reason"] == "the baseline is 2x1 (2 ranks): 1x1 has no completed run"
    base, four, eight = others
    assert base["efficiency"] == 1
    assert four["efficiency"] == pytest.approx(base["step_time_sec"] / four["step_time_sec"] / 2)
    assert eight["speedup"] == pytest.approx(base["step_time_sec"] / eight["step_time_sec"])


def test_another_baseline_can_be_selected_and_one_of_no_planned_size_is_an_error(tmp_path: Path) -> None:
    study = load_study(studies.finished(tmp_path / "s"))
    for asked in ("2x1", "n2x1-gloo-srun-b32", "2", "2 GPUs", "2 × 1"):
        found = studies.frame(scaling_table(study, baseline=asked))
        assert set(found["baseline"]) == {"2x1 (2 ranks)"}
        assert found["efficiency"].iloc[1] == 1
        assert set(found["reason"]) == {""}
    for asked in ("3x1", "16", "no-such-cell", "no-ddp"):
        said = raised(BenchError, scaling_table, study, baseline=asked)
        assert said.startswith(
            f"--baseline {asked}: no such size or cell; the sizes are 1x1, 2x1, 4x1 and 8x1; "
        )


def test_a_baseline_that_was_planned_but_not_measured_is_a_reason(tmp_path: Path) -> None:
    failed = ("failed", "boom", "bad-exit")
    path = studies.finished(tmp_path / "s", state=lambda cell, _: failed if cell.world_size == 2 else None)
    found = table(path, baseline="2x1")
    assert set(found["baseline"]) == {"1x1 (1 rank)"}
    told = "the baseline asked for, 2x1, was not measured in this series"
    assert set(found.loc[found["n"] > 0, "reason"]) == {told}


@pytest.mark.parametrize(
    ("states", "state", "reason"),
    [
        (
            ["completed", "failed", "completed"],
            "completed",
            "2 of 3 runs counted: 1 exited with an error (boom)",
        ),
        (
            ["failed", "running", "queued"],
            "running",
            "no run counted: 1 exited with an error, 1 running and 1 queued (boom)",
        ),
        (["planned", "planned", "planned"], "planned", "no run counted: 3 not started"),
    ],
)
def test_the_state_of_a_cell_and_why_runs_are_missing(tmp_path, states, state, reason):
    def of(cell: Any, repeat: int) -> tuple[str, str, str | None]:
        name = states[repeat - 1] if cell.world_size == 2 else "completed"
        return (name, "boom", "bad-exit") if name == "failed" else (name, "", None)

    found = table(studies.finished(tmp_path / "s", state=of)).set_index("gpus").loc[2]
    assert (found["state"], found["reason"]) == (state, reason)
    assert found["n"] == states.count("completed")
    assert pd.isna(found["throughput_samples_per_sec"]) == (found["n"] == 0)


def test_without_an_attribution_window_only_its_factors_are_missing(tmp_path: Path) -> None:
    path = studies.finished(tmp_path / "s")
    for cell, lost in (("n2x1", ["load_balance", "comm_efficiency"]), ("n4x1", ["other_time_sec"])):
        for metrics in path.glob(f"runs/{cell}*/attempt-1/metrics.csv"):
            with edited_csv(metrics) as frame:
                frame[lost] = math.nan
    found = table(path).set_index("gpus")
    factors = ["load_balance", "comm_efficiency", "pop_parallel_efficiency", "computational_scalability"]
    assert found.loc[2, factors].isna().all()
    assert found.loc[4, factors[:3]].notna().all()
    assert pd.isna(found.loc[4, "computational_scalability"])
    assert found["efficiency"].notna().all()


def test_mixed_nodes_keep_their_layout(tmp_path: Path) -> None:
    cells = studies.weak(sizes=(1, 6))
    cells[1].nodes, cells[1].tasks_per_node = 2, [4, 2]
    found = table(studies.finished(tmp_path / "s", cells))
    assert found["gpus_per_node"].to_list() == ["1", "4+2"]
    assert found["baseline"].iloc[1] == "1x1 (1 rank)"


def test_the_incremental_efficiency_is_that_per_doubling(tmp_path: Path) -> None:
    cells = studies.strong(64, (1, 2, 8), per_node=2)
    found = studies.frame(
        scaling_table(load_study(studies.finished(tmp_path / "s", cells, repeats=4, noise=0.03)))
    )
    one, two, eight = (row for _, row in found.iterrows())
    assert math.isnan(one["incremental_efficiency"])
    assert (two["incremental_from"], eight["incremental_from"]) == (1, 2)
    assert two["incremental_efficiency"] == pytest.approx(two["efficiency"])
    assert eight["incremental_efficiency"] == pytest.approx((eight["efficiency"] / two["efficiency"]) ** 0.5)
    assert eight["incremental_low"] < eight["incremental_efficiency"] < eight["incremental_high"]
    assert two["incremental_low"] == pytest.approx(two["efficiency_low"])


def test_the_serial_fraction_is_that_of_karp_and_flatt() -> None:
    sizes = [1, 2, 4, 8]
    points = pd.DataFrame({"gpus": sizes, "time": [0.05 + 0.95 / n for n in sizes], "global_batch": 64})
    found = studies.frame(scaling_table(frames_of_points(points)))["karp_flatt"]
    assert math.isnan(found.iloc[0])
    assert found.iloc[1:].to_list() == pytest.approx([0.05] * 3)
    weak = studies.frame(
        scaling_table(frames_of_points(points.drop(columns="global_batch").assign(per_gpu_batch=8)))
    )
    assert weak["karp_flatt"].isna().all()


def test_the_smallest_common_size_can_be_the_baseline(tmp_path: Path) -> None:
    cells = [*studies.strong(64, (1, 2, 4)), *studies.strong(64, (2, 4), backend="nccl")]
    found = table(studies.finished(tmp_path / "s", cells), baseline="common")
    assert set(found["baseline"]) == {"2x1 (2 ranks)"}
    apart = [*studies.strong(64, (1, 2)), *studies.strong(64, (4, 8), backend="nccl")]
    with pytest.raises(BenchError) as refused:
        table(studies.finished(tmp_path / "t", apart), baseline="common")
    assert str(refused.value) == (
        "--baseline common: no size was measured in every series; give a size or omit --baseline"
    )


def test_a_cell_without_ddp_is_a_baseline_on_request_only(tmp_path: Path) -> None:
    alone = studies.make_cell(1, batch=64, swept={"strategy": "none"}, name="plain")
    alone.workload["strategy"] = "none"
    own = studies.strong(64)
    for cell in own[1:]:
        cell.workload["strategy"] = "none"  # has no effect on a user's command
    path = studies.finished(tmp_path / "s", [alone, *own])
    usual = series(table(path), STRONG)
    assert set(usual["baseline"]) == {"1x1 (1 rank)"}
    found = studies.frame(scaling_table(load_study(path), baseline="no-ddp"))
    own = series(found, STRONG)
    assert set(own["baseline"]) == {"1x1 (1 rank) without DDP"}
    plain = found[found["cell_id"] == "plain"].iloc[0]
    ratio = plain["step_time_sec"] / own["step_time_sec"]
    assert own["efficiency"].to_list() == pytest.approx((ratio / own["gpus"]).to_list())
    assert own["efficiency_low"].notna().all()
