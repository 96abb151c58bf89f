"""The measurements of the windows, compared with known values."""

import gzip
import json
import math
import os
import re
import socket
from datetime import datetime
from statistics import mean, median

import pytest
import torch

from ddp_scaling_bench.measure.env_file import KEYS
from ddp_scaling_bench.records import METRICS_COLUMNS
from tests.measure.test_window_conditions import check_wire_bytes, conditions_of
from tests.train.ranks import QUICK, torchrun_env

PARTS = ("data_load", "forward", "backward", "comm_exposed", "optimizer", "other")
HOST = socket.gethostname()


def number(row: dict[str, str], column: str) -> float:
    return float(row[column])


def test_every_row_is_there_and_metrics_follow_from_the_ranks_and_steps(plain):
    assert [row["epoch"] for row in plain.table("metrics")] == ["1", "2"]
    assert [row["epoch"] + row["rank"] for row in plain.table("ranks")] == ["10", "11", "20", "21"]
    numbers = [(int(row["epoch"]), int(row["step"])) for row in plain.table("steps")]
    assert numbers == [(epoch, step) for epoch in (1, 2) for step in range(1, 7)]
    assert {row["slowest_rank"] for row in plain.table("steps")} <= {"0", "1"}
    for row in plain.table("metrics"):
        ranks, steps = (
            [one for one in plain.table(name) if one["epoch"] == row["epoch"]] for name in ("ranks", "steps")
        )
        assert (int(row["steps"]), int(row["samples"])) == (6, 6 * 2 * 2 * 16)
        assert {one["samples"] for one in ranks} == {str(6 * 2 * 16)}
        window_s = max(number(one, "window_time_sec") for one in ranks)
        rate = number(row, "throughput_samples_per_sec")
        assert (number(row, "epoch_time_sec"), rate) == pytest.approx((window_s, 6 * 64 / window_s), rel=1e-9)
        times = [number(one, "step_time_sec") for one in steps]
        assert number(row, "step_time_sec_median") == pytest.approx(median(times), rel=1e-9)
        assert max(times) >= number(row, "step_time_sec_p95") >= median(times) * (1 - 1e-9)
        for part in (*PARTS, "comm_wait"):
            expected = mean(number(one, f"{part}_time_sec") for one in ranks)
            assert number(row, f"{part}_time_sec") == pytest.approx(expected, rel=1e-6, abs=1e-12)
        compute = number(row, "forward_time_sec") + number(row, "backward_time_sec")
        assert number(row, "compute_time_sec") == pytest.approx(compute, rel=1e-9)
        step_s = [number(one, "step_time_sec") for one in ranks]
        useful = [s - number(one, "comm_exposed_time_sec") for s, one in zip(step_s, ranks, strict=True)]
        expected = {"load_balance": mean(useful) / max(useful), "comm_efficiency": max(useful) / max(step_s)}
        expected["pop_parallel_efficiency"] = math.prod(expected.values())
        assert {name: number(row, name) for name in expected} == pytest.approx(expected, rel=1e-6)


def test_without_a_wrapper_a_rank_has_parts_but_no_communication(server, tmp_path):
    options = QUICK | {"batch": 4, "strategy": "none", "grad_accum": 2, "probe_steps": 2}
    run = server.train(tmp_path / "alone", torchrun_env(1), checkpoint=True, **options).finish()
    for row in run.succeeded().table("ranks"):
        parts = [number(row, f"{part}_time_sec") for part in PARTS]
        assert sum(parts) == pytest.approx(number(row, "step_time_sec"), rel=1e-6)
        assert [part > 0 for part in parts[:-1]] == [True, True, True, False, True]
    probes = json.loads((run.folder / "probes.json").read_text())
    assert (probes["bucket_bytes"], probes["reasons"]["steps"]) == ([], "strategy none has no buckets")
    failed = server.train(tmp_path / "two", torchrun_env(2), **options).finish()
    assert 1 in failed.codes
    assert "workload.strategy none does not exchange gradients; start one rank" in failed.err[0]


def test_what_is_not_measured_is_empty(plain):
    for row in plain.table("metrics"):
        for column in ("mfu", "gpu_util_avg", "val_mae", "val_rmse"):
            assert row[column] == ""
        assert row["cpu_util_avg"] != ""
    flops = plain.env["flops"]
    assert (flops["mfu_empty_because"], flops["peaks"]) == ("no peak rate is known for CPUs", {})
    assert flops["per_step_and_rank"] == 2 * 16 * flops["per_sample"] > 0


