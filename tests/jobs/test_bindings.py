"""Core masks of a matrix arrive at the ranks: with srun, in a pack, on mixed nodes and with torchrun."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.cluster.bed import Cluster
from tests.cluster.configuration import Options
from tests.cluster.plugin import StartCluster
from tests.jobs.slurm_studies import Study, plan_study, submitted
from tests.matrices import BARE, command, matrix, slurm, training

ETH0 = {"GLOO_SOCKET_IFNAME": "eth0"}
TRAINING = training(parameters="100k", **BARE | {"steps_per_epoch": 1, "attribution_steps": 0})
#: A rank of a command. It writes its cores to the run's folder; torch is not imported.
RANK = """\
import os, pathlib, sys
cores = " ".join(map(str, sorted(os.sched_getaffinity(0))))
pathlib.Path(sys.argv[1], "rank-" + os.environ["RANK"]).write_text(f"{os.environ['SLURMD_NODENAME']} {cores}")
"""


def study_of(folder: Path, cluster: Cluster, workload: dict[str, Any] | None = None, /, **axes: Any) -> Study:
    """Plan a study with axes, and the masks ``cpu_bind``; without a workload, its ranks execute RANK."""
    section = slurm(
        exclusive=True, time_limit="5m", srun_options=[f"--cpu-bind={axes.pop('cpu_bind')}"], env=ETH0
    )
    (folder / "rank.py").write_text(RANK)
    words = ["python", f"{folder}/rank.py", "{run_dir}"]
    del section["cpus_per_task"]
    text = matrix("bindings", cluster=section, axes=axes, batch=2, workload=workload or command(words))
    return plan_study(folder, text, cluster.environment)


def cores_of_ranks(study: Study) -> list[tuple[str, str]]:
    """Return the host and the cores of each rank of the only run, in the order of the ranks."""
    (shown,) = study.status().values()
    folder = study.folder / f"runs/{shown['run_id']}/attempt-1"
    assert shown["state"] == "completed", (shown, (folder / "job.err").read_text())
    paths = sorted(folder.glob("rank-*"), key=lambda path: int(path.name.partition("-")[2]))
    words = [path.read_text().split(maxsplit=1) for path in paths]
    return [(host, cores) for host, cores in words]


def test_masks_per_rank_arrive_in_a_pack_and_are_recorded_in_env_json(cluster, tmp_path):
    study = study_of(tmp_path, cluster, TRAINING, nodes=[1], tasks_per_node=[2], cpu_bind="mask_cpu:0x2,0x1")
    with submitted(study, "--wait", "--pack"):
        (shown,) = study.status().values()
    folder = study.folder / f"runs/{shown['run_id']}/attempt-1"
    assert shown["state"] == "completed", (shown, (folder / "job.err").read_text())
    assert study.run_json(shown["run_id"])["allocation"]["kind"] == "pack"
    (host,) = json.loads((folder / "env.json").read_text())["hosts"]
    assert (host["ranks"], host["affinity"]) == ([0, 1], ["1", "0"])


def test_a_mask_outside_of_the_cores_of_the_ranks_arrives(start_cluster: StartCluster, tmp_path):
    """Here Slurm knows the real cores of the node, and rejects masks outside of a step's own cores."""
    cores = max(os.sched_getaffinity(0)) + 1
    options = Options(nodes=1, gpus=0, cpus=cores, memory_mb=1000 * cores, accounting=False)
    with start_cluster(options) as cluster:
        axes = {"nodes": [1], "tasks_per_node": [1]}
        study = study_of(tmp_path, cluster, cpu_bind=f"map_cpu:{cores - 1}", **axes)
        with submitted(study, "--wait"):
            assert cores_of_ranks(study) == [("n1", str(cores - 1))]
