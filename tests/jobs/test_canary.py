"""`bench submit --canary` on the real cluster, with and without a working network."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from tests.cluster.bed import Cluster
from tests.jobs.slurm_studies import Study, plan_study
from tests.matrices import SHORT, matrix, slurm, training


def _study(cluster: Cluster, folder: Path, *, name: str, interface: str) -> Study:
    text = matrix(
        name,
        cluster=slurm(env={"GLOO_SOCKET_IFNAME": interface}),
        axes={"nodes": [1, 2], "tasks_per_node": [1], "backend": ["gloo"]},
        workload=training(parameters="10k", **SHORT, val_steps=0, join_timeout=30),
    )
    return plan_study(folder, text, cluster.environment)


def test_the_rest_follows_a_canary_that_has_passed(cluster, tmp_path):
    study = _study(cluster, tmp_path, name="sound", interface="eth0")
    done = study.bench("submit", "STUDY", "--canary", "--wait")
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert said[0] == "canary: n2x1-gloo-srun-b4-r1 runs first; 1 run held back until it has passed"
    assert said[-1] == "study sound: 2 completed"
    ended = datetime.fromisoformat(study.run_json("n2x1-gloo-srun-b4-r1")["ended_at"])
    assert ended <= datetime.fromisoformat(study.run_json("n1x1-gloo-srun-b4-r1")["submitted_at"])
    verified = json.loads(
        study.bench("verify", "n2x1-gloo-srun-b4-r1", "--results", str(study.folder.parent), "--json").stdout
    )
    checks = {check["check"]: check for check in verified["runs"][0]["checks"]}
    assert verified["passed"]
    assert checks["transport"]["found"].startswith("gloo over ")
    assert checks["transport"]["found"].endswith("eth0")


def test_a_canary_without_its_interface_holds_the_rest_back_with_the_cause(cluster, tmp_path):
    study = _study(cluster, tmp_path, name="broken", interface="ib7")
    done = study.bench("submit", "STUDY", "--canary", "--wait")
    assert done.returncode == 1, done.stderr
    said = done.stderr.splitlines()
    assert said[-1] == "the canary n2x1-gloo-srun-b4-r1 did not pass: nothing else was submitted"
    state = next(line for line in said if line.startswith("  FAIL  state: failed ("))
    assert "; cause: gloo-bad-ifname" in state
    assert "such as eth0 or ib0" in state  # what the doctor would change
    assert sum(study.jobs_per_run().values()) == 1
