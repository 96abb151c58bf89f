"""The recorder in a loop on a CUDA device, while the host runs ahead."""

from __future__ import annotations

import pytest
import torch

from tests.workload.conftest import torchrun_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_the_device_is_timed_and_not_the_host(run_ranks):
    done = run_ranks(target="tests.record.loops:on_a_gpu", environments=torchrun_env(1)).succeeded()
    assert [row["epoch"] for row in done.table("metrics")] == ["1", "2"]
    for row in done.table("metrics"):
        step, forward = float(row["step_time_sec_median"]), float(row["forward_time_sec"])
        assert forward > 0.005  # twenty million cycles at most at 4 GHz
        assert step >= forward * 0.95
    for row in done.table("ranks"):
        assert row["device"] == "cuda:0"
        assert abs(float(row["other_time_sec"])) <= 0.05 * float(row["step_time_sec"])
    assert done.env["device"] == "cuda"


def test_the_nccl_log_requested_by_a_user_is_read(run_ranks, tmp_path):
    path = tmp_path / "mine.log"
    asked = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(path)}
    environments = [{**torchrun_env(1)[0], **asked}]
    done = run_ranks(target="tests.record.loops:on_a_gpu", environments=environments).succeeded()
    transport = done.env["transport"]
    assert (transport["backend"], transport["source"]) == ("nccl", "NCCL's log")
    assert transport["version"]
    assert path.exists()
