"""Metrics of unchanged commands, from their output or a file."""

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.jobs.end import missing_results
from bench.matrix.cell import Cell
from bench.study.findings import AverageOfRun, LineForms
from bench.study.ledger import End, Record, RunState
from bench.study.readings import readings_of
from bench.study.verify import verify_run
from ddp_scaling_bench.records import METRICS_COLUMNS, EpochRow
from ddp_scaling_bench.run_folder import RunFolder
from tests.analysis.studies import make_cell

ROOT = Path(__file__).resolve().parents[2]


def cell(metrics: dict[str, Any]) -> Cell:
    usual = make_cell(4, batch=8, mode="weak", per_node=2, launcher="torchrun")
    workload = {"device": "cpu", "epochs": 3, "steps_per_epoch": 5}
    return replace(usual, argv=["x"], metrics=metrics, workload=workload, planned_epochs=None)


class Left:
    """A run's folder with the output of a command."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)

    def lack(self, metrics: dict[str, Any]) -> str:
        missing = missing_results(self.folder, cell(metrics))
        return missing.message if missing else ""

    def rows(self, metrics: dict[str, Any]) -> list[EpochRow]:
        before = sorted(self.folder.path.iterdir())
        found = readings_of(self.folder, cell(metrics))
        assert found.problem == self.lack(metrics) == ""
        assert sorted(self.folder.path.iterdir()) == before
        return list(found.rows)


@pytest.fixture
def left(tmp_path) -> Left:
    return Left(tmp_path)


def values(row: EpochRow) -> dict[str, Any]:
    """Return the values of a row that are known."""
    return {name: value for name, value in asdict(row).items() if value == value}


def column(rows: list[EpochRow], name: str) -> list[float | str]:
    return ["" if math.isnan(value) else value for value in (getattr(row, name) for row in rows)]


STEP_TIME = {"step_time": r"time ([0-9.]+)ms"}
BOTH = {"throughput": r"(\S+) img/s", "step_time": r"in (\S+) s"}


def test_step_times_in_milliseconds_become_throughputs_of_the_global_batch(left):
    left.folder.out.write_text("iter 0: loss 3.0, time 900ms\niter 1: loss 2.5, time 64.0ms\nend\n")
    metrics = {"output": {**STEP_TIME, "loss": r"loss ([0-9.]+)"}, "units": {"step_time": "ms"}, "skip": 1}
    (row,) = left.rows(metrics)
    assert values(row) == {
        "epoch": 1,
        "steps": 1,
        "samples": 32,
        "train_loss": 2.5,
        "epoch_time_sec": 0.064,
        "throughput_samples_per_sec": 500,
        "step_time_sec_median": 0.064,
    }


@pytest.mark.parametrize(
    ("more", "throughput"),
    [({}, 100.0), ({"scope": "per_gpu"}, 400.0), ({"units": {"throughput": "it/s"}}, 3200.0)],
)
def test_a_rate_counts_samples_of_all_ranks_of_one_rank_or_steps(left, more, throughput):
    left.folder.out.write_text("speed: 100/s\n")
    rows = left.rows({"output": {"throughput": r"speed: (\S+)/s"}, **more})
    assert column(rows, "throughput_samples_per_sec") == [throughput]
    assert column(rows, "step_time_sec_median") == [32 / throughput]


@pytest.mark.parametrize(
    ("out", "err", "metrics", "name", "values"),
    [
        ("1,000.5 img/s in 0.5 s\n", "", {"output": BOTH}, "throughput_samples_per_sec", [1000.5]),
        ("1,000.5 img/s in 0.5 s\n", "", {"output": BOTH}, "step_time_sec_median", [0.5]),
        # Progress bars on standard error are read if the output has no match.
        ("nothing\n", " 10%|#  | [00:01, 4.00it/s]\r 20%|## | [00:02, 8.00it/s]\r",
         {"output": {"throughput": r"([0-9.]+)it/s"}, "units": {"throughput": "it/s"}},
         "throughput_samples_per_sec", [128.0, 256.0]),
        # A loss that is printed more often is left out.
        ("loss 3\nloss 2\ntime 10ms\n", "", {"output": {**STEP_TIME, "loss": r"loss (\S+)"}}, "train_loss", [""]),
    ],
)  # fmt: skip
def test_values_are_found_in_the_output_of_a_command(left, out, err, metrics, name, values):
    left.folder.out.write_text(out)
    left.folder.err.write_text(err)
    assert column(left.rows(metrics), name) == values


def summary(rate: float | str, loss: float) -> str:
    """Return what HuggingFace's Trainer prints at the end of a training of 40 steps."""
    return (
        f"{{'train_runtime': 12.3, 'train_samples_per_second': {rate}, 'train_steps_per_second': 3.2, "
        f"'train_loss': {loss}, 'epoch': 1.0}}\n"
    )


