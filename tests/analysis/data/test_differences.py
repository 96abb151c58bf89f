"""What differs between the runs of a study: planned settings, and what nobody planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.checks.assessment import assess
from analysis.data.differences import Difference
from analysis.data.load import load_study
from analysis.report.results import Results
from analysis.report.write import write_report
from bench.matrix.cell import Cell
from tests.analysis import studies


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
    assert not [fact for fact in assess(load_study(tmp_path / "s")).findings if fact.kind == "runs-differ"]


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
    (fact,) = [fact for fact in assess(load_study(path)).findings if fact.kind == "runs-differ"]
    assert fact.values["differing"] == ["torch", "parameters"]
    section = page.read_text().partition('id="differs"')
    assert section[0].endswith("<details open><summary><h2 ")
    assert '<td class="text">PyTorch</td><td class="text">no</td>' in section[2].replace(" wide", "")
