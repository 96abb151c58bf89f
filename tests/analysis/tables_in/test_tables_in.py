"""Reports of tables measured elsewhere: `bench report TABLE.csv`.

Published numbers and their raw values are rounded or truncated. Each test allows the error that the
rounding of its inputs permits. A throughput of one GPU is written as the throughput of all.
"""

import html
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from analysis.decide import decide
from analysis.report.tables import csv_table
from analysis.tables_in.read import read_table
from analysis.tables_in.study import study_of_table
from analysis.tables_in.vocabulary import COLUMNS, Heading, heading
from bench.cli import app
from ddp_scaling_bench.errors import InputError

FORMATS = Path(__file__).with_name("formats")
PROBLEMS = sorted(Path(__file__).with_name("problems").glob("*.csv"))

Report = Callable[..., pd.DataFrame]


def run_report(*words: str) -> Result:
    return CliRunner().invoke(app, ["report", *words])


@pytest.fixture
def reported(tmp_path: Path, nothing_drawn: None) -> Report:
    """Report a table with the command, but without figures; return its scaling.csv, sorted by size."""

    def report(text: str, *options: str, name: str = "table") -> pd.DataFrame:
        table = tmp_path / f"{name}.csv"
        table.write_text(text, encoding="utf-8")
        done = run_report(str(table), *options)
        assert done.exit_code == 0, done.output
        folder = tmp_path / f"{name}-report"
        assert done.stdout.splitlines()[0] == str(folder / "index.html")
        found = pd.read_csv(folder / "scaling.csv", dtype={"gpus_per_node": str})
        return found.sort_values("gpus", kind="stable").reset_index(drop=True)

    return report


@pytest.fixture
def analysed(tmp_path: Path) -> Report:
    """Return the same table without the page and the figures, which take most of the time."""

    def analyse(text: str, *, mode: str | None = None) -> pd.DataFrame:
        table = tmp_path / "table.csv"
        table.write_text(text, encoding="utf-8")
        study = study_of_table(read_table(table), mode=mode, folder=tmp_path)
        (tmp_path / "scaling.csv").write_text(csv_table(study.scale()), encoding="utf-8")
        found = pd.read_csv(tmp_path / "scaling.csv", dtype={"gpus_per_node": str})
        return found.sort_values("gpus", kind="stable").reset_index(drop=True)

    return analyse


def error_of(tmp_path: Path, text: str, *options: str) -> str:
    table = tmp_path / "t.csv"
    table.write_text(text, encoding="utf-8")
    done = run_report(str(table), *options)
    assert done.exit_code == 2, done.output
    assert not (tmp_path / "t-report").exists()
    lines = [line for line in done.stderr.splitlines() if str(table) in line or line.startswith("error")]
    return "\n".join(lines).replace(str(table), "t.csv")


