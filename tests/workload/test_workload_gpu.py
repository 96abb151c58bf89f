"""The same promises on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.workload.conftest import torchrun_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

WORDS = [
    "--device",
    "cuda",
    "--model",
    "mlp",
    "--parameters",
    "8M",
    "--steps-per-epoch",
    "20",
    "--epochs",
    "2",
]


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_parts_make_up_the_step_on_a_gpu(server, tmp_path, backend, ranks, precision):
    words = [*WORDS, "--per-gpu-batch", "512", "--precision", precision, "--backend", backend]
    finished = server.start(tmp_path, words, torchrun_env(ranks)).finish().succeeded()
    for row in finished.table("ranks"):
        step = float(row["step_time_sec"])
        assert abs(float(row["other_time_sec"])) <= 0.05 * step
        assert float(row["forward_time_sec"]) > 0
        assert float(row["backward_time_sec"]) > 0
        assert row["device"] == "cuda:0" or torch.cuda.device_count() > 1
    metrics = finished.table("metrics")
    assert all(float(row["throughput_samples_per_sec"]) > 0 for row in metrics)
    assert int(metrics[-1]["peak_mem_bytes"]) > 3 * finished.env["gradient_bytes"]
    assert finished.env["cuda"] == torch.version.cuda


def test_throughput_without_synchronisation_adds_up_to_the_window(server, tmp_path):
    words = [*WORDS, "--per-gpu-batch", "512", "--backend", "nccl"]
    finished = server.start(tmp_path, words, torchrun_env(1)).finish().succeeded()
    for row in finished.table("metrics"):
        steps = [float(r["step_time_sec"]) for r in finished.table("steps") if r["epoch"] == row["epoch"]]
        assert sum(steps) == pytest.approx(float(row["epoch_time_sec"]), rel=0.1)
