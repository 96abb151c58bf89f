"""The measurements of the windows, compared with known values."""

import gzip
import json
import math
from statistics import mean, median

import pytest
import torch

from ddp_scaling_bench.records import METRICS_COLUMNS
from tests.train.ranks import QUICK, torchrun_env

PARTS = ("data_load", "forward", "backward", "comm_exposed", "optimizer", "other")


def number(row: dict[str, str], column: str) -> float:
    return float(row[column])


@pytest.fixture(scope="module")
def plain(server, tmp_path_factory):
    """A run with 4 MiB of gradients in several buckets, and a checkpoint."""
    folder = tmp_path_factory.mktemp("plain run")
    options = {"device": "cpu", "model": "mlp", "parameters": 10**6, "bucket_cap_mb": 1, "val_steps": 2}
    options |= {"steps_per_epoch": 6, "epochs": 2, "warmup_steps": 4, "attribution_steps": 8}
    started = server.train(folder, torchrun_env(2), batch=16, checkpoint=True, **options)
    return started.finish().succeeded()


def test_every_row_is_there(plain):
    assert [row["epoch"] for row in plain.table("metrics")] == ["1", "2"]
    ranks = [row["epoch"] + row["rank"] for row in plain.table("ranks")]
    assert ranks == ["10", "11", "20", "21"]
    steps = [(int(row["epoch"]), int(row["step"])) for row in plain.table("steps")]
    assert steps == [(epoch, step) for epoch in (1, 2) for step in range(1, 7)]

    for row in plain.table("metrics"):
        assert int(row["samples"]) == 6 * 2 * 16
        assert int(row["steps"]) == 6
    assert {row["samples"] for row in plain.table("ranks")} == {str(6 * 16)}


def test_throughput_is_all_samples_over_the_slowest_ranks_window(plain):
    for row in plain.table("metrics"):
        windows = [number(r, "window_time_sec") for r in plain.table("ranks") if r["epoch"] == row["epoch"]]
        assert number(row, "epoch_time_sec") == pytest.approx(max(windows), rel=1e-9)
        rate = int(row["samples"]) / number(row, "epoch_time_sec")
        assert number(row, "throughput_samples_per_sec") == pytest.approx(rate, rel=1e-9)


def test_the_median_and_the_95th_percentile_are_those_of_the_steps(plain):
    for row in plain.table("metrics"):
        steps = [number(r, "step_time_sec") for r in plain.table("steps") if r["epoch"] == row["epoch"]]
        assert number(row, "step_time_sec_median") == pytest.approx(median(steps), rel=1e-9)
        assert max(steps) >= number(row, "step_time_sec_p95") >= number(row, "step_time_sec_median")
        assert {r["slowest_rank"] for r in plain.table("steps")} <= {"0", "1"}


def test_metrics_are_the_means_of_the_ranks(plain):
    for row in plain.table("metrics"):
        ranks = [r for r in plain.table("ranks") if r["epoch"] == row["epoch"]]
        for part in (*PARTS, "comm_wait"):
            expected = mean(number(r, f"{part}_time_sec") for r in ranks)
            assert number(row, f"{part}_time_sec") == pytest.approx(expected, rel=1e-6, abs=1e-12)
        compute = number(row, "forward_time_sec") + number(row, "backward_time_sec")
        assert number(row, "compute_time_sec") == pytest.approx(compute, rel=1e-9)


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


def test_pop_efficiencies_follow_from_the_ranks(plain):
    for row in plain.table("metrics"):
        ranks = [r for r in plain.table("ranks") if r["epoch"] == row["epoch"]]
        steps = [number(r, "step_time_sec") for r in ranks]
        useful = [step - number(r, "comm_exposed_time_sec") for step, r in zip(steps, ranks, strict=True)]
        assert number(row, "load_balance") == pytest.approx(mean(useful) / max(useful), rel=1e-6)
        assert number(row, "comm_efficiency") == pytest.approx(max(useful) / max(steps), rel=1e-6)
        product = number(row, "load_balance") * number(row, "comm_efficiency")
        assert number(row, "pop_parallel_efficiency") == pytest.approx(product, rel=1e-6)


def test_what_is_not_measured_is_empty(plain):
    for row in plain.table("metrics"):
        for column in ("mfu", "gpu_util_avg", "val_mae", "val_rmse"):
            assert row[column] == ""
        assert row["cpu_util_avg"] != ""
    flops = plain.env["flops"]
    assert (flops["mfu_empty_because"], flops["peaks"]) == ("no peak rate is known for CPUs", {})
    assert flops["per_step_and_rank"] == 16 * flops["per_sample"] > 0


def test_the_loss_falls_and_validation_sees_it(plain):
    first, second = plain.table("metrics")
    assert number(second, "train_loss") < number(first, "train_loss")
    assert number(second, "val_loss") < math.log(10)
    assert 0.1 < number(second, "val_accuracy") <= 1


def test_a_checkpoint_is_written_and_its_time_kept_apart(plain):
    state = torch.load(plain.folder / "checkpoint.pt", weights_only=True)
    assert state["epoch"] == 2
    assert sum(value.numel() for value in state["model"].values()) == plain.env["parameters"]
    assert all(number(row, "checkpoint_time_sec") > 0 for row in plain.table("metrics"))
    assert [path.name for path in plain.folder.iterdir() if path.name.startswith(".")] == []


def test_accumulated_gradients_equal_those_of_one_big_batch(run_ranks):
    finished = run_ranks(target="tests.train.scenarios:weights_after_a_step").succeeded()
    content = json.loads((finished.folder / "weights.json").read_text())
    assert content["change"] > 1e-3
    assert content["error"] < 1e-6


def test_without_attribution_the_split_is_empty_and_throughput_is_there(run_ranks):
    finished = run_ranks(attribution_steps=0, val_steps=0).succeeded()
    (row,) = finished.table("metrics")
    empty = [name for name in METRICS_COLUMNS if row[name] == ""]
    assert "throughput_samples_per_sec" not in empty
    split = {f"{part}_time_sec" for part in (*PARTS, "compute", "comm", "comm_wait")}
    pop = {"load_balance", "comm_efficiency", "pop_parallel_efficiency"}
    assert split | pop | {"val_loss", "val_accuracy", "checkpoint_time_sec"} <= set(empty)
    assert finished.table("ranks")[0]["step_time_sec"] == ""
    assert not (finished.folder / "probes.json").exists()


def test_a_trace_has_the_steps_that_were_asked_for_and_leaves_the_rows_as_they_are(run_ranks):
    finished = run_ranks(trace_steps=3).succeeded()
    assert len(finished.table("metrics")) == 1
    assert finished.out[0].splitlines()[-1] == "bench: a trace of 3 steps of rank 0 is in trace-rank0.json.gz"
    with gzip.open(finished.folder / "trace-rank0.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("bench: traced step")] == [
        f"bench: traced step {number}" for number in (1, 2, 3)
    ]
    assert "aten::addmm" in {event["name"] for event in events}
    assert not [path for path in finished.folder.iterdir() if path.name.startswith(".")]
