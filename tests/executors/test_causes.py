"""Causes of loss planted on a real cluster, and those that the report's page names."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.bed import Cluster
from tests.executors.slurm_studies import plan_study

TRAINING = Path(__file__).with_name("sleeping_training.py")
#: Text on the page for each planted cause.
CAUSES = {
    "communication": "communication that computation does not hide",
    "straggler": "uneven work between ranks",
}
MATRIX = """\
study: planted
cluster:
  executor: slurm
  exclusive: false            # the runs are side by side
  partition: l40s
  account: users
  cpus_per_task: 1
  mem: 600M
  time_limit: 3m
  env: {{GLOO_SOCKET_IFNAME: eth0}}
axes: {{nodes: [1, 2], tasks_per_node: [1], backend: [gloo], env.CAUSE: [{causes}]}}
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
def test_each_planted_cause_is_the_main_cause_of_loss(cluster: Cluster, tmp_path: Path) -> None:
    python, training = (json.dumps(word) for word in (sys.executable, str(TRAINING)))
    matrix = MATRIX.format(causes=", ".join(CAUSES), python=python, training=training)
    study = plan_study(tmp_path, matrix, cluster.environment)
    with cluster.linked("400mbit"):
        done = study.bench("submit", "STUDY", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    reported = study.bench("report", "STUDY")
    assert reported.returncode == 0, reported.stderr
    page = (study.folder / "report" / "index.html").read_text(encoding="utf-8")
    assert {cause: main_loss(page, cause) for cause in CAUSES} == CAUSES


def main_loss(page: str, cause: str) -> str:
    """Return the first cause in the finding of the series with this planted cause."""
    findings = re.findall(r'<p class="finding"[^>]*><strong>([^<]*)</strong>(.*?)</p>', page, re.S)
    (words,) = (words for heading, words in findings if cause in heading)
    found = re.search(r"Of the loss on 2 ranks, \d+ % is (.*?)( and \d|, \d|[.;])", words)
    assert found, words
    return found.group(1)
