"""Core masks of a matrix arrive at the ranks: with srun, in a pack, on mixed nodes and with torchrun."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cluster.bed import Cluster
from tests.cluster.configuration import Options
from tests.cluster.plugin import StartCluster
from tests.jobs.slurm_studies import Study, plan_study, submitted

MATRIX = """\
study: bindings
cluster:
  partition: l40s
  account: users
  exclusive: true
  time_limit: 5m
  env: {{GLOO_SOCKET_IFNAME: eth0}}
  {cluster}
axes: {axes}
scaling: [{{mode: weak, per_gpu_batch: [2]}}]
workload: {{device: cpu, {workload}}}
repeats: 1
"""
TRAINING = (
    "model: mlp, parameters: 100k, steps_per_epoch: 1, epochs: 1, warmup_steps: 3, attribution_steps: 0, "
    "val_steps: 0, probe_steps: 0, sweep_time: 0"
)
#: A rank of a command. It writes its cores to the run's folder; torch is not imported.
RANK = """\
import os, pathlib, sys
cores = " ".join(map(str, sorted(os.sched_getaffinity(0))))
pathlib.Path(sys.argv[1], "rank-" + os.environ["RANK"]).write_text(f"{os.environ['SLURMD_NODENAME']} {cores}")
"""


def study_of(folder: Path, cluster: Cluster, *, keys: str, axes: str, workload: str) -> Study:
    matrix = MATRIX.format(cluster=keys, axes=axes, workload=workload)
    return plan_study(folder, matrix, cluster.environment)


def command(folder: Path) -> str:
    (folder / "rank.py").write_text(RANK)
    return f"command: [python, '{folder}/rank.py', '{{run_dir}}'], metrics: none"


def cores_of_ranks(study: Study) -> list[tuple[str, str]]:
    """Return the host and the cores of each rank of the only run, in the order of the ranks."""
    (shown,) = study.status().values()
    folder = study.folder / f"runs/{shown['run_id']}/attempt-1"
    assert shown["state"] == "completed", (shown, (folder / "job.err").read_text())
    paths = sorted(folder.glob("rank-*"), key=lambda path: int(path.name.partition("-")[2]))
    words = [path.read_text().split(maxsplit=1) for path in paths]
    return [(host, cores) for host, cores in words]


def test_masks_per_rank_arrive_with_srun(cluster, tmp_path):
    axes = "{nodes: [2], tasks_per_node: [2]}"
    study = study_of(
        tmp_path, cluster, keys="cpu_bind: mask_cpu:0x1,0x2", axes=axes, workload=command(tmp_path)
    )
    with submitted(study, "--wait"):
        first, second, third, last = cores_of_ranks(study)
    assert (first[0], third[0]) == (second[0], last[0])
    assert [cores for _, cores in (first, second, third, last)] == ["0", "1", "0", "1"]


def test_masks_per_rank_arrive_in_a_pack_and_are_recorded_in_env_json(cluster, tmp_path):
    axes = "{nodes: [1], tasks_per_node: [2]}"
    study = study_of(tmp_path, cluster, keys="cpu_bind: mask_cpu:0x2,0x1", axes=axes, workload=TRAINING)
    with submitted(study, "--wait", "--pack"):
        (shown,) = study.status().values()
    folder = study.folder / f"runs/{shown['run_id']}/attempt-1"
    assert shown["state"] == "completed", (shown, (folder / "job.err").read_text())
    assert study.run_json(shown["run_id"])["allocation"]["kind"] == "pack"
    (host,) = json.loads((folder / "env.json").read_text())["hosts"]
    assert (host["ranks"], host["affinity"]) == ([0, 1], ["1", "0"])


def test_one_mask_per_node_arrives_on_mixed_nodes_with_torchrun(cluster, tmp_path):
    axes = "{nodes: [2], tasks_per_node: [[2, 1]], launcher: [torchrun]}"
    study = study_of(tmp_path, cluster, keys="cpu_bind: mask_cpu:0x2", axes=axes, workload=command(tmp_path))
    with submitted(study, "--wait"):
        ranks = cores_of_ranks(study)
    assert [cores for _, cores in ranks] == ["1", "1", "1"]
    assert len({host for host, _ in ranks}) == 2


def test_a_mask_outside_of_the_cores_of_the_ranks_arrives(start_cluster: StartCluster, tmp_path):
    """Here Slurm knows the real cores of the node, and rejects masks outside of a step's own cores."""
    cores = max(os.sched_getaffinity(0)) + 1
    options = Options(nodes=1, gpus=0, cpus=cores, memory_mb=1000 * cores, accounting=False)
    with start_cluster(options) as cluster:
        study = study_of(
            tmp_path,
            cluster,
            keys=f"cpu_bind: map_cpu:{cores - 1}",
            axes="{nodes: [1], tasks_per_node: [1]}",
            workload=command(tmp_path),
        )
        with submitted(study, "--wait"):
            assert cores_of_ranks(study) == [("n1", str(cores - 1))]