def test_the_loss_falls_validation_sees_it_and_the_checkpoint_has_its_own_time(plain):
    first, second = plain.table("metrics")
    assert number(second, "train_loss") < number(first, "train_loss")
    assert number(second, "val_loss") < math.log(10)
    assert 0.1 < number(second, "val_accuracy") <= 1
    state = torch.load(plain.folder / "checkpoint.pt", weights_only=True)
    assert state["epoch"] == 2
    assert sum(value.numel() for value in state["model"].values()) == plain.env["parameters"]
    assert all(number(row, "checkpoint_time_sec") > 0 for row in plain.table("metrics"))
    assert [path.name for path in plain.folder.iterdir() if path.name.startswith(".")] == []


def test_every_window_has_its_conditions(plain):
    windows = conditions_of(plain)
    assert [window["epoch"] for window in windows] == [1, 2]
    times = [datetime.fromisoformat(window[key]) for window in windows for key in ("start", "end")]
    assert times == sorted(times)
    (node,) = windows[0]["nodes"]
    assert (node["node"], node["net"]["interface"]) == (HOST, "lo")
    assert node["foreign_cpu_s"] >= 0
    assert node["net"]["rx_bytes"] > 100_000  # two ranks exchange 1.6 MB of gradients in each of 6 steps
    for number, rank in enumerate(windows[0]["ranks"]):
        assert (rank["rank"], rank["threads"]) == (number, 1)
        # 6 steps of two micro-batches, of which the second synchronises
        assert (rank["sync_passes"], rank["clocks"]) == (6, None)
        assert (rank["recompilations"], rank["compile_s"], rank["allocator_retries"]) == (0, 0, None)
        assert rank["collectives"] == 6 * len(plain.env["ddp"]["bucket_bytes"])
        assert rank["cpu_wait_s"] >= 0
    check_wire_bytes(plain)
    ddp = plain.env["ddp"]
    assert sum(ddp.pop("bucket_bytes")) == plain.env["gradient_bytes"]
    assert ddp == {
        "find_unused_parameters": False,
        "unused_parameter_bytes": None,
        "gradient_as_bucket_view": True,
        "static_graph": False,
        "broadcast_buffers": False,
        "buffer_bytes": 0,
    }


def test_rank_0_prints_how_many_joined_and_env_json_says_what_ran(plain):
    env, lines = plain.env, plain.out[0].splitlines()
    joined = rf"bench: 2/2 ranks joined on 1 host \({HOST}: 0-1\) in \d+\.\d\d s, backend gloo"
    assert any(re.fullmatch(joined, line) for line in lines)
    # Some releases of torch, such as 2.10, print lines of gloo.
    assert not [line for line in plain.out[1].splitlines() if not line.startswith("[Gloo]")]
    assert tuple(env) == KEYS
    assert env["env"]["NCCL_ALGO"] == "Ring"
    assert "hidden" not in str(env)
    assert env["gradient_bytes"] == 4 * env["parameters"]
    assert env["threads_per_rank"] == 1
    (node,) = env["cores"]
    assert (node["node"], node["cores"], node["threads_per_rank"]) == (HOST, os.cpu_count(), [1, 1])
    assert env["transport"]["interface"] == "lo"
    assert env["workload"]["steps_per_epoch"] == 6
    assert {"planned": "srun", "used": "torchrun"} in [fact["values"] for fact in env["facts"]]


def test_accumulated_gradients_equal_those_of_one_big_batch(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:weights_after_a_step").succeeded()
    content = json.loads((finished.folder / "weights.json").read_text())
    assert content["change"] > 1e-3
    assert content["error"] < 1e-6


def test_without_attribution_the_split_is_empty_and_a_trace_leaves_the_rows_as_they_are(run_ranks):
    finished = run_ranks(attribution_steps=0, val_steps=0, trace_steps=3).succeeded()
    (row,) = finished.table("metrics")
    empty = [name for name in METRICS_COLUMNS if row[name] == ""]
    assert "throughput_samples_per_sec" not in empty
    split = {f"{part}_time_sec" for part in (*PARTS, "compute", "comm", "comm_wait")}
    pop = {"load_balance", "comm_efficiency", "pop_parallel_efficiency"}
    assert split | pop | {"val_loss", "val_accuracy", "checkpoint_time_sec"} <= set(empty)
    assert finished.table("ranks")[0]["step_time_sec"] == ""
    assert not (finished.folder / "probes.json").exists()
    assert finished.out[0].splitlines()[-1] == "bench: a trace of 3 steps of rank 0 is in trace-rank0.json.gz"
    with gzip.open(finished.folder / "trace-rank0.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    traced = [name for name in names if name.startswith("bench: traced step")]
    assert traced == [f"bench: traced step {number}" for number in (1, 2, 3)]
    assert "aten::addmm" in {event["name"] for event in events}
    assert not [path for path in finished.folder.iterdir() if path.name.startswith(".")]
