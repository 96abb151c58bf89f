"""Planning: the cells of a matrix, their names and order, the files of a study, planning again, and rejected changes."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.commands.options import only
from bench.matrix.cell import Cell, Run
from bench.plan import Plan, make_plan, ordered_runs, plan_content, scripts, write_plan
from bench.shipped import find_matrix, shipped
from bench.study.found import read_findings
from bench.study.layout import StudyFolder
from bench.study.ledger import Ledger, Record, RunState
from bench.study.plan_json import open_study, read_plan
from ddp_scaling_bench.cell_json import read_cell
from ddp_scaling_bench.errors import BenchError, InputError
from tests.common import raised, run_program, write_program
from tests.matrices import plan_of

MATRIX = """\
study: s
cluster: {executor: slurm, time_limit: 30m}
axes: {nodes: [1, 2], gpus_per_node: [4]}
scaling: [{mode: weak, per_gpu_batch: [8]}]
repeats: 2
"""


def planned(tmp_path: Path, text: str = MATRIX) -> StudyFolder:
    return write_plan(plan_of(tmp_path, text), tmp_path / "results")


def give_it_a_run(folder: StudyFolder, run_id: str) -> None:
    folder.attempt(run_id, 1).path.mkdir(parents=True)


def scripts_in(folder: StudyFolder) -> list[str]:
    return sorted(path.name for path in folder.scripts.iterdir())


def test_the_study_contains_the_matrix_the_plan_and_one_script_per_cell(tmp_path):
    folder = planned(tmp_path)
    assert folder.path == tmp_path / "results" / "s"
    assert folder.matrix.read_text() == MATRIX
    assert scripts_in(folder) == "n1x4-nccl-srun-b8.sbatch n2x4-nccl-srun-b8.sbatch pack.sbatch".split()
    content = json.loads(folder.plan_json.read_text())
    assert content["study"] == "s"
    assert list(read_findings(content["warnings"])) == make_plan(tmp_path / "m.yaml").warnings != []
    assert [run["order"] for run in content["runs"]] == [1, 2, 3, 4]
    assert not {"time_limit_s", "exclusive", "repeats", "gpu_option", "cost"} & content.keys()


def test_only_the_owner_can_change_scripts_even_without_a_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = planned(tmp_path)
    finally:
        os.umask(before)
    written = [folder.scripts, *folder.scripts.iterdir(), folder.plan_json, folder.matrix]
    modes = {path.name: path.stat().st_mode & 0o777 for path in written}
    assert modes == {name: 0o755 if name == "scripts" else 0o644 for name in modes}


def test_planning_again_changes_nothing_but_removes_the_scripts_of_removed_cells(tmp_path):
    folder = planned(tmp_path)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    planned(tmp_path)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    planned(tmp_path, MATRIX.replace("[1, 2]", "[2, 4]"))
    assert scripts_in(folder) == "n2x4-nccl-srun-b8.sbatch n4x4-nccl-srun-b8.sbatch pack.sbatch".split()


def test_a_study_with_results_can_grow(tmp_path):
    give_it_a_run(planned(tmp_path), "n1x4-nccl-srun-b8-r1")
    folder = planned(tmp_path, MATRIX.replace("[1, 2]", "[1, 2, 4]").replace("repeats: 2", "repeats: 5"))
    assert len(json.loads(folder.plan_json.read_text())["runs"]) == 15


CHANGED = "results of cell n1x4-nccl-srun-b8, which this matrix changes"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("[1, 2]", "[2]", "runs of cell n1x4-nccl-srun-b8, which this matrix omits"),
        ("repeats: 2", "workload: {epochs: 9}", f"{CHANGED} (epochs from 3 to 9)"),
        ("30m", "30m, exclusive: false", f"{CHANGED} (exclusive from true to false)"),
    ],
)
def test_a_cell_that_has_results_cannot_change(tmp_path, old, new, what):
    folder = planned(tmp_path)
    for repeat in (1, 2):
        give_it_a_run(folder, f"n1x4-nccl-srun-b8-r{repeat}")
    before = folder.plan_json.read_bytes()
    said = raised(BenchError, planned, tmp_path, MATRIX.replace(old, new))
    assert f"m.yaml: study s has {what}" in said
    assert said.endswith(f"; give the matrix another `study:` name, or move {folder.path} away")
    assert folder.plan_json.read_bytes() == before


def test_a_cell_can_change_if_all_its_runs_have_ended_without_a_result(tmp_path):
    folder, changed = planned(tmp_path), MATRIX.replace("repeats: 2", "workload: {epochs: 9}")
    give_it_a_run(folder, run_id := "n1x4-nccl-srun-b8-r1")
    ledger = Ledger(folder.ledger)
    ledger.append([Record(run_id=run_id, attempt=1, state=RunState.RUNNING, job_name="j", job_id="1")])
    assert CHANGED in raised(BenchError, planned, tmp_path, changed)
    ledger.append([Record(run_id=run_id, attempt=1, state=RunState.FAILED, job_name="j", job_id="1")])
    assert {cell["workload"]["epochs"] for cell in read_plan(planned(tmp_path, changed))["cells"]} == {9}
    assert open_study(folder).records()[run_id].state is RunState.FAILED


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "results").write_text("a file where the folder should be")
    said = raised(BenchError, planned, tmp_path)
    assert said.endswith(
        "results/s/scripts: cannot be written: Not a directory; check the folders of this path"
    )


def test_shipped_examples_are_found_by_name_and_the_users_own_files_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke_cpu").mkdir()
    assert find_matrix("smoke_cpu") == shipped("matrices") / "smoke_cpu.yaml"
    assert find_matrix("matrices/l40s.yaml") == shipped("matrices") / "l40s.yaml"
    (tmp_path / "smoke_cpu.yaml").write_text("study: mine\n")
    assert find_matrix("smoke_cpu.yaml") == find_matrix("smoke_cpu") == Path("smoke_cpu.yaml")
    examples = "backends, h200, l40s, large_request, mixed_nodes, smoke_cpu, ssh_hosts, strong_cpu, weak_cpu"
    assert raised(BenchError, find_matrix, "nowhere") == (
        "nowhere: matrix file does not exist; "
        f"give the path of a YAML file, or one of the shipped examples: {examples}"
    )


DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "clusters.md").read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("\n## Recipes\n") :].split("\n## ")[1]
RECIPES = dict(part.split("\n", 1) for part in SECTION.split("\n### ")[1:])


def recipe(name: str) -> str:
    (matrix,) = re.findall(r"^```yaml\n(.*?)^```$", RECIPES[name], re.MULTILINE | re.DOTALL)
    return matrix


def test_a_recipe_plans_without_warnings_about_its_keys_and_the_masks_of_lumi_are_right(tmp_path):
    plans = {name: plan_of(tmp_path, recipe(name)) for name in RECIPES}
    for name, plan in plans.items():
        assert not [str(one) for one in plan.warnings if "m.yaml:" in str(one)], name
    # The usable cores beside each GPU: the first core of the L3 region beside GPU 0, 1, ... is reserved.
    first = [48, 56, 16, 24, 0, 8, 32, 40]
    (option,) = plans["LUMI-G"].matrix.cluster.srun_options
    masks = option.removeprefix("--cpu-bind=mask_cpu:").split(",")
    assert [int(mask, 16) for mask in masks] == [sum(1 << core + i for i in range(1, 8)) for core in first]


def gpu_matrix(**more) -> dict:
    return {
        "study": "s",
        "axes": {"nodes": [1, 2, 4], "gpus_per_node": [4]},
        "scaling": [{"mode": "strong", "global_batch": [352]}, {"mode": "weak", "per_gpu_batch": [22]}],
        **more,
    }


def test_strong_keeps_the_global_batch_and_weak_the_per_rank_batch_exactly(tmp_path):
    matrix = gpu_matrix(workload={"grad_accum": 2})
    matrix["scaling"] = [
        {"mode": "strong", "global_batch": [352, 704]},
        {"mode": "weak", "per_gpu_batch": [7, 22]},
    ]
    for cell in plan_of(tmp_path, matrix).cells:
        assert cell.global_batch == cell.per_gpu_batch * cell.world_size * 2
        for member in cell.series:
            assert member.batch == (cell.global_batch if member.mode == "strong" else cell.per_gpu_batch)


def test_every_axis_is_enumerated_and_named_in_the_cell(tmp_path):
    matrix = gpu_matrix(cluster={"env": {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"}})
    matrix["axes"] |= {
        "precision": ["fp32", "bf16"],
        "env.NCCL_ALGO": ["Ring", "Tree"],
        "backend": ["nccl", "gloo"],
    }
    cells = plan_of(tmp_path, matrix).cells
    assert len(cells) == 5 * 2 * 2 * 2
    (cell,) = [c for c in cells if c.cell_id == "n2x4-gloo-srun-b44-precision.bf16-NCCL_ALGO.Tree"]
    assert cell.env == {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree"}
    assert cell.workload["precision"] == "bf16"
    assert [member.series for member in cell.series] == ["strong-352-gloo-srun-precision.bf16-NCCL_ALGO.Tree"]


def test_an_unset_option_is_named_as_in_the_matrix(tmp_path):
    matrix = gpu_matrix()
    matrix["axes"] |= {"bucket_cap_mb": [None, 25]}
    cells = {cell.cell_id: cell for cell in plan_of(tmp_path, matrix).cells}
    assert cells["n2x4-nccl-srun-b44-bucket_cap_mb.null"].workload["bucket_cap_mb"] is None
    runs = [Run(f"{name}-r1", name, 1, order) for order, name in enumerate(cells, start=1)]
    kept = only(SimpleNamespace(runs=runs, cells=cells), ["bucket_cap_mb=null"])
    assert len(kept) == len(runs) / 2
    assert all(run.cell_id.endswith(".null") for run in kept)


def test_unsafe_values_give_safe_and_different_names(tmp_path):
    matrix = gpu_matrix()
    matrix["axes"] |= {"env.X": ["a/b", "a b", "a;b", "$(x)", "é", "-", "a-X.b", "y" * 300, "y" * 301, ""]}
    ids = [cell.cell_id for cell in plan_of(tmp_path, matrix).cells]
    assert len(set(ids)) == len(ids) == 50
    assert all(
        set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-") for name in ids
    )
    assert max(map(len, ids)) <= 150


def test_exclude_removes_cells_that_match_all_its_keys_and_include_takes_all_values_of_other_axes(tmp_path):
    added = {"nodes": 8, "backend": "nccl", "mode": "weak", "per_gpu_batch": 22}
    matrix = gpu_matrix(exclude=[{"nodes": 4}, {"nodes": 1, "mode": "weak"}], include=[added])
    matrix["axes"]["env.NCCL_ALGO"] = ["Ring", "Tree"]
    names = [cell.cell_id.replace("-nccl-srun", "") for cell in plan_of(tmp_path, matrix).cells]
    assert [name.replace("-NCCL_ALGO.", " ") for name in names] == [
        *("n1x4-b88 Ring", "n1x4-b88 Tree"),
        *("n2x4-b44 Ring", "n2x4-b22 Ring", "n2x4-b44 Tree", "n2x4-b22 Tree"),
        *("n8x4-b22 Ring", "n8x4-b22 Tree"),
    ]


def test_the_order_of_runs_is_seeded_and_spreads_the_repeats(tmp_path):
    cells = plan_of(tmp_path, gpu_matrix(repeats=4)).cells
    runs = ordered_runs(cells, seed=7)
    assert runs == ordered_runs(cells, seed=7)
    assert runs != ordered_runs(cells, seed=8)
    assert [run.order for run in runs] == list(range(1, 21))
    for repeat in range(4):
        block = runs[5 * repeat : 5 * repeat + 5]
        cell_ids = {run.cell_id for run in block}
        assert cell_ids == {cell.cell_id for cell in cells}, "each round holds every cell once"
    orders = [tuple(run.cell_id for run in runs[i : i + 5]) for i in range(0, 20, 5)]
    assert len(set(orders)) > 1, "and not in the same order"


@pytest.mark.parametrize(
    ("cores", "threads", "sizes"),
    [(6, 1, [1, 2, 4]), (6, 2, [1, 2]), (1, 2, [1]), (128, 1, [1, 2, 4, 8, 16])],
)
def test_the_sizes_of_a_local_study_follow_the_cores_of_the_machine(
    cores, threads, sizes, tmp_path, monkeypatch
):
    monkeypatch.setattr("bench.matrix.load.usable_cores", lambda: cores)
    text = (shipped("matrices") / "smoke_cpu.yaml").read_text()
    plan = plan_of(tmp_path, text.replace("executor: local", f"executor: local\n  cpus_per_task: {threads}"))
    assert sorted({cell.world_size for cell in plan.cells}) == sizes
    alone = "every series has only one size, so speedups and efficiencies cannot be computed"
    assert (alone in map(str, plan.warnings)) == (sizes == [1])
    with pytest.raises(InputError) as caught:  # they are no size for other machines
        plan_of(tmp_path, "axes: {tasks_per_node: cores}\nscaling: [{mode: weak, per_gpu_batch: [1]}]\n")
    (problem,) = caught.value.problems[:1]
    assert (problem.line, problem.remedy) == (1, "write a list such as [1, 2, 4]")


def plan(folder: Path, cluster: dict[str, Any], **axes: Any) -> Plan:
    content = {
        "study": "hosts",
        "cluster": {"executor": "ssh", **cluster},
        "axes": axes,
        "scaling": [{"mode": "weak", "per_gpu_batch": [4]}],
        "workload": {"device": "cpu", "model": "mlp"},
    }
    return plan_of(folder, content)


def refusal(folder: Path, cluster: dict[str, Any], **axes: Any) -> str:
    """Return the problems of a matrix without file name and line."""
    with pytest.raises(InputError) as caught:
        plan(folder, cluster, **axes)
    problems = [str(problem).partition(": ")[2] for problem in caught.value.problems]
    return "\n".join(problems)


def test_without_an_axis_each_host_starts_its_own_processes(tmp_path):
    hosts = [{"host": "a", "processes": 4}, {"host": "user@b", "processes": 4}, {"host": "c", "processes": 2}]
    planned = plan(tmp_path, {"hosts": hosts}, nodes=[1, 2, 3])
    assert [(cell.nodes, cell.tasks_per_node, cell.world_size) for cell in planned.cells] == [
        (1, 4, 4),
        (2, 4, 8),
        (3, [4, 4, 2], 10),
    ]
    assert {cell.launcher for cell in planned.cells} == {"torchrun"}
    assert plan_content(planned)["hosts"] == [{**host, "address": None} for host in hosts]
    # A plain name is a host with one rank, or with the value of the axis.
    plain = {"hosts": ["a", "b"]}
    assert plan(tmp_path, plain, nodes=[2]).cells[0].tasks_per_node == 1
    assert plan(tmp_path, plain, nodes=[2], tasks_per_node=[[4, 2]]).cells[0].world_size == 6


def test_unsafe_host_names_are_rejected(tmp_path):
    for name in ("-oProxyCommand=touch planted", "a;touch planted", "$(x)", "a\nb", "a:22", "é", "a\0"):
        said = refusal(tmp_path, {"hosts": ["n1", name]})
        allowed = "is not a host name; allowed: NAME or USER@NAME"
        assert said.startswith(f"cluster.hosts[1].host: {name!r} {allowed}")
        said = refusal(tmp_path, {"hosts": [{"host": "n1", "address": name}]})
        allowed = "is not an address; allowed: a name or an IPv4"
        assert said.startswith(f"cluster.hosts[0].address: {name!r} {allowed}")


SEEN = "import json, os, sys; json.dump({'words': sys.argv[1:], 'env': dict(os.environ)}, sys.stdout)"


def launched(script: str, folder: Path, *words: str) -> dict[str, Any]:
    """Return the arguments and the environment of torchrun in a script."""
    python = folder / "python"
    write_program(python, f'#!/bin/bash\nexec {sys.executable} -c "{SEEN}" "$@"\n')
    path = folder / "cell.sh"
    path.write_text(script)
    env = {"PATH": "/usr/bin:/bin", "BENCH_PYTHON": str(python), "GLOO_SOCKET_IFNAME": "eth7"}
    done = run_program(["bash", path, *words], env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_same_script_starts_each_hosts_part_of_a_run(tmp_path):
    planned = plan(tmp_path, {"hosts": ["a", "b"]}, nodes=[2], tasks_per_node=[[4, 2]])
    ((_, text),) = scripts(planned)
    first = launched(text, tmp_path, "run dir", "0", "10.0.0.1:29400", "an-id")
    second = launched(text, tmp_path, "run dir", "1", "10.0.0.1:29400", "an-id")
    assert first["words"][0] == "-c"
    assert first["words"][2:] == [
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29400", "--rdzv-id=an-id"),
        *("--rdzv-conf=join_timeout=300,is_host=true", "--max-restarts=0", "--no-python"),
        *(str(tmp_path / "python"), "-m", "ddp_scaling_bench.train"),
    ]
    assert {(a, b) for a, b in zip(first["words"], second["words"], strict=True) if a != b} == {
        ("--rdzv-conf=join_timeout=300,is_host=true", "--rdzv-conf=join_timeout=300,is_host=false")
    }
    assert [one["env"]["PET_NPROC_PER_NODE"] for one in (first, second)] == ["4", "2"]
    assert read_cell(tmp_path / "run dir").tasks_per_node == [4, 2]


LAYOUT = """\
cluster:
  executor: slurm
  cpus_per_task: 8
  partition: {1: small, 129: medium, 257: large}
  time_limit: {1: 1h, 257: 30m}
  exclusive: {1: true, 257: false}