#: By file: the options, the unit of the rates, and for each series its sizes and rates per rank, by hand.
READ = {
    "01-markdown.md": ({}, "tokens", {"01-markdown": {1: 12400, 2: 24000 / 2, 4: 45900 / 4}}),
    "02-semicolon-comma.csv": ({}, "samples", {"02-semicolon-comma": {8: 2460.5 / 8, 16: 4710 / 16, 32: 8700.25 / 32}}),
    "03-per-gpu.tsv": ({}, "tokens", {"03-per-gpu": {8: 7480, 32: 7210, 128: 6510}}),
    "04-epoch-fixed-dataset.csv": ({}, "", {"04-epoch-fixed-dataset": {1: 1 / 30.2, 2: 1 / 15.6 / 2, 4: 1 / 8.3 / 4}}),
    "05-suffix-mixed-models.csv": ({}, "tokens", {"7B": {64: 220e3 / 64, 128: 431e3 / 128}, "1B": {256: 1.4e6 / 256}}),
    "06-iterations-per-second.csv": ({}, "samples", {"06-iterations-per-second": {1: 3.95 * 16, 4: 2.70 * 16}}),
    "07-blanks.csv": ({}, "samples", {"07-blanks": {1: 100, 2: 190 / 2, 4: 340 / 4}}),
    "08-wide.csv": ({}, "samples", {"08-wide": {1: 2980, 2: 5700 / 2, 4: 10600 / 4}}),
    "09-layout.csv": ({"mode": "strong"}, "", {"pp 1": {8: 1 / 4.10 / 8, 16: 1 / 2.14 / 16}, "pp 2": {128: 1}}),
    "10-other-baseline.csv": ({}, "samples", {"10-other-baseline": {1: 500, 2: 1900 / 2, 4: 3700 / 4}}),
    "11-rate-per-gpu.csv": ({"mode": "weak"}, "samples", {"11-rate-per-gpu": {8: 30, 16: 10}}),
    "12-iterations.csv": ({"mode": "weak"}, "", {"12-iterations": {1: 3.95, 4: 2.7}}),
    # mwasifshkeel/distributed-mlp: three epochs of 12,000 samples, which are no repeats.
    "13-epochs.csv": ({}, "samples", {"strong": {1: 3 * 12000 / (219.076841 + 190.150473 + 245.263903), 2: 3 * 12000 / (32.780 + 32.385 + 32.462) / 2}}),
    # ramanathanlab/genslm: efficiencies of 1.014, 0.706 and 0.641 on 32 nodes.
    "14-params.csv": ({}, "samples", {"2.5B": {1: 1, 32: 1.0145 * 1}, "250M": {1: 1, 32: 0.70628 * 1}, "25M": {1: 1, 32: 0.64075 * 1}}),
    # deepaksatna/Distributed-LLM-Training-Benchmark-Framework: 73 % from 2 to 4 GPUs.
    "15-document.md": ({}, "tokens", {"DDP": {2: 8369 / 2, 4: 12220 / 4}, "FSDP": {2: 6771 / 2, 4: 9424 / 4}}),
    # saberm2837/PyTorch-DDP-Performance-Analysis-on-RCC-HPC-Cluster: speedups of 3.65 and 1.67.
    "16-clock-times.txt": ({"names": {"gpus_per_node": "#GPUs"}}, "", {"16-clock-times": {1: 1 / 8521, 2: 1 / 5100 / 2, 4: 1 / 2332 / 4}}),
    # marin-community/marin#6979: 0.981, 0.989, 0.993.
    "17-mfu.csv": ({"mode": "weak"}, "", {"17-mfu": {1: 26.7, 2: 26.2, 4: 26.4, 8: 26.5}}),
    "18-wide.md": ({}, "tokens", {"18-wide": {1: 1200, 2: 1100, 4: 1000}}),
    "19-tokens-and-batch.csv": ({}, "samples", {"bf16": {8: 64 / 1 / 8, 16: 64 / 0.55 / 16}, "fp32": {8: 64 / 2 / 8, 16: 64 / 1.05 / 16}}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_public_forms_of_tables_are_read(name: str, tmp_path: Path) -> None:
    given, unit, by_series = READ[name]
    options: dict[str, Any] = {"mode": None, "names": {}} | given
    table = read_table(FORMATS / name, names=options["names"])
    rows = study_of_table(table, mode=options["mode"], folder=tmp_path).scale()
    assert {(row.series, row.gpus) for row in rows} == {
        (one, size) for one in by_series for size in by_series[one]
    }
    for row in rows:
        own = by_series[row.series]
        rate, base = own[row.gpus], own[min(own)]
        expected = rate / base if len(own) > 1 else float("nan")
        assert row.efficiency == pytest.approx(expected, rel=1e-4, nan_ok=True)
        assert row.speedup == pytest.approx(expected * row.gpus / min(own), rel=1e-4, nan_ok=True)
        if not unit:
            assert math.isnan(row.throughput_samples_per_sec)
        elif not name.startswith("14"):
            assert row.throughput_samples_per_sec == pytest.approx(rate * row.gpus)
        assert (row.tokens_per_sample == 1) == (unit == "tokens")


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("01-markdown.md", "Ignored columns: Notes (--map NAME=COLUMN uses one)"),
        ("03-per-gpu.tsv", "Ignored columns: mfu (--map NAME=COLUMN uses one)"),
        ("10-other-baseline.csv", "Ignored columns: precision (--map NAME=COLUMN uses one)"),
        ("15-document.md", "Rows that differ in Strategy are different series"),
        ("13-epochs.csv", "Rows that differ in the epoch alone are one run, whose epochs are averaged"),
    ],
)
def test_what_is_ignored_or_assumed_is_said_in_one_line(name: str, remark: str) -> None:
    assert read_table(FORMATS / name).remarks.count(remark) == 1


