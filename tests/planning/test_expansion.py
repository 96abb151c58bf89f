"""The cells of a matrix, their names and order, and the plan's warnings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.commands.options import only
from bench.errors import InputError
from bench.matrix.cell import Cell, Run
from bench.matrix.expansion import expand
from bench.matrix.load import load_matrix
from bench.plan import make_plan, ordered_runs
from bench.shipped import shipped


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


def test_an_exclude_without_a_match_gives_a_warning_with_its_line(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump(gpu_matrix(exclude=[{"nodes": 64}])))
    line = path.read_text().splitlines().index("- nodes: 64") + 1
    assert make_plan(path).warnings[0] == f"{path}:{line}: exclude[0] matches no cell and has no effect"


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
    return make_plan(shipped("matrices") / f"{name}.yaml").warnings


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
    assert (alone in plan.warnings) == (sizes == [1])


def test_the_cores_of_this_machine_are_no_size_for_other_machines(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("axes: {tasks_per_node: cores}\nscaling: [{mode: weak, per_gpu_batch: [1]}]\n")
    with pytest.raises(InputError) as caught:
        make_plan(path)
    problem = caught.value.problems[0]
    assert (problem.line, problem.remedy) == (1, "write a list such as [1, 2, 4]")


def test_settings_without_effect_give_warnings(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(
        "study: s\ncluster: {executor: local, partition: gpu}\n"
        "workload:\n  device: cpu\n  model: mlp\n  seq_len: 64\n  memory_format: channels_last\n"
        "  strategy: fsdp-keep\n  bucket_cap_mb: 4\n  fsdp_wrap: root\n"
        "scaling: [{mode: weak, per_gpu_batch: [8]}]\n"
    )
    warnings = make_plan(path).warnings
    root = "with fsdp_wrap root, FSDP gathers all weights before it computes, so communication cannot overlap"
    assert f"{path}:10: {root} computation (pytorch#176318); use block" in warnings
    assert [w for w in warnings if "ignored" in w] == [
        f"{path}:2: cluster.partition is ignored by executor local",
        f"{path}:6: seq_len is ignored by mlp; only transformer can use it",
        f"{path}:7: memory_format is ignored by mlp; only convnet and resnet50 can use it",
        f"{path}:9: bucket_cap_mb is ignored by fsdp-keep; only ddp, ddp-static and zero1 can use it",
    ]


def test_strategies_that_do_not_use_an_option_or_do_not_fit_are_named(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(
        "study: s\ncluster: {executor: slurm}\n"
        "axes: {nodes: [1, 2], strategy: [ddp, fsdp, fsdp-keep, hsdp], fsdp_wrap: [block, root]}\n"
        "workload: {device: cpu, comm_hook: fp16}\nscaling: [{mode: weak, per_gpu_batch: [8]}]\n"
        "exclude: [{fsdp_wrap: root, strategy: hsdp}]\n"
    )
    plan = make_plan(path)
    ignoring, users = "fsdp, fsdp-keep and hsdp (as fsdp)", "ddp, ddp-static and zero1"
    assert f"{path}:4: comm_hook is ignored by {ignoring}; only {users} can use it" in plan.warnings
    twice = (
        f"{path}:3: fsdp_wrap is ignored by ddp; only fsdp, fsdp-keep and hsdp can use it; exclude all but"
    )
    assert f"{twice} one of its values there, or the same is measured repeatedly" in plan.warnings
    cells = [f"n{nodes}x1-gloo-srun-b8-strategy.hsdp-fsdp_wrap.block" for nodes in (1, 2)]
    assert f"{path}:3: strategy hsdp runs as fsdp in {cells[0]}" in plan.warnings
    assert f"{path}:3: strategy hsdp runs as ddp in {cells[1]}" in plan.warnings
    assert "n1x1-gloo-srun-b8-strategy.fsdp-keep-fsdp_wrap.root" in [cell.cell_id for cell in plan.cells]
    path.write_text(path.read_text().replace("exclude: [", "exclude: [{fsdp_wrap: root, strategy: ddp}, "))
    assert not [one for one in make_plan(path).warnings if "fsdp_wrap is ignored" in one]
    # At one size with one rank, the same is measured twice without a wrapper, and as hsdp on one rank per node.
    path.write_text(
        path.read_text()
        .replace("strategy: [ddp,", "strategy: [none, ddp,")
        .replace("{fsdp_wrap: root, strategy: hsdp}]", "{nodes: 2, strategy: none}]")
    )
    assert (
        f"{path}:3: fsdp_wrap is ignored by none and hsdp (as ddp); only fsdp, fsdp-keep and hsdp"
        in "\n".join(make_plan(path).warnings)
    )
