"""Causes of loss planted on a real cluster, and those that the report's page names."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.cluster.bed import Cluster
from tests.jobs.slurm_studies import plan_study
from tests.matrices import SHORT, command, matrix, slurm

TRAINING = Path(__file__).with_name("sleeping_training.py")
#: The factor of the parallel efficiency that each planted cause lowers.
CAUSES = {"communication": "comm_efficiency", "straggler": "load_balance"}
MATRIX = matrix(
    "planted",
    cluster=slurm(mem="600M", time_limit="3m", env={"GLOO_SOCKET_IFNAME": "eth0"}),
    axes={"nodes": [2], "tasks_per_node": [1], "backend": ["gloo"], "env.CAUSE": [*CAUSES]},
    scaling=[{"mode": "strong", "global_batch": [16]}],
    workload=command(
        ["bash", "-c", 'exec "$0" "$1" "$CAUSE" "$2"', sys.executable, str(TRAINING), "{per_gpu_batch}"],
        metrics="recorder",
        **SHORT | {"steps_per_epoch": 6, "attribution_steps": 6},
    ),
)


@pytest.mark.slow
def test_each_planted_cause_is_the_main_cause_of_loss(
    cluster: Cluster, tmp_path: Path, nothing_drawn: None
) -> None:
    study = plan_study(tmp_path, MATRIX, cluster.environment)
    with cluster.linked("400mbit"):
        done = study.bench("submit", "STUDY", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    reported = study.bench("report", "STUDY")
    assert reported.returncode == 0, reported.stderr
    assert {cause: smallest_factor(study.folder / "report/scaling.csv", cause) for cause in CAUSES} == CAUSES


def smallest_factor(table: Path, cause: str) -> str:
    """Return the factor of the parallel efficiency that is smallest on two ranks in the series with this cause."""
    rows = pd.read_csv(table)
    (place,) = rows.index[rows["cell_id"].str.contains(cause) & (rows["gpus"] == 2)]
    factors = rows.loc[place, ["load_balance", "comm_efficiency"]]
    return str(factors.astype(float).idxmin())
