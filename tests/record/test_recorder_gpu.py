"""The recorder in a loop on a CUDA device, while the host runs ahead."""

import pytest
import torch

from tests.record.loops import SPIN_CYCLES
from tests.train.ranks import torchrun_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

#: Parts of a step in which the GPU spins, and a clock rate that no GPU reaches.
SPINNING = ("forward", "backward", "optimizer")
FASTEST_HZ = 4e9


def test_the_device_is_timed_and_not_the_host(run_program):
    done = run_program("tests.record.loops:on_a_gpu", environments=torchrun_env(1)).succeeded()
    assert [row["epoch"] for row in done.table("metrics")] == ["1", "2"]
    for row in done.table("ranks"):
        assert row["device"] == "cuda:0"
        step, *spinning = (float(row[f"{part}_time_sec"]) for part in ("step", *SPINNING))
        # The host needs less than a millisecond for each part. Other programs on the GPU, and a low clock, only
        # make the parts longer, so there is no upper limit.
        assert all(seconds > SPIN_CYCLES / FASTEST_HZ for seconds in spinning), spinning
        assert sum(spinning) <= 1.05 * step
    for row in done.table("metrics"):
        assert float(row["step_time_sec_median"]) > len(SPINNING) * SPIN_CYCLES / FASTEST_HZ
    assert done.env["device"] == "cuda"


def test_the_nccl_log_requested_by_a_user_is_read(run_program, tmp_path):
    path = tmp_path / "mine.log"
    asked = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(path)}
    environments = [{**torchrun_env(1)[0], **asked}]
    done = run_program("tests.record.loops:on_a_gpu", environments=environments).succeeded()
    transport = done.env["transport"]
    assert (transport["backend"], transport["source"]) == ("nccl", "NCCL's log")
    assert transport["version"]
    assert path.exists()