def test_the_mode_is_assumed_only_if_the_efficiency_does_not_depend_on_it(tmp_path: Path) -> None:
    study = study_of_table(read_table(FORMATS / "01-markdown.md"), mode=None, folder=tmp_path)
    assert study.remarks[-1] == (
        "The table does not show whether this is strong or weak scaling: weak is assumed. Speedup and efficiency "
        "are the same in both; --mode states it"
    )
    strong = study_of_table(read_table(FORMATS / "01-markdown.md"), mode="strong", folder=tmp_path)
    both = [[(row.efficiency, row.speedup) for row in one.scale()] for one in (study, strong)]
    assert both[0] == [pytest.approx(pair) for pair in both[1]]
    with pytest.raises(InputError, match="strong or weak scaling; add a column"):
        study_of_table(read_table(FORMATS / "12-iterations.csv"), mode=None, folder=tmp_path)


def test_another_precision_at_the_baseline_is_a_finding_and_no_size_is_recommended(tmp_path: Path) -> None:
    study = study_of_table(read_table(FORMATS / "10-other-baseline.csv"), mode=None, folder=tmp_path)
    choice = decide(study.scale())
    assert [one.kind for one in choice.findings] == ["slow-baseline"]
    assert choice.best is None


def test_a_column_gets_a_meaning_by_an_option(tmp_path: Path, nothing_drawn: None) -> None:
    table = tmp_path / "a'; echo foo.tsv"
    table.write_text("cores\tspeed $(x)\tframework\n1\t1.1k\tA\n2\t2k\tB\n", encoding="utf-8")
    maps = ["--map", "gpus=cores", "--map", "tokens/s=speed $(x)"]
    done = run_report(str(table), *maps)
    assert done.exit_code == 0, done.output
    assert "Ignored columns: framework (--map NAME=COLUMN uses one)\n" in done.stderr
    folder = tmp_path / "a'; echo foo-report"
    assert pd.read_csv(folder / "scaling.csv")["efficiency"].to_list() == pytest.approx([1, 2 / 2.2])
    page = html.unescape(re.sub("<wbr>|</?span[^>]*>", "", (folder / "index.html").read_text()))
    assert "Tokens/s" in page
    assert shlex.join(["bench", "report", table.name, *maps]) in page
    done = run_report(str(table), "--map", "gpus=cpus", "--map", "speed=speed $(x)", "--mode", "weak")
    assert done.exit_code == 2
    assert (
        f"{table}:1: --map gpus=cpus: there is no such column; give one of 'cores', 'speed $(x)' and"
        in done.stderr
    )
    assert f"{table}:1: --map speed=speed $(x): 'speed' has no meaning; names are " in done.stderr


def test_names_of_columns_and_forms_of_numbers() -> None:
    assert {name: (heading(name) or Heading("")).column for name in COLUMNS} == {one: one for one in COLUMNS}
    #: The column of a name, the factor of its unit, and whether it is per GPU.
    names = {
        "tokens_per_sec_per_gpu": ("tokens/s", 1, True),
        "images/min": ("throughput", 1 / 60, False),
        "throughput_per_gpu": ("throughput", 1, True),
        "Step Time (ms)": ("time", 1e-3, False),
        "s/it": ("time", 1, False),
        "epoch time [h]": ("epoch_time", 3600, False),
        "TFLOP/s/GPU": ("mfu", 1, True),
        "numNodes": ("nodes", 1, False),
        "n_gpus": ("gpus", 1, False),
    }
    for name, expected in names.items():
        found = heading(name)
        assert found is not None
        assert (found.column, found.factor, found.per_gpu) == pytest.approx(expected), name
    assert heading("Batch Size") is None
    column = Heading("throughput")
    values = {"~12,400": 12400, "1,234.5": 1234.5, "12 400": 12400, "220k": 220e3, "1.4M": 1.4e6}
    values |= {"98.5 ± 0.4": 98.5, "1e3": 1000, "–": None}
    assert {text: column.number(text, decimal_comma=False) for text in values} == pytest.approx(values)
    assert column.number("1.234,5", decimal_comma=True) == 1234.5
    for text in ("1,2,3", "8 x", "inf"):
        with pytest.raises(ValueError, match="a number above 0"):
            column.number(text, decimal_comma=False)


