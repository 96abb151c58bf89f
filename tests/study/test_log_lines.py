"""The lines of logs that count, and their numbers: logs as public training scripts print them."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench.matrix.cell import Cell
from bench.study.readings import Readings, readings_in


def read(path: Path, log: str, size: int = 2, **metrics: Any) -> Readings:
    """Read a log of ``size`` ranks; the global batch is 1, so rates in steps are those in samples."""
    (path / "a.log").write_text(log, newline="")
    cell = Cell("c", "", "", 1, size, size, 1, 1, [], metrics, {}, {})
    return readings_in({"a.log": path / "a.log"}, cell)


def rates(found: Readings) -> list[float]:
    assert found.problem == ""
    return [round(row.throughput_samples_per_sec, 3) for row in found.rows]


def kinds(found: Readings) -> list[str]:
    """Return the kinds of findings that are warnings."""
    return [one.kind for one in found.findings if one.severity == "warning"]


#: Each log below the patterns and settings, the rates that count, and the warnings.
LOGS = sorted(Path(__file__).with_name("log_lines").glob("*.txt"))


def parts_of(path: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the settings, what is expected, and the log, with its carriage returns."""
    metrics, expected, log = path.read_bytes().decode().split("\n", 2)
    return (
        json.loads(metrics.removeprefix("# metrics: ")),
        json.loads(expected.removeprefix("# expected: ")),
        log,
    )


def test_lines_count_and_their_numbers_are_read(tmp_path):
    assert LOGS
    for path in LOGS:
        metrics, expected, log = parts_of(path)
        found = read(tmp_path, log, **metrics)
        assert {"rates": rates(found), "warnings": kinds(found)} == expected, path.stem


def test_the_rate_of_a_progress_bar_is_the_mean_over_all_steps(tmp_path):
    metrics, _, log = parts_of(Path(__file__).with_name("log_lines") / "tqdm-turns-to-s-it.txt")
    found = read(tmp_path, log, **metrics)
    assert fmean(1 / rate for rate in rates(found)) == pytest.approx(
        0.35
    )  # with a batch of 8: 22.9 samples/s
    forms, losses = (one for one in found.findings)
    assert forms.message == (
        "throughput is read from a.log (first 20, last 0.8): 40 x 'Epoch #: #%|#| #/# [#<#, #it/s, loss=#]' from line 1 on"
    )
    assert losses.values["last"] == "0.05"


@pytest.mark.parametrize(
    ("log", "output", "ranks", "problem"),
    [
        ("time 0,05 s\n", r"time (\S+)", 1, "a.log:1: workload.metrics.output.step_time found '0,05', in which the"),
        ("\ntime 1,24 s\n", "time ([0-9.]+)", 1, "a.log:2: workload.metrics.output.step_time found '1', which is on"),
        ("rate 5MB\n", "rate ([0-9.]+)", 1, "a.log:1: workload.metrics.output.step_time found '5' before 'MB'; let"),
        ("9 s\n0 s\n0 s\n8 s\n", "(.+) s", 1, "a.log:2: step_time is 0, in 2 of 4 values"),
        ("1 s\n-2 s\n", "(.+) s", 1, "a.log:2: reading 2 is not a positive number: {'step_time': -2.0}"),
        ("x\n" + "iter 1: time 5s\n" * 2 + "iter 2: time 5s\n" * 2, "time (.+)s", 2, "a.log:2: lines such as 'iter #: time #s' occur 2 times each, but do not"),
        ("".join(f"Epoch: [{e}][{i}/39] time 5s\n" * 2 for e in (0, 1) for i in (1, 2)), "time (.+)s", 2, "occur 2 times each"),
        ("".join(f"Epoch {e}\n" * 2 + "step 1 time 5s\n" * 2 for e in (0, 1)), "time (.+)s", 2, "a.log:3: lines such as"),
        ("step 1 (4ms, mean 5ms)\n", "([0-9.]+)ms", 1, "a.log:1: the pattern matches 2 times in 'step # (#ms, mean #ms)'"),
        ("[5/9] time 5s\n" * 3, "time (.+)s", 3, "a.log:1: lines such as '[#/#] time #s' occur 3 times each"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_line(tmp_path, log, output, ranks, problem):
    assert problem in read(tmp_path, log, ranks, output={"step_time": output}).problem