AVERAGE = {
    "kind": "average",
    "output": {"throughput": "samples_per_second': ([0-9.]+)", "loss": "train_loss': ([0-9.]+)"},
}


@pytest.mark.parametrize(
    ("output", "metrics", "throughput", "printed"),
    [
        (summary(13.008, 0.5), AVERAGE, 13.008, ("throughput", 1, 13.008, 13.008)),
        # Two nodes print the summary; each has its own clock.
        (summary(13.008, 0.5) + summary(12.9, 0.5), AVERAGE, 12.9, ("throughput", 2, 12.9, 13.008)),
        # More values than the 4 ranks: they must be equal, but for rounding.
        ("rate 0.012\n" * 9 + "rate 0.013\n", {"kind": "average", "output": {"throughput": r"rate (\S+)"}},
         0.012, ("throughput", 10, 0.012, 0.013)),
        ("50 ms a step\n51 ms a step\n",
         {"kind": "average", "output": {"step_time": r"(\S+) ms"}, "units": {"step_time": "ms"}},
         32 / 0.051, ("step_time", 2, 50.0, 51.0)),
    ],
)  # fmt: skip
def test_an_average_of_the_run_has_a_rate_and_a_loss_but_no_steps(left, output, metrics, throughput, printed):
    left.folder.out.write_text(f"{{'loss': 0.7, 'epoch': 0.5}}\n{output}")
    (row,) = left.rows(metrics)
    loss = {"train_loss": 0.5} if "loss" in metrics["output"] else {}
    rate = {"throughput_samples_per_sec": pytest.approx(throughput)}
    assert values(row) == {"epoch": 1, **rate, **loss}
    quantity, reported, lowest, highest = printed
    told = {"quantity": quantity, "reported": reported, "lowest": lowest, "highest": highest}
    average = AverageOfRun(subject=(quantity,), source="job.out", **told)
    findings = readings_of(left.folder, cell(metrics)).findings
    assert [one for one in findings if not isinstance(one, LineForms)] == [average]


def test_several_averages_and_parts_of_a_number_are_refused(left):
    left.folder.out.write_text(summary(13.0, 0.5) + summary(9.0, 0.5))
    assert left.lack(AVERAGE) == (
        "job.out contains 2 different values of throughput (9 in line 2 to 13 in line 1), but kind average reads "
        "one value of the whole run; let workload.metrics match only the summary, or remove kind"
    )
    for printed, found in (("1.235e+04", "1.235"), ("1,234.5", "1")):
        left.folder.out.write_text(f"took 5.25s\nrate {printed}, step 2,100\n")
        assert left.lack({"output": {"throughput": "rate ([0-9.]+)"}}) == (
            f"job.out:2: workload.metrics.output.throughput found {found!r}, which is only a part of {printed}; "
            "let the pattern match the whole number, for example with ([0-9.,e+-]+)"
        )


LOSS = {**STEP_TIME, "loss": r"loss (\S+)"}


@pytest.mark.parametrize(
    ("output", "metrics", "kinds"),
    [
        ("loss 3\nloss 2\ntime 10ms\n", {"output": LOSS}, ["values-left-out"]),
        ("time 9ms loss 3 val_loss 4\n", {"output": LOSS}, ["lines-left-out"]),
        ("time 9ms\ntime 8ms loss 3 loss 2\n", {"output": LOSS}, ["line-forms", "repeated-matches"]),
        ("time 9ms\n", {"output": LOSS, "kind": "average"}, ["values-left-out"]),
        ("time 9ms loss 3\ntime 8ms loss 2\n", {"output": LOSS}, []),
    ],
)
def test_values_that_are_left_out_or_counted_twice_are_named_by_verify(left, output, metrics, kinds):
    left.folder.out.write_text(output)
    left.folder.run_json.write_text("{}")
    record = Record(run_id="r1", attempt=1).ended(End(state=RunState.COMPLETED))
    verdict = verify_run(left.folder, record, cell(metrics))
    assert verdict.passed
    assert [warning.kind for warning in verdict.warnings if warning.severity != "info"] == kinds
    checks = {check.name: check.outcome for check in verdict.checks}
    assert (checks["epochs"], checks["throughput"]) == ("ok", "ok")


def test_an_unreadable_metric_is_reported_with_source_and_pattern(left):
    left.folder.out.write_text("time 5ms\ntime 6ms, rate 3\n")
    correct = "correct it: workload.metrics.output, or --pattern for logs"
    for metrics, where in (({}, "job.out or job.err"), (STEP_TIME, "job.out")):
        assert left.lack({"output": {**metrics, "throughput": "speed ([0-9]+)"}}) == (
            f"no line of {where} matches the pattern of throughput, 'speed ([0-9]+)'; {correct}"
        )
    assert left.lack({"output": {**STEP_TIME, "throughput": "rate ([0-9]+)"}}) == (
        "job.out contains step_time 2 times and throughput 1 times, so the values cannot be paired (as in line 1)"
    )
    all_dropped = "job.out contains 2 values, and skip 2 drops all of them; lower it"
    assert left.lack({"output": STEP_TIME, "skip": 2}) == all_dropped
    assert left.lack({"output": {"step_time": "(time)"}}) == (
        "job.out:1: workload.metrics.output.step_time found 'time', which is not a number"
    )