def test_a_table_with_repeats_recommends_a_size(reported: Report, tmp_path: Path) -> None:
    rates = {1: 100, 2: 190, 4: 350}
    rows = [f"{ranks},64,{rate + more}" for ranks, rate in rates.items() for more in (-1, 0, 1)]
    found = reported("\n".join(["gpus,global_batch,throughput", *rows]), "--mode", "strong")
    assert found["verdict"].to_list() == ["baseline", "efficient", "efficient"]
    page = (tmp_path / "table-report" / "index.html").read_text()
    assert "<b>use 4 ranks, 3.50 times the rate of 1 rank, the largest size planned</b>; efficiency " in page


@pytest.mark.parametrize("column", ["tokens/s", "epoch time"])
def test_a_size_of_a_table_without_batches_is_recommended(
    tmp_path: Path, nothing_drawn: None, column: str
) -> None:
    """Weak scaling by tokens/s, and strong scaling by the time of an epoch: 0.96 on two ranks."""
    rates = {1: 100.0, 2: 192.0}
    lines = [
        f"{gpus},{rate * more if column == 'tokens/s' else 1000 / (rate * more)}"
        for gpus, rate in rates.items()
        for more in (0.998, 1, 1.002)
    ]
    table = tmp_path / "t.csv"
    table.write_text("\n".join([f"gpus,{column}", *lines]), encoding="utf-8")
    content = json.loads(run_report(str(table), "--json").stdout)
    assert [one["gpus"] for one in content["recommended"]] == [2]
    assert [one["verdict"] for one in content["verdicts"]] == ["baseline", "efficient"]
    page = (tmp_path / "t-report" / "index.html").read_text()
    assert ("to train 1M tokens" in page) == (column == "tokens/s")


def test_a_label_that_contradicts_the_batches_is_overruled_with_a_reason(analysed: Report) -> None:
    found = analysed("gpus,global_batch,time,mode\n1,64,1.0,weak\n2,64,0.5,weak\n")
    assert set(found["mode"]) == {"strong"}
    assert set(found["reason"]) == {
        "the series is called weak by the table, but its global batch is constant: strong scaling"
    }
    found = analysed("gpus,per_gpu_batch,time\n1,64,1.0\n2,64,1.5\n", mode="strong")
    assert set(found["mode"]) == {"weak"}
    assert set(found["reason"]) == {
        "the series is called strong by --mode, but its batch per rank is constant: weak scaling"
    }


def test_a_mixed_strong_and_weak_series_gets_a_remedy(analysed: Report) -> None:
    text = "gpus,global_batch,throughput\n1,64,100\n2,64,180\n4,64,300\n2,128,190\n4,256,370\n"
    found = analysed(text)
    assert set(found["reason"]) == {
        "no efficiency: neither the global batch nor the batch per rank is constant over the series; if these rows "
        "are a strong and a weak series, distinguish them by a column mode or series"
    }
    apart = "".join(
        f"{line},{mode}\n"
        for line, mode in zip(text.splitlines(), ["mode", *["strong"] * 3, *["weak"] * 2], strict=True)
    )
    found = analysed(apart + "1,64,100,weak\n")
    assert found["efficiency"].notna().all()
    assert set(found["mode"]) == {"strong", "weak"}


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.stem)
def test_each_problem_has_a_line_a_reason_and_a_remedy(tmp_path: Path, path: Path) -> None:
    """The messages are in the comments at the end of a table in ``problems/``."""
    text, _, messages = path.read_text(encoding="utf-8").rstrip("\n").partition("# expect: ")
    expected = [f"t.csv:{message}" for message in messages.split("\n# expect: ")]
    assert error_of(tmp_path, text).removeprefix("error: ").splitlines() == expected


