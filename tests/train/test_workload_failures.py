"""Failed runs: they end soon, report the reason and leave complete files."""

import os
import signal

import pytest
import torch

from bench.doctor import diagnose_text
from ddp_scaling_bench.finding import with_remedies
from ddp_scaling_bench.measure.failures import OutOfMemory
from ddp_scaling_bench.measure.node import host_name
from ddp_scaling_bench.records import METRICS_COLUMNS
from ddp_scaling_bench.train.failures import failure_from
from tests.cluster.containers import wait_for
from tests.train.ranks import QUICK, torchrun_env

HOST = host_name(os.environ)
LOST = "lost the connection to another rank"
NAN = "lower the learning rate, use bf16 or fp32 instead of fp16, or look for NaN in the data"


def test_a_loss_that_is_no_number_ends_all_ranks_with_one_message(run_ranks):
    finished = run_ranks(epochs=2, target="tests.train.scenarios:nan_on_rank_1")
    assert finished.codes == [1, 1]
    assert finished.err == [f"bench: error: the loss became NaN in epoch 2 on every rank; {NAN}\n", ""]
    assert len(finished.table("metrics")) == 1


def test_an_unforeseen_error_keeps_its_traceback_and_ends_the_others(run_ranks):
    finished = run_ranks(join_timeout=600, target="tests.train.scenarios:raises_on_rank_1")
    assert finished.codes == [1, 1]
    assert "ZeroDivisionError: a defect" in finished.err[1]
    assert finished.err[1].endswith(
        f"bench: error: rank 1 on {HOST}: ZeroDivisionError: a defect; see the traceback above\n"
    )
    assert finished.err[0] == (
        f"bench: error: rank 0 on {HOST}: {LOST}: rank 1 on {HOST} failed first: ZeroDivisionError: a defect\n"
    )
    assert "Traceback" not in finished.err[0]


def test_running_out_of_memory_is_one_line(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:out_of_memory_on_rank_1")
    assert finished.codes == [1, 1]
    assert finished.err[1].startswith(f"bench: error: rank 1 on {HOST}: out of memory: ")
    cause = finished.err[1].partition(f"rank 1 on {HOST}: ")[2]
    assert (
        finished.err[0] == f"bench: error: rank 0 on {HOST}: {LOST}: rank 1 on {HOST} failed first: {cause}"
    )
    assert finished.err[1].endswith(
        "; lower the batch per rank, or set workload.activation_checkpointing to true\n"
    )
    assert "Traceback" not in finished.err[1]


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(run_ranks):
    finished = run_ranks(model="transformer", parameters=900 * 10**9)
    assert finished.codes == [1, 1]
    assert finished.err[0].startswith("bench: error: out of memory: weights, gradients and sgd's states of ")
    assert finished.err[0].endswith("; lower workload.parameters\n")
    assert finished.err[1] == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compile": True, "bucket_cap_mb": 0.5},
            "workload.compile true needs workload.bucket_cap_mb of 1 or more",
        ),
        ({"data": "/nowhere/å b"}, "data folder /nowhere/å b does not exist on this host"),
    ],
)
def test_an_error_that_all_ranks_have_is_one_message(run_ranks, options, message):
    finished = run_ranks(**options)
    assert finished.codes == [1, 1]
    assert finished.err == [f"bench: error: {message}\n", ""]


def test_a_killed_rank_ends_the_other_and_leaves_whole_files(server, tmp_path):
    options = QUICK | {"epochs": 400, "attribution_steps": 2, "checkpoint": True}
    started = server.train(tmp_path, torchrun_env(2), "tests.train.scenarios:naps_in_epochs", **options)
    wait_for((tmp_path / "checkpoint.pt").exists, what="a checkpoint")
    wait_for((tmp_path / "metrics.csv").exists, what="an epoch")
    os.kill(started.pids[1], signal.SIGKILL)
    finished = started.finish()
    assert finished.codes == [1, -9]
    assert finished.err[0] == (
        f"bench: error: rank 0 on {HOST}: {LOST}: no report from rank 1 on {HOST}:"
        " it ended or was killed, or the host was lost\n"
    )
    rows = finished.table("metrics")
    assert 1 <= len(rows) < 400
    assert all(list(row) == list(METRICS_COLUMNS) and None not in row.values() for row in rows)
    assert (tmp_path / "metrics.csv").read_text().endswith("\n")
    assert len(finished.table("ranks")) == 2 * len(rows)
    assert len(finished.table("steps")) == 5 * len(rows)


