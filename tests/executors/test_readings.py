"""Metrics of unchanged commands, from their output or a file."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.executors.outcome import missing_results
from bench.matrix.cell import Cell
from bench.study.layout import METRICS_COLUMNS, RunFolder


def cell(metrics: dict[str, Any]) -> Cell:
    return Cell(
        cell_id="c",
        launcher="torchrun",
        backend="gloo",
        nodes=2,
        tasks_per_node=2,
        world_size=4,
        per_gpu_batch=8,
        global_batch=32,
        workload={"command": ["x"], "metrics": metrics, "epochs": 3},
        env={},
    )


class Left:
    """A run's folder with the output of a command."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)

    def lack(self, metrics: dict[str, Any]) -> str:
        return missing_results(self.folder, cell(metrics))

    def rows(self, metrics: dict[str, Any]) -> list[dict[str, str]]:
        assert self.lack(metrics) == ""
        with self.folder.metrics_csv.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert tuple(rows[0]) == METRICS_COLUMNS
        return rows


@pytest.fixture
def left(tmp_path) -> Left:
    return Left(tmp_path)


def column(rows: list[dict[str, str]], name: str) -> list[float | str]:
    return [float(row[name]) if row[name] else "" for row in rows]


STEP_TIME = {"step_time": r"time ([0-9.]+)ms"}


def test_step_times_in_milliseconds_become_throughputs_of_the_global_batch(left):
    left.folder.out.write_text("iter 0: loss 3.0, time 900ms\niter 1: loss 2.5, time 64.0ms\nend\n")
    metrics = {"output": {**STEP_TIME, "loss": r"loss ([0-9.]+)"}, "units": {"step_time": "ms"}, "skip": 1}
    (row,) = left.rows(metrics)
    told = {name: value for name, value in row.items() if value}
    assert told == {
        "epoch": "1",
        "steps": "1",
        "samples": "32",
        "train_loss": "2.5",
        "epoch_time_sec": "0.064",
        "throughput_samples_per_sec": "500",
        "step_time_sec_median": "0.064",
    }


@pytest.mark.parametrize(
    ("more", "throughput"),
    [
        ({}, 100.0),
        ({"scope": "per_gpu"}, 400.0),
        ({"units": {"throughput": "it/s"}}, 3200.0),
        ({"units": {"throughput": "it/s"}, "scope": "per_gpu"}, 3200.0),
    ],
)
def test_a_rate_counts_samples_of_all_ranks_of_one_rank_or_steps(left, more, throughput):
    left.folder.out.write_text("speed: 100/s\n")
    rows = left.rows({"output": {"throughput": r"speed: (\S+)/s"}, **more})
    assert column(rows, "throughput_samples_per_sec") == [throughput]
    assert column(rows, "step_time_sec_median") == [32 / throughput]


def test_throughput_and_step_time_are_both_kept(left):
    left.folder.out.write_text("1,000.5 img/s in 0.5 s\n")
    rows = left.rows({"output": {"throughput": r"(\S+) img/s", "step_time": r"in (\S+) s"}})
    assert column(rows, "throughput_samples_per_sec") == [1000.5]
    assert column(rows, "step_time_sec_median") == [0.5]


def test_progress_bars_on_standard_error_are_read_if_the_output_has_no_match(left):
    left.folder.out.write_text("nothing\n")
    left.folder.err.write_text(" 10%|#  | [00:01, 4.00it/s]\r 20%|## | [00:02, 8.00it/s]\r")
    rows = left.rows({"output": {"throughput": r"([0-9.]+)it/s"}, "units": {"throughput": "it/s"}})
    assert column(rows, "throughput_samples_per_sec") == [128.0, 256.0]


def test_a_loss_that_is_printed_more_often_is_left_out(left):
    left.folder.out.write_text("loss 3\nloss 2\ntime 10ms\n")
    rows = left.rows({"output": {**STEP_TIME, "loss": r"loss (\S+)"}, "units": {"step_time": "ms"}})
    assert column(rows, "train_loss") == [""]


def test_a_csv_of_the_command_is_read_by_its_columns(left):
    (left.folder.path / "log.csv").write_text("\ufeffstep, ips ,val\n1,10,\n2,20,\n3,,0.5\n")
    rows = left.rows({"csv": "log.csv", "columns": {"throughput": "ips"}})
    assert column(rows, "throughput_samples_per_sec") == [10.0, 20.0]


def test_json_lines_are_read_by_their_keys_and_other_lines_are_skipped(left):
    records = [{"t": 0.5, "loss": 1.0}, {"eval": 3}, {"t": 0.25, "loss": 0.5}]
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (left.folder.path / "log.jsonl").write_text(f"starting\n{text}[1]\n" + '{"t": 0.')
    rows = left.rows({"jsonl": "log.jsonl", "columns": {"step_time": "t", "loss": "loss"}})
    assert column(rows, "throughput_samples_per_sec") == [64.0, 128.0]
    assert column(rows, "train_loss") == [1.0, 0.5]