def test_a_missing_table_or_a_binary_file_is_an_error(tmp_path: Path) -> None:
    done = run_report(str(tmp_path / "no.csv"))
    assert done.exit_code == 2
    assert f"error: {tmp_path}/no.csv: the table does not exist; give a file with a table\n" in done.stderr
    (tmp_path / "binary.csv").write_bytes(b"gpus,time\n1,\xff\n")
    done = run_report(str(tmp_path / "binary.csv"))
    assert f"{tmp_path}/binary.csv:2: the text is not UTF-8; save it as UTF-8" in done.stderr


def test_options_and_names_that_do_not_fit_have_one_message(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("gpus,speed,x\n1,100,1\n2,190,2\n")
    for options, said in (
        (["--map", "speed"], "--map speed has no =; write NAME=COLUMN, such as --map throughput=tok_s"),
        (["--map", "throughput", "speed"], "--map throughput has no =; "),
        (["--map", "throughput=speed", "--map", "throughput=x"], "--map gives two columns for throughput: "),
        (
            ["--map", "throughput=sped"],
            f"{table}:1: --map throughput=sped: there is no such column; did you mean",
        ),
        (["--unit", "tokens/s"], "--unit is for logs, not for a table; omit it; "),
        (["speed"], f"a report is of one study or table, but 2 are given: {table} speed; "),
        (["--check"], "--check: there are no targets; add --targets FILE.yaml\n"),
        (
            ["--proposal", "--profile", "csc", "--target-size", "8nodes"],
            "--target-size 8nodes is not a size; ",
        ),
    ):
        errors = run_report(str(table), *options).stderr.removeprefix("reading the table\n")
        assert errors.startswith(f"error: {said}")
        assert len(errors.splitlines()) == 1


@pytest.mark.usefixtures("nothing_drawn")
def test_two_tables_in_one_folder_have_two_reports_and_nothing_else_is_replaced(tmp_path: Path) -> None:
    text = "gpus,global_batch,time\n1,64,1\n2,64,{}\n"
    (tmp_path / "sub").mkdir()
    first, second, third = tmp_path / "a.csv", tmp_path / "sub" / "a.csv", tmp_path / "mine.csv"
    first.write_text(text.format(0.5))
    second.write_text(text.format(0.9))
    third.write_text(text.format(0.9))
    target = tmp_path / "else where"
    done = run_report(str(first), "--output", str(target), "--json")
    page = target / "a-report" / "index.html"
    assert json.loads(done.stdout)["report"] == str(page)
    before = page.read_bytes()
    done = run_report(str(second), "--output", str(target))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: {page.parent} is the report of {first}; {second} would replace it; "
        "give another folder with --output DIR, or rename the table or this folder"
    )
    assert page.read_bytes() == before
    first.write_text(text.format(0.6))
    assert run_report(str(first), "--output", str(target)).exit_code == 0
    assert page.read_bytes() != before
    notes = tmp_path / "mine-report" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("keep")
    done = run_report(str(third))
    assert done.exit_code == 2
    assert f"{notes.parent} exists and is not a table's report; {third} would replace it" in done.stderr
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_size_with_another_batch_is_named_and_the_others_are_analysed(tmp_path: Path, repeats: int) -> None:
    rows = ["1,1024,100", "2,1024,180", "4,1024,300", "8,2048,640", "16,1024,800"]
    table = tmp_path / "t.csv"
    table.write_text(
        "gpus,global_batch,throughput\n" + "\n".join(row for row in rows for _ in range(repeats))
    )
    study = study_of_table(read_table(table), mode=None, folder=tmp_path)
    found = {row.gpus: row for row in study.scale()}
    assert {gpus: row.efficiency for gpus, row in found.items()} == pytest.approx(
        {1: 1, 2: 0.9, 4: 0.75, 8: float("nan"), 16: 0.5}, nan_ok=True
    )
    assert found[8].series == "t, global batch 2,048"
    assert found[8].throughput_samples_per_sec == pytest.approx(640)
    lines = "Line 5" if repeats == 1 else "Lines 8 and 9"
    assert (
        f"{lines} (8 ranks): the global batch is 2,048, but 1,024 in the rest of the series, "
        "so this size is not compared with the other sizes"
    ) in study.remarks


