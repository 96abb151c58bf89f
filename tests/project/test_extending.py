"""What CONTRIBUTING.md says about new parts: a new part is one file, and the rest of the program finds it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = '''
"""One layer of weights."""

from torch import nn

from .spec import DataShape, ModelSpec


def build(options, shape):
    return nn.Linear(shape.inputs[0], shape.classes)


def sample(options):
    return DataShape((options.seq_len,), (), 3)


SPEC = ModelSpec("one-layer", "classes", build, sample, options=("seq_len",))
'''
MATRIX = """
study: own
cluster: {executor: local}
axes: {tasks_per_node: [1]}
scaling: [{mode: weak, per_gpu_batch: [2]}]
workload: {device: cpu, model: one-layer, seq_len: 5, steps_per_epoch: 2, epochs: 1, warmup_steps: 3,
           attribution_steps: 1, probe_steps: 0, sweep_time: 0}
repeats: 1
"""


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the program."""
    for name in ("bench", "analysis", "ddp_scaling_bench", "matrices", "slurm_templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_model_is_one_file(copy):
    (copy / "bench/workload/models/one_layer.py").write_text(MODEL)
    (copy / "own.yaml").write_text(MATRIX)
    assert '"one-layer"' in run(copy, "schema")
    run(copy, "run", "own")
    (env_json,) = copy.glob("results/own/runs/*/attempt-1/env.json")
    assert json.loads(env_json.read_text())["parameters"] == 5 * 3 + 3
    page = (copy / "results/own/report/index.html").read_text()
    assert "; model one-layer, on" in page