def test_a_killed_rank_0_leaves_whole_files(server, tmp_path):
    options = QUICK | {"epochs": 400, "attribution_steps": 2}
    started = server.train(tmp_path, torchrun_env(2), "tests.train.scenarios:naps_in_epochs", **options)
    wait_for((tmp_path / "metrics.csv").exists, what="an epoch")
    os.kill(started.pids[0], signal.SIGKILL)
    finished = started.finish()
    assert finished.codes == [-9, 1]
    # torch prints its own message about the lost store before this one.
    assert finished.err[1].splitlines()[-1] == (
        f"bench: error: rank 1 on {HOST}: {LOST}: rank 0 on {HOST} has ended, and its own message says why"
    )
    rows = finished.table("metrics")
    assert rows
    assert all(list(row) == list(METRICS_COLUMNS) and None not in row.values() for row in rows)


def test_of_four_ranks_the_one_that_does_not_come_is_named_by_those_that_did(server, tmp_path):
    options = QUICK | {"epochs": 4, "join_timeout": 6}
    started = server.train(tmp_path, torchrun_env(4), "tests.train.scenarios:sleeps_on_rank_1", **options)
    others = [tmp_path / f"{rank}.err" for rank in (0, 2, 3)]
    try:
        wait_for(
            lambda: all(path.exists() and "bench: error" in path.read_text() for path in others),
            what="the time-outs",
        )
    finally:
        os.kill(started.pids[1], signal.SIGKILL)
    finished = started.finish()
    assert finished.codes == [1, -9, 1, 1]
    lines = [finished.err[rank] for rank in (0, 2, 3)]
    # The first rank with a time-out closes its connections; the others may notice that first.
    assert all(f"rank 1 on {HOST}" in line and len(line.splitlines()) == 1 for line in lines), lines
    assert all(f"rank {rank} on {HOST} did not reach" not in line for rank in (0, 2, 3) for line in lines)
    assert any("a collective did not complete in 6 s" in line for line in lines)
    assert finished.table("metrics")


def test_rank_0_reports_its_own_error_and_the_others_point_to_it(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:raises_on_rank_0")
    assert finished.codes == [1, 1]
    assert finished.err[0].endswith(
        f"bench: error: rank 0 on {HOST}: ZeroDivisionError: a defect; see the traceback above\n"
    )
    # Its store ends with it, possibly before the other rank has read the cause.
    assert finished.err[1].splitlines()[-1] in (
        f"bench: error: rank 1 on {HOST}: {LOST}: rank 0 on {HOST} has ended, and its own message says why",
        f"bench: error: rank 1 on {HOST}: {LOST}: rank 0 on {HOST} failed first: ZeroDivisionError: a defect",
    )


def test_cudas_lack_of_memory_is_one_line():
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 44.40 GiB of which"
    error = torch.cuda.OutOfMemoryError(f"{text} 1.21 GiB is free.\nmore")
    assert with_remedies([failure_from(error, timeout_s=1)]) == (
        f"out of memory: {text} 1.21 GiB is free; lower the batch per rank,"
        " or set workload.activation_checkpointing to true"
    )


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
def test_a_librarys_lack_of_memory_is_one_line_of_the_training_and_of_the_log(text):
    assert failure_from(RuntimeError(text), timeout_s=1) == OutOfMemory(text=text)
    first = diagnose_text(f"[rank1]: RuntimeError: {text}\n").first_failure
    assert first is not None
    assert first.cause == "oom-gpu"


def test_steps_in_which_a_clock_was_set_are_left_out_with_a_warning(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:clock_set_on_rank_1").succeeded()
    assert {"steps": 1} in [one["values"] for one in finished.env["facts"] if one["kind"] == "clock-was-set"]
    assert (
        "bench: warning: clock-was-set: a host's clock was set during 1 attribution step" in finished.out[0]
    )
    for row in finished.table("ranks"):
        step = float(row["step_time_sec"])
        parts = ("forward", "backward", "optimizer", "comm_exposed")
        assert all(0 <= float(row[f"{part}_time_sec"]) <= step < 3600 for part in parts), row


def test_a_device_that_is_not_there_is_named(run_ranks):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    finished = run_ranks(device="cuda", environments=[{}])
    assert finished.codes == [1]
    build = (
        ""
        if torch.version.cuda or torch.version.hip
        else f", and torch {torch.__version__} is a build without CUDA"
    )
    assert finished.err == [
        f"bench: error: rank 0: no CUDA device is visible{build}; request GPUs for the job, install torch with CUDA, "
        "or set the device to cpu\n"
    ]