def test_a_file_is_read_by_its_columns_and_one_that_is_missing_or_has_others_is_named(left):
    path = left.folder.path / "log.csv"
    metrics = {"csv": "log.csv", "columns": {"throughput": "ips"}}
    assert (
        left.lack(metrics)
        == "the command did not create log.csv in the run's folder; let it write to {run_dir}/log.csv, or correct workload.metrics.csv"
    )
    path.write_text("\ufeffips ,step, val\n10,1,\n20,2,\n,3,0.5\n")  # a line without a value is skipped
    assert column(left.rows(metrics), "throughput_samples_per_sec") == [10.0, 20.0]
    path.write_text("a,b\n1,2\n")
    assert left.lack(metrics) == "log.csv has no ips; it contains a, b; correct workload.metrics.columns"
    path.write_text("ips\n5\nips\n6\n")
    assert left.lack(metrics) == (
        "log.csv:3 repeats the names of its columns, so several ranks wrote it; let only one write it"
    )
    path.write_text("ips\nfast\n")
    assert left.lack(metrics) == "log.csv:2: contains 'fast', which is not a number"


def test_a_log_that_cannot_be_read_is_the_problem(left):
    os.mkfifo(left.folder.out)
    problem = f"{left.folder.out}: cannot be read:"
    assert left.lack({"output": STEP_TIME}) == f"{problem} It is not a regular file"
    left.folder.out.unlink()
    with left.folder.out.open("wb") as file:
        file.truncate(2**30 + 1)
    assert left.lack({"output": STEP_TIME}) == f"{problem} it is larger than 1 GiB"


def test_a_command_that_records_nothing_is_incomplete_unless_metrics_is_none(left):
    assert left.lack({"source": "recorder"}) == (
        "the command recorded no metrics: use the Recorder in its training loop, or set workload.metrics to the file or output that contains them"
    )
    assert left.lack({"source": "none"}) == ""


def test_a_loss_that_is_not_finite_is_reported_with_its_place_and_the_rows_are_kept(left):
    left.folder.out.write_text("loss 3 time 5ms\nloss nan time 5ms\n")
    assert left.lack({"output": LOSS}) == "the loss became nan in reading 2 of job.out, line 2"
    assert len(readings_of(left.folder, cell({"output": LOSS})).rows) == 2
    rest = "," * (len(METRICS_COLUMNS) - 4)
    assert METRICS_COLUMNS[3] == "train_loss"
    for loss, words in (("nan", "the loss became nan in epoch 2"), ("2.4", ""), ("", "")):
        rows = [f"1,5,40,2.5{rest}", f"2,5,40,{loss}{rest}", ""]
        left.folder.metrics_csv.write_text("\n".join([",".join(METRICS_COLUMNS), *rows]))
        assert left.lack({"source": "recorder"}) == words


TOKENS = {"throughput": "tokens/s"}


@pytest.mark.parametrize(
    ("line", "pattern", "more", "expected"),
    [
        ("rate: 123 tok/s", "rate: (\\S+)", {}, "the rate is one of tokens (tok/s)"),
        ("99 tok/s/GPU", "^(\\S+)", {}, "tokens/s/GPU if it is that of one rank"),
        ("3.1 it/s 4000 tokens/s", "^(\\S+)", {}, "the rate is one of steps"),
        ("thr: 10 samples/s tokens/s: 500", "thr: (\\S+)", {}, 10),
        ("tokens/s: 500 samples/s: 10", "samples/s: (\\S+)", {}, 10),
        ("rate 1,024 tok/s", "rate ([0-9,]+)", {"units": {"throughput": "samples/s"}}, 1024),
        ("rate 1,024 tok/s", "rate ([0-9,]+)", {"units": TOKENS, "tokens_per_sample": 128}, 8),
        ("tps: 256", "tps: (\\S+)", {"units": TOKENS, "tokens_per_sample": 128, "scope": "per_gpu"}, 8),
        ("tps: 256", "tps: (\\S+)", {"units": TOKENS, "tokens_per_sample": 128, "scope": "per_replica"}, 4),
    ],
)
def test_rates_of_tokens_need_their_unit(tmp_path, line, pattern, more, expected):
    folder = RunFolder(tmp_path)
    folder.out.write_text(f"{line}\n{line}\n")
    found = readings_of(folder, replace(cell({"output": {"throughput": pattern}, **more}), model_parallel=2))
    if isinstance(expected, str):
        assert expected in found.problem
        assert found.problem.startswith("job.out:1: ")
    else:
        assert [row.throughput_samples_per_sec for row in found.rows] == [expected] * 2
