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
from tests.train.ranks import QUICK, srun_env, torchrun_env
from tests.train.test_training_strategies import needs_fsdp

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


NO_REPLICAS = "strategy hsdp needs the same number of ranks on every node, not 2, 1; use strategy fsdp"
NORMALISED = (
    "model resnet50 has batch normalisation, which needs weights in fp32, not bf16; use param_dtype fp32"
)
HALF = {"strategy": "fsdp", "model": "resnet50", "image_size": 32, "precision": "bf16", "param_dtype": "bf16"}
BY_NCCL = "strategy zero1 sends bf16 with torch's bf16 hook, which needs nccl, not gloo; use fp16 or fp32"
COMPILED = "workload.compile true needs workload.bucket_cap_mb of 1 or more"


@pytest.mark.parametrize(
    ("options", "hosts", "message"),
    [
        (
            {"model": "transformer", "parameters": 900 * 10**9},
            {"a": 2},
            "out of memory: weights, gradients and",
        ),
        ({"compile": True, "bucket_cap_mb": 0.5}, {"a": 2}, COMPILED),
        ({"data": "/nowhere/å b"}, {"a": 2}, "data folder /nowhere/å b does not exist on this host"),
        ({"data": "", "model": "convnet"}, {"a": 2}, "model convnet takes "),
        ({"strategy": "hsdp"}, {"a": 2, "b": 1}, NO_REPLICAS),
        pytest.param(HALF, {"a": 1, "b": 1}, NORMALISED, marks=needs_fsdp),
        ({"strategy": "zero1", "comm_hook": "bf16"}, {"a": 1}, BY_NCCL),
    ],
)
def test_an_error_that_all_ranks_have_is_one_message(run_ranks, tmp_path, options, hosts, message):
    if options.get("data") == "":
        for name, shape in (("inputs", (40, 3)), ("targets", 40)):
            torch.save(torch.zeros(shape, dtype=torch.int64), tmp_path / f"{name}.pt")
        options = {**options, "data": str(tmp_path)}
    finished = run_ranks(batch=1, environments=srun_env(hosts), **options)
    assert {*finished.codes} == {1}
    (line,) = [text for text in "".join(finished.err).splitlines() if text.startswith("bench: error: ")]
    said = line.removeprefix("bench: error: ")
    ends = ("; lower workload.parameters", "; the data has inputs [3] and targets [] per sample")
    assert said == message or (said.startswith(message) and said.endswith(ends))


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
