"""conditions.json of jobs on the cluster: a busy process on one node is foreign there, and the job's are not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.bed import Cluster
from tests.jobs.slurm_studies import Study, plan_study, submitted
from tests.matrices import command, matrix, slurm, torchrun_cell

LOOP = "echo $$; while :; do :; done"
ON_TWO = slurm(time_limit="3m", nodelist="n[1-2]")
BUSY = "SECONDS=0; while ((SECONDS < {})); do :; done"


@contextmanager
def busy(cluster: Cluster, node: str, folder: Path) -> Iterator[None]:
    """Keep one core busy on a node with a process that belongs to no job."""
    command = cluster.command_on_node(node, ["sh", "-c", LOOP], cwd=folder)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as loop:
        assert loop.stdout is not None
        pid = loop.stdout.readline().strip()
        try:
            yield
        finally:
            cluster.run_on_node(node, ["kill", "-KILL", pid])


def foreign_cpu_s(study: Study, run_id: str) -> dict[str, float]:
    folder = study.planned.folder.attempt(run_id, 1)
    content: dict[str, Any] = json.loads(folder.conditions.read_text())
    (window,) = content["windows"]
    for node in window["nodes"]:
        assert (node["net"]["interface"], node["net"]["rate_mbit_s"]) == ("eth0", None)  # the machine's /sys
    return {node["node"]: node["foreign_cpu_s"] for node in window["nodes"]}


def test_the_runs_of_a_pack_are_sampled_on_their_own_nodes(cluster: Cluster, tmp_path: Path):
    axes, mixed = {"nodes": [2], "tasks_per_node": [1]}, torchrun_cell(nodes=2, tasks_per_node=[2, 1])
    workload = command(["bash", "-c", BUSY.format(1)])
    text = matrix(cluster=ON_TWO, axes=axes, include=[mixed], workload=workload)
    planned = plan_study(tmp_path, text, cluster.environment)
    with submitted(planned, "--pack", "--wait") as study:
        found = [foreign_cpu_s(study, run.run_id) for run in study.planned.runs]
    assert [list(foreign_s) for foreign_s in found] == [["n1", "n2"], ["n1", "n2"]]
