"""GPU-hours of whole nodes in `bench plan` and `bench submit --budget`."""

from __future__ import annotations

import json

import pytest

from tests.commands.command_line import bench
from tests.matrices import matrix


@pytest.fixture
def folder(tmp_path):
    def write(**cluster):
        axes = {"nodes": [1, 2], "gpus_per_node": [1, 4]}
        cluster["time_limit"] = "30m"
        text = matrix("s", cluster=cluster, axes=axes, batch=8, workload=None, repeats=2)
        (tmp_path / "m.yaml").write_text(text)
        return tmp_path

    return write


WHOLE = "; at most 24 GPU-hours with exclusive nodes, 15 without"
UNKNOWN = "; at least 15 GPU-hours (set cluster.node_gpus for the number with exclusive nodes)"


@pytest.mark.parametrize(
    ("cluster", "expected", "cost"),
    [
        # 2 repeats of half an hour: the nodes of the four cells x 4 GPUs, or the GPUs in use.
        ({"node_gpus": 4}, (24, True, 15, {"n1x1-nccl-srun-b8": 3, "n2x1-nccl-srun-b8": 6}, True), WHOLE),
        ({"exclusive": True}, (15, False, 15, {}, True), UNKNOWN),
        ({"exclusive": False}, (15, True, 15, {}, False), "; at most 15 GPU-hours"),
        ({"exclusive": False, "node_gpus": 4}, (15, True, 15, {}, False), "; at most 15 GPU-hours"),
    ],
)
def test_the_plan_says_what_nodes_cost_and_whether_this_is_exact(folder, cluster, expected, cost):
    path = folder(**cluster)
    content = json.loads(bench("plan", "m.yaml", "--json", cwd=path).stdout)
    names = ("gpu_hours", "gpu_hours_exact", "gpu_hours_without_exclusive", "idle_gpus", "exclusive")
    assert tuple(content[name] for name in names) == expected
    lines = bench("plan", "m.yaml", cwd=path).stdout.splitlines()
    assert any(line.endswith(cost) for line in lines[-3:])
    idle = "idle GPUs that each run of a cell reserves: n1x1-nccl-srun-b8 (3), n2x1-nccl-srun-b8 (6)"
    assert (idle in lines) == bool(expected[3])


def test_the_budget_counts_all_gpus_of_whole_nodes(folder):
    path = folder(node_gpus=4)
    bench("plan", "m.yaml", cwd=path)
    done = bench("submit", "--budget", "23", "--dry-run", cwd=path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: 8 runs could use 24 GPU-hours, more than the budget of 23; raise --budget, lower "
        "cluster.time_limit, or choose runs with --only\n",
    )
    assert bench("submit", "--budget", "24", "--dry-run", cwd=path).returncode == 0


def test_a_pack_of_whole_nodes_costs_all_their_gpus(folder):
    path = folder(node_gpus=4)
    bench("plan", "m.yaml", cwd=path)
    done = bench("submit", "--pack", "--dry-run", "--budget", "31", cwd=path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: a pack of 8 runs could use 32 GPU-hours (2 x 4 GPUs for 4 h 00 min), more than the budget of 31; "
        "raise --budget, lower cluster.time_limit, choose runs with --only, or omit --pack\n",
    )
    only = ("--only", "nodes=1", "--only", "gpus_per_node=1")
    done = bench("submit", "--pack", "--dry-run", "--budget", "4", *only, cwd=path)
    assert done.stderr == "pack: 2 runs in one job of 1 node for at most 1 h 00 min, 4 GPU-hours at most\n"
    assert " --nodes=1 --ntasks-per-node=1 --gres=gpu:1 --time=01:00:00 " in done.stdout
