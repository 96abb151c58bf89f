"""Planning: the files of a study, planning again, and rejected changes."""

import json
import os
import re
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.plan import Plan, continue_study, make_plan, write_plan
from bench.shipped import find_matrix, shipped
from bench.study.found import read_findings
from bench.study.layout import StudyFolder
from tests.common import raised

MATRIX = """\
study: s
cluster: {executor: slurm, time_limit: 30m}
axes: {nodes: [1, 2], gpus_per_node: [4]}
scaling: [{mode: weak, per_gpu_batch: [8]}]
repeats: 2
"""


def planned(tmp_path: Path, text: str = MATRIX) -> StudyFolder:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return write_plan(make_plan(path), tmp_path / "results")


def give_it_a_run(folder: StudyFolder, run_id: str) -> None:
    folder.attempt(run_id, 1).path.mkdir(parents=True)


def test_the_study_contains_the_matrix_the_plan_and_one_script_per_cell(tmp_path):
    folder = planned(tmp_path)
    assert folder.path == tmp_path / "results" / "s"
    assert folder.matrix.read_text() == MATRIX
    assert (
        sorted(path.name for path in folder.scripts.iterdir())
        == "n1x4-nccl-srun-b8.sbatch n2x4-nccl-srun-b8.sbatch pack.sbatch".split()
    )
    content = json.loads(folder.plan_json.read_text())
    assert content["study"] == "s"
    assert list(read_findings(content["warnings"])) == make_plan(tmp_path / "m.yaml").warnings != []
    assert [run["order"] for run in content["runs"]] == [1, 2, 3, 4]
    assert content["cost"] == {
        "cells": 2,
        "runs": 4,
        "nodes_max": 2,
        "gpus_max": 8,
        "wall_s_max": 4 * 1800,
        "gpu_hours_max": (4 + 8) * 2 * 0.5,
        "gpu_hours_without_exclusive": (4 + 8) * 2 * 0.5,
        "gpu_hours_exact": False,
        "node_hours_max": (1 + 2) * 2 * 0.5,
        "idle_gpus": {},
    }


def test_only_the_owner_can_change_scripts_even_without_a_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = planned(tmp_path)
    finally:
        os.umask(before)
    written = [folder.scripts, *folder.scripts.iterdir(), folder.plan_json, folder.matrix]
    modes = {path.name: path.stat().st_mode & 0o777 for path in written}
    assert modes == {name: 0o755 if name == "scripts" else 0o644 for name in modes}


def test_planning_again_changes_nothing(tmp_path):
    folder = planned(tmp_path)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    planned(tmp_path)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_scripts_of_removed_cells_are_removed(tmp_path):
    planned(tmp_path)
    folder = planned(tmp_path, MATRIX.replace("[1, 2]", "[2, 4]"))
    assert (
        sorted(path.name for path in folder.scripts.iterdir())
        == "n2x4-nccl-srun-b8.sbatch n4x4-nccl-srun-b8.sbatch pack.sbatch".split()
    )


def test_a_study_with_results_can_grow(tmp_path):
    give_it_a_run(planned(tmp_path), "n1x4-nccl-srun-b8-r1")
    folder = planned(tmp_path, MATRIX.replace("[1, 2]", "[1, 2, 4]").replace("repeats: 2", "repeats: 5"))
    assert len(json.loads(folder.plan_json.read_text())["runs"]) == 15


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("[1, 2]", "[2]"), "has results of cell n1x4-nccl-srun-b8, which this matrix omits"),
        (
            ("repeats: 2", "workload: {epochs: 9}"),
            "has results of cell n1x4-nccl-srun-b8, which this matrix changes (epochs from 3 to 9)",
        ),
        (("repeats: 2", "repeats: 1"), "has results of run n1x4-nccl-srun-b8-r2, which this matrix omits"),
    ],
)
def test_a_cell_that_has_results_cannot_change(tmp_path, change, what):
    folder = planned(tmp_path)
    give_it_a_run(folder, "n1x4-nccl-srun-b8-r1")
    give_it_a_run(folder, "n1x4-nccl-srun-b8-r2")
    before = folder.plan_json.read_bytes()
    with pytest.raises(BenchError) as caught:
        planned(tmp_path, MATRIX.replace(*change))
    assert str(caught.value).startswith(f"study s {what}")
    assert str(caught.value).endswith(f"; give the matrix another `study:` name, or move {folder.path} away")
    assert folder.plan_json.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "results").write_text("a file where the folder should be")
    with pytest.raises(BenchError, match=r"results/s/scripts: cannot be written: Not a directory$"):
        planned(tmp_path)


def test_shipped_examples_are_found_by_name_and_the_users_own_files_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke_cpu").mkdir()
    assert find_matrix("smoke_cpu") == shipped("matrices") / "smoke_cpu.yaml"
    assert find_matrix("matrices/l40s.yaml") == shipped("matrices") / "l40s.yaml"
    (tmp_path / "smoke_cpu.yaml").write_text("study: mine\n")
    assert find_matrix("smoke_cpu.yaml") == find_matrix("smoke_cpu") == Path("smoke_cpu.yaml")
    with pytest.raises(BenchError) as caught:
        find_matrix("nowhere")
    examples = "backends, h200, l40s, mixed_nodes, smoke_cpu, ssh_hosts, strong_cpu, weak_cpu"
    assert str(caught.value) == (
        "nowhere: matrix file does not exist; "
        f"give the path of a YAML file, or one of the shipped examples: {examples}"
    )