@pytest.mark.parametrize(
    "text",
    [
        "gpus,global_batch,time\n1,64,1\n2,64,\n4,64,0.3\n",
        "gpus,global_batch,throughput\n1,1e-300,1\n2,1e-300,1e300\n4,1e-300,3\n",  # a time too small for a float
    ],
)
def test_a_row_without_a_value_is_a_cell_with_a_reason(analysed: Report, text: str) -> None:
    found = analysed(text)
    assert found["n"].to_list() == [1, 0, 1]
    assert found["reason"].iloc[1] == (
        "no run counted: 1 completed without a throughput (the row has no value)"
    )


def test_words_for_missing_values_are_names_of_series(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text(
        "series,gpus,global_batch,throughput\nNone,1,64,100\nNone,2,64,190\nNA,1,64,90\nNA,2,64,\n"
    )
    assert [row.series for row in read_table(table).rows] == ["None", "None", "NA", "NA"]


def test_patterns_make_a_table_of_the_logs_of_finished_runs(
    tmp_path, monkeypatch, nothing_drawn: None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rate in (("one", 10.0), ("two", 9.5), ("again", 9.7)):
        Path(f"{name}.log").write_text(f"step 1 {rate}it/s loss 2.5\nstep 2 {1 / rate}s/it loss 2.0\n")
    words = ["1=one.log", "1x2=two.log", "1x2=again.log", "--unit", "it/s"]
    words += ["--pattern", "throughput=([0-9.]+)it/s"]
    done = run_report(*words, "--pattern", "loss=loss (.+)", "--mode", "weak", "--batch", "4")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "logs-report/index.html"), done.output
    assert (
        "throughput is read from one.log (first 10, last 10): 2 x 'step # #it/s loss #' from line 1 on\n"
        in done.stderr
    )
    assert "one.log: 2 values, mean 40 samples/s\n" in done.stderr
    table = ["nodes,gpus,per_gpu_batch,samples/s,repeat", ",1,4,40,1", "1,2,4,76,1", "1,2,4,77.6,2"]
    assert Path("logs-report/logs.csv").read_text().splitlines() == table
    assert pd.read_csv("logs-report/scaling.csv")["efficiency"].round(3).tolist() == [1, 0.96]
    slower = run_report(*words, "--mode", "strong", "--output", "b")
    assert slower.exit_code == 1
    assert "slower-than-smaller" in slower.output
    assert Path("b/logs-report/logs.csv").read_text().splitlines()[1] == ",1,10,1"
    assert (
        "no report: the logs do not show whether this is strong or weak scaling" in run_report(*words).stderr
    )
    tried = run_report("1=one.log", "--pattern", "step_time=step (.+?) ", "--json")
    assert (tried.exit_code, json.loads(tried.stdout)["logs"][0]["rate"]) == (0, pytest.approx(2 / 3))
    for more, error in (
        (["--batch", "4"], "--batch requires --mode"),
        (
            ["--set", "skip=9", "--mode", "weak"],
            "error: one.log contains 2 values, and skip 9",
        ),
        (
            ["--unit", "km/h"],
            "--unit 'km/h' is not known; allowed: samples/s, it/s, tokens/s, samples/s/GPU, ",
        ),
        (["--pattern", "loss=x"], "--pattern loss: 'x' has 0 groups; put ( ) around the number"),
        (
            ["three.log"],
            "'three.log' has no number of GPUs; write 4=three.log for 4 GPUs, or 1x4=three.log for 1 node with 4",
        ),
    ):
        done = run_report(*words, *more)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert error in done.stderr
