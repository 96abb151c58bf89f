"""The lines of logs that count, and their numbers: logs as public training scripts print them."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench.matrix.cell import Cell
from bench.study.readings import Readings, readings_in


def read(path: Path, log: str, size: int = 2, **metrics: Any) -> Readings:
    """Read a log of ``size`` ranks; the global batch is 1, so rates in steps are those in samples."""
    (path / "a.log").write_text(log)
    cell = Cell("c", "", "", 1, size, size, 1, 1, [], metrics, {}, {})
    return readings_in({"a.log": path / "a.log"}, cell)


def rates(found: Readings) -> list[float]:
    assert found.problem == ""
    return [round(row.throughput_samples_per_sec, 3) for row in found.rows]


def kinds(found: Readings) -> list[str]:
    """Return the kinds of findings that are warnings."""
    return [one.kind for one in found.findings if one.severity == "warning"]


def bar(step: int, rate: str, *, of: int = 40, name: str = "Epoch 0: ", tail: str = "") -> str:
    done = "#" * (20 * step // of)
    return f"\r{name}{100 * step // of:3d}%|{done:<20}| {step}/{of} [00:{step:02d}<00:09, {rate}{tail}]"


IT = r"([0-9.]+)it/s"
SAMPLES = r"([0-9.]+) samples/s"
MS = {"units": {"step_time": "ms"}}
IN_STEPS = {"units": {"throughput": "it/s"}}
TITAN = "[titan] \x1b[31mstep: {:2}  \x1b[32mloss: 7.5000  \x1b[34mtps: {:,}  \x1b[39mmfu: 3.4%\n"
TIMM = (
    "Train: 0 [  {:2}/1251 (  4%)]  Loss: 6.9 (6.9)  Time: 0.283s,  {}/s  (0.300s,  853.22/s)  LR: 1.0e-05\n"
)
HF = (
    "{'loss': '2.1', 'epoch': '0.5'}\n{'eval_loss': 0.3, 'eval_samples_per_second': 900.0, 'epoch': 1.0}\n"
    "{'train_runtime': 12.3, 'train_samples_per_second': 13.0, 'train_loss': 0.5, 'epoch': 1.0}\n"
)
YOLO = "      1/3      2.3G      0.05      0.02      {}        640:"

#: Each log with the pattern and the settings, the rates that count, and the warnings.
LOGS: dict[str, tuple[str, dict[str, str], dict[str, Any], list[float], list[str]]] = {
    "tqdm turns to s/it": (
        "".join(bar(i, "20.00it/s" if i % 4 else "1.25s/it", tail=f", loss={2 / i:.3f}") for i in range(1, 41)),
        {"throughput": IT, "loss": "loss=([0-9.]+)"}, IN_STEPS, [20, 20, 20, 0.8] * 10, []),
    "s/it turns to it/s": ("4.00s/it\n2.00it/s\n", {"step_time": "([0-9.]+)s/it"}, {}, [0.25, 2], []),
    "any unit of tqdm": (bar(1, "2.00s/img") + bar(2, "4.00img/s"), {"throughput": r"(\S+?)img/s"}, {}, [0.5, 4], []),
    "a bar without a first rate": (
        bar(0, "?it/s", tail=", loss=3") + "".join(bar(i, "5.0it/s", tail=", loss=2") for i in range(1, 9)),
        {"throughput": IT, "loss": "loss=([0-9.]+)"}, IN_STEPS, [5] * 8, []),
    "two ranks in one line": (
        "5 samples/s\n" * 9 + "5 samples/s9 samples/s\n", {"throughput": SAMPLES}, {}, [5] * 9, ["lines-left-out"]),
    "an outer bar of epochs": (
        "".join(bar(i, "5.0it/s", name="Steps: ") for i in range(1, 10)) + bar(1, "9.0s/it", of=3, name="Epochs: "),
        {"throughput": IT}, IN_STEPS, [5] * 9, ["lines-left-out"]),
    "a few bars of other work": (
        bar(1, "26804.95it/s", of=9, name="Loading weights: ") + "".join(bar(i, "5.0it/s") for i in range(1, 41)),
        {"throughput": IT}, IN_STEPS, [5] * 40, ["lines-left-out"]),
    "units of a time": (
        "step 1 time 250ms\nstep 2 time 0.5 s\nstep 3 time 1 min\n", {"step_time": r"time ([0-9.]+)"}, MS,
        [4, 2, 0.017], ["line-forms"]),
    "a bar that is redrawn": (
        bar(1, "5.0it/s") + bar(2, "6.0it/s") + bar(2, "6.0it/s", tail=", loss=1") + "\n" + bar(3, "7.0it/s"),
        {"throughput": IT}, IN_STEPS, [5, 6, 7], []),
    "a rate in front of its other form": ("4.0 it/s, 0.25 s/it\n", {"throughput": "([0-9.]+) it/s"}, IN_STEPS, [4], []),
    "the name of the next number": ("Time 0.25 img/s 8.0\n", {"step_time": "Time ([0-9.]+)"}, {}, [4], []),
    "suffix": (
        "step 1 throughput: 1.24k samples/s\nstep 2 throughput: 987 samples/s\nstep 3 throughput: 1.5M samples/s\n",
        {"throughput": "throughput: ([0-9.]+)"}, {}, [1240, 987, 1.5e6], []),
    "suffix before the text of the pattern": (
        "1.24k samples/s\n987 samples/s\n1.3 k samples/s\n", {"throughput": SAMPLES}, {}, [1240, 987, 1300], []),
    "unit_scale of tqdm": (bar(1, "987it/s") + bar(2, "1.24kit/s"), {"throughput": IT}, IN_STEPS, [987, 1240], []),
    "kimg": ("3.2 kimg/s\n", {"throughput": "([0-9.]+) img/s"}, {}, [3200], []),
    "no suffix": ("time 0.25 G_loss 2.3\n", {"step_time": "time ([0-9.]+)"}, {}, [4], []),
    "torchtitan": (
        TITAN.format(1, 990) + TITAN.format(2, 1240), {"throughput": "tps: ([0-9.,]+)"},
        {"units": {"throughput": "tokens/s"}, "tokens_per_sample": 10}, [99, 124], []),
    "values between commas": (
        "10,250,3.4\n11,500,3.3\n", {"step_time": "^[0-9]+,([0-9.]+),"}, MS, [4, 2], []),
    "timm": (
        TIMM.format(0, 904.52) + TIMM.format(50, 905.52), {"throughput": r"s, +([0-9.]+)/s +\("}, {},
        [904.52, 905.52], []),
    "nanoGPT": (
        "iter 0: loss 10.9, time 500.00ms, mfu -100.00%\nstep 250: train loss 2.1, val loss 2.2\n"
        "iter 1: loss 9.1, time 250.00ms, mfu 12.10%\n",
        {"step_time": "time ([0-9.]+)ms", "loss": r"iter \d+: loss ([0-9.]+)"}, MS, [2, 4], []),
    "Megatron": (
        " iteration       10/     100 | consumed samples: 640 | elapsed time per iteration (ms): 125.0 | lr: 1E-05 |\n",
        {"step_time": r"per iteration \(ms\): ([0-9.]+)"}, MS, [8], []),
    "a Trainer's summary": (
        HF, {"throughput": r"samples_per_second': ([0-9.]+)"}, {"kind": "average"}, [13], ["lines-left-out"]),
    "Lightning": (
        bar(1, "9.0it/s", of=2, name="Sanity Checking DataLoader 0: ") + bar(1, "5.0it/s", tail=", v_num=0")
        + bar(1, "8.0it/s", of=2, name="Validation DataLoader 0: ")
        + bar(2, "6.0it/s", name="Epoch 1: ", tail=", v_num=0, val_loss=0.2"),
        {"throughput": IT}, IN_STEPS, [5, 6], ["lines-left-out"]),
    "YOLO": (
        bar(1, "4.0it/s", name=YOLO.format(0.02)) + bar(2, "5.0it/s", name=YOLO.format(0.03)),
        {"throughput": IT}, IN_STEPS, [4, 5], []),
    "an evaluation without a name": (
        "".join(bar(i, "4.0it/s", of=9, name="") for i in (1, 2)) + bar(1, "8.0it/s", of=2, name=""),
        {"throughput": IT}, IN_STEPS, [4, 4, 8], ["line-forms"]),
    "an evaluation": (
        "train step 1 time 50.0ms\neval step 1 time 5.0ms\ntrain step 2 time 50.0ms\n",
        {"step_time": "time ([0-9.]+)ms"}, MS, [20, 20], ["lines-left-out"]),
    "an evaluation that the pattern names": (
        "train step 1 time 50.0ms\neval step 1 time 5.0ms\n", {"step_time": "eval step . time ([0-9.]+)ms"}, MS,
        [200], []),
    "a result of an evaluation": (
        "epoch 1 loss 0.5 time 2.0s\nepoch 2 loss 0.4 val loss 0.6 time 4.0s\nepoch 3 val_loss 0.5 time 4.0s\n",
        {"step_time": "time ([0-9.]+)s"}, {}, [0.5, 0.25, 0.25], ["line-forms"]),
    "the best result so far": (
        "".join(f"step {i} best_val 0.31 speed 100 samples/s\n" for i in range(3)) + "step 4 speed 50 samples/s\n",
        {"throughput": SAMPLES}, {}, [100] * 3 + [50], ["line-forms"]),
    "as many epochs as ranks": (
        "".join(f"step {i} 100 samples/s\n" for i in range(5)) * 2, {"throughput": SAMPLES}, {}, [100] * 10, []),
    "two forms": (
        "train 1 took 2.0s\nsaved 1 took 9.0s\n", {"step_time": "took ([0-9.]+)s"}, {}, [0.5, 0.111], ["line-forms"]),
    "rank in the line": (
        "".join(f"INFO:train:[rank {r}] step {i} | {100 + 50 * r}.0 samples/s\n" for i in range(3) for r in (1, 0)),
        {"throughput": SAMPLES}, {}, [100] * 3, []),
    "all ranks": (
        "[rank0]: 100 samples/s\n[rank1]: 150 samples/s\n", {"throughput": SAMPLES}, {"ranks": "all"}, [100, 150], []),
    "srun --label": (
        "".join(f"{r}: step {i} {100 + r} samples/s\n" for i in range(3) for r in (0, 1)),
        {"throughput": SAMPLES}, {}, [100] * 3, []),
    "torchrun's prefix": (
        "".join(f"[default{r}]:step {i} {100 + r} samples/s\n" for i in range(3) for r in (0, 1)),
        {"throughput": SAMPLES}, {}, [100] * 3, []),
    "steps as prefixes": (
        "start\n" + "".join(f"{i}: loss 0.5 | {100 + i} samples/s\n" for i in range(2)),
        {"throughput": SAMPLES}, {}, [100, 101], []),
    "GPUs": (
        "".join(f"[GPU{r}] step {i} {100 + r} samples/s\n" for i in range(3) for r in (1, 0)),
        {"throughput": SAMPLES}, {}, [100] * 3, []),
    "the rank of an adapter": (
        "lora rank 1 step 1 100 samples/s\nlora rank 1 step 2 101 samples/s\n", {"throughput": SAMPLES}, {},
        [100, 101], []),
    "steps of two epochs": (
        "Epoch 0\nstep 1 100 samples/s\nEpoch 1\nstep 1 101 samples/s\n", {"throughput": SAMPLES}, {}, [100, 101], []),
    "a first zero": ("0.00 samples/s\n10 samples/s\n", {"throughput": SAMPLES}, {}, [10], ["lines-left-out"]),
    "a zero that is skipped": (
        "9 samples/s\n0 samples/s\n10 samples/s\n", {"throughput": SAMPLES}, {"skip": 2}, [10], ["lines-left-out"]),
    "a few zeros": (
        ("10 samples/s\n" * 20 + "0.0 samples/s\n") * 2, {"throughput": SAMPLES}, {}, [10] * 40, ["lines-left-out"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_lines_count_and_their_numbers_are_read(tmp_path, name):
    log, output, settings, expected, warned = LOGS[name]
    found = read(tmp_path, log, output=output, **settings)
    assert rates(found) == expected
    assert kinds(found) == warned


def test_the_rate_of_a_progress_bar_is_the_mean_over_all_steps(tmp_path):
    log, output, settings, *_ = LOGS["tqdm turns to s/it"]
    found = read(tmp_path, log, output=output, **settings)
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
        ("time 1,240 ms\n", "([0-9.]+) ms", 1, "found '240', which is only a part of 1,240; let the pattern match"),
        ("rate 5MB\n", "rate ([0-9.]+)", 1, "a.log:1: workload.metrics.output.step_time found '5' before 'MB'; let"),
        ("9 s\n0 s\n0 s\n8 s\n", "(.+) s", 1, "a.log:2: step_time is 0, in 2 of 4 values"),
        ("0 s\n0 s\n", "(.+) s", 1, "a.log contains 2 values, and all are 0 from a.log:1 on"),
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