def test_an_unreadable_metric_is_reported_with_source_and_pattern(left):
    left.folder.out.write_text("time 5ms\ntime 6ms, rate 3\n")
    pattern = STEP_TIME["step_time"]
    assert left.lack({"output": {"throughput": "speed ([0-9]+)"}}) == (
        "no line of job.out or job.err matches workload.metrics.output.throughput 'speed ([0-9]+)'"
    )
    assert left.lack({"output": {**STEP_TIME, "throughput": "speed ([0-9]+)"}}) == (
        "no line of job.out matches workload.metrics.output.throughput 'speed ([0-9]+)'"
    )
    assert left.lack({"output": {**STEP_TIME, "throughput": "rate ([0-9]+)"}}) == (
        "job.out contains step_time 2 times and throughput 1 times, so the values cannot be paired"
    )
    assert (
        left.lack({"output": STEP_TIME, "skip": 2})
        == "job.out contains 2 values, and workload.metrics.skip 2 drops all of them"
    )
    assert left.lack({"output": {"step_time": "(time)"}}) == (
        "job.out: workload.metrics.output found 'time', which is not a number"
    )
    assert not left.folder.metrics_csv.exists()
    assert pattern in left.lack({"output": {"step_time": f"x{pattern}"}})


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf"])
def test_an_impossible_rate_is_refused(left, value):
    left.folder.out.write_text(f"rate {value}\n")
    assert left.lack({"output": {"throughput": r"rate (\S+)"}}) == (
        f"reading 1 of job.out is not a positive number: {{'throughput': {float(value)}}}"
    )


def test_a_loss_that_is_not_finite_is_reported_and_the_rows_are_kept(left):
    left.folder.out.write_text("loss 3 time 5ms\nloss nan time 5ms\n")
    assert (
        left.lack({"output": {**STEP_TIME, "loss": r"loss (\S+)"}})
        == "the loss became nan in reading 2 of job.out"
    )
    assert len(left.folder.metrics_csv.read_text().splitlines()) == 3


def test_a_file_that_is_missing_or_has_other_columns_is_named(left):
    path = left.folder.path / "log.csv"
    metrics = {"csv": "log.csv", "columns": {"throughput": "ips"}}
    assert left.lack(metrics) == f"the command did not create {path}, the file named in workload.metrics.csv"
    path.write_text("a,b\n1,2\n")
    assert left.lack(metrics) == f"{path} has no ips (workload.metrics.columns); it contains a, b"
    path.write_text("ips\nfast\n")
    assert left.lack(metrics) == f"{path}: contains 'fast', which is not a number"


def test_a_file_of_an_earlier_run_is_refused(left, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "log.csv"
    elsewhere.write_text("ips\n5\n")
    left.folder.run_json.write_text('{"submitted_at": "2026-01-01T00:00:00.000Z"}')
    metrics = {"csv": str(elsewhere), "columns": {"throughput": "ips"}}
    os.utime(elsewhere, (1.7e9, 1.7e9))  # 2023
    assert left.lack(metrics) == f"{elsewhere} is older than this run, so another run wrote it"
    os.utime(elsewhere, (1.9e9, 1.9e9))
    assert len(left.rows(metrics)) == 1


def test_a_command_that_records_nothing_is_incomplete_unless_metrics_is_none(left):
    assert left.lack({"source": "recorder"}) == (
        "the command recorded no metrics: call bench.record in its training loop, or set workload.metrics to the file or output that contains them"
    )
    assert left.lack({"source": "none"}) == ""


def test_a_recorder_with_too_few_steps_reports_the_required_number(left):
    words = "no window was recorded: a rank took fewer than 6 steps"
    left.folder.env.write_text(json.dumps({"recorder": {}, "warnings": ["another one", words]}))
    assert left.lack({"source": "recorder"}) == words


def test_a_recorded_loss_that_is_not_finite_is_reported_with_its_epoch(left):
    def record(loss: str) -> None:
        rows = [METRICS_COLUMNS, *([epoch, "5", "40", told] for epoch, told in (("1", "2.5"), ("2", loss)))]
        lines = [",".join([*row, *[""] * (len(METRICS_COLUMNS) - len(row))]) for row in rows]
        left.folder.metrics_csv.write_text("\n".join(lines) + "\n")

    assert METRICS_COLUMNS[3] == "train_loss"
    for loss, words in (("nan", "the loss became nan in epoch 2"), ("2.4", ""), ("", "")):
        record(loss)
        assert left.lack({"source": "recorder"}) == words
