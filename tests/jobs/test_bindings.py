"""Core masks of a matrix arrive at the ranks."""

from __future__ import annotations

import json

from tests.jobs.slurm_studies import plan_study, submitted
from tests.matrices import BARE, matrix, slurm, training

ETH0 = {"GLOO_SOCKET_IFNAME": "eth0"}
TRAINING = training(parameters="100k", **BARE | {"steps_per_epoch": 1, "attribution_steps": 0})


def test_masks_per_rank_arrive_in_a_pack_and_are_recorded_in_env_json(cluster, tmp_path):
    section = slurm(exclusive=True, time_limit="5m", srun_options=["--cpu-bind=mask_cpu:0x2,0x1"], env=ETH0)
    del section["cpus_per_task"]
    axes = {"nodes": [1], "tasks_per_node": [2]}
    text = matrix("bindings", cluster=section, axes=axes, batch=2, workload=TRAINING)
    study = plan_study(tmp_path, text, cluster.environment)
    with submitted(study, "--wait", "--pack"):
        (shown,) = study.status().values()
    folder = study.folder / f"runs/{shown.run_id}/attempt-1"
    assert shown.state == "completed", (shown, (folder / "job.err").read_text())
    assert study.run_json(shown.run_id)["allocation"]["kind"] == "pack"
    (host,) = json.loads((folder / "env.json").read_text())["hosts"]
    assert (host["ranks"], host["affinity"]) == ([0, 1], ["1", "0"])