SHARED = MATRIX.replace("time_limit: 30m", "time_limit: 30m, exclusive: false")
EXCLUSIVE = MATRIX.replace("time_limit: 30m", "time_limit: 30m, exclusive: true")
RUN = "n1x4-nccl-srun-b8-r1"


def script_of(folder: StudyFolder) -> str:
    return (folder.scripts / "n1x4-nccl-srun-b8.sbatch").read_text()


def test_a_begun_study_keeps_shared_nodes_and_warns(tmp_path):
    folder = planned(tmp_path, SHARED)
    give_it_a_run(folder, RUN)
    again = continue_study(make_plan(tmp_path / "m.yaml"), tmp_path / "results")
    assert not again.exclusive
    (tmp_path / "m.yaml").write_text(MATRIX)
    kept = continue_study(make_plan(tmp_path / "m.yaml"), tmp_path / "results")
    assert [warning for warning in map(str, kept.warnings) if "exclusive" in warning] == [
        f"{tmp_path}/m.yaml:2: cluster.exclusive is false: other jobs can run on the same nodes and disturb a "
        "run. Runs of these cells can also share a node: n1x4-nccl-srun-b8, n2x4-nccl-srun-b8; give the "
        "matrix another `study:` name for whole nodes, or use `bench submit --pack` or "
        "max_running: 1"
    ]
    write_plan(kept, tmp_path / "results")
    assert "--exclusive" not in script_of(folder)
    assert json.loads(folder.plan_json.read_text())["exclusive"] is False


@pytest.mark.parametrize(
    ("before", "after", "value"), [(SHARED, EXCLUSIVE, "false"), (MATRIX, SHARED, "true")]
)
def test_a_matrix_that_would_change_exclusive_of_a_begun_study_is_refused(tmp_path, before, after, value):
    folder = planned(tmp_path, before)
    planned(tmp_path, after)  # nothing has run yet
    planned(tmp_path, before)
    give_it_a_run(folder, RUN)
    content = folder.plan_json.read_bytes()
    assert raised(BenchError, planned, tmp_path, after) == (
        f"{tmp_path}/m.yaml:2: study s has begun with exclusive: {value}, which this matrix would change; "
        f"set cluster.exclusive: {value}, or give the matrix another `study:` name"
    )
    assert folder.plan_json.read_bytes() == content


def test_mixed_nodes_reserve_the_gpus_of_the_largest(tmp_path):
    path = tmp_path / "m.yaml"
    axes = "nodes: [2], gpus_per_node: [[4, 2]], launcher: [torchrun]"
    path.write_text(SHARED.replace("nodes: [1, 2], gpus_per_node: [4]", axes))
    assert make_plan(path).cost.idle_gpus == {"n2x4+2-nccl-torchrun-b8": 2}


def test_a_cpu_study_on_gpu_nodes_costs_their_gpus(tmp_path):
    path = tmp_path / "m.yaml"
    text = MATRIX.replace("time_limit: 30m", "time_limit: 30m, node_gpus: 4").replace("gpus_per", "tasks_per")
    path.write_text(f"{text}workload: {{device: cpu}}\n")
    cost = make_plan(path).cost
    assert (cost.gpu_hours_max, cost.gpus_max) == ((1 + 2) * 4, 0)
    assert cost.idle_gpus == {"n1x4-gloo-srun-b8": 4, "n2x4-gloo-srun-b8": 8}


TEXT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("\n## Recipes\n") :].split("\n## ")[1]
RECIPES = dict(part.split("\n", 1) for part in SECTION.split("\n### ")[1:])


def plan_of(folder: Path, name: str) -> Plan:
    (matrix,) = re.findall(r"^```yaml\n(.*?)^```$", RECIPES[name], re.MULTILINE | re.DOTALL)
    (folder / "recipe.yaml").write_text(matrix, encoding="utf-8")
    return make_plan(folder / "recipe.yaml")


def test_there_is_a_recipe_for_each_cluster():
    expected = ["LUMI-G", "Frontier", "JUWELS Booster", "Perlmutter", "A cluster with two sockets per node"]
    assert list(RECIPES) == expected
    assert "**not run on these systems**" in SECTION


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_without_warnings_about_its_keys(tmp_path, name):
    plan = plan_of(tmp_path, name)
    assert not [warning for warning in map(str, plan.warnings) if "recipe.yaml:" in warning]


def test_the_masks_of_lumi_are_the_usable_cores_beside_each_gpu(tmp_path):
    # The first core of the L3 region beside GPU 0, 1, ..., which is reserved.
    first = [48, 56, 16, 24, 0, 8, 32, 40]
    (option,) = plan_of(tmp_path, "LUMI-G").matrix.cluster.srun_options
    masks = option.removeprefix("--cpu-bind=mask_cpu:").split(",")
    assert [int(mask, 16) for mask in masks] == [sum(1 << core + i for i in range(1, 8)) for core in first]
