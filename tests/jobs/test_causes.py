"""Causes of loss planted on a real cluster, and those that the report's page names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.cluster.bed import Cluster
from tests.jobs.slurm_studies import plan_study

TRAINING = Path(__file__).with_name("sleeping_training.py")
#: The factor of the parallel efficiency that each planted cause lowers.
CAUSES = {"communication": "comm_efficiency", "straggler": "load_balance"}
MATRIX = """\
study: planted
cluster:
  executor: slurm
  partition: l40s
  account: users
  cpus_per_task: 1
  mem: 600M
  time_limit: 3m
  env: {{GLOO_SOCKET_IFNAME: eth0}}
axes: {{nodes: [2], tasks_per_node: [1], backend: [gloo], env.CAUSE: [{causes}]}}
scaling: [{{mode: strong, global_batch: [16]}}]
workload:
  device: cpu
  steps_per_epoch: 6
  epochs: 1
  warmup_steps: 3
  attribution_steps: 6
  command: [bash, -c, 'exec "$0" "$1" "$CAUSE" "$2"', {python}, {training}, "{{per_gpu_batch}}"]
repeats: 1
"""


@pytest.mark.slow
def test_each_planted_cause_is_the_main_cause_of_loss(
    cluster: Cluster, tmp_path: Path, nothing_drawn: None
) -> None:
    python, training = (json.dumps(word) for word in (sys.executable, str(TRAINING)))
    matrix = MATRIX.format(causes=", ".join(CAUSES), python=python, training=training)
    study = plan_study(tmp_path, matrix, cluster.environment)
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
