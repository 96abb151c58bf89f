"""GPU-hours of whole nodes in `bench plan` and `bench submit --budget`."""

from __future__ import annotations

import json

import pytest

from tests.commands.command_line import bench

MATRIX = """\
study: s
cluster: {{time_limit: 30m, {cluster}}}
axes: {{nodes: [1, 2], gpus_per_node: [1, 4]}}
scaling: [{{mode: weak, per_gpu_batch: [8]}}]
repeats: 2
"""


@pytest.fixture
def folder(tmp_path):
    def write(cluster: str):
        (tmp_path / "m.yaml").write_text(MATRIX.format(cluster=cluster))
        return tmp_path

    return write


def test_the_plan_names_the_cost_and_the_cells_with_idle_gpus(folder):
    done = bench("plan", "m.yaml", cwd=folder("node_gpus: 4"))
    lines = done.stdout.splitlines()
    assert lines[-3].endswith("; at most 24 GPU-hours with exclusive nodes, 15 without")
    assert lines[-2] == (
        "idle GPUs that each run of a cell reserves: n1x1-nccl-srun-b8 (3), n2x1-nccl-srun-b8 (6)"
    )


def test_many_cells_with_idle_gpus_are_counted(folder):
    path = folder("node_gpus: 8")
    text = (path / "m.yaml").read_text().replace("nodes: [1, 2]", "nodes: [1, 2, 3, 4, 5]")
    (path / "m.yaml").write_text(text)
    line = bench("plan", "m.yaml", cwd=path).stdout.splitlines()[-2]
    assert line.count("(") - 1 == 8
    assert line.endswith(" and 2 more cells (--all lists them)")
    assert bench("plan", "m.yaml", "--all", cwd=path).stdout.splitlines()[-2].count("(") == 10


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("node_gpus: 4", (24, True, 15, {"n1x1-nccl-srun-b8": 3, "n2x1-nccl-srun-b8": 6}, True)),
        ("exclusive: true", (15, False, 15, {}, True)),
        ("exclusive: false", (15, True, 15, {}, False)),
    ],
)
def test_the_plan_as_json_says_whether_the_cost_is_exact(folder, cluster, expected):
    content = json.loads(bench("plan", "m.yaml", "--json", cwd=folder(cluster)).stdout)
    names = ("gpu_hours", "gpu_hours_exact", "gpu_hours_without_exclusive", "idle_gpus", "exclusive")
    assert tuple(content[name] for name in names) == expected


def test_the_budget_counts_all_gpus_of_whole_nodes(folder):
    path = folder("node_gpus: 4")
    bench("plan", "m.yaml", cwd=path)
    done = bench("submit", "--budget", "23", "--dry-run", cwd=path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: 8 runs could use 24 GPU-hours, more than the budget of 23; raise --budget, lower "
        "cluster.time_limit, or choose runs with --only\n",
    )
    done = bench("submit", "--budget", "24", "--dry-run", cwd=path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_budget_of_nodes_of_unknown_size_is_reported_as_a_lower_bound(folder):
    path = folder("exclusive: true")
    bench("plan", "m.yaml", cwd=path)
    done = bench("submit", "--budget", "15", "--dry-run", cwd=path)
    assert (done.returncode, done.stderr) == (
        0,
        "--budget: the runs could use more than the counted 15 GPU-hours, because they reserve all GPUs of "
        "their nodes; set cluster.node_gpus for the exact number\n",
    )


def test_a_pack_of_whole_nodes_costs_all_their_gpus(folder):
    path = folder("node_gpus: 4")
    bench("plan", "m.yaml", cwd=path)
    small = ("submit", "--pack", "--dry-run", "--only", "nodes=1", "--only", "gpus_per_node=1")
    done = bench(*small, "--budget", "3", cwd=path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: a pack of 2 runs could use 4 GPU-hours (1 x 4 GPUs for 1 h 00 min), more than the budget of 3; "
        "raise --budget, lower cluster.time_limit, choose runs with --only, or omit --pack\n",
    )
    done = bench(*small, cwd=path)
    assert done.stderr == "pack: 2 runs in one job of 1 node for at most 1 h 00 min, 4 GPU-hours at most\n"
    assert " --gres=gpu:1 " in done.stdout
