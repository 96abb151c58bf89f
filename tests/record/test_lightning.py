"""The callback in Lightning's loop, with and without DDP."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PARTS = ("data_load", "forward", "backward", "optimizer")

# Only the scripts import it: its import takes a third of the time in which all tests are collected.
pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="the extra `lightning` is not installed"
)


@pytest.fixture
def fit(tmp_path):
    """Return a function that runs a script with the callback, and returns metrics.csv and env.json."""

    def fit(*words: str) -> tuple[list[dict[str, str]], dict]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "RANK", "WORLD"))
        }
        env = {
            **kept,
            "BENCH_RUN_DIR": str(tmp_path),
            "BENCH_WARMUP_STEPS": "3",
            "BENCH_STEPS_PER_EPOCH": "5",
            "BENCH_ATTRIBUTION_STEPS": "3",
            "BENCH_EPOCHS": "2",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        done = subprocess.run(
            [sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with (tmp_path / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file)), json.loads((tmp_path / "env.json").read_text())

    return fit


@pytest.mark.slow
def test_two_ranks_are_measured_as_any_others(fit):
    script = [str(EXAMPLES / "train_lightning.py"), "--devices", "2", "--samples", "1024", "--width", "64"]
    rows, env = fit("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script)
    assert [(row["epoch"], row["steps"], row["samples"]) for row in rows] == [
        ("1", "5", "320"),
        ("2", "5", "320"),
    ]
    assert (env["world_size"], env["joined"]["ranks"], env["global_batch"]) == (2, 2, 64)
    for row in rows:
        assert all(float(row[f"{part}_time_sec"]) > 0 for part in (*PARTS, "comm_exposed"))
        assert float(row["train_loss"]) > 0


SINGLE = """\
import time
import lightning.pytorch as pl
import torch
from bench.record.lightning import BenchCallback

class Naps(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        time.sleep(0.02)
        return self.layer(batch[0]).square().mean() * 0 + 1.5
    def validation_step(self, batch, index):
        time.sleep(0.3)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = torch.utils.data.TensorDataset(torch.randn(64, 4))
few = torch.utils.data.TensorDataset(torch.randn(4, 4))
loader = torch.utils.data.DataLoader
pl.Trainer(
    accelerator="cpu", devices=1, max_epochs=8, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, accumulate_grad_batches=2, callbacks=[BenchCallback()],
).fit(Naps(), loader(data, batch_size=8), loader(few, batch_size=4))
"""


@pytest.mark.slow
def test_one_device_without_ddp_has_its_parts_and_no_validation_in_them(fit, tmp_path):
    script = tmp_path / "single.py"
    script.write_text(SINGLE)
    rows, env = fit(str(script))
    assert env["global_batch"] == 16  # two micro-batches of eight are one step
    for row in rows:
        assert row["comm_exposed_time_sec"] == "0"
        assert float(row["train_loss"]) == pytest.approx(1.5)  # of a sample, not a micro-batch's share of it
        assert float(row["forward_time_sec"]) >= 0.04 * 0.95
        assert float(row["epoch_time_sec"]) < 5 * 0.3
        for part in PARTS:
            assert float(row[f"{part}_time_sec"]) > 0
            assert part == "forward" or float(row[f"{part}_time_sec"]) < 0.04
