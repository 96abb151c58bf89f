"""With the default of `exclusive`, the jobs of a study never share a node."""

from __future__ import annotations

from tests.cluster.bed import Cluster
from tests.cluster.containers import wait_for
from tests.jobs.slurm_studies import plan_study, submitted
from tests.matrices import command, matrix, slurm


def test_each_job_has_a_node_for_itself(running_cluster: Cluster, tmp_path):
    text = matrix(cluster=slurm(mem="100M"), axes={"nodes": [1]}, workload=command("sleep 60"), repeats=6)
    with submitted(plan_study(tmp_path, text, running_cluster.environment)) as study:
        jobs = ",".join(study.job_ids())

        def queue() -> list[list[str]]:
            shown = running_cluster.run(["squeue", "-h", "-j", jobs, "-o%T %N %r"]).stdout
            return [line.split() for line in shown.splitlines()]

        def on_all_nodes() -> bool:
            return sorted(row[1] for row in queue() if row[0] == "RUNNING") == ["n1", "n2", "n3", "n4"]

        wait_for(on_all_nodes, what="a job on each node")
        waiting = [row for row in queue() if row[0] == "PENDING"]
        assert len(waiting) == 2
        assert {row[-1] for row in waiting} <= {"Resources", "Priority", "None"}