axes:
  nodes: [32, 64, 128]
  gpus_per_node: [4]
  model_parallel: [128]
  args.tp: [8]
scaling: [{mode: strong, global_batch: [2520]}, {mode: weak, per_replica_batch: [4]}]
workload:
  device: cuda
  command: ./t {args.tp} {model_parallel} {replicas} {per_replica_batch} {global_batch} {run_dir}/x
  metrics: {output: {throughput: 'tokens/s ([0-9.]+)'}, units: {throughput: tokens/s/GPU}, tokens_per_sample: 9}
repeats: {1: 3, 257: 1}
"""


def test_ranks_of_a_replica_share_a_batch_and_settings_depend_on_the_size(tmp_path):
    cells = plan_of(tmp_path, LAYOUT).cells
    assert [(c.world_size, c.replicas, c.per_gpu_batch, c.global_batch) for c in cells] == [
        (128, 1, 2520, 2520),
        (128, 1, 4, 4),
        (256, 2, 1260, 2520),
        (256, 2, 4, 8),
        (512, 4, 630, 2520),
        (512, 4, 4, 16),
    ]
    by_size = [(cell.repeats, *cell.resources[:2], cell.resources.exclusive) for cell in cells[::2]]
    assert by_size == [(3, 3600, "small", True), (3, 3600, "medium", True), (1, 1800, "large", False)]
    runs = [run.cell_id for run in ordered_runs(cells, seed=1)]
    assert [runs.count(cell.cell_id) for cell in cells] == [3, 3, 3, 3, 1, 1]
    assert cells[0].workload["args.tp"] == "8"
    assert cells[0] == Cell.from_json(cells[0].as_json())
    assert {m.series for cell in cells for m in cell.series} == {"strong-2520-nccl-srun", "weak-4-nccl-srun"}
    *_, (_, script) = scripts(make_plan(tmp_path / "m.yaml"))
    assert '\n  ./t 8 128 4 4 16 "$run_dir"/x\n' in script
    batch = "BENCH_PER_GPU_BATCH * world_size / BENCH_MODEL_PARALLEL * BENCH_GRAD_ACCUM"
    assert f"\nexport BENCH_GLOBAL_BATCH=$(({batch}))\n" in script
    assert "--exclusive" not in script
    assert "#SBATCH --partition=large\n" in script
    assert "#SBATCH --time=00:30:00\n" in script


def test_a_layout_is_constant_within_a_series(tmp_path):
    text = LAYOUT.replace("model_parallel: [128]", "model_parallel: [64, 128]")
    text = text.replace("repeats", "exclude: [{per_replica_batch: 4, nodes: 32}]\nrepeats")
    cells = plan_of(tmp_path, text.replace("[32, 64, 128]", "[64, 32]")).cells
    assert [(m.series, cell.replicas) for cell in cells for m in cell.series] == [
        ("strong-2520-nccl-srun-model_parallel.64", 4),
        ("weak-4-nccl-srun-model_parallel.64", 4),
        ("strong-2520-nccl-srun-model_parallel.128", 2),
        ("weak-4-nccl-srun-model_parallel.128", 2),
        ("strong-2520-nccl-srun-model_parallel.64", 2),
        ("strong-2520-nccl-srun-model_parallel.128", 1),
    ]


@pytest.mark.parametrize(
    ("metrics", "more", "stored"),
    [
        ("{throughput: tokens/s/GPU}, tokens_per_sample: 9", "seq_len: 7", ("tokens/s", "per_gpu", [9])),
        ("{throughput: samples/s/GPU}", "", ("samples/s", "per_gpu", [None])),
        ("{throughput: tokens/s}, scope: per_replica", "seq_len: 7", ("tokens/s", "per_replica", [7])),
        ("{throughput: tokens/s}", "seq_len: [64, 128]", ("tokens/s", None, [64, 128])),
    ],
)
def test_every_cell_knows_the_tokens_of_a_sample(tmp_path, metrics, more, stored):
    section = "axes" if "[" in more else "workload"
    text = LAYOUT.replace("{throughput: tokens/s/GPU}, tokens_per_sample: 9", metrics)
    cells = plan_of(tmp_path, text.replace(f"{section}:\n", f"{section}:\n  {more}\n")).cells
    found = [cell.metrics for cell in cells]
    assert {(one["units"]["throughput"], one.get("scope")) for one in found} == {stored[:2]}
    assert list(dict.fromkeys(one.get("tokens_per_sample") for one in found)) == stored[2]


def test_arguments_are_texts_as_written(tmp_path):
    text = LAYOUT.replace("args.tp: [8]", "args.tp: [1e-3, 010, True, 'x']")
    cells = plan_of(tmp_path, text.replace("repeats", "exclude: [{args.tp: True}]\nrepeats")).cells
    assert list(dict.fromkeys(cell.workload["args.tp"] for cell in cells)) == ["1e-3", "010", "x"]


def test_a_site_file_can_contain_settings_by_size(tmp_path):
    (tmp_path / "site.yaml").write_text(
        "cluster: {partition: {1: a, 5: b}, exclusive: {1: false, 5: true}}\n"
    )
    plan = plan_of(tmp_path, MATRIX, site=tmp_path / "site.yaml")
    assert [cell.resources[1:2] + cell.resources[5:6] for cell in plan.cells] == [("a", False), ("b", True)]
    assert [one.cells for one in plan.warnings if one.kind == "shared-nodes"] == [("n1x4-nccl-srun-b8",)]


def test_the_examples_of_the_docs_plan():
    plans = {path.stem: make_plan(path) for path in (DOCS / "examples").glob("*.yaml")}
    assert all(len(list(scripts(plan))) == len(plan.cells) for plan in plans.values())
    cells = plans["tensor_pipeline"].cells
    sizes = [(cell.replicas, cell.per_gpu_batch, cell.repeats) for cell in cells]
    assert sizes == [(1, 28, 3), (2, 14, 3), (4, 7, 1)]
