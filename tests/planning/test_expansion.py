"""The cells of a matrix, their names and order, and the plan's warnings."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.commands.options import only
from bench.errors import InputError
from bench.matrix.cell import Cell, Run
from bench.matrix.expansion import expand
from bench.matrix.load import load_matrix
from bench.plan import Plan, make_plan, ordered_runs, plan_content, scripts
from bench.shipped import shipped
from bench.study.cell_json import read_cell
from tests.common import run_program, write_program


def expanded(folder: Path, content: dict) -> list[Cell]:
    path = folder / "m.yaml"
    path.write_text(yaml.safe_dump(content))
    return expand(*load_matrix(path))


def gpu_matrix(**more) -> dict:
    return {
        "study": "s",
        "axes": {"nodes": [1, 2, 4], "gpus_per_node": [4]},
        "scaling": [{"mode": "strong", "global_batch": [352]}, {"mode": "weak", "per_gpu_batch": [22]}],
        **more,
    }


def test_a_cell_of_two_series_is_planned_once_and_is_in_both(tmp_path):
    cells = {cell.cell_id: cell for cell in expanded(tmp_path, gpu_matrix())}
    assert (
        list(cells)
        == (
            "n1x4-nccl-srun-b88 n1x4-nccl-srun-b22 n2x4-nccl-srun-b44 n2x4-nccl-srun-b22 n4x4-nccl-srun-b22"
        ).split()
    )
    meeting = cells["n4x4-nccl-srun-b22"]
    assert (meeting.world_size, meeting.global_batch, meeting.modes) == (16, 352, ["strong", "weak"])


def test_strong_keeps_the_global_batch_and_weak_the_per_rank_batch_exactly(tmp_path):
    matrix = gpu_matrix(workload={"grad_accum": 2})
    matrix["scaling"] = [
        {"mode": "strong", "global_batch": [352, 704]},
        {"mode": "weak", "per_gpu_batch": [7, 22]},
    ]
    for cell in expanded(tmp_path, matrix):
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
    cells = expanded(tmp_path, matrix)
    assert len(cells) == 5 * 2 * 2 * 2
    (cell,) = [c for c in cells if c.cell_id == "n2x4-gloo-srun-b44-precision.bf16-NCCL_ALGO.Tree"]
    assert cell.env == {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree"}
    assert cell.workload["precision"] == "bf16"
    assert [member.series for member in cell.series] == ["strong-352-gloo-srun-precision.bf16-NCCL_ALGO.Tree"]


def test_an_unset_option_is_named_as_in_the_matrix(tmp_path):
    matrix = gpu_matrix()
    matrix["axes"] |= {"bucket_cap_mb": [None, 25]}
    cells = {cell.cell_id: cell for cell in expanded(tmp_path, matrix)}
    assert cells["n2x4-nccl-srun-b44-bucket_cap_mb.null"].workload["bucket_cap_mb"] is None
    runs = [Run(f"{name}-r1", name, 1, order) for order, name in enumerate(cells, start=1)]
    kept = only(runs, cells, ["bucket_cap_mb=null"])
    assert len(kept) == len(runs) / 2
    assert all(run.cell_id.endswith(".null") for run in kept)


def test_unsafe_values_give_safe_and_different_names(tmp_path):
    matrix = gpu_matrix()
    matrix["axes"] |= {"env.X": ["a/b", "a b", "a;b", "$(x)", "é", "-", "a-X.b", "y" * 300, "y" * 301, ""]}
    ids = [cell.cell_id for cell in expanded(tmp_path, matrix)]
    assert len(set(ids)) == len(ids) == 50
    assert all(
        set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-") for name in ids
    )
    assert max(map(len, ids)) <= 150


def test_exclude_removes_cells_that_match_all_its_keys(tmp_path):
    matrix = gpu_matrix(exclude=[{"nodes": 4}, {"nodes": 1, "mode": "weak"}])
    assert [c.cell_id for c in expanded(tmp_path, matrix)] == [
        "n1x4-nccl-srun-b88",
        "n2x4-nccl-srun-b44",
        "n2x4-nccl-srun-b22",
    ]


def test_include_takes_all_values_of_an_axis_that_it_does_not_name(tmp_path):
    matrix = gpu_matrix(include=[{"nodes": 8, "backend": "nccl", "mode": "weak", "per_gpu_batch": 22}])
    matrix["axes"]["env.NCCL_ALGO"] = ["Ring", "Tree"]
    added = [c.cell_id for c in expanded(tmp_path, matrix) if c.nodes == 8]
    assert added == ["n8x4-nccl-srun-b22-NCCL_ALGO.Ring", "n8x4-nccl-srun-b22-NCCL_ALGO.Tree"]


def test_mixed_nodes_count_their_own_ranks(tmp_path):
    matrix = gpu_matrix()
    matrix["axes"] = {"nodes": [2], "gpus_per_node": [4, [4, 2]], "launcher": ["torchrun"]}
    matrix["scaling"] = [{"mode": "strong", "global_batch": [48]}]
    assert [(c.cell_id, c.world_size, c.per_gpu_batch) for c in expanded(tmp_path, matrix)] == [
        ("n2x4-nccl-torchrun-b6", 8, 6),
        ("n2x4+2-nccl-torchrun-b8", 6, 8),
    ]


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True),
    per_node=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3, unique=True),
    weak=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
    buckets=st.lists(st.sampled_from([1, 5, 25, 100]), min_size=1, max_size=3, unique=True),
)
def test_the_matrix_is_the_product_of_its_axes(tmp_path_factory, nodes, per_node, weak, buckets):
    content = {
        "study": "s",
        "axes": {"nodes": nodes, "gpus_per_node": per_node, "bucket_cap_mb": buckets},
        "scaling": [{"mode": "weak", "per_gpu_batch": weak}],
    }
    cells = expanded(tmp_path_factory.mktemp("m"), content)
    found = [(c.nodes, c.tasks_per_node, c.workload["bucket_cap_mb"], c.per_gpu_batch) for c in cells]
    expected = [(n, p, b, w) for n in nodes for p in per_node for b in buckets for w in weak]
    assert Counter(found) == Counter(expected)
    assert len({c.cell_id for c in cells}) == len(cells)


def test_the_order_of_runs_is_seeded_and_spreads_the_repeats(tmp_path):
    cells = expanded(tmp_path, gpu_matrix())
    runs = ordered_runs(cells, repeats=4, seed=7)
    assert runs == ordered_runs(cells, repeats=4, seed=7)
    assert runs != ordered_runs(cells, repeats=4, seed=8)
    assert [run.order for run in runs] == list(range(1, 21))
    for repeat in range(4):
        block = runs[5 * repeat : 5 * repeat + 5]
        assert {run.cell_id for run in block} == {cell.cell_id for cell in cells}, (
            "each round holds every cell once"
        )
    orders = [tuple(run.cell_id for run in runs[i : i + 5]) for i in range(0, 20, 5)]
    assert len(set(orders)) > 1, "and not in the same order"


def warnings_of(name: str) -> list[str]:
    return list(map(str, make_plan(shipped("matrices") / f"{name}.yaml").warnings))


def test_the_plan_warns_about_questions_that_the_study_cannot_answer(monkeypatch):
    monkeypatch.setattr("bench.matrix.load.usable_cores", lambda: 4)
    assert warnings_of("smoke_cpu") == ["one node count (1): no efficiency across nodes, only within a node"]
    (shared,) = warnings_of("strong_cpu")
    assert shared.startswith("up to 24 runs on several nodes can execute side by side and share the network")


@pytest.mark.parametrize(
    ("cores", "threads", "sizes"),
    [(1, 1, [1]), (2, 1, [1, 2]), (6, 1, [1, 2, 4]), (6, 2, [1, 2]), (1, 2, [1]), (128, 1, [1, 2, 4, 8, 16])],
)
def test_the_sizes_of_a_local_study_follow_the_cores_of_the_machine(
    cores, threads, sizes, tmp_path, monkeypatch
):
    monkeypatch.setattr("bench.matrix.load.usable_cores", lambda: cores)
    text = (shipped("matrices") / "smoke_cpu.yaml").read_text()
    path = tmp_path / "m.yaml"
    path.write_text(text.replace("executor: local", f"executor: local\n  cpus_per_task: {threads}"))
    plan = make_plan(path)
    assert sorted({cell.world_size for cell in plan.cells}) == sizes
    alone = "every series has only one size, so speedups and efficiencies cannot be computed"
    assert (alone in map(str, plan.warnings)) == (sizes == [1])


def test_the_cores_of_this_machine_are_no_size_for_other_machines(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("axes: {tasks_per_node: cores}\nscaling: [{mode: weak, per_gpu_batch: [1]}]\n")
    with pytest.raises(InputError) as caught:
        make_plan(path)
    problem = caught.value.problems[0]
    assert (problem.line, problem.remedy) == (1, "write a list such as [1, 2, 4]")


def plan(folder: Path, cluster: dict[str, Any], **axes: Any) -> Plan:
    path = folder / "m.yaml"
    content = {
        "study": "hosts",
        "cluster": {"executor": "ssh", **cluster},
        "axes": axes,
        "scaling": [{"mode": "weak", "per_gpu_batch": [4]}],
        "workload": {"device": "cpu", "model": "mlp"},
    }
    path.write_text(yaml.safe_dump(content, allow_unicode=True))
    return make_plan(path)


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


def test_a_plain_name_is_a_host_with_one_rank_or_the_axis_value(tmp_path):
    assert plan(tmp_path, {"hosts": ["a", "b"]}, nodes=[2]).cells[0].tasks_per_node == 1
    assert plan(tmp_path, {"hosts": ["a", "b"]}, nodes=[2], tasks_per_node=[[4, 2]]).cells[0].world_size == 6


NAME_RULE = (
    "allowed: NAME or USER@NAME with letters, digits, '.', '_' and '-' "
    "(set ports, keys and jump hosts in ~/.ssh/config)"
)


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=touch planted", "a;touch planted", "$(touch planted)", "a\nb", "a:22", "é", "a\0"],
)
def test_unsafe_host_names_are_rejected(tmp_path, name):
    said = refusal(tmp_path, {"hosts": ["n1", name]})
    assert said == f"cluster.hosts[1].host: {name!r} is not a host name; {NAME_RULE}"
    said = refusal(tmp_path, {"hosts": [{"host": "n1", "address": name}]})
    assert said == (
        f"cluster.hosts[0].address: {name!r} is not an address; allowed: a name or an IPv4 address, "
        "with letters, digits, '.', '_' and '-'"
    )


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
        *(str(tmp_path / "python"), "-P", "-m", "ddp_scaling_bench.train"),
    ]
    assert {(a, b) for a, b in zip(first["words"], second["words"], strict=True) if a != b} == {
        ("--rdzv-conf=join_timeout=300,is_host=true", "--rdzv-conf=join_timeout=300,is_host=false")
    }
    assert [one["env"]["PET_NPROC_PER_NODE"] for one in (first, second)] == ["4", "2"]
    assert read_cell(tmp_path / "run dir").tasks_per_node == [4, 2]


@pytest.mark.parametrize("value", ["it's $(touch planted)", "`touch planted`", 'two\nlines "quoted"', "; é"])
def test_values_arrive_literally_on_the_hosts(tmp_path, value):
    ((_, text),) = scripts(plan(tmp_path, {"hosts": ["a"], "env": {"VALUE": value}}))
    assert launched(text, tmp_path, "run dir")["env"]["VALUE"] == value
    assert not (tmp_path / "planted").exists()
